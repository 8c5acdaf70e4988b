// `fovea demo`: attention over a real layer's queries, keys and values: speed, memory, error, a picture of one head.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands/commands.hpp"
#include "cli/data/inputs.hpp"
#include "cli/data/output.hpp"
#include "cli/measure/measure.hpp"
#include "cli/measure/textbook.hpp"
#include "cli/options/options.hpp"
#include "cli/picture/attention_map.hpp"
#include "cli/picture/figure.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct DemoOptions {
  std::string input, output, tokens;
  int64_t head = 9;
  int threads = 0;
  bool json = false;
};

constexpr int64_t kWindow = 52;      // as many named tokens as make a picture the width of a page
constexpr int64_t kMostWindow = 96;  // as many as fit a large screen

struct Run {
  std::string type, backend, reason;
  int threads = 0;
  Timing timing;
  double flops = 0, memory = 0;
  ErrorSize error;
};

/// o in float64, by the oracle.
std::vector<double> oracle_output(const Inputs& inputs) {
  Inputs wide;
  wide.q = converted(inputs.q, ElementType::f64);
  wide.k = converted(inputs.k, ElementType::f64);
  wide.v = converted(*inputs.v, ElementType::f64);
  const Array o = io::make_array("o", ElementType::f64, wide.o_shape());
  Problem problem = wide.problem();
  problem.o = view(o);
  attend(problem, {.backend = "reference"});
  return to_doubles(o);
}

Run run_as(const Inputs& inputs, ElementType type, const std::vector<double>& oracle, int threads) {
  Inputs typed;
  typed.q = converted(inputs.q, type);
  typed.k = converted(inputs.k, type);
  typed.v = converted(*inputs.v, type);
  const Array o = io::make_array("o", output_type(type), typed.o_shape());
  Problem problem = typed.problem();
  problem.o = view(o);
  const Plan plan(problem, {.num_threads = threads});
  Workspace workspace(plan);
  const Buffers buffers = {
      .q = problem.q.data(), .k = problem.k.data(), .v = problem.v.data(), .o = problem.o.data()};
  Run run;
  run.timing = measure([&] { plan.run(buffers, workspace); }, 0.5, 9);
  run.type = type_name(type);
  run.backend = plan.backend();
  run.reason = plan.reason();
  run.threads = threads;
  run.flops = plan.flops();
  run.memory = static_cast<double>(plan.workspace_size() + o.bytes.size());
  run.error = error_between(to_doubles(o), oracle);
  return run;
}

Run run_textbook(const Inputs& inputs, const std::vector<double>& oracle, double flops) {
  const std::vector<int64_t> q = full_shape(inputs.q.shape, false), k = full_shape(inputs.k.shape, false);
  const TextbookShape shape = {q[0], q[1], k[1], q[2], k[2], q[3], inputs.v->shape.back()};
  const std::vector<float> q_values = to_floats(inputs.q), k_values = to_floats(inputs.k),
                           v_values = to_floats(*inputs.v);
  std::vector<float> o(oracle.size());
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  Run run;
  run.timing = measure([&] { textbook_attention(shape, scale, q_values, k_values, v_values, o); }, 0.5, 5);
  run.type = "float32";
  run.backend = "textbook";
  run.threads = 1;
  run.flops = flops;
  run.memory = static_cast<double>(4 * q[1] * k[1]) + static_cast<double>(4 * o.size());
  run.error = error_between(std::vector<double>(o.begin(), o.end()), oracle);
  return run;
}

/// The names of the tokens in the metadata of the file; none where it does not name each of them.
std::vector<std::string> token_names(const Inputs& inputs, int64_t seqlen) {
  std::vector<std::string> names;
  const auto entry = inputs.metadata.find("tokens");
  if (entry == inputs.metadata.end()) return names;
  const Json parsed = Json::parse(entry->second, nullptr, false);
  if (!parsed.is_array() || static_cast<int64_t>(parsed.size()) != seqlen) return names;
  for (const Json& token : parsed) names.push_back(token.is_string() ? token.get<std::string>() : "?");
  return names;
}

/// The window in which tokens look most at others that are not beside them: the most to see.
Range busiest_window(const WeightGrid& all, int64_t size) {
  constexpr int64_t kBeside = 4;
  size = std::min(size, all.rows);
  Range best{0, size};
  double most = -1;
  for (int64_t first = 0; first + size <= all.rows; ++first) {
    double sum = 0;
    for (int64_t i = first; i < first + size; ++i) {
      for (int64_t j = first; j < first + size; ++j) {
        // Squares: one strong look counts more than many weak ones.
        if (std::abs(i - j) > kBeside) sum += std::pow(static_cast<double>(all.at(i, j)), 2);
      }
    }
    if (sum > most) {
      most = sum;
      best = {first, first + size};
    }
  }
  return best;
}

/// The largest weights between different tokens of the window, largest first.
std::vector<Look> strongest_looks(const WeightGrid& all, Range window) {
  constexpr size_t kMost = 8;
  std::vector<Look> looks;
  for (int64_t i = window.first; i < window.last; ++i) {
    for (int64_t j = window.first; j < window.last; ++j) {
      if (i != j) looks.push_back({all.at(i, j), i, j});
    }
  }
  std::stable_sort(looks.begin(), looks.end(),
                   [](const Look& a, const Look& b) { return a.weight > b.weight; });
  looks.resize(std::min(looks.size(), kMost));
  return looks;
}

Range chosen_window(const std::string& tokens, const WeightGrid& all) {
  if (tokens.empty()) return busiest_window(all, kWindow);
  const auto [first, last] = parse_pair("--tokens", tokens, ':', "FIRST:LAST");
  if (first < 0 || last <= first || last > all.rows || last - first > kMostWindow) {
    throw Failure(
        Exit::usage,
        fmt::format("--tokens: got {}, expected FIRST:LAST with 0 <= FIRST < LAST <= {} and at most "
                    "{} tokens (LAST itself is not shown)",
                    tokens, all.rows, kMostWindow));
  }
  return {first, last};
}

std::string gflops_text(const Run& run) {
  return fmt::format("{:.1f}", run.flops / run.timing.median * 1e-9);
}

Json to_json(const Run& run) {
  return {{"type", run.type},
          {"backend", run.backend},
          {"threads", run.threads},
          {"runs", run.timing.runs},
          {"median_seconds", run.timing.median},
          {"fastest_seconds", run.timing.fastest},
          {"spread", run.timing.spread},
          {"gflops", run.flops / run.timing.median * 1e-9},
          {"memory_bytes", run.memory},
          {"max_error", run.error.largest},
          {"relative_error", run.error.relative}};
}

/// Sizes of the sample, whose queries and keys are of the same tokens.
struct Sizes {
  int64_t batch, seqlen, heads;
  /// Of one matrix of scores in float32, as the textbook keeps it.
  double matrix() const { return 4 * static_cast<double>(seqlen) * static_cast<double>(seqlen); }
  double all_matrices() const { return matrix() * static_cast<double>(batch * heads); }
};

Sizes sizes_of(const Inputs& inputs) {
  const std::vector<int64_t> q = full_shape(inputs.q.shape, false), k = full_shape(inputs.k.shape, false);
  if (q[1] != k[1]) {
    throw misfit("k", fmt::format("got {} keys for {} queries, expected as many (self-attention); use fovea "
                                  "attend and fovea look for others",
                                  k[1], q[1]));
  }
  return {q[0], q[1], q[2]};
}

struct Measured {
  std::vector<Run> runs;  ///< in the sample's type, and in float32 where that is another
  Run textbook;
};

Measured measure_all(const Inputs& inputs, int threads) {
  const std::vector<double> oracle = oracle_output(inputs);
  Measured measured;
  measured.runs.push_back(run_as(inputs, inputs.q.type, oracle, threads));
  if (inputs.q.type != ElementType::f32) {
    measured.runs.push_back(run_as(inputs, ElementType::f32, oracle, threads));
  }
  measured.textbook = run_textbook(inputs, oracle, measured.runs.front().flops);
  return measured;
}

std::string title_of(const DemoOptions& options, const io::Metadata& metadata) {
  std::string title = fmt::format("Attention of head {}", options.head);
  if (const auto layer = metadata.find("layer"); layer != metadata.end()) title += ", layer " + layer->second;
  if (const auto layers = metadata.find("num_layers"); layers != metadata.end())
    title += " of " + layers->second;
  return title;
}

std::string subtitle_of(const io::Metadata& metadata, Range window, int64_t seqlen) {
  const auto model = metadata.find("model");
  const std::string name =
      model == metadata.end() ? "" : model->second.substr(0, model->second.find_first_of(" ,;(")) + ", ";
  return fmt::format("{}tokens {} to {} of {}, computed by fovea {}", name, window.first, window.last - 1,
                     seqlen, version());
}

/// Returns the window of tokens that the picture shows with their names.
Range write_demo_picture(const DemoOptions& options, const Inputs& inputs,
                         const std::vector<std::string>& names, const Execution& execution) {
  const AttentionMap map(inputs, {}, execution, 0, options.head);
  const int64_t seqlen = map.seqlen_q();
  if (seqlen == 0) throw Failure(Exit::input, "q, k: got an empty sequence, expected tokens to look at");
  const int threads = execution.resolved_threads();
  const Range whole = {0, seqlen};
  const WeightGrid all = map.pooled(whole, whole, seqlen, seqlen, Pooling::max, threads);
  const Range window = chosen_window(options.tokens, all);
  LabelledMap figure;
  figure.title = title_of(options, inputs.metadata);
  figure.subtitle = subtitle_of(inputs.metadata, window, seqlen);
  figure.range = window;
  figure.seqlen = seqlen;
  for (int64_t i = window.first; i < window.last; ++i) {
    figure.tokens.push_back(names.empty() ? std::to_string(i) : names[static_cast<size_t>(i)]);
  }
  figure.window = map.pooled(window, window, window.size(), window.size(), Pooling::max, threads);
  // Cells of two pixels: a single strong look stays visible.
  figure.overview = map.pooled(whole, whole, 256, 256, Pooling::max, threads);
  figure.looks = strongest_looks(all, window);
  write_picture_output(options.output, draw_labelled_map(figure, picture_format(options.output)),
                       inputs.files);
  return window;
}

void print_as_json(const DemoOptions& options, const Inputs& inputs, const Sizes& sizes,
                   const Measured& measured, Range window) {
  Json json = {{"version", version()},   {"machine", machine()},
               {"input", options.input}, {"shape", full_shape(inputs.q.shape, false)},
               {"runs", Json::array()},  {"textbook", to_json(measured.textbook)}};
  for (const Run& run : measured.runs) {
    Json entry = to_json(run);
    entry["speedup_over_textbook"] = measured.textbook.timing.median / run.timing.median;
    entry["plan"] = run.reason;
    json["runs"].push_back(std::move(entry));
  }
  json["matrix_bytes_per_head"] = sizes.matrix();
  json["matrix_bytes"] = sizes.all_matrices();
  json["peak_process_bytes"] = peak_memory();
  if (!options.output.empty()) {
    json["picture"] = {
        {"file", options.output}, {"head", options.head}, {"tokens", {window.first, window.last}}};
  }
  print_json(json);
}

void print_input(const DemoOptions& options, const Inputs& inputs, const std::vector<std::string>& names) {
  fmt::print("fovea {} on {}\n\n", version(), machine());
  fmt::print("Input    {}\n", options.input);
  fmt::print("         q {} k {} v {} {}: batch, tokens, heads, head size\n", shape_text(inputs.q.shape),
             shape_text(inputs.k.shape), shape_text(inputs.v->shape), type_name(inputs.q.type));
  if (names.empty()) return;
  std::string text;
  for (size_t i = 0; i < names.size() && text.size() < 60; ++i) text += safe_text(names[i]) + " ";
  fmt::print("         {} tokens: {}...\n", names.size(), text);
}

void print_reason(const std::string& reason) {
  fmt::print("\nBackends in order of preference, and why each was taken or not:\n");
  for (size_t start = 0; start <= reason.size();) {
    const size_t end = std::min(reason.find('\n', start), reason.size());
    fmt::print("  {}\n", reason.substr(start, end - start));
    start = end + 1;
  }
  fmt::print("\n");
}

/// A column for each run, the textbook last.
void print_runs(const Measured& measured) {
  Table table;
  const auto row = [&](const std::string& name, const auto& cell) {
    std::vector<std::string> cells = {name};
    for (const Run& run : measured.runs) cells.push_back(cell(run));
    cells.push_back(cell(measured.textbook));
    table.add(std::move(cells));
  };
  const auto is_textbook = [](const Run& run) { return run.backend == "textbook"; };
  row("", [&](const Run& run) { return is_textbook(run) ? "textbook loop, float32" : "fovea, " + run.type; });
  row("backend", [&](const Run& run) { return is_textbook(run) ? "-" : run.backend; });
  row("threads", [](const Run& run) { return std::to_string(run.threads); });
  row("time (median)", [](const Run& run) { return seconds_text(run.timing.median); });
  row("  fastest", [](const Run& run) { return seconds_text(run.timing.fastest); });
  row("  runs", [](const Run& run) { return std::to_string(run.timing.runs); });
  row("GFLOP/s", gflops_text);
  row("faster than the loop", [&](const Run& run) {
    return is_textbook(run) ? "-"
                            : fmt::format("{:.1f} x", measured.textbook.timing.median / run.timing.median);
  });
  row("workspace and output", [](const Run& run) { return bytes_text(run.memory); });
  row("largest error", [](const Run& run) { return fmt::format("{:.2e}", run.error.largest); });
  row("relative error", [](const Run& run) { return fmt::format("{:.2e}", run.error.relative); });
  fmt::print("{}", table.text());
}

void print_as_text(const DemoOptions& options, const Inputs& inputs, const std::vector<std::string>& names,
                   const Sizes& sizes, const Measured& measured, Range window) {
  print_input(options, inputs, names);
  print_reason(measured.runs.front().reason);
  print_runs(measured);
  fmt::print("\nErrors are distances from attention in float64 over the same stored values.\n");
  fmt::print(
      "The {0} x {0} matrix of scores that was not made: {1} a head, {2} for all {3} heads (float32).\n",
      sizes.seqlen, bytes_text(sizes.matrix()), bytes_text(sizes.all_matrices()), sizes.batch * sizes.heads);
  fmt::print("Most memory this process held, the oracle and the textbook loop included: {}.\n",
             bytes_text(peak_memory()));
  if (!options.output.empty()) {
    fmt::print("\nPicture  {}: head {}, tokens {} to {} with their names, and all {}\n", options.output,
               options.head, window.first, window.last - 1, sizes.seqlen);
  }
}

void show(const DemoOptions& options, const Inputs& inputs) {
  const Sizes sizes = sizes_of(inputs);
  const std::vector<std::string> names = token_names(inputs, sizes.seqlen);
  Execution execution;
  execution.threads = options.threads;
  const Measured measured = measure_all(inputs, execution.resolved_threads());
  Range window;
  if (!options.output.empty()) window = write_demo_picture(options, inputs, names, execution);
  if (options.json) {
    print_as_json(options, inputs, sizes, measured, window);
  } else {
    print_as_text(options, inputs, names, sizes, measured, window);
  }
}

Exit run_demo(const DemoOptions& options) {
  if (!options.output.empty()) check_picture_output("--output", options.output, {options.input});
  InputFiles files;
  files.input = options.input;
  const Inputs inputs = read_inputs(files);
  try {
    show(options, inputs);
  } catch (const Error& error) {
    throw inputs.naming_file(error);
  }
  return Exit::ok;
}

}  // namespace

void add_demo(CLI::App& program, Action& action) {
  const auto options = std::make_shared<DemoOptions>();
  CLI::App* command =
      program.add_subcommand("demo", "Attend over a real sample: speed, memory, exactness, a picture");
  command
      ->add_option("--input", options->input,
                   "A .safetensors file with q, k, v; names of tokens are read from its metadata")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--output", options->output,
                   "Where the picture goes, as PNG or SVG; left out: none is made")
      ->type_name("FILE");
  command->add_option("--head", options->head, "The head to picture (9)")->type_name("N");
  command
      ->add_option("--tokens", options->tokens,
                   "Tokens shown with their names, LAST not included; left out: where most happens")
      ->type_name("FIRST:LAST");
  command->add_option("--threads", options->threads, "0: all processors that the process may use")
      ->type_name("N");
  add_json_option(*command, options->json);
  command->footer("Example:\n  fovea demo --input data/minilm_layer3_qkv.safetensors --output attention.png");
  command->callback([options, &action] { action = [options] { return run_demo(*options); }; });
}

}  // namespace fovea::cli
