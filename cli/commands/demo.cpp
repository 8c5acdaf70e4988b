// `fovea demo`: attention over a real layer's queries, keys and values, what it cost, how exact it is, and a
// picture of one head.
#include <fmt/core.h>

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

constexpr int64_t kWindow = 52;      // tokens with labels that a screen has room for
constexpr int64_t kMostWindow = 96;  // beyond this the picture does not fit any screen

struct Run {
  std::string type, backend, reason;
  int threads = 0;
  Timing timing;
  double flops = 0, memory = 0;
  ErrorSize error;
};

/// float64 throughout, on the oracle.
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
  const Array o = io::make_array("o", type, typed.o_shape());
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

/// One name for each token: from the file where it has them, else their numbers.
std::vector<std::string> token_names(const Inputs& inputs, int64_t seqlen, bool& from_file) {
  std::vector<std::string> names;
  const auto entry = inputs.metadata.find("tokens");
  if (entry != inputs.metadata.end()) {
    const Json parsed = Json::parse(entry->second, nullptr, false);
    if (parsed.is_array()) {
      for (const Json& token : parsed)
        names.push_back(token.is_string() ? safe_text(token.get<std::string>()) : "?");
    }
  }
  from_file = static_cast<int64_t>(names.size()) == seqlen;
  if (!from_file) {
    names.clear();
    for (int64_t i = 0; i < seqlen; ++i) names.push_back(std::to_string(i));
  }
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

/// The largest weights between different tokens of the window, a line each.
std::vector<std::string> strongest_looks(const WeightGrid& all, Range window,
                                         const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  struct Look {
    float weight;
    int64_t query, key;
  };
  std::vector<Look> looks;
  for (int64_t i = window.first; i < window.last; ++i) {
    for (int64_t j = window.first; j < window.last; ++j) {
      if (i != j) looks.push_back({all.at(i, j), i, j});
    }
  }
  std::stable_sort(looks.begin(), looks.end(),
                   [](const Look& a, const Look& b) { return a.weight > b.weight; });
  looks.resize(std::min(looks.size(), kMost));
  std::vector<std::string> lines = {"Strongest looks at another token:"};
  const auto named = [&](int64_t i) { return fmt::format("{} {}", i, names[static_cast<size_t>(i)]); };
  for (const Look& look : looks) {
    lines.push_back(fmt::format("{:.2f}  {:<16} -> {}", look.weight, named(look.query), named(look.key)));
  }
  return lines;
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

Exit run_demo(const DemoOptions& options) {
  if (!options.output.empty()) check_output("--output", options.output, {".png"}, {options.input});
  InputFiles files;
  files.input = options.input;
  const Inputs inputs = read_inputs(files);
  const std::vector<int64_t> q = full_shape(inputs.q.shape, false), k = full_shape(inputs.k.shape, false);
  if (q[1] != k[1]) {
    throw Failure(Exit::problem,
                  fmt::format("k: got {} keys for {} queries, expected as many (self-attention); use fovea "
                              "attend and fovea look for others",
                              k[1], q[1]));
  }
  const int64_t seqlen = q[1], batch = q[0], heads = q[2];
  Execution execution;
  execution.threads = options.threads;
  const int threads = execution.resolved_threads();

  const std::vector<double> oracle = oracle_output(inputs);
  std::vector<Run> runs;
  runs.push_back(run_as(inputs, inputs.q.type, oracle, threads));
  if (inputs.q.type != ElementType::f32) runs.push_back(run_as(inputs, ElementType::f32, oracle, threads));
  const Run textbook = run_textbook(inputs, oracle, runs.front().flops);
  // Scores in float32, as the textbook keeps them.
  const double matrix = 4 * static_cast<double>(seqlen) * static_cast<double>(seqlen);
  const double all_matrices = matrix * static_cast<double>(batch * heads);

  bool named = false;
  const std::vector<std::string> names = token_names(inputs, seqlen, named);
  Range window{0, 0};
  if (!options.output.empty()) {
    const AttentionMap map(inputs, {}, execution, 0, options.head);
    const WeightGrid all = map.pooled({0, seqlen}, {0, seqlen}, seqlen, seqlen, Pooling::max, threads);
    window = chosen_window(options.tokens, all);
    LabelledMap figure;
    const auto entry = [&](const char* key) {
      const auto found = inputs.metadata.find(key);
      return found == inputs.metadata.end() ? std::string() : safe_text(found->second);
    };
    figure.title = fmt::format("Attention of head {}", options.head);
    if (!entry("layer").empty()) figure.title += ", layer " + entry("layer");
    if (!entry("num_layers").empty()) figure.title += " of " + entry("num_layers");
    const std::string model = entry("model");
    figure.subtitle = fmt::format("{}{}tokens {} to {} of {}, computed by fovea {}",
                                  model.substr(0, model.find_first_of(" ,;(")), model.empty() ? "" : ", ",
                                  window.first, window.last - 1, seqlen, version());
    figure.range = window;
    figure.seqlen = seqlen;
    figure.tokens.assign(names.begin() + window.first, names.begin() + window.last);
    figure.window = map.pooled(window, window, window.size(), window.size(), Pooling::max, threads);
    // Cells of two pixels: a single strong look stays visible.
    figure.overview = map.pooled({0, seqlen}, {0, seqlen}, 256, 256, Pooling::max, threads);
    figure.remarks = strongest_looks(all, window, names);
    write_png_output(options.output, draw_labelled_map(figure), inputs.files);
  }

  if (options.json) {
    Json json = {{"version", version()}, {"machine", machine()},  {"input", options.input},
                 {"shape", q},           {"runs", Json::array()}, {"textbook", to_json(textbook)}};
    for (const Run& run : runs) {
      Json entry = to_json(run);
      entry["speedup_over_textbook"] = textbook.timing.median / run.timing.median;
      entry["plan"] = run.reason;
      json["runs"].push_back(std::move(entry));
    }
    json["matrix_bytes_per_head"] = matrix;
    json["matrix_bytes"] = all_matrices;
    json["peak_process_bytes"] = peak_memory();
    if (!options.output.empty()) {
      json["picture"] = {
          {"file", options.output}, {"head", options.head}, {"tokens", {window.first, window.last}}};
    }
    print_json(json);
    return Exit::ok;
  }

  fmt::print("fovea {} on {}\n\n", version(), machine());
  fmt::print("Input    {}\n", options.input);
  fmt::print("         q {} k {} v {} {}: batch, tokens, heads, head size\n", shape_text(inputs.q.shape),
             shape_text(inputs.k.shape), shape_text(inputs.v->shape), type_name(inputs.q.type));
  if (named) {
    std::string text;
    for (size_t i = 0; i < names.size() && text.size() < 60; ++i) text += names[i] + " ";
    fmt::print("         {} tokens: {}...\n", seqlen, text);
  }
  fmt::print("\nBackends in order of preference, and why each was taken or not:\n");
  std::string reason = runs.front().reason;
  for (size_t start = 0; start <= reason.size();) {
    const size_t end = std::min(reason.find('\n', start), reason.size());
    fmt::print("  {}\n", reason.substr(start, end - start));
    start = end + 1;
  }
  fmt::print("\n");

  Table table;
  const auto row = [&](const std::string& name, const auto& cell) {
    std::vector<std::string> cells = {name};
    for (const Run& run : runs) cells.push_back(cell(run));
    cells.push_back(cell(textbook));
    table.add(std::move(cells));
  };
  std::vector<std::string> head = {""};
  for (const Run& run : runs) head.push_back("fovea, " + run.type);
  head.emplace_back("textbook loop, float32");
  table.add(std::move(head));
  row("backend", [](const Run& run) { return run.backend == "textbook" ? std::string("-") : run.backend; });
  row("threads", [](const Run& run) { return std::to_string(run.threads); });
  row("time (median)", [](const Run& run) { return seconds_text(run.timing.median); });
  row("  fastest", [](const Run& run) { return seconds_text(run.timing.fastest); });
  row("  runs", [](const Run& run) { return std::to_string(run.timing.runs); });
  row("GFLOP/s", gflops_text);
  row("faster than the loop", [&](const Run& run) {
    return run.backend == "textbook" ? std::string("-")
                                     : fmt::format("{:.1f} x", textbook.timing.median / run.timing.median);
  });
  row("workspace and output", [](const Run& run) { return bytes_text(run.memory); });
  row("largest error", [](const Run& run) { return fmt::format("{:.2e}", run.error.largest); });
  row("relative error", [](const Run& run) { return fmt::format("{:.2e}", run.error.relative); });
  fmt::print("{}", table.text());
  fmt::print("\nErrors are distances from attention in float64 over the same stored values.\n");
  fmt::print(
      "The {0} x {0} matrix of scores that was not made: {1} a head, {2} for all {3} heads (float32).\n",
      seqlen, bytes_text(matrix), bytes_text(all_matrices), batch * heads);
  fmt::print("Most memory this process held, the oracle and the textbook loop included: {}.\n",
             bytes_text(peak_memory()));
  if (!options.output.empty()) {
    fmt::print("\nPicture  {}: head {}, tokens {} to {} with their names, and all {}\n", options.output,
               options.head, window.first, window.last - 1, seqlen);
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
  command->add_option("--output", options->output, "Where the picture goes; left out: none is made")
      ->type_name("FILE.png");
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
