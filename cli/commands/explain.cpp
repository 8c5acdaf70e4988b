// `fovea explain`: the tensors of a problem, which backend would do it, and what rules out each other one.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <optional>

#include "cli/commands/commands.hpp"
#include "cli/data/expressions.hpp"
#include "cli/data/inputs.hpp"
#include "cli/options/lengths.hpp"
#include "cli/options/options.hpp"
#include "cli/options/rank_options.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/ranks/rank_group.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct ExplainOptions {
  InputFiles files;
  ShapeOptions shape;
  Terms terms;
  ExpressionOptions expressions;
  Execution execution;
  RankOptions ranks;
  std::string pass = "fwd", device;
  std::vector<std::string> with, lengths;
  bool json = false;
};

/// Rows of all sequences behind each other.
void pack(Problem& problem, const Shape& s, int64_t total_q, int64_t total_k, const Tensor& starts) {
  const auto packed = [&](ElementType type, int64_t total, std::array<int64_t, 4> shape) {
    const std::array<int64_t, 3> rows = {total, shape[2], shape[3]};
    return described(type, rows);
  };
  problem.q = packed(s.type, total_q, s.q());
  problem.k = packed(s.type, total_k, s.k());
  problem.v = packed(s.type, total_k, s.v());
  problem.o = packed(output_type(s.type), total_q, s.o());
  const std::array<int64_t, 2> lse = {s.heads_q, total_q};
  problem.lse = described(ElementType::f32, lse);
  if (problem.pass == Pass::backward) {
    problem.d_o = problem.o;
    problem.dq = problem.q;
    problem.dk = problem.k;
    problem.dv = problem.v;
  }
  problem.cu_seqlens_q = problem.cu_seqlens_k = starts;
  problem.max_seqlen_q = s.seqlen_q;
  problem.max_seqlen_k = s.seqlen_k;
}

/// Adds tensors without data for the names in --with.
void add_described_terms(Problem& problem, const Shape& s, const std::vector<std::string>& names) {
  constexpr int64_t kBlock = 64;
  const auto blocks = [](int64_t length) { return (length + kBlock - 1) / kBlock; };
  const std::array<int64_t, 4> scores = {s.batch, s.heads_q, s.seqlen_q, s.seqlen_k};
  const std::array<int64_t, 4> block_grid = {s.batch, s.heads_q, blocks(s.seqlen_q), blocks(s.seqlen_k)};
  const std::array<int64_t, 1> per_head = {s.heads_q}, per_sequence = {s.batch};
  for (const std::string& name : names) {
    if (name == "bias") {
      problem.bias = described(ElementType::f32, scores);
    } else if (name == "dbias") {
      problem.bias = described(ElementType::f32, scores);
      if (problem.pass == Pass::backward) problem.dbias = described(ElementType::f32, scores);
    } else if (name == "mask") {
      problem.mask = described(ElementType::boolean, scores);
    } else if (name == "block_mask") {
      problem.block_mask = described(ElementType::boolean, block_grid);
      problem.block_q = problem.block_k = kBlock;
    } else if (name == "alibi") {
      problem.alibi = described(ElementType::f32, per_head);
    } else if (name == "sink") {
      problem.sink = described(ElementType::f32, per_head);
    } else if (name == "keys") {
      const std::array<int64_t, 4> lists = {s.batch, s.heads_kv, s.seqlen_q,
                                            std::min<int64_t>(s.seqlen_k, 512)};
      problem.keys = described(ElementType::i32, lists);
    } else if (name == "seqused") {
      problem.seqused_q = problem.seqused_k = described(ElementType::i32, per_sequence);
    } else if (name == "pages") {
      const std::array<int64_t, 2> table = {s.batch, blocks(s.seqlen_k)};
      const auto pool = [&](std::array<int64_t, 4> shape) {
        return described(s.type, std::array{table[0] * table[1], kBlock, shape[2], shape[3]});
      };
      problem.k = pool(s.k());
      problem.v = pool(s.v());
      problem.page_table = described(ElementType::i32, table);
      problem.seqused_k = described(ElementType::i32, per_sequence);
    } else if (name == "qv") {
      problem.qv = described(output_type(s.type), s.o());
    } else if (name == "descale") {
      const std::array<int64_t, 2> factors = {s.batch, s.heads_kv};
      problem.q_descale = problem.k_descale = problem.v_descale = described(ElementType::f32, factors);
    } else if (name == "leftpad") {
      problem.leftpad_k = described(ElementType::i32, per_sequence);
    } else if (name == "append" || name == "rotary") {
      const auto rows = [&](int64_t size) {
        return described(output_type(s.type), std::array{s.batch, s.seqlen_q, s.heads_kv, size});
      };
      problem.k_new = rows(s.k()[3]);
      problem.v_new = rows(s.v()[3]);
      problem.seqused_k = described(ElementType::i32, per_sequence);
      if (name == "rotary") {
        const std::array<int64_t, 2> angles = {s.seqlen_k, s.k()[3] / 2};
        problem.rotary_cos = problem.rotary_sin = described(ElementType::f32, angles);
      }
    } else if (name == "packed") {
      const std::array<int64_t, 1> starts = {s.batch + 1};
      pack(problem, s, s.batch * s.seqlen_q, s.batch * s.seqlen_k, described(ElementType::i32, starts));
    } else {
      throw Failure(Exit::usage, "--with: got '" + name +
                                     "', expected names out of bias, dbias, mask, block_mask, alibi, sink, "
                                     "keys, seqused, pages, qv, descale, leftpad, append, rotary, packed");
    }
  }
}

/// The tensors that a run over these inputs would write, without data.
void add_described_outputs(Problem& problem, const Inputs& inputs) {
  problem.o = described(output_type(inputs.q.type), inputs.o_shape());
  problem.lse = described(ElementType::f32, inputs.lse_shape());
  if (problem.pass == Pass::forward) return;
  problem.d_o = problem.o;
  problem.dq = described(inputs.q.type, problem.q.shape());
  problem.dk = described(inputs.q.type, problem.k.shape());
  problem.dv = described(inputs.q.type, problem.v.shape());
}

/// A tensor that a problem has, and what FOVEA_TENSORS says of it.
struct TensorLine {
  std::string name;
  fovea_access access;  ///< in the problem's pass
  std::vector<int64_t> shape;
  const char* meaning;
};

/// Inputs first, then outputs, each in the order of FOVEA_TENSORS.
std::vector<TensorLine> tensors_of(const Problem& p) {
  std::vector<TensorLine> all;
#define FOVEA_LINE(field, Name, in_forward, in_backward, meaning)      \
  if (p.field)                                                         \
    all.push_back({#field,                                             \
                   p.pass == Pass::forward ? in_forward : in_backward, \
                   {p.field.shape().begin(), p.field.shape().end()},   \
                   meaning});
  FOVEA_TENSORS(FOVEA_LINE)
#undef FOVEA_LINE
  for (TensorLine& line : all) {
    if (p.k_new && (line.name == "k" || line.name == "v")) line.access = FOVEA_WRITE;
  }
  for (const NamedTensor& named : p.named) {
    const auto shape = named.tensor.shape();
    all.push_back({named.name, FOVEA_READ, {shape.begin(), shape.end()}, "read by expressions"});
  }
  std::stable_partition(all.begin(), all.end(),
                        [](const TensorLine& line) { return line.access == FOVEA_READ; });
  return all;
}

void print_tensors(const Problem& problem) {
  const std::vector<TensorLine> all = tensors_of(problem);
  size_t name = 0, shape = 0;
  for (const TensorLine& line : all) {
    name = std::max(name, line.name.size());
    shape = std::max(shape, shape_text(line.shape).size());
  }
  for (const TensorLine& line : all) {
    fmt::print("{:<6}  {:<{}}  {:<{}}  {}\n", line.access == FOVEA_READ ? "reads" : "writes", line.name, name,
               shape_text(line.shape), shape, line.meaning);
  }
}

struct Verdict {
  std::string backend, text;
  bool chosen = false;
};

/// The lines of fovea_plan_reason: "> name: verdict" for the one chosen, "  name: verdict" for the others.
std::vector<Verdict> verdicts(std::string_view reason) {
  std::vector<Verdict> all;
  while (!reason.empty()) {
    const std::string_view line = reason.substr(0, reason.find('\n'));
    reason.remove_prefix(std::min(line.size() + 1, reason.size()));
    const size_t colon = line.find(": ");
    if (line.size() < 2 || colon == std::string_view::npos) continue;
    all.push_back(
        {std::string(line.substr(2, colon - 2)), std::string(line.substr(colon + 2)), line[0] == '>'});
  }
  return all;
}

void print_verdicts(const Plan& plan) {
  const std::vector<Verdict> all = verdicts(plan.reason());
  size_t widest = 0;
  for (const Verdict& verdict : all) widest = std::max(widest, verdict.backend.size());
  for (const Verdict& verdict : all) {
    fmt::print("{} {:<{}}  {}\n", verdict.chosen ? '>' : ' ', verdict.backend, widest, verdict.text);
  }
}

/// How many pairs of the blocks that a kernel works on are seen: the size of a usual tile.
constexpr int64_t kBlock = 128;

void print_expressions(const Plan& plan, const std::optional<BlockCounts>& counts) {
  const std::vector<ExpressionLine> lines = lines_of(plan.expressions());
  size_t widest = 0;
  for (const ExpressionLine& line : lines) widest = std::max(widest, line.name.size());
  for (const ExpressionLine& line : lines) fmt::print("{:<{}}  {}\n", line.name, widest, line.text);
  if (counts) {
    const int64_t total = std::max<int64_t>(counts->none + counts->all + counts->some, 1);
    fmt::print("blocks of {} x {}{}: {} not seen ({:.0f} %), {} seen whole, {} in part\n", kBlock, kBlock,
               counts->every_head ? "" : ", first head of the first sequence", counts->none,
               100.0 * static_cast<double>(counts->none) / static_cast<double>(total), counts->all,
               counts->some);
  }
  if (!lines.empty() || counts) fmt::print("\n");
}

const char* name_of(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

Json json_of(const Problem& problem, const Plan& plan, const std::optional<BlockCounts>& counts,
             int threads) {
  Json json = {{"pass", name_of(problem.pass)},
               {"q", problem.q.shape()},
               {"k", problem.k.shape()},
               {"v", problem.v.shape()},
               {"backend", plan.backend()},
               {"threads", threads},
               {"workspace_bytes", plan.workspace_size()},
               {"flops", plan.flops()},
               {"tensors", Json::array()},
               {"backends", Json::array()}};
  for (const TensorLine& line : tensors_of(problem)) {
    json["tensors"].push_back({{"name", line.name},
                               {"access", line.access == FOVEA_READ ? "read" : "write"},
                               {"shape", line.shape},
                               {"meaning", line.meaning}});
  }
  json["expressions"] = Json::array();
  for (const ExpressionLine& line : lines_of(plan.expressions()))
    json["expressions"].push_back({{"name", line.name}, {"text", line.text}});
  if (counts) {
    json["blocks"] = {{"size", counts->block},
                      {"every_head", counts->every_head},
                      {"none", counts->none},
                      {"all", counts->all},
                      {"some", counts->some}};
  }
  for (const Verdict& verdict : verdicts(plan.reason())) {
    json["backends"].push_back(
        {{"name", verdict.backend}, {"chosen", verdict.chosen}, {"reason", verdict.text}});
  }
  return json;
}

/// What the plan over ranks says; nothing where none are asked for.
std::string reason_of_ranks(const Problem& problem, const ExplainOptions& options,
                            const std::optional<Inputs>& inputs) {
  if (!options.ranks.asked()) return "";
  try {
    const auto weigh = options.ranks.on_paper.empty() ? reason_over_ranks : methods_on_paper;
    return weigh(problem, options.ranks, options.execution);
  } catch (const Error& error) {
    if (inputs) throw inputs->naming_file(error);
    throw;
  }
}

void print_ranks(int ranks, std::string_view reason) {
  fmt::print("\nover {} ranks\n", ranks);
  while (!reason.empty()) {
    const std::string_view line = reason.substr(0, reason.find('\n'));
    reason.remove_prefix(std::min(line.size() + 1, reason.size()));
    fmt::print("  {}\n", line);
  }
}

/// The problem of the sizes, or of sequences of `lengths` where --lengths names some; the problem points into it.
Problem described_problem(const ExplainOptions& options, const PackedLengths& lengths, Pass pass) {
  Shape shape = options.shape.shapes().front();
  if (options.lengths.empty()) {
    Problem problem = described(shape, pass);
    add_described_terms(problem, shape, options.with);
    return problem;
  }
  if (std::ranges::find(options.with, "packed") != options.with.end())
    throw Failure(Exit::usage, "--with: got packed beside --lengths, which packs; leave it out");
  shape.batch = lengths.sequences();
  shape.seqlen_q = shape.seqlen_k = lengths.longest;
  Problem problem = described(shape, pass);
  add_described_terms(problem, shape, options.with);
  const std::array<int64_t, 1> count = {lengths.sequences() + 1};
  const Tensor type = described(ElementType::i32, count);
  pack(problem, shape, lengths.total(), lengths.total(),
       Tensor(const_cast<int32_t*>(lengths.starts.data()), type.dtype(), count));
  return problem;
}

Exit run_explain(const ExplainOptions& options) {
  options.ranks.check();
  Problem problem;
  std::optional<Inputs> inputs;
  const PackedLengths lengths = parse_lengths(options.lengths);
  const Pass pass = parse_pass(options.pass);
  if (options.files.any()) {
    if (options.shape.given() || !options.with.empty() || !options.lengths.empty()) {
      throw Failure(Exit::usage, "inputs: got both files and sizes, expected one or the other");
    }
    inputs = read_inputs(options.files);
    problem = inputs->problem();
    problem.pass = pass;
    add_described_outputs(problem, *inputs);
  } else {
    problem = described_problem(options, lengths, pass);
  }
  options.terms.apply(problem);
  const Expressions expressions = read_expressions(options.expressions);
  expressions.apply(problem);
  if (inputs) inputs->sources.insert(expressions.sources.begin(), expressions.sources.end());
  const Problem on_host = problem;
  const std::optional<int> gpu = gpu_of(options.device, options.execution.backend);
  if (gpu && options.ranks.asked()) {
    throw Failure(Exit::usage,
                  "--ranks: got it with a GPU, expected --device cpu; ranks of this program compute on CPUs");
  }
  if (gpu) move_to_gpu(problem, *gpu);
  const Plan plan = [&] {
    try {
      return Plan(problem, options.execution.options());
    } catch (const Error& error) {
      if (inputs) throw inputs->naming_file(error);
      throw;
    }
  }();

  const std::string over_ranks = reason_of_ranks(problem, options, inputs);

  const int threads = options.execution.resolved_threads();
  std::optional<BlockCounts> counts;
  const bool has_data = !on_host.cu_seqlens_q || on_host.cu_seqlens_q.data() != nullptr;
  if (!options.expressions.sees.empty() && has_data) counts = count_blocks(on_host, kBlock);
  if (options.json) {
    Json json = json_of(problem, plan, counts, threads);
    if (options.ranks.asked()) json["ranks"] = {{"count", options.ranks.ranks}, {"reason", over_ranks}};
    print_json(json);
    return Exit::ok;
  }
  fmt::print("{}\n\n", name_of(pass));
  print_tensors(problem);
  fmt::print("\n");
  print_expressions(plan, counts);
  print_verdicts(plan);
  fmt::print("\n");
  if (!gpu) fmt::print("threads    {}\n", threads);
  fmt::print("workspace  {}\nwork       {:.3g} GFLOP\n",
             bytes_text(static_cast<double>(plan.workspace_size())), plan.flops() * 1e-9);
  if (options.ranks.asked()) print_ranks(options.ranks.ranks, over_ranks);
  return Exit::ok;
}

}  // namespace

void add_explain(CLI::App& program, Action& action) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App* command =
      program.add_subcommand("explain", "Which backend a problem gets, and why each other one does not");
  options->shape.add_options(*command, false);
  CLI::Option* const lengths =
      command
          ->add_option("--lengths", options->lengths,
                       "Packed sequences of these lengths: LENGTH or COUNTxLENGTH, each of queries and keys")
          ->delimiter(',')
          ->type_name("N,...")
          ->group("Sizes");
  for (const char* other : {"--batch", "--seqlen", "--seqlen-k"}) lengths->excludes(other);
  options->terms.add_options(*command, true);
  command->add_option("--pass", options->pass, "fwd (the default) or bwd")->type_name("PASS")->group("Sizes");
  command
      ->add_option(
          "--with", options->with,
          "Optional tensors of the problem: bias, dbias, mask, block_mask, alibi, sink, keys (lists "
          "of 512), seqused, "
          "pages (of 64 keys), qv, leftpad, append (a row of k and v for each query), rotary (append, "
          "and rotate), packed")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->group("Terms of the score");
  options->expressions.add_options(*command);
  options->execution.add_options(*command, true);
  add_device_option(*command, options->device);
  options->ranks.add_options(*command, false);
  options->ranks.add_paper_options(*command);
  options->files.add_options(*command, true, true, false);
  add_json_option(*command, options->json);
  command->footer(
      "Sizes or files describe the problem; nothing is computed.\n"
      "\n"
      "Examples:\n"
      "  fovea explain --seqlen 4096 --heads 32 --heads-kv 8 --head-dim 128 --dtype bfloat16 --causal\n"
      "  fovea explain --pass bwd --with bias,sink --backend cpu_generic\n"
      "  fovea explain --device cuda --seqlen 4096 --heads 16 --head-dim 128 --with bias\n"
      "  fovea explain --seqlen 1024 --sees \"k <= q && q - k < 256\" --score \"30 * tanh(s / 30)\"\n"
      "  fovea explain --seqlen 65536 --heads 32 --heads-kv 8 --causal --ranks 8\n"
      "  fovea explain --seqlen 1048576 --heads 16 --causal --ranks 64 --on-paper gpu --ranks-per-host 8\n"
      "  fovea explain --lengths 4x16384,32x2048 --heads 16 --causal --ranks 8 --on-paper gpu\n"
      "  fovea explain --input qkv.safetensors --json");
  command->callback([options, &action] { action = [options] { return run_explain(*options); }; });
}

}  // namespace fovea::cli
