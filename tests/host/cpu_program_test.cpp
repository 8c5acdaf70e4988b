// Random trees as programs, on every instruction set of this machine, pair by pair against the oracle's evaluation.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../expr/random_expression.hpp"
#include "cpu/ops.hpp"
#include "cpu/pair_programs.hpp"
#include "cpu_tables.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {
namespace {

using expr::Pair, expr::Use;

/// The tensors of random_expression.hpp in memory.
class Tensors {
 public:
  Tensors() {
    const expr::MadeUpTensors made_up(true);
    for (size_t i = 0; i < expr::kTensors.size(); ++i) {
      NamedTensor named{expr::kTensors[i].name, {}, {}};
      TensorDesc& t = named.tensor;
      t.present = true;
      t.dtype = expr::kTensors[i].dtype;
      t.ndim = static_cast<int>(expr::kExtents[i].size());
      int64_t count = 1;
      for (size_t d = expr::kExtents[i].size(); d-- > 0;) {
        t.shape[d] = expr::kExtents[i][d];
        t.stride[d] = count;
        count *= t.shape[d];
      }
      bytes_.emplace_back(static_cast<size_t>(count * size_of(t.dtype)));
      for (int64_t at = 0; at < count; ++at) {
        std::array<int64_t, 4> index{};
        for (size_t d = 0; d < expr::kExtents[i].size(); ++d) index[d] = at / t.stride[d] % t.shape[d];
        set(i, at, t.dtype, *made_up.read(i, {index.data(), expr::kExtents[i].size()}));
      }
      problem.named.push_back(named);
    }
    problem.batch = problem.heads_q = 2;
    problem.heads_kv = 1;
    problem.seqlen_q = problem.seqlen_k = 16;
    problem.scale = 0.5;
  }
  std::array<const char*, kMaxTermTensors> pointers() const {
    std::array<const char*, kMaxTermTensors> all{};
    for (size_t i = 0; i < bytes_.size(); ++i) all[i] = bytes_[i].data();
    return all;
  }
  AttentionProblem problem;

 private:
  void set(size_t tensor, int64_t at, DType type, double x) {
    char* to = bytes_[tensor].data() + at * size_of(type);
    const auto put = [&](auto value) { std::memcpy(to, &value, sizeof(value)); };
    if (type == DType::kF32) put(static_cast<float>(x));
    if (type == DType::kF16) put(from_float<F16>(static_cast<float>(x)));
    if (type == DType::kBF16) put(from_float<Bf16>(static_cast<float>(x)));
    if (type == DType::kI32) put(static_cast<int32_t>(x));
    if (type == DType::kU8) put(static_cast<uint8_t>(x));
  }
  std::vector<std::vector<char>> bytes_;
};

/// Nodes in float64, and rounded to float32 after each operation: where both agree, a program agrees with them.
class Evaluators {
 public:
  explicit Evaluators(const expr::Expression& e) : e_(e), exact_(e, &tensors_), values_(e.graph.size()) {}

  /// Whether float32 and float64 take the same choices and have nearly the same values in all nodes.
  bool agree(const Pair& pair) {
    for (expr::NodeId id = 0; id <= e_.root; ++id) {
      const expr::Node& node = e_.graph[id];
      const expr::Value exact = exact_.value(id, pair);
      expr::Value& rounded = values_[id];
      if (node.operand_count == 0 || node.op == expr::Op::kTensor) {
        rounded = exact;
      } else {
        std::array<expr::Value, expr::kMaxRank> operands;
        for (size_t i = 0; i < operands.size() && i < node.operand_count; ++i)
          operands[i] = values_[node.operand[i]];
        rounded = expr::apply(node.op, e_.graph[node.operand[0]].type, {operands.data(), node.operand_count});
      }
      rounded.number = static_cast<double>(static_cast<float>(rounded.number));
      if (std::fabs(rounded.number) < 0x1p-100) rounded.number = 0;
      if (rounded.valid != exact.valid || rounded.integer != exact.integer) return false;
      if (!near(rounded.number, exact.number, 1e-5)) return false;
      // What is near a step or a pole may be on its other side.
      if (node.type == expr::Type::kFloat && std::isfinite(exact.number)) {
        if (std::fabs(exact.number) < 1e-3 && exact.number != 0) return false;
        if (std::fabs(exact.number) > 1e6) return false;
      }
      if (expr::is_comparison(node.op) && e_.graph[node.operand[0]].type == expr::Type::kFloat) {
        const double a = values_[node.operand[0]].number, b = values_[node.operand[1]].number;
        if (a != b && near(a, b, 1e-4)) return false;
        if (a == b && !std::isinf(a)) return false;
      }
      if (node.op == expr::Op::kFloor &&
          near(std::round(rounded.number), exact_.value(node.operand[0], pair).number, 1e-4))
        return false;
    }
    return true;
  }
  expr::Evaluator& exact() { return exact_; }

  static bool near(double a, double b, double error) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) == std::isnan(b);
    return a == b || std::fabs(a - b) <= error * (1 + std::fabs(b));
  }

 private:
  const expr::Expression& e_;
  expr::MadeUpTensors tensors_{true};
  expr::Evaluator exact_;
  std::vector<expr::Value> values_;
};

/// Runs the program of `text` for all pairs of one head each lane, and compares those that can be compared.
void check(Tensors& tensors, const std::string& text, Use use, bool keys_on_columns, uint64_t seed,
           int64_t& compared) {
  SCOPED_TRACE(text + (keys_on_columns ? ", keys on columns" : ""));
  const expr::Expression tree = expr::parsed(text, use);
  auto expressions = std::make_shared<expr::PairExpressions>();
  (use == Use::kScore ? expressions->score : expressions->sees) = tree;
  tensors.problem.expressions = expressions;
  const PairPrograms programs(tensors.problem, keys_on_columns);
  const Program& program = use == Use::kScore ? programs.all : programs.some;
  Evaluators evaluators(tree);
  constexpr int64_t kFirstKey = 2, kKeys = 13, kRows = 16;
  std::array<int32_t, 48> query{}, head{};
  const int64_t lanes = keys_on_columns ? 4 : 30;
  for (size_t x = 0; x < 48; ++x) {
    const auto row = static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(x), lanes - 1));
    query[x] = row / 2;
    head[x] = row % 2;
  }
  std::vector<float> before(static_cast<size_t>(kRows * kProgramWidth), 0.0f);
  expr::RandomText random(seed, use);
  for (float& s : before) s = static_cast<float>(random.below(4000)) / 500 - 4;
  std::vector<char> scratch(static_cast<size_t>(programs.scratch_bytes()) + 64);
  for (const Ops* ops : tables_of_this_machine()) {
    std::vector<float> tile = before;
    ProgramInputs in;
    in.query = query.data();
    in.head = head.data();
    in.lanes = lanes;
    in.first_key = kFirstKey;
    in.keys = kKeys;
    in.b = 1;
    in.nq = 16;
    in.nk = 15;
    in.tensors = tensors.pointers();
    in.tiles = {tile.data(), nullptr, nullptr};
    in.scratch = scratch.data() + 64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64;
    ops->run_program(program, in);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      for (int64_t j = 0; j < kKeys; ++j) {
        const auto at = static_cast<size_t>(keys_on_columns ? lane * kProgramWidth + j : j * 48 + lane);
        const double s = use == Use::kScore ? 0.5 * static_cast<double>(before[at]) : 0;
        const Pair pair{
            s,  1, head[static_cast<size_t>(lane)], 0, query[static_cast<size_t>(lane)], kFirstKey + j,
            16, 15};
        if (!evaluators.agree(pair)) continue;
        ++compared;
        if (use == Use::kSees) {
          const float expected =
              evaluators.exact().sees(pair) ? before[at] : -std::numeric_limits<float>::infinity();
          ASSERT_EQ(tile[at], expected) << ops->name << " query " << pair.q << " key " << pair.k;
        } else {
          const double expected = evaluators.exact().score(pair);
          ASSERT_PRED3(Evaluators::near, static_cast<double>(tile[at]), expected, 2e-4)
              << ops->name << " query " << pair.q << " key " << pair.k << " s " << s;
        }
      }
    }
  }
}

TEST(CpuProgram, RandomTrees) {
  Tensors tensors;
  int64_t compared = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    const Use use = seed % 2 == 0 ? Use::kScore : Use::kSees;
    expr::RandomText random(seed, use);
    std::string text = random.of(use == Use::kScore ? expr::Type::kFloat : expr::Type::kBool, 4);
    for (size_t at = 0; seed % 8 >= 4 && (at = text.find("flag[k]", at)) != std::string::npos; at += 5)
      text.replace(at + 5, 1, random.of(expr::Type::kInt, 2));  // often outside of the tensor
    check(tensors, text, use, seed % 4 >= 2, seed, compared);
    if (HasFailure()) return;
  }
  EXPECT_GT(compared, 1000000);
}

/// Whether a score is s and what a distance adds to it.
bool is_of_distance(const AttentionProblem& problem, const std::string& text) {
  const auto form = form_of_score(problem, expr::parsed(text, Use::kScore));
  return form && form->of_distance.has_value();
}

TEST(ScoreForm, KnowsFunctionsOfTheDistance) {
  const Tensors tensors;
  const AttentionProblem& p = tensors.problem;
  for (const char* text :
       {"s - 0.5 * abs(q - k)", "s + tanh(float(k - q) / 4.0)", "s - 0.5 * abs(q + nk - nq - k)",
        "1.5 + s - (k - q) * float(k - q)", "s + 2 * float(h)"}) {
    EXPECT_TRUE(is_of_distance(p, text)) << text;
  }
  for (const char* text :
       {"s + float(q)", "s - 0.5 * abs(q + k)", "s * 2 + float(q - k)", "s + s + float(q - k)",
        "s + float(q * 2 - k * 2)", "where(q < k, s, 0.0)", "float(q - k) - s"}) {
    EXPECT_FALSE(is_of_distance(p, text)) << text;
  }
}

/// "elements", "factor" or both in a form; "none" without a form.
std::string form_of(const AttentionProblem& problem, const std::string& text) {
  const auto form = form_of_score(problem, expr::parsed(text, Use::kScore));
  if (!form) return "none";
  return std::string(form->elements ? "elements" : "") + (form->factor ? " factor" : "");
}

TEST(ScoreForm, KnowsElementsTimesAFactor) {
  const Tensors tensors;
  const AttentionProblem& p = tensors.problem;
  EXPECT_EQ(form_of(p, "s + bias[b, h, q, k]"), "elements");
  for (const char* text :
       {"s - bias[b, h, q, k]", "s + slope[h] * bias[b, h, q, k]", "bias[b, h, q, k] * gain + s",
        "s - (1.5 + slope[h]) * bias[b, 0, q, k] + 0.5 * abs(q - k)", "s - -(2.0 * bias[b, h, q, k])"}) {
    EXPECT_EQ(form_of(p, text), "elements factor") << text;
  }
  for (const char* text : {"s + float(q) * bias[b, h, q, k]", "s + float(q - k) * bias[b, h, q, k]",
                           "s + bias[b, h, k, q]", "s + bias[b, h, q, k] * bias[b, h, q, k]",
                           "s + 2.0 * bias[b, h, q, k] + bias[b, h, q, k]", "s * bias[b, h, q, k]"}) {
    EXPECT_EQ(form_of(p, text), "none") << text;
  }
}

TEST(GradientForm, IsThatOfATensorWithAnElementForEachPair) {
  Tensors tensors;
  AttentionProblem& p = tensors.problem;
  const size_t bias = 1;
  TensorDesc& gradient = p.named[bias].gradient;
  gradient = p.named[bias].tensor;
  const auto has = [&](const char* text) {
    return form_of_gradient(p, expr::parsed(text, Use::kScore), bias).has_value();
  };
  EXPECT_TRUE(has("s + bias[b, h, q, k]"));
  EXPECT_TRUE(has("s - slope[h] * abs(q - k) + bias[b, h, q, k]"));
  for (const char* text : {"s - bias[b, h, q, k]", "s + slope[h] * bias[b, h, q, k]", "s + bias[b, 0, q, k]",
                           "s + bias[b, b, q, k]", "s + bias[b, h, q, k] + bias[b, h, 0, 0]",
                           "2.0 * s + bias[b, h, q, k]", "s + bias[0, h, q, k]"}) {
    EXPECT_FALSE(has(text)) << text;
  }
  gradient.stride[1] = 0;
  EXPECT_FALSE(has("s + bias[b, h, q, k]"));
  gradient = p.named[bias].tensor;
  p.seqlen_k = 15;
  EXPECT_FALSE(has("s + bias[b, h, q, k]"));
}

TEST(SeenForm, KnowsElementsThatAreZeroOrNot) {
  const Tensors tensors;
  const auto form = [&](const char* text) {
    const auto found = form_of_sees(tensors.problem, expr::parsed(text, Use::kSees));
    return !found ? "none" : found->zeros ? "zeros" : "others";
  };
  EXPECT_STREQ(form("flag[k] != 0"), "others");
  EXPECT_STREQ(form("0 == doc[b, k]"), "zeros");
  EXPECT_STREQ(form("bias[b, h, q, k] == 0.0"), "zeros");
  EXPECT_STREQ(form("bias[b, h, q, k] == 1.0"), "none");
  EXPECT_STREQ(form("doc[b, q] == 0"), "none");
  EXPECT_STREQ(form("flag[k] != 0 && q < 3"), "none");
}

TEST(SeenForm, KnowsClassesOfQueriesAndKeys) {
  const Tensors tensors;
  const auto has = [&](const char* text) {
    return classes_of_sees(tensors.problem, expr::parsed(text, Use::kSees)).has_value();
  };
  EXPECT_TRUE(has("doc[b, q] == doc[b, k]"));
  EXPECT_TRUE(has("doc[0, k] == doc[b, q]"));
  for (const char* text : {"doc[b, q] != doc[b, k]", "doc[b, q] == doc[b, q]", "doc[b, k] == doc[b, k]",
                           "doc[b, q + 1] == doc[b, k]", "doc[b, q] == doc[b, k] && k <= q", "doc[b, k] == 1",
                           "flag[q] == flag[k]", "doc[h, q] == doc[h, k]"}) {
    EXPECT_FALSE(has(text)) << text;
  }
}

}  // namespace
}  // namespace fovea::cpu
