// `fovea bench`: how fast a backend does given sizes here, after it was checked against the oracle.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <optional>

#include "cli/commands/commands.hpp"
#include "cli/measure/gpu.hpp"
#include "cli/measure/measure.hpp"
#include "cli/options/options.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/terminal/failure.hpp"
#include "cli/terminal/progress.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct BenchOptions {
  ShapeOptions shape;
  Terms terms;
  Execution execution;
  std::vector<std::string> pass = {"fwd"};
  std::string device;
  double seconds = 1;
  bool json = false;

  std::optional<int> gpu() const { return gpu_of(device, execution.backend); }
};

/// Near enough to normal, of variance 1; the same numbers everywhere.
void fill_normal(Array& array, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const auto normal = [&state] {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      state ^= state << 13;  // xorshift64 (Marsaglia 2003)
      state ^= state >> 7;
      state ^= state << 17;
      sum += static_cast<double>(state >> 11) * 0x1p-53;
    }
    return (sum - 2) * 1.7320508075688772;
  };
  switch (array.type) {
    case ElementType::f16:
      for (uint16_t& x : array.elements<uint16_t>()) x = encode_float16(normal());
      break;
    case ElementType::bf16:
      for (uint16_t& x : array.elements<uint16_t>()) x = encode_bfloat16(normal());
      break;
    case ElementType::f32:
      for (float& x : array.elements<float>()) x = static_cast<float>(normal());
      break;
    default:
      for (double& x : array.elements<double>()) x = normal();
  }
}

/// Rows `rows` and heads `heads` of sequence `batch` of a (batch, seqlen, heads, size) array.
Array cut_out(const Array& array, int64_t batch, std::pair<int64_t, int64_t> rows,
              std::pair<int64_t, int64_t> heads) {
  const int64_t seqlen = array.shape[1], all_heads = array.shape[2], size = array.shape[3];
  Array part =
      io::make_array(array.name, array.type, {1, rows.second - rows.first, heads.second - heads.first, size});
  const size_t run = static_cast<size_t>((heads.second - heads.first) * size) * io::element_size(array.type);
  for (int64_t row = rows.first; row < rows.second; ++row) {
    const size_t from = static_cast<size_t>(((batch * seqlen + row) * all_heads + heads.first) * size) *
                        io::element_size(array.type);
    std::copy_n(
        array.bytes.begin() + static_cast<std::ptrdiff_t>(from), run,
        part.bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(row - rows.first) * run));
  }
  return part;
}

/// The arrays of one problem, and their mirrors on a GPU where that is to run.
struct Data {
  Shape shape;
  Array q, k, v, o, lse, d_o, dq, dk, dv;
  Gpu* gpu = nullptr;
  std::map<const Array*, void*> mirrors;

  Data(const Data&) = delete;  // mirrors go by the address of an array
  Data& operator=(const Data&) = delete;
  Data(const Shape& s, bool backward, Gpu* on_gpu = nullptr) : shape(s), gpu(on_gpu) {
    const auto make = [&](const char* name, std::span<const int64_t> sizes, ElementType type) {
      return io::make_array(name, type, {sizes.begin(), sizes.end()});
    };
    q = make("q", s.q(), s.type);
    k = make("k", s.k(), s.type);
    v = make("v", s.v(), s.type);
    o = make("o", s.o(), s.type);
    lse = make("lse", s.lse(), ElementType::f32);
    fill_normal(q, 1);
    fill_normal(k, 2);
    fill_normal(v, 3);
    if (backward) {
      d_o = make("d_o", s.o(), s.type);
      dq = make("dq", s.q(), s.type);
      dk = make("dk", s.k(), s.type);
      dv = make("dv", s.v(), s.type);
    }
    if (gpu == nullptr) return;
    for (const Array* array : {&q, &k, &v, &o, &lse, &d_o, &dq, &dk, &dv}) {
      if (array->shape.empty()) continue;
      mirrors[array] = gpu->allocate(array->bytes.size());
      upload(*array);
    }
  }

  /// Brings what the host wrote to where the problem lies.
  void upload(const Array& array) const {
    if (gpu != nullptr) gpu->upload(mirrors.at(&array), array);
  }
  /// Brings results to the host.
  void download(Array& array) const {
    if (gpu != nullptr) gpu->download(array, mirrors.at(&array));
  }
  Tensor tensor(const Array& array) const {
    const Tensor here = view(array);
    if (gpu == nullptr) return here;
    return Tensor(mirrors.at(&array), here.dtype(), here.shape()).on(gpu->device());
  }

  Problem problem(Pass pass, const Terms& terms) const {
    Problem p;
    terms.apply(p);
    p.pass = pass;
    p.q = tensor(q);
    p.k = tensor(k);
    p.v = tensor(v);
    p.o = tensor(o);
    p.lse = tensor(lse);
    if (pass == Pass::backward) {
      p.d_o = tensor(d_o);
      p.dq = tensor(dq);
      p.dk = tensor(dk);
      p.dv = tensor(dv);
    }
    return p;
  }
};

Buffers buffers_of(const Problem& p) {
  return {.q = p.q.data(),
          .k = p.k.data(),
          .v = p.v.data(),
          .o = p.o.data(),
          .lse = p.lse.data(),
          .d_o = p.d_o.data(),
          .dq = p.dq.data(),
          .dk = p.dk.data(),
          .dv = p.dv.data(),
          .seed = p.seed};
}

/// The part of a problem that the oracle does: the last `rows` queries (to which the diagonal stays where it
/// is) of the heads that share one head of keys.
struct Slice {
  int64_t batch, head_kv, rows;
};

/// How many rows the oracle does in a moment.
int64_t rows_for_oracle(const Shape& s, Pass pass) {
  constexpr double kOperations = 1e8;
  const double a_row = static_cast<double>(s.seqlen_k * (s.heads_q / s.heads_kv)) *
                       static_cast<double>(2 * (s.head_dim + s.head_dim_v)) * (pass == Pass::forward ? 1 : 4);
  return std::clamp(static_cast<int64_t>(kOperations / std::max(a_row, 1.0)),
                    std::min<int64_t>(s.seqlen_q, 1), s.seqlen_q);
}

/// d_o is 0 but in the last `rows` queries: then no other query has a part in dk and dv, and a slice of
/// queries is enough to check them.
void fill_last_rows(Array& d_o, int64_t rows) {
  Array full = io::make_array("d_o", d_o.type, d_o.shape);
  fill_normal(full, 4);
  std::fill(d_o.bytes.begin(), d_o.bytes.end(), std::byte{0});
  const int64_t batch = d_o.shape[0], seqlen = d_o.shape[1];
  const size_t row_bytes = static_cast<size_t>(d_o.shape[2] * d_o.shape[3]) * io::element_size(d_o.type);
  for (int64_t b = 0; b < batch; ++b) {
    const auto from = static_cast<std::ptrdiff_t>(static_cast<size_t>((b + 1) * seqlen - rows) * row_bytes);
    std::copy_n(full.bytes.begin() + from, static_cast<size_t>(rows) * row_bytes, d_o.bytes.begin() + from);
  }
}

double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// The largest relative error of the outputs of `pass` over the slice.
double error_of(const Data& data, Pass pass, const Terms& terms, const Slice& slice) {
  const Shape& s = data.shape;
  const int64_t group = s.heads_q / s.heads_kv;
  const std::pair rows{s.seqlen_q - slice.rows, s.seqlen_q}, keys{int64_t{0}, s.seqlen_k};
  const std::pair heads{slice.head_kv * group, (slice.head_kv + 1) * group},
      heads_kv{slice.head_kv, slice.head_kv + 1};
  const auto wide = [&](const Array& array, auto row_range, auto head_range) {
    return converted(cut_out(array, slice.batch, row_range, head_range), ElementType::f64);
  };
  Shape small = s;
  small.batch = 1;
  small.seqlen_q = slice.rows;
  small.heads_q = group;
  small.heads_kv = 1;
  small.type = ElementType::f64;
  Data oracle(small, pass == Pass::backward);
  oracle.q = wide(data.q, rows, heads);
  oracle.k = wide(data.k, keys, heads_kv);
  oracle.v = wide(data.v, keys, heads_kv);
  const Options reference = {.backend = "reference"};
  attend(oracle.problem(Pass::forward, terms), reference);
  const auto error = [&](const Array& got, const Array& expected, auto row_range, auto head_range) {
    return error_between(to_doubles(cut_out(got, slice.batch, row_range, head_range)), to_doubles(expected))
        .relative;
  };
  if (pass == Pass::forward) return error(data.o, oracle.o, rows, heads);
  oracle.d_o = wide(data.d_o, rows, heads);
  attend_backward(oracle.problem(Pass::backward, terms), reference);
  return larger(error(data.dq, oracle.dq, rows, heads),
                larger(error(data.dk, oracle.dk, keys, heads_kv), error(data.dv, oracle.dv, keys, heads_kv)));
}

/// What rounding explains: a few roundings to the type, and for float32 those of long sums.
double allowed_error(ElementType type, Pass pass) {
  if (type == ElementType::f64) return 1e-6;  // lse is float32
  if (type == ElementType::f32) return 2e-5;
  return unit_roundoff(type) * (pass == Pass::forward ? 4 : 8);
}

struct Row {
  Shape shape;
  Pass pass;
  std::string backend;
  Timing timing;
  double flops = 0, error = 0, allowed = 0;
  int64_t rows_checked = 0;
  size_t workspace = 0;
  double host_seconds = 0;  ///< on a GPU: of the call, which does not wait for the work
  bool right() const { return error <= allowed; }
};

Row bench_one(const Shape& shape, Pass pass, const BenchOptions& options) {
  std::optional<Gpu> gpu;
  if (const std::optional<int> id = options.gpu()) gpu.emplace(*id);

  // Problems that make no sense are refused before memory is asked for.
  Problem sizes = described(shape, pass);
  options.terms.apply(sizes);
  if (gpu) {
    for (Tensor* t :
         {&sizes.q, &sizes.k, &sizes.v, &sizes.o, &sizes.lse, &sizes.d_o, &sizes.dq, &sizes.dk, &sizes.dv}) {
      *t = t->on(gpu->device());
    }
  }
  { const Plan validated(sizes, options.execution.options()); }

  Data data(shape, pass == Pass::backward, gpu ? &*gpu : nullptr);
  const Problem forward = data.problem(Pass::forward, options.terms);
  const int64_t rows = rows_for_oracle(shape, pass);
  if (pass == Pass::backward) {
    // The backward reads o and lse; any backend's will do.
    attend(forward, {.num_threads = options.execution.threads, .stream = gpu ? gpu->stream() : nullptr});
    fill_last_rows(data.d_o, rows);
    data.upload(data.d_o);
  }
  const Problem problem = data.problem(pass, options.terms);
  const Plan plan(problem, options.execution.options());
  Workspace workspace(plan);
  Buffers buffers = buffers_of(problem);
  if (gpu) buffers.stream = gpu->stream();
  plan.run(buffers, workspace);
  if (pass == Pass::forward) {
    data.download(data.o);
  } else {
    for (Array* gradient : {&data.dq, &data.dk, &data.dv}) data.download(*gradient);
  }

  Row row{shape,
          pass,
          std::string(plan.backend()),
          {},
          plan.flops(),
          0,
          allowed_error(shape.type, pass),
          rows,
          plan.workspace_size()};
  if (shape.batch > 0 && rows > 0 && shape.seqlen_k > 0) {
    row.error = error_of(data, pass, options.terms, {0, 0, rows});
    if (shape.batch > 1 || shape.heads_kv > 1) {
      row.error =
          larger(error_of(data, pass, options.terms, {shape.batch - 1, shape.heads_kv - 1, rows}), row.error);
    }
  }
  if (!row.right()) return row;  // how fast it is wrong is of no interest
  if (pass == Pass::backward) {
    fill_last_rows(data.d_o, shape.seqlen_q);
    data.upload(data.d_o);
  }
  const auto run = [&] { plan.run(buffers, workspace); };
  if (gpu) {
    row.timing = gpu->measure(run, options.seconds, 5);
    row.host_seconds = gpu->host_seconds(run);
  } else {
    row.timing = measure(run, options.seconds, 5);
  }
  return row;
}

const char* pass_name(Pass pass) {
  return pass == Pass::forward ? "fwd" : "bwd";
}

Exit run_bench(const BenchOptions& options) {
  const std::vector<Shape> shapes = options.shape.shapes();
  const std::optional<int> gpu = options.gpu();
  const std::string gpu_text = gpu ? Gpu(*gpu).text() : "";
  std::vector<Row> rows;
  {
    Progress progress("bench", static_cast<int64_t>(shapes.size() * options.pass.size()));
    for (const Shape& shape : shapes) {
      for (const std::string& pass : options.pass) {
        rows.push_back(bench_one(shape, parse_pass(pass), options));
        progress.advance();
      }
    }
  }
  const bool all_right = std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.right(); });

  if (options.json) {
    Json json = {{"version", version()},
                 {"machine", machine()},
                 {"threads", options.execution.resolved_threads()},
                 {"causal", options.terms.causal},
                 {"rows", Json::array()}};
    if (gpu) json["gpu"] = gpu_text;
    for (const Row& row : rows) {
      const Shape& s = row.shape;
      Json entry = {{"pass", pass_name(row.pass)},
                    {"dtype", type_name(s.type)},
                    {"batch", s.batch},
                    {"seqlen", s.seqlen_q},
                    {"seqlen_k", s.seqlen_k},
                    {"heads", s.heads_q},
                    {"heads_kv", s.heads_kv},
                    {"head_dim", s.head_dim},
                    {"head_dim_v", s.head_dim_v},
                    {"backend", row.backend},
                    {"workspace_bytes", row.workspace},
                    {"flops", row.flops},
                    {"right", row.right()},
                    {"relative_error", row.error},
                    {"allowed_error", row.allowed},
                    {"rows_checked", row.rows_checked}};
      if (row.right()) {
        entry["runs"] = row.timing.runs;
        entry["median_seconds"] = row.timing.median;
        entry["fastest_seconds"] = row.timing.fastest;
        entry["spread"] = row.timing.spread;
        entry["gflops"] = row.flops / row.timing.median * 1e-9;
        if (gpu) entry["host_nanoseconds"] = row.host_seconds * 1e9;
      }
      json["rows"].push_back(std::move(entry));
    }
    print_json(json);
    return all_right ? Exit::ok : Exit::check_failed;
  }

  const std::string threads = fmt::format("{}; {} threads", machine(), options.execution.resolved_threads());
  fmt::print("fovea {} on {}{}\n", version(), gpu ? gpu_text : threads,
             options.terms.causal ? "; causal" : "");
  Table table;
  std::vector<std::string> head = {"pass",    "dtype",  "batch",   "queries", "keys",    "heads", "size",
                                   "backend", "median", "fastest", "spread",  "GFLOP/s", "error"};
  if (gpu) head.insert(head.end() - 1, "host");
  table.add(head);
  const auto pair_text = [](int64_t a, int64_t b) {
    return a == b ? std::to_string(a) : fmt::format("{}/{}", a, b);
  };
  for (const Row& row : rows) {
    const Shape& s = row.shape;
    const bool right = row.right();
    std::vector<std::string> line = {
        pass_name(row.pass),
        type_name(s.type),
        std::to_string(s.batch),
        std::to_string(s.seqlen_q),
        std::to_string(s.seqlen_k),
        pair_text(s.heads_q, s.heads_kv),
        pair_text(s.head_dim, s.head_dim_v),
        row.backend,
        right ? seconds_text(row.timing.median) : "WRONG",
        right ? seconds_text(row.timing.fastest) : "-",
        right ? fmt::format("{:.0f} %", row.timing.spread * 100) : "-",
        right ? fmt::format("{:.1f}", row.flops / row.timing.median * 1e-9) : "-",
        fmt::format("{:.1e}", row.error)};
    if (gpu) line.insert(line.end() - 1, right ? seconds_text(row.host_seconds) : "-");
    table.add(std::move(line));
  }
  fmt::print("{}", table.text());
  if (gpu) {
    fmt::print(
        "median, fastest: of a launch inside a CUDA graph, inputs as they lie; host: of a call that is not "
        "captured\n");
  }
  fmt::print(
      "spread: distance of the quartiles over the median; error: relative, to the oracle in float64, over a "
      "slice\n");
  return all_right ? Exit::ok : Exit::check_failed;
}

}  // namespace

void add_bench(CLI::App& program, Action& action) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      program.add_subcommand("bench", "Time given sizes on this machine, once they were checked");
  options->shape.add_options(*command, true);
  command->add_option("--pass", options->pass, "fwd (the default), bwd, or both: fwd,bwd")
      ->delimiter(',')
      ->type_name("PASS,...")
      ->group("Sizes");
  options->terms.add_options(*command, false);
  options->execution.add_options(*command, true);
  add_device_option(*command, options->device);
  command->add_option("--seconds", options->seconds, "How long each row is repeated, at least (1)")
      ->type_name("S");
  add_json_option(*command, options->json);
  command->footer(
      "Sizes may be lists: every combination is timed. Inputs are normal random numbers. Each row is first "
      "checked\n"
      "against the oracle in float64, on as many of the last queries as that does in a moment; when a result "
      "is wrong\n"
      "no time is told and the exit code is 1. On a GPU times are of launches in a CUDA graph.\n"
      "\n"
      "Examples:\n"
      "  fovea bench --seqlen 1024,4096 --heads 16 --head-dim 64,128 --dtype bfloat16 --causal\n"
      "  fovea bench --batch 8 --seqlen 1 --seqlen-k 16384 --heads 32 --heads-kv 8 --head-dim 128\n"
      "  fovea bench --pass fwd,bwd --backend cpu_generic --threads 1 --json\n"
      "  fovea bench --device cuda --batch 4 --seqlen 4096 --heads 16 --head-dim 128 --causal --pass "
      "fwd,bwd");
  command->callback([options, &action] { action = [options] { return run_bench(*options); }; });
}

}  // namespace fovea::cli
