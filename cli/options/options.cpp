// Options that several subcommands share: the definitions of options.hpp.
#include "cli/options/options.hpp"

#include <CLI/CLI.hpp>
#include <charconv>

#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {

std::pair<int64_t, int64_t> parse_pair(const std::string& option, const std::string& text, char separator,
                                       const std::string& expected) {
  const size_t at = text.find(separator);
  if (at != std::string::npos) {
    const auto first = whole_number(std::string_view(text).substr(0, at));
    const auto second = whole_number(std::string_view(text).substr(at + 1));
    if (first && second) return {*first, *second};
  }
  throw Failure(Exit::usage, option + ": got '" + text + "', expected " + expected +
                                 ", two whole numbers with '" + separator + "' between them");
}

ElementType parse_type(const std::string& option, const std::string& text) {
  const auto type = type_from_option(text);
  if (!type) {
    throw Failure(Exit::usage, option + ": got '" + text +
                                   "', expected one of float32, float16, bfloat16, float64, float8_e4m3fn "
                                   "(or f32, f16, bf16, f64, e4m3)");
  }
  return *type;
}

void Terms::add_options(CLI::App& command, bool with_dropout) {
  constexpr const char* kGroup = "Terms of the score";
  command.add_flag("--causal", causal, "Query i sees key j when j <= i + seqlen_k - seqlen_q")->group(kGroup);
  command
      .add_option("--window", window,
                  "Keys seen to the left and right of the diagonal, for example 128,0; -1 is unlimited")
      ->type_name("LEFT,RIGHT")
      ->group(kGroup);
  command
      .add_option("--softcap", softcap, "Replaces a score s by C tanh(s / C); 0 (the default): no softcap")
      ->type_name("C")
      ->group(kGroup);
  command.add_option("--scale", scale, "Factor of q k^T; 0 (the default): 1/sqrt(head size)")
      ->type_name("FACTOR")
      ->group(kGroup);
  if (!with_dropout) return;
  command.add_option("--dropout", dropout, "Probability of dropping a weight, in [0, 1)")
      ->type_name("P")
      ->group(kGroup);
  command.add_option("--seed", seed, "Seed of the dropout: the same seed drops the same weights")
      ->type_name("N")
      ->group(kGroup);
}

void Terms::apply(Problem& problem) const {
  problem.causal = causal;
  if (!window.empty()) {
    std::tie(problem.window_left, problem.window_right) = parse_pair("--window", window, ',', "LEFT,RIGHT");
  }
  problem.softcap = softcap;
  problem.scale = scale;
  problem.dropout = dropout;
  problem.seed = seed;
}

void Execution::add_options(CLI::App& command, bool with_bits) {
  constexpr const char* kGroup = "Execution";
  command
      .add_option("--backend", backend,
                  "A name that `fovea info` lists (default: the first backend that can do the problem)")
      ->type_name("NAME")
      ->group(kGroup);
  command
      .add_option("--threads", threads, "Threads; 0 (the default): all processors that the process may use")
      ->type_name("N")
      ->group(kGroup);
  if (with_bits) add_options_of_bits(command, kGroup);
}

void Execution::add_options_of_bits(CLI::App& command, const char* group) {
  command.add_flag("--deterministic", deterministic, "Compute gradients that are bit-identical in every run")
      ->group(group);
  command
      .add_option(
          "--num-splits", splits,
          "Parts of the keys that are computed apart and merged, at most; 0 (the default): as many as "
          "pay, 1: none")
      ->type_name("N")
      ->group(group);
  command
      .add_flag("--batch-invariant", batch_invariant,
                "The bits of a sequence's results do not depend on the rest of the batch")
      ->group(group);
}

void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "cpu, cuda or cuda:N (default: the device of --backend, else cpu)")
      ->type_name("DEVICE")
      ->group("Execution");
}

std::optional<int> gpu_of(const std::string& device, const std::string& backend) {
  if (device == "cpu") return std::nullopt;
  if (device.empty()) {
    for (const BackendInfo& info : backends()) {
      if (info.name == backend && info.on_gpu) return 0;
    }
    return std::nullopt;
  }
  if (device == "cuda") return 0;
  int id = 0;
  const char* end = device.data() + device.size();
  if (device.starts_with("cuda:")) {
    const auto [stop, error] = std::from_chars(device.data() + 5, end, id);
    if (error == std::errc() && stop == end && id >= 0) return id;
  }
  throw Failure(Exit::usage, "--device: got '" + device + "', expected cpu, cuda or cuda:N");
}

void add_json_option(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "Print one JSON value on stdout instead of text");
}

}  // namespace fovea::cli
