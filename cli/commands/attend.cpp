// `fovea attend`: attention over files, and its gradients.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <memory>
#include <set>

#include "cli/commands/commands.hpp"
#include "cli/data/expressions.hpp"
#include "cli/data/inputs.hpp"
#include "cli/data/output.hpp"
#include "cli/options/options.hpp"
#include "cli/options/rank_options.hpp"
#include "cli/ranks/rank_group.hpp"
#include "cli/ranks/shard_output.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct AttendOptions {
  InputFiles files;
  Terms terms;
  ExpressionOptions expressions;
  Execution execution;
  RankOptions ranks;
  std::string output, lse_output, grad, output_dtype;
  bool json = false;

  bool writes_shards() const { return io::is_index(output); }
};

struct Step {
  std::string pass, backend;
  double seconds = 0, flops = 0;
  size_t workspace = 0;
  std::optional<RankedRun> over_ranks{};
};

/// Ranks that compute, and what they read and keep.
struct Ranks {
  explicit Ranks(const RankOptions& options) : group(options) {}

  RankGroup group;
  RankFiles files{};
};

/// On all ranks, where there are some. The plan of the whole problem checks it in either case.
Step run_pass(const Problem& problem, const AttendOptions& options, Ranks* ranks) {
  const Plan plan(problem, options.execution.options());
  if (ranks != nullptr) {
    const RankedRun run = ranks->group.attend(problem, options.execution, ranks->files);
    return {problem.pass == Pass::forward ? "forward" : "backward",
            std::string(plan.backend()),
            run.seconds,
            plan.flops(),
            run.workspace,
            run};
  }
  Workspace workspace(plan);
  const auto start = std::chrono::steady_clock::now();
  plan.run(buffers_of(problem), workspace);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {problem.pass == Pass::forward ? "forward" : "backward", std::string(plan.backend()), seconds,
          plan.flops(), plan.workspace_size()};
}

void check_outputs(const AttendOptions& options, const Paths& inputs) {
  const bool gradients = !options.grad.empty();
  if (options.writes_shards()) {
    if (!options.ranks.asked()) {
      throw Failure(Exit::usage,
                    fmt::format("--output: got '{}' without --ranks, expected FILE.safetensors; shards are "
                                "what ranks write",
                                safe_text(options.output)));
    }
    if (!options.lse_output.empty())
      throw Failure(Exit::usage, "--lse-output: got it beside shards, which have lse; leave it out");
    return check_output("--output", options.output, {".json"}, inputs);
  }
  check_output(
      "--output", options.output,
      gradients ? std::vector<std::string>{".safetensors"} : std::vector<std::string>{".safetensors", ".npy"},
      inputs);
  if (options.lse_output.empty()) return;
  check_output("--lse-output", options.lse_output, {".npy"}, inputs);
  std::error_code ignored;
  const std::filesystem::path a = options.output, b = options.lse_output;
  if (std::filesystem::weakly_canonical(a, ignored) == std::filesystem::weakly_canonical(b, ignored)) {
    throw Failure(Exit::usage, "--lse-output: got the same file as --output, expected another");
  }
}

/// d_o from --grad, in the type of q.
Array read_gradient(const AttendOptions& options, Inputs& inputs) {
  std::optional<RowSource> rows = open_rows("d_o", options.grad);
  Array d_o = !rows                   ? read_array("d_o", options.grad)
              : options.ranks.asked() ? rows->described("d_o")
                                      : rows->file.read_all();
  if (rows) {
    for (std::filesystem::path& file : rows->file.files()) inputs.files.push_back(std::move(file));
  } else {
    inputs.files.push_back(file_of(options.grad));
  }
  inputs.sources["d_o"] = full_reference("d_o", options.grad);
  if (d_o.shape != inputs.o_shape_for_user() || !is_real(d_o.type)) {
    throw Failure(
        Exit::input,
        fmt::format("--grad ({}): got {} of shape {}, expected real numbers of shape {}, that of the output",
                    inputs.sources.at("d_o"), type_name(d_o.type), shape_text(d_o.shape),
                    shape_text(inputs.o_shape_for_user())));
  }
  if (!rows || !options.ranks.asked()) return converted(std::move(d_o), inputs.q.type);
  d_o.type = rows->type = inputs.q.type;
  inputs.rows.emplace("d_o", std::move(*rows));
  return d_o;
}

/// What was computed: o and lse come first.
struct Results {
  std::vector<Array> outputs;
  std::vector<Step> steps;
  size_t shards = 0;  ///< files that hold the outputs; 0: they are no set
  const Array& o() const { return outputs[0]; }
  const Array& lse() const { return outputs[1]; }
};

/// The gradient of a tensor x of --tensor is written as dx, beside dq, dk, dv, dbias and dsink.
void check_names(const AttendOptions& options, const Expressions& expressions) {
  if (options.grad.empty()) return;
  for (const Array& tensor : expressions.tensors) {
    for (const std::string_view taken : {"v", "bias", "sink"}) {
      if (tensor.name == taken) {
        throw Failure(
            Exit::usage,
            fmt::format("--tensor: got the name '{}', expected another beside --grad: d{} is the gradient of "
                        "an input",
                        taken, taken));
      }
    }
  }
}

/// Runs the forward, and the backward where there is d_o. Arrays have the shapes that the user gave q in; the library sees them in
/// the rank that it wants.
Results compute(const AttendOptions& options, const Inputs& inputs, const Expressions& expressions,
                const std::optional<Array>& d_o, Ranks* ranks) {
  const ElementType o_type = options.output_dtype.empty()
                                 ? output_type(inputs.q.type)
                                 : parse_type("--output-dtype", options.output_dtype);
  Results results;
  results.outputs.reserve(8 + FOVEA_MAX_NAMED_TENSORS);  // views point into them
  const auto output = [&](const char* name, ElementType type, const std::vector<int64_t>& shape) -> Array& {
    // What ranks keep has no elements here.
    return results.outputs.emplace_back(options.writes_shards() ? Array{name, type, shape, {}}
                                                                : io::make_array(name, type, shape));
  };
  Problem problem = inputs.problem();
  options.terms.apply(problem);
  expressions.apply(problem);
  problem.o = view(output("o", o_type, inputs.o_shape_for_user()), inputs.o_shape());
  problem.lse = view(output("lse", ElementType::f32, inputs.lse_shape_for_user()), inputs.lse_shape());
  results.steps.push_back(run_pass(problem, options, ranks));
  if (!d_o) return results;

  problem.pass = Pass::backward;
  problem.d_o = view(*d_o, inputs.o_shape());
  const auto gradient_of = [&](const char* name, const Array& array, const Tensor& tensor) {
    return view(output(name, array.type, array.shape), tensor.shape());
  };
  problem.dq = gradient_of("dq", inputs.q, problem.q);
  problem.dk = gradient_of("dk", inputs.k, problem.k);
  problem.dv = gradient_of("dv", *inputs.v, problem.v);
  if (inputs.bias) problem.dbias = gradient_of("dbias", *inputs.bias, problem.bias);
  if (inputs.sink) problem.dsink = gradient_of("dsink", *inputs.sink, problem.sink);
  for (NamedTensor& named : problem.named) {
    if (options.expressions.score.empty() || !is_float(named.tensor)) continue;
    const auto shape = named.tensor.shape();
    named.gradient = view(output(("d" + named.name).c_str(), ElementType::f32, {shape.begin(), shape.end()}));
  }
  results.steps.push_back(run_pass(problem, options, ranks));
  return results;
}

bool writes_npy(const AttendOptions& options) {
  return std::filesystem::path(options.output).extension() == ".npy";
}

/// On every process: ranks that keep their results write them.
void write_outputs(const AttendOptions& options, const Inputs& inputs, Results& results, const Ranks* ranks) {
  io::Metadata metadata = {{"made_by", "fovea attend"}, {"version", std::string(version())}};
  if (const auto tokens = inputs.metadata.find("tokens"); tokens != inputs.metadata.end())
    metadata.insert(*tokens);
  if (options.writes_shards()) {
    results.shards =
        write_shards(options.output, results.outputs, metadata, ranks->group, ranks->files, inputs.files);
    return;
  }
  if (ranks != nullptr && !ranks->group.has_result()) return;
  if (writes_npy(options)) {
    write_npy_output(options.output, results.o(), inputs.files);
  } else {
    write_safetensors_output(options.output, results.outputs, metadata, inputs.files);
  }
  if (!options.lse_output.empty()) write_npy_output(options.lse_output, results.lse(), inputs.files);
}

void print_json_results(const AttendOptions& options, const Inputs& inputs, const Results& results) {
  const auto about = [](const Array& array) {
    return Json{{"type", type_name(array.type)}, {"shape", array.shape}};
  };
  Json json = {{"q", about(inputs.q)},    {"k", about(inputs.k)},
               {"v", about(*inputs.v)},   {"threads", options.execution.resolved_threads()},
               {"passes", Json::array()}, {"outputs", Json::array()}};
  for (const Step& step : results.steps) {
    json["passes"].push_back({{"pass", step.pass},
                              {"backend", step.backend},
                              {"seconds", step.seconds},
                              {"flops", step.flops},
                              {"workspace_bytes", step.workspace}});
    if (!step.over_ranks) continue;
    json["passes"].back()["ranks"] = {{"count", step.over_ranks->ranks},
                                      {"threads", step.over_ranks->threads},
                                      {"reason", step.over_ranks->reason}};
  }
  const bool npy = writes_npy(options);
  for (const Array& array : results.outputs) {
    const bool is_lse = &array == &results.lse();
    if (npy && is_lse && options.lse_output.empty()) continue;
    Json entry = {{"name", array.name}};
    entry.update(about(array));
    entry["file"] = npy && is_lse ? options.lse_output : options.output;
    json["outputs"].push_back(std::move(entry));
  }
  if (results.shards > 0) json["shards"] = results.shards;
  print_json(json);
}

void print_text_report(const AttendOptions& options, const Inputs& inputs, const Results& results) {
  fmt::print("q {} k {} v {} {}\n", shape_text(inputs.q.shape), shape_text(inputs.k.shape),
             shape_text(inputs.v->shape), type_name(inputs.q.type));
  for (const Step& step : results.steps) {
    const std::string threads =
        step.over_ranks
            ? fmt::format("{} ranks of {} threads", step.over_ranks->ranks, step.over_ranks->threads)
            : fmt::format("{} threads", options.execution.resolved_threads());
    fmt::print("{}: {}, {}, {}, {:.1f} GFLOP/s, workspace {}\n", step.pass, step.backend, threads,
               seconds_text(step.seconds), step.seconds > 0 ? step.flops / step.seconds * 1e-9 : 0,
               bytes_text(static_cast<double>(step.workspace)));
  }
  std::string names;
  for (const Array& array : results.outputs) {
    if (writes_npy(options) && &array == &results.lse()) continue;
    names += fmt::format("{}{} {} {}", names.empty() ? "" : ", ", array.name, type_name(array.type),
                         shape_text(array.shape));
  }
  const std::string in_shards = results.shards > 0 ? fmt::format(" and {} shards", results.shards) : "";
  fmt::print("wrote {}{}: {}\n", options.output, in_shards, names);
  if (options.lse_output.empty()) return;
  fmt::print("wrote {}: lse float32 {}\n", options.lse_output, shape_text(results.lse().shape));
}

Exit run_attend(const AttendOptions& options) {
  Inputs inputs = read_inputs(options.files, true, options.ranks.asked());
  std::optional<Array> d_o;
  if (!options.grad.empty()) d_o = read_gradient(options, inputs);
  const Expressions expressions = read_expressions(options.expressions);
  check_names(options, expressions);
  inputs.files.insert(inputs.files.end(), expressions.files.begin(), expressions.files.end());
  inputs.sources.insert(expressions.sources.begin(), expressions.sources.end());
  check_outputs(options, inputs.files);
  options.ranks.check();
  std::optional<Ranks> ranks;
  if (options.ranks.asked()) {
    ranks.emplace(options.ranks);
    ranks->files.read = [&](const std::string& tensor, int64_t sequence, int64_t begin, int64_t end,
                            std::byte* to) {
      const auto rows = inputs.rows.find(tensor);
      if (rows != inputs.rows.end()) rows->second.read(sequence, begin, end, to);
    };
    ranks->files.keeps_results = options.writes_shards();
    ranks->files.gradients_follow = d_o.has_value();
  }
  Results results;
  const auto work = [&] {
    try {
      results = compute(options, inputs, expressions, d_o, ranks ? &*ranks : nullptr);
    } catch (const Error& error) {
      throw inputs.naming_file(error);
    }
    write_outputs(options, inputs, results, ranks ? &*ranks : nullptr);
  };
  ranks ? ranks->group.telling(work) : work();
  const bool is_written = !options.writes_shards() || results.shards > 0;
  if (ranks && (!ranks->group.has_result() || !is_written)) return Exit::ok;
  (options.json ? print_json_results : print_text_report)(options, inputs, results);
  return Exit::ok;
}

}  // namespace

void add_attend(CLI::App& program, Action& action) {
  const auto options = std::make_shared<AttendOptions>();
  CLI::App* command =
      program.add_subcommand("attend", "Attention over .npy and .safetensors files, and its gradients");
  options->files.add_options(*command, true, true);
  options->terms.add_options(*command, true);
  options->expressions.add_options(*command);
  options->execution.add_options(*command, true);
  options->ranks.add_options(*command, true);
  constexpr const char* kOutputs = "Outputs";
  command
      ->add_option("--output", options->output,
                   "FILE.safetensors takes o and lse (and gradients), FILE.npy takes o; "
                   "FILE.safetensors.index.json: over ranks, each writes its rows to files beside it")
      ->type_name("FILE")
      ->required()
      ->group(kOutputs);
  command
      ->add_option("--lse-output", options->lse_output,
                   "Write the lse (natural logarithm, float32) to this file as well")
      ->type_name("FILE.npy")
      ->group(kOutputs);
  command
      ->add_option(
          "--output-dtype", options->output_dtype,
          "Type of o: that of q (the default) or float32; where q has 8 bits any other, by default bfloat16")
      ->type_name("TYPE")
      ->group(kOutputs);
  command
      ->add_option(
          "--grad", options->grad,
          "The gradient of o; dq, dk, dv (and dbias, dsink, and dX for each float tensor X of --score) are "
          "written as well")
      ->type_name("FILE")
      ->group(kOutputs);
  add_json_option(*command, options->json);
  command->footer(
      "A FILE to read is FILE.npy, FILE.safetensors (the tensor named as the option) or "
      "FILE.safetensors:NAME. For FILE.safetensors may stand FILE.safetensors.index.json or the shards\n"
      "FILE-00001-of-00004.safetensors and so on; over ranks each reads its rows only.\n"
      "o has the shape of q with the head size of v; lse is (seqlen), (heads, seqlen) or (batch, heads, "
      "seqlen).\n"
      "Outputs appear complete or not at all, and never over an input.\n"
      "\n"
      "Examples:\n"
      "  fovea attend --input qkv.safetensors --causal --output o.safetensors\n"
      "  fovea attend --q q.npy --k k.npy --v v.npy --dtype bfloat16 --output o.npy --lse-output lse.npy\n"
      "  fovea attend --input qkv.safetensors --grad d_o.npy --output gradients.safetensors\n"
      "  fovea attend --input qkv.safetensors --causal --ranks 4 --output o.npy\n"
      "  mpirun -n 4 fovea attend --input qkv.safetensors --causal --output o.npy\n"
      "  fovea attend --input qkv.safetensors --score \"s - slope[h] * abs(q - k)\" --tensor "
      "slope=slopes.npy "
      "--output o.npy");
  command->callback([options, &action] { action = [options] { return run_attend(*options); }; });
}

}  // namespace fovea::cli
