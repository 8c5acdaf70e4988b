// `fovea compile`: makes the kernels of an expression ahead of time, for programs that ship without NVRTC.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <memory>
#include <utility>

#include "cli/commands/commands.hpp"
#include "cli/data/expressions.hpp"
#include "cli/options/options.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct CompileOptions {
  ShapeOptions shape;
  Terms terms;
  ExpressionOptions expressions;
  Execution execution;  ///< on GPUs: without threads
  std::string chip, cache;
  std::vector<std::string> passes = {"fwd"};
  int sms = 0;
  bool json = false;
};

/// NAME=TYPE:SIZE,... without a file: the name, and a tensor without data.
struct DescribedTensor {
  std::string name;
  Tensor tensor;
};

std::vector<int64_t> parse_sizes(const std::string& option, std::string_view text) {
  std::vector<int64_t> sizes;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    int64_t size = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), size);
    if (error != std::errc() || end != part.data() + part.size() || size < 0) {
      throw Failure(Exit::usage,
                    fmt::format("--tensor: got '{}', expected NAME=FILE or NAME=TYPE:SIZE,... as "
                                "in doc=int32:4,4096",
                                safe_text(option)));
    }
    sizes.push_back(size);
    text.remove_prefix(std::min(part.size() + 1, text.size()));
  }
  return sizes;
}

/// Takes what is described out of `tensors`; files stay.
std::vector<DescribedTensor> take_described(std::vector<std::string>& tensors) {
  constexpr std::array<std::pair<std::string_view, ElementType>, 6> kTypes = {
      {{"float32", ElementType::f32},
       {"float16", ElementType::f16},
       {"bfloat16", ElementType::bf16},
       {"int32", ElementType::i32},
       {"uint8", ElementType::u8},
       {"bool", ElementType::boolean}}};
  std::vector<DescribedTensor> found;
  std::erase_if(tensors, [&](const std::string& option) {
    const size_t at = option.find('=');
    const size_t colon = at == std::string::npos ? at : option.find(':', at);
    if (at == 0 || colon == std::string::npos) return false;
    const std::string_view type = std::string_view(option).substr(at + 1, colon - at - 1);
    for (const auto& [name, element] : kTypes) {
      if (type != name) continue;
      const auto sizes = parse_sizes(option, std::string_view(option).substr(colon + 1));
      found.push_back({option.substr(0, at), described(element, sizes)});
      return true;
    }
    return false;
  });
  return found;
}

/// The problem of a pass; in the backward each float tensor of the score gets a gradient, as `fovea attend --grad` asks for.
Problem problem_of(const CompileOptions& options, const Shape& shape, Pass pass,
                   const Expressions& expressions, const std::vector<DescribedTensor>& tensors) {
  Problem problem = described(shape, pass);
  options.terms.apply(problem);
  expressions.apply(problem);
  for (const DescribedTensor& tensor : tensors) problem.named.push_back({tensor.name, tensor.tensor, {}});
  if (pass == Pass::forward || expressions.score.empty()) return problem;
  for (NamedTensor& named : problem.named) {
    if (is_float(named.tensor)) named.gradient = described(ElementType::f32, named.tensor.shape());
  }
  return problem;
}

std::string number_text(int number) {
  return number < 0 ? "?" : std::to_string(number);
}

void print_table(const std::vector<CompiledKernel>& kernels) {
  if (kernels.empty()) {
    fmt::print("nothing to compile: the library holds every kernel of this problem\n");
    return;
  }
  Table table("  ");
  table.add({"kernel", "registers", "spilled bytes", "seconds", "", "file"});
  for (const CompiledKernel& kernel : kernels) {
    table.add({kernel.name, number_text(kernel.registers), number_text(kernel.spilled_bytes),
               fmt::format("{:.2f}", kernel.seconds), kernel.kept ? "was there" : "compiled",
               safe_text(kernel.file)});
  }
  fmt::print("{}", table.text());
}

Exit run_compile(const CompileOptions& options) {
  ExpressionOptions files = options.expressions;
  const std::vector<DescribedTensor> tensors = take_described(files.tensors);
  const Expressions expressions = read_expressions(files);
  std::string folder;
  if (!options.cache.empty()) folder = std::filesystem::absolute(options.cache).lexically_normal().string();
  std::vector<CompiledKernel> kernels;
  for (const Shape& shape : options.shape.shapes()) {
    for (const std::string& pass : options.passes) {
      const Problem problem = problem_of(options, shape, parse_pass(pass), expressions, tensors);
      try {
        for (CompiledKernel& kernel :
             compile(problem, options.chip, folder, options.execution.options(), options.sms)) {
          // Passes and shapes share kernels.
          const bool known = std::any_of(kernels.begin(), kernels.end(), [&](const CompiledKernel& other) {
            return other.file == kernel.file;
          });
          if (!known) kernels.push_back(std::move(kernel));
        }
      } catch (const Error& error) {
        if (error.argument() == "folder")
          throw Failure(Exit::output, std::string("--cache: ") + error.what());
        throw;
      }
    }
  }
  if (!options.json) {
    print_table(kernels);
    return Exit::ok;
  }
  Json json = {{"chip", options.chip}, {"kernels", Json::array()}};
  for (const CompiledKernel& kernel : kernels) {
    json["kernels"].push_back({{"name", kernel.name},
                               {"registers", kernel.registers},
                               {"spilled_bytes", kernel.spilled_bytes},
                               {"seconds", kernel.seconds},
                               {"was_there", kernel.kept},
                               {"file", kernel.file}});
  }
  print_json(json);
  return Exit::ok;
}

}  // namespace

void add_compile(CLI::App& program, Action& action) {
  const auto options = std::make_shared<CompileOptions>();
  CLI::App* command = program.add_subcommand(
      "compile", "Makes the GPU kernels of an expression ahead of time, for programs without NVRTC");
  options->shape.add_options(*command, true);
  options->terms.add_options(*command, true);
  command->add_option("--pass", options->passes, "fwd (the default), bwd or fwd,bwd")
      ->delimiter(',')
      ->type_name("PASS,...")
      ->group("Sizes");
  options->expressions.add_options(*command);
  constexpr const char* kGroup = "Target";
  command->add_option("--chip", options->chip, "The GPU's chip; it need not be here: sm_80, sm_90, ...")
      ->type_name("CHIP")
      ->required()
      ->group(kGroup);
  command
      ->add_option(
          "--sms", options->sms,
          "SMs of the GPU, which decide among tile sizes; 0 (the default): those of the chip's usual GPU")
      ->type_name("N")
      ->group(kGroup);
  command->add_option("--cache", options->cache, "Folder of the kernels (default: the user's cache)")
      ->type_name("DIR")
      ->group(kGroup);
  command
      ->add_option("--backend", options->execution.backend,
                   "One of cuda_... (default: the first that can do the problem)")
      ->type_name("NAME")
      ->group(kGroup);
  options->execution.add_options_of_bits(*command, "Of the plans");
  add_json_option(*command, options->json);
  command->footer(
      "A tensor that has no file yet is NAME=TYPE:SIZE,... with a TYPE out of float32, float16, bfloat16, "
      "int32, "
      "uint8, bool.\n"
      "Programs find the kernels where FOVEA_CACHE_DIR names the folder, with whatever NVRTC, or none.\n"
      "\n"
      "Examples:\n"
      "  fovea compile --chip sm_90 --cache kernels --batch 4 --seqlen 4096 --heads 16 --head-dim 128 --pass "
      "fwd,bwd\n"
      "    --score \"s - slope[h] * abs(q - k)\" --tensor slope=float32:16\n"
      "  fovea compile --chip sm_80 --sees \"doc[b, q] == doc[b, k]\" --tensor doc=doc.npy --json");
  command->callback([options, &action] { action = [options] { return run_compile(*options); }; });
}

}  // namespace fovea::cli
