// `fovea bench`: checks a backend against the oracle on given sizes, then times it.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "cli/bench/beside_read.hpp"
#include "cli/bench/data.hpp"
#include "cli/bench/decode.hpp"
#include "cli/bench/report.hpp"
#include "cli/bench/rows.hpp"
#include "cli/bench/verify.hpp"
#include "cli/commands/commands.hpp"
#include "cli/measure/gpu.hpp"
#include "cli/measure/measure.hpp"
#include "cli/options/options.hpp"
#include "cli/options/rank_options.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/ranks/crew.hpp"
#include "cli/terminal/failure.hpp"
#include "cli/terminal/progress.hpp"

namespace fovea::cli {
namespace {

struct BenchOptions {
  ShapeOptions shape;
  Terms terms;
  ExpressionOptions expressions;
  Execution execution;
  RankOptions ranks;
  std::vector<std::string> pass = {"fwd"};
  std::optional<std::string> rows;
  std::string device, layout = "bshd";
  double seconds = 1;
  DecodeOptions cache;
  bool decode = false, json = false, list = false;

  std::optional<int> gpu() const { return gpu_of(device, execution.backend); }
  Layout memory_order() const { return layout == "bhsd" ? Layout::bhsd : Layout::bshd; }
};

/// The rows of --decode, which times a forward without expressions.
std::vector<BenchCase> decode_cases(const BenchOptions& options) {
  const auto refuse = [](bool given, const char* name, const char* got) {
    if (given)
      throw Failure(Exit::usage, fmt::format("{}: got {} beside --decode; leave one of them out", name, got));
  };
  refuse(options.rows || options.list, "--rows, --list", "rows that have a name");
  refuse(options.pass != std::vector<std::string>{"fwd"}, "--pass", "another pass than fwd");
  refuse(options.expressions.any(), "--score, --sees, --tensor", "an expression");
  if (options.ranks.asked()) {
    throw Failure(
        Exit::usage,
        "--ranks: got ranks beside --decode, expected none; leave it out, and under mpirun pass --no-mpi");
  }
  ShapeOptions shapes = options.shape;
  shapes.take_defaults(default_decode_shapes());
  DecodeOptions caches = options.cache;
  caches.heads_outside = options.memory_order() == Layout::bhsd;
  return caches.cases(shapes.shapes(), options.terms);
}

std::vector<BenchCase> cases_of(const BenchOptions& options) {
  if (options.decode) return decode_cases(options);
  if (options.cache.given())
    throw Failure(
        Exit::usage,
        "--page, --cache-dtype, --caches: got one without --decode, whose caches have them; add it");
  if (options.rows || options.list) {
    if (options.shape.given()) {
      throw Failure(Exit::usage, "--rows: got sizes as well, but a row has its own; leave one of them out");
    }
    std::vector<BenchCase> rows = listed_rows(options.rows.value_or(""));
    if (rows.empty()) {
      throw Failure(Exit::usage,
                    fmt::format("--rows: got '{}', which no row's name contains; --list names the rows",
                                *options.rows));
    }
    return rows;
  }
  std::vector<BenchCase> cases;
  for (const Shape& shape : options.shape.shapes()) {
    for (const std::string& pass : options.pass)
      cases.push_back({"", shape, parse_pass(pass), options.terms});
  }
  return cases;
}

/// Plans the problem without data: an invalid one is refused before memory is asked for.
void validate(const BenchCase& what, const Expressions& expressions, const Options& options, const Gpu* gpu) {
  Problem sizes = described(what.shape, what.pass);
  what.terms.apply(sizes);
  expressions.apply(sizes);
  if (gpu != nullptr) {
    for (Tensor* t :
         {&sizes.q, &sizes.k, &sizes.v, &sizes.o, &sizes.lse, &sizes.d_o, &sizes.dq, &sizes.dk, &sizes.dv}) {
      *t = t->on(gpu->device());
    }
    for (NamedTensor& named : sizes.named)
      named.tensor = Tensor(nullptr, named.tensor.dtype(), named.tensor.shape()).on(gpu->device());
  }
  const Plan validated(sizes, options);
}

BenchRow bench_decode(const BenchCase& what, const BenchOptions& options) {
  std::optional<Gpu> gpu;
  if (const std::optional<int> id = options.gpu()) gpu.emplace(*id);
  const Options how = options.execution.options();
  static_cast<void>(Plan(DecodeData::described(what, gpu ? &*gpu : nullptr), how));
  DecodeData data(what, gpu ? &*gpu : nullptr);
  const Problem problem = data.problem();
  const Plan plan(problem, how);
  Workspace workspace(plan);
  Buffers buffers = buffers_of(problem);
  if (gpu) buffers.stream = gpu->stream();
  const auto run = [&] { plan.run(buffers, workspace); };
  const auto run_over = [&](const KeysAndValues& cache) {
    buffers.k = cache.k->bytes.data();
    buffers.v = cache.v->bytes.data();
    run();
  };

  run();
  data.download_outputs();
  BenchRow row{.what = what,
               .backend = std::string(plan.backend()),
               .flops = plan.flops(),
               .error = data.largest_error(),
               .allowed = allowed_error(what.shape.type, Pass::forward),
               .rows_checked = what.shape.seqlen_q,
               .workspace = plan.workspace_size()};
  if (!row.right()) return row;  // a wrong result has no time
  if (gpu) {
    time_beside_copy(run, data.k(), data.v(), data.mirrors(), *gpu, options.seconds, row);
  } else {
    std::vector<KeysAndValues> caches = {{&data.k(), &data.v()}};
    for (const auto& [k, v] : data.copies()) caches.push_back({&k, &v});
    time_beside_read(run_over, caches, options.execution.resolved_threads(), options.seconds, row);
  }
  return row;
}

/// `group`: ranks that compute, or nullptr. Processes of mpirun but the first are told what to do by that one, and have no result.
std::optional<BenchRow> bench_one(const BenchCase& what, const Expressions& expressions,
                                  const BenchOptions& options, const RankGroup* group) {
  if (what.cache) return bench_decode(what, options);
  std::optional<Gpu> gpu;
  if (const std::optional<int> id = options.gpu()) gpu.emplace(*id);
  validate(what, expressions, options.execution.options(), gpu ? &*gpu : nullptr);

  const bool backward = what.pass == Pass::backward;
  BenchData data(what.shape, backward, expressions, options.memory_order(), gpu ? &*gpu : nullptr);
  const auto fill_d_o = [&](int64_t rows) {
    data.d_o.fill_last_rows(rows, 4);
    data.upload(data.d_o.array());
  };
  const int64_t rows = rows_for_oracle(what.shape, what.pass);
  if (backward) {
    // The backward reads o and lse, which every backend computes alike.
    attend(data.problem(Pass::forward, what.terms),
           {.num_threads = options.execution.threads, .stream = gpu ? gpu->stream() : nullptr});
    fill_d_o(rows);
  }
  const Problem problem = data.problem(what.pass, what.terms);
  const Plan plan(problem, options.execution.options());
  Workspace workspace(plan);
  Buffers buffers = buffers_of(problem);
  if (gpu) buffers.stream = gpu->stream();
  std::optional<RankCrew> crew;
  const auto renew = [&] {
    if (backward) fill_d_o(what.shape.seqlen_q);
  };
  if (group != nullptr) crew.emplace(problem, *group, options.ranks, options.execution);
  if (crew && !group->has_result()) {
    crew->follow(renew);
    return std::nullopt;
  }
  const std::function<void()> alone = [&] { plan.run(buffers, workspace); };
  const std::function<void()> run = crew ? [&] { crew->run(); } : alone;

  run();
  if (crew) crew->collect();
  data.download_outputs(what.pass);
  BenchRow row{.what = what,
               .backend = std::string(plan.backend()),
               .flops = plan.flops(),
               .error = largest_error(data, what.pass, what.terms, rows),
               .allowed = allowed_error(what.shape.type, what.pass),
               .rows_checked = rows,
               .workspace = crew ? crew->workspace() : plan.workspace_size()};
  if (!row.right()) return row;  // a wrong result has no time
  if (crew) {
    crew->deal(renew);
    const std::vector<Timing> timings =
        measure_in_turns(std::array{run, alone}, options.seconds, {.pause = kUntilPoolsSleep});
    row.timing = timings[0];
    row.single = {timings[1], group->size(), crew->reason()};
    return row;
  }
  renew();
  if (gpu) {
    row.timing = gpu->measure(run, options.seconds, 5);
    row.host_seconds = gpu->host_seconds(run);
  } else if (what.reads_memory) {
    const KeysAndValues cache{&data.k.array(), &data.v.array()};
    time_beside_read([&](const KeysAndValues&) { run(); }, {&cache, 1}, options.execution.resolved_threads(),
                     options.seconds, row);
  } else {
    row.timing = measure(run, options.seconds);
  }
  return row;
}

Exit run_bench(const BenchOptions& options) {
  const std::vector<BenchCase> cases = cases_of(options);
  if (options.list) {
    for (const BenchCase& what : cases) fmt::print("{}\n", what.name);
    return Exit::ok;
  }
  const Expressions expressions = read_expressions(options.expressions);
  const std::optional<int> gpu = options.gpu();
  options.ranks.check();
  if (gpu && options.ranks.asked()) {
    throw Failure(
        Exit::usage,
        "--ranks: got ranks with a GPU, expected --device cpu; ranks of this program compute on CPUs, "
        "and under mpirun --no-mpi makes none");
  }
  if (gpu && options.cache.copies > 1) {
    throw Failure(Exit::usage,
                  fmt::format("--caches: got {} with a GPU, expected 1; caches in turn are of CPUs",
                              options.cache.copies));
  }
  const BenchSetting setting{options.execution.resolved_threads(), options.terms.causal,
                             gpu ? Gpu(*gpu).text() : ""};
  // While the first process checks a result, the others are silent.
  constexpr int64_t kDeadline = 3'600'000;
  std::optional<RankGroup> group;
  if (options.ranks.asked()) group.emplace(options.ranks, kDeadline);
  std::vector<BenchRow> rows;
  const auto work = [&] {
    Progress progress("bench", static_cast<int64_t>(cases.size()));
    for (const BenchCase& what : cases) {
      std::optional<BenchRow> row = bench_one(what, expressions, options, group ? &*group : nullptr);
      if (row) rows.push_back(std::move(*row));
      progress.advance();
    }
  };
  group ? group->telling(work) : work();
  if (group && !group->has_result()) return Exit::ok;
  if (options.json) {
    print_bench_json(setting, rows);
  } else {
    print_bench_table(setting, rows);
  }
  const bool all_right = std::ranges::all_of(rows, [](const BenchRow& row) { return row.right(); });
  return all_right ? Exit::ok : Exit::check_failed;
}

}  // namespace

void add_bench(CLI::App& program, Action& action) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      program.add_subcommand("bench", "Check a backend on given sizes, then time it on this machine");
  options->shape.add_options(*command, true);
  command->add_option("--pass", options->pass, "fwd (the default), bwd, or both: fwd,bwd")
      ->delimiter(',')
      ->type_name("PASS,...")
      ->group("Sizes");
  command
      ->add_option("--rows", options->rows,
                   "Instead of sizes: the rows of the CPU benchmark whose names contain TEXT (\"\": all)")
      ->type_name("TEXT")
      ->group("Rows");
  command->add_flag("--list", options->list, "Print the names of these rows, and stop")->group("Rows");
  command
      ->add_flag(
          "--decode", options->decode,
          "Time few queries over a key-value cache beside a plain read of it; sizes that are left out: "
          "--batch 1,8 --seqlen 1 --seqlen-k 8192 --heads 32 --heads-kv 8 --head-dim 128")
      ->group("Decoding");
  options->cache.add_options(*command);
  options->terms.add_options(*command, false);
  options->expressions.add_options(*command);
  options->execution.add_options(*command, true);
  options->ranks.add_options(*command, true);
  add_device_option(*command, options->device);
  command
      ->add_option("--layout", options->layout,
                   "Memory order, of a cache that of its pieces: bshd (the default) or bhsd")
      ->check(CLI::IsMember({"bshd", "bhsd"}))
      ->type_name("NAME");
  command->add_option("--seconds,--min-time", options->seconds, "How long to repeat each row, at least (1)")
      ->type_name("S");
  add_json_option(*command, options->json);
  command->footer(
      "Sizes may be lists: every combination is timed. Inputs are normal random numbers. Each row is first "
      "checked\n"
      "against the oracle in float64, on as many of the last queries as the oracle computes in a moment. A "
      "wrong "
      "result\n"
      "has no time, and the exit code is 1. GPU times are those of launches in a CUDA graph. Rows named "
      "decode are "
      "timed\n"
      "in turns with a plain read of K and V; on a GPU a copy of them follows. With --ranks each row is "
      "timed in turns with "
      "one rank that has all threads; under mpirun that is the first process.\n"
      "\n"
      "Examples:\n"
      "  fovea bench --seqlen 1024,4096 --heads 16 --head-dim 64,128 --dtype bfloat16 --causal\n"
      "  fovea bench --batch 8 --seqlen 1 --seqlen-k 16384 --heads 32 --heads-kv 8 --head-dim 128\n"
      "  fovea bench --decode --batch 1,64 --page 0,16 --cache-dtype q\n"
      "  fovea bench --pass fwd,bwd --backend cpu_generic --threads 1 --json\n"
      "  fovea bench --seqlen 2048 --sees \"q - k < 256\" --causal\n"
      "  fovea bench --seqlen 4096 --heads 8 --causal --pass fwd,bwd --ranks 2\n"
      "  mpirun -n 2 --bind-to none fovea bench --seqlen 4096 --heads 8 --causal\n"
      "  fovea bench --rows bfloat16_fwd --layout bhsd\n"
      "  fovea bench --device cuda --batch 4 --seqlen 4096 --heads 16 --head-dim 128 --causal --pass "
      "fwd,bwd");
  command->callback([options, &action] { action = [options] { return run_bench(*options); }; });
}

}  // namespace fovea::cli
