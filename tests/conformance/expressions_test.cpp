// Expressions: each known one alone, with other terms and with each other, against the arguments that mean the same, and
// where pairs are not valid or nothing is seen.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

ProblemSpec small_problem() {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seqlen_q = 37;
  spec.seqlen_k = 53;
  spec.head_dim = spec.head_dim_v = 16;
  spec.named_gradients = true;
  return spec;
}
ProblemSpec with_score(const KnownExpression& score) {
  ProblemSpec spec = small_problem();
  spec.score = &score;
  return spec;
}
ProblemSpec with_mask(const KnownExpression& mask) {
  ProblemSpec spec = small_problem();
  spec.sees = &mask;
  return spec;
}
const KnownExpression& score_named(const char* name) {
  return *known(known_scores(), name);
}
const KnownExpression& mask_named(const char* name) {
  return *known(known_masks(), name);
}

/// Each pass once without and once with `deterministic`: other tests repeat runs.
CheckOptions without_repetitions() {
  CheckOptions options;
  options.repeat = false;
  return options;
}

void pack_sequences(ProblemSpec& spec) {
  spec.lengths_q = {37, 0, 19, 1};
  spec.lengths_k = {26, 3, 53, 0};
  spec.spare_rows = 2;
  spec.batch = 4;
}

// --- each known expression ---

struct Known {
  const KnownExpression* expression;
  ProblemSpec spec() const { return expression->score ? with_score(*expression) : with_mask(*expression); }
};
void PrintTo(const Known& known, std::ostream* out) {
  *out << known.expression->name;
}
std::vector<Known> all_known() {
  std::vector<Known> all;
  for (const auto* list : {&known_scores(), &known_masks()}) {
    for (const KnownExpression& expression : *list) all.push_back({&expression});
  }
  return all;
}
class Expressions : public testing::TestWithParam<Known> {};

TEST_P(Expressions, Alone) {
  expect_conformance_of_all_types(GetParam().spec());
}
TEST_P(Expressions, TypesOfTensors) {
  ProblemSpec spec = GetParam().spec();
  for (const Type type : {Type::kF16, Type::kBF16}) {
    spec.named_type = type;
    ++spec.data_seed;
    expect_conformance(spec);
  }
}
TEST_P(Expressions, WithoutGradients) {
  ProblemSpec spec = GetParam().spec();
  spec.named_gradients = false;
  expect_conformance(spec);
}
TEST_P(Expressions, Packed) {
  ProblemSpec spec = GetParam().spec();
  pack_sequences(spec);
  expect_conformance_of_all_types(spec);
  spec.plan_knows_data = false;
  spec.used_q = {30, 0, 19, 0};
  spec.used_k = {26, 2, 41, 0};
  expect_conformance_of_all_types(spec);
}
/// Hopper has kernels of its own for these, whose tiles share rows.
TEST_P(Expressions, LargeHeads) {
  ProblemSpec spec = GetParam().spec();
  spec.type = Type::kBF16;
  spec.head_dim = 576;
  spec.head_dim_v = 320;
  spec.seqlen_q = spec.seqlen_k = 68;
  expect_conformance(spec, without_repetitions());
}
TEST_P(Expressions, OneQuery) {
  ProblemSpec spec = GetParam().spec();
  spec.seqlen_q = 1;
  spec.seqlen_k = 131;
  expect_conformance_of_all_types(spec);
}
TEST_P(Expressions, MoreQueriesThanKeys) {
  ProblemSpec spec = GetParam().spec();
  spec.seqlen_q = 61;
  spec.seqlen_k = 22;
  expect_conformance(spec);
}
TEST_P(Expressions, NoQueriesOrKeys) {
  for (const auto& [q, k] : {std::pair{0, 5}, std::pair{5, 0}, std::pair{0, 0}}) {
    ProblemSpec spec = GetParam().spec();
    spec.seqlen_q = q;
    spec.seqlen_k = k;
    expect_conformance(spec);
  }
}
/// Dimensions of size 1 that stand for all: gradients are summed over them.
TEST_P(Expressions, Broadcast) {
  if (GetParam().expression->tensors.empty()) return;
  ProblemSpec spec = GetParam().spec();
  for (const int bits : {1, 2, 4, 10, 15}) {
    spec.named_broadcast = bits;
    expect_conformance(spec, without_repetitions());
  }
}
TEST_P(Expressions, StridesAndSpareElements) {
  if (GetParam().expression->tensors.empty()) return;
  ProblemSpec spec = GetParam().spec();
  spec.named_spare = 3;
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kPadded, Layout::kSliced}) {
    spec.layout = layout;
    for (const Placement placement : {Placement::kGuarded, Placement::kPageEnd}) {
      spec.placement = placement;
      ++spec.data_seed;
      expect_conformance(spec, without_repetitions());
    }
  }
}
TEST_P(Expressions, WithEveryOtherTerm) {
  ProblemSpec spec = GetParam().spec();
  spec.causal = true;
  spec.window_left = 30;
  spec.softcap = 4;
  spec.alibi = spec.bias = spec.dbias = spec.mask = spec.sink = spec.dsink = spec.dlse = true;
  spec.bias_broadcast = 0b0001;
  spec.dropout = 0.25;
  spec.rng_state = true;
  expect_conformance_of_all_types(spec);
  pack_sequences(spec);
  expect_conformance_of_all_types(spec);
}
/// Rows that take no part hold NaN, so tiles that end with them are computed again row by row, with each term once.
TEST_P(Expressions, BesideTermsOfPartlyUsedSequences) {
  ProblemSpec spec = GetParam().spec();
  spec.softcap = 6;
  spec.bias = spec.mask = spec.alibi = true;
  spec.bias_broadcast = 0b0101;
  pack_sequences(spec);
  spec.used_q = {30, 0, 19, 0};
  spec.used_k = {26, 2, 41, 0};
  expect_conformance_of_all_types(spec, without_repetitions());
}
/// Heads of queries that share their only key head, and may see different keys.
TEST_P(Expressions, OneKeyHead) {
  ProblemSpec spec = GetParam().spec();
  spec.heads_q = 3;
  spec.heads_kv = 1;
  expect_conformance_of_all_types(spec, without_repetitions());
}
TEST_P(Expressions, WithEachMask) {
  ProblemSpec spec = GetParam().spec();
  if (!spec.score) return;  // scores take their turn
  for (const KnownExpression& mask : known_masks()) {
    spec.sees = &mask;
    expect_conformance(spec, without_repetitions());
  }
}

/// The bound of a backend grows with the error of the plain implementation, so that one has to be right by itself: within
/// the floor that all results are allowed.
TEST_P(Expressions, PlainAgreesWithTheOracle) {
  ProblemSpec spec = GetParam().spec();
  spec.causal = true;
  const OwnedProblem x(spec), oracle = x.in_float64();
  Plain plain(x);
  plain.forward();
  plain.backward();
  ASSERT_EQ(run_pass(oracle, FOVEA_FORWARD, {kOracle}).failure, "");
  ASSERT_EQ(run_pass(oracle, FOVEA_BACKWARD, {kOracle}).failure, "");
  const auto computed = plain.outputs;
  for (const auto& [role, output] : computed) {
    x[role].assign(output.values);
    plain.outputs[role].values = oracle[role].values();
    EXPECT_EQ(compare(role, spec.type, x[role], oracle[role].values(), plain), "") << describe(spec);
  }
}

INSTANTIATE_TEST_SUITE_P(Known, Expressions, testing::ValuesIn(all_known()),
                         [](const auto& parameter) { return std::string(parameter.param.expression->name); });

// --- blocks ---

/// Problems of many blocks, in which consumers of a tile need different ones: most of them hold no pair that is seen, many no other.
TEST(SeenBlocks, OfLongSequences) {
  const KnownExpression
      documents = {.name = "documents",
                   .text = "q / 90 == k / 900",
                   .sees = [](NamedValues&, const Pair&p) { return p.q / 90 == p.k / 900; }},
      far_apart = {.name = "far_apart",
                   .text = "q / 64 % 3 == 0 && (k < 70 || k > 600) || k / 64 == 6",
                   .sees =
                       [](NamedValues&, const Pair&p) {
                         return (p.q / 64 % 3 == 0 && (p.k < 70 || p.k > 600)) || p.k / 64 == 6;
                       }},
      of_heads = {.name = "of_heads",
                  .text = "h * 100 <= k && k < h * 100 + 300 && q % 200 > 5",
                  .sees =
                      [](NamedValues&, const Pair&p) {
                        return p.h * 100 <= p.k && p.k < p.h * 100 + 300 && p.q % 200 > 5;
                      }},
      read = {.name = "read",
              .text = "wall[q, k] == 0.0",
              .tensors = {{"wall",
                           Elements::kReal,
                           {kQueries, kKeys},
                           [](Random&, const Index&at) { return at[0] / 90 == at[1] / 900 ? 0.0 : 1.0; }}},
              .sees =
                  [](NamedValues&t, const Pair&p) {
                    return t.real(0, {p.q, p.k}) == 0;
                  }},
      classes = {
          .name = "classes",  // neighbours are of one, but others of it lie elsewhere
          .text = "doc[b, k] == doc[b, q]",
          .tensors = {{"doc",
                       Elements::kInteger,
                       {kBatches, kKeys},
                       [](Random&, const Index&at) { return static_cast<double>(at[1] / 70 % 5 - at[0]); }}},
          .sees = [](NamedValues&t, const Pair&p) {
            return t.integer(0, {p.b, p.q}) == t.integer(0, {p.b, p.k});
          }};
  for (const KnownExpression* sees : {&documents, &far_apart, &of_heads, &read, &classes}) {
    ProblemSpec spec = with_mask(*sees);
    spec.batch = 1;
    spec.heads_q = 4;
    spec.heads_kv = 2;
    spec.seqlen_q = 230;
    spec.seqlen_k = 2200;
    spec.head_dim = spec.head_dim_v = 64;
    spec.type = Type::kBF16;
    expect_conformance(spec, without_repetitions());
    spec.head_dim = spec.head_dim_v = 128;
    expect_conformance(spec, without_repetitions());
    spec.window_left = 1700;
    spec.window_right = 40;
    expect_conformance(spec, without_repetitions());
    spec.window_left = spec.window_right = -1;
    spec.lengths_q = {100, 5, 210};
    spec.lengths_k = {700, 90, 800};
    spec.batch = 3;
    expect_conformance(spec, without_repetitions());
  }
}

// --- the same as an argument ---

/// A tensor of one problem and the one that is the same in the other.
struct Same {
  Role argument, named;
};

/// Runs both problems on each backend and compares all that both write.
void expect_same(const ProblemSpec& argument, const ProblemSpec& expression, const std::vector<Same>& tensors,
                 const Tweak& tweak = {}) {
  for (const std::string& backend : backends_under_test()) {
    OwnedProblem a(argument), e(expression);
    if (tweak) tweak(a);
    for (const Same& same : tensors) e[same.named].assign(a[same.argument].values());
    for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
      const RunResult of_a = run_pass(a, pass, {backend}), of_e = run_pass(e, pass, {backend});
      if (of_a.unsupported || of_e.unsupported) break;
      ASSERT_EQ(of_a.failure + of_e.failure, "") << backend;
      std::vector<Same> outputs;
      for (const auto& [role, bytes] : output_bytes(a, pass)) outputs.push_back({role, role});
      for (Same& output : outputs) {
        if (output.argument == Role::kDBias) output.named = gradient_role(0);
        const std::vector<double> expected = a[output.argument].values(), got = e[output.named].values();
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          if (got[i] == expected[i]) continue;
          ASSERT_NEAR(got[i], expected[i], 1e-5 * (1 + std::abs(expected[i])))
              << backend << ": " << name_of(output.argument) << "[" << i << "] of " << describe(expression);
        }
      }
    }
  }
}

/// Sums of one sequence, of a few and of many, in rows that start at multiples of 16 bytes and in others.
void expect_gradients_of_a_bias(int64_t batch, int64_t keys, int64_t head_dim) {
  ProblemSpec spec = with_mask(mask_named("prefix"));
  spec.batch = batch;
  spec.seqlen_q = 70;
  spec.seqlen_k = keys;
  spec.head_dim = spec.head_dim_v = head_dim;
  spec.bias = spec.dbias = true;
  spec.bias_broadcast = 1;  // one for all sequences
  expect_conformance_of_all_types(spec);
  spec.used_k = std::vector<int32_t>(static_cast<size_t>(batch), 51);
  spec.window_right = 3;
  expect_conformance_of_all_types(spec);
}
TEST(GradientOfABias, BesideAMask) {
  for (const int64_t batch : {1, 3, 9}) {
    for (const int64_t keys : {136, 53}) expect_gradients_of_a_bias(batch, keys, 64);
  }
}
TEST(GradientOfABias, OfLargeHeads) {
  for (const int64_t head_dim : {320, 512}) {
    expect_gradients_of_a_bias(3, 136, head_dim);
    expect_gradients_of_a_bias(1, 53, head_dim);
  }
}

TEST(SameAsArgument, Alibi) {
  ProblemSpec argument = small_problem(), expression = with_score(score_named("alibi"));
  argument.alibi = true;
  expect_same(argument, expression, {{Role::kAlibi, named_role(0)}});
}
TEST(SameAsArgument, Softcap) {
  ProblemSpec argument = small_problem(), expression = with_score(score_named("softcap"));
  argument.softcap = 5;
  argument.logit = expression.logit = 4;
  expect_same(argument, expression, {});
}
TEST(SameAsArgument, Bias) {
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    ProblemSpec argument = small_problem(), expression = with_score(score_named("bias"));
    argument.bias = argument.dbias = true;
    argument.bias_broadcast = expression.named_broadcast = broadcast;
    expect_same(argument, expression, {{Role::kBias, named_role(0)}});
  }
}
TEST(SameAsArgument, BiasOfMinusInfinity) {
  ProblemSpec argument = small_problem(), expression = with_score(score_named("bias"));
  argument.bias = argument.dbias = true;
  for (const BiasValues values : {BiasValues::kSomeMinusInfinity, BiasValues::kRowsMinusInfinity}) {
    argument.bias_values = values;
    expect_same(argument, expression, {{Role::kBias, named_role(0)}});
  }
}
TEST(SameAsArgument, Mask) {
  const KnownExpression mask = {
      .name = "mask",
      .text = "mask[b, h, q, k] != 0",
      .tensors = {{"mask", Elements::kTruth, {kBatches, kHeads, kQueries, kKeys}, [](Random&, const Index&) {
                     return 1.0;
                   }}}};
  for (const int broadcast : {0, 2, 4, 9, 15}) {
    ProblemSpec argument = small_problem(), expression = with_mask(mask);
    argument.mask = true;
    argument.mask_broadcast = expression.named_broadcast = broadcast;
    expect_same(argument, expression, {{Role::kMask, named_role(0)}});
  }
}
TEST(SameAsArgument, CausalAndWindow) {
  for (const int64_t queries : {20, 53, 70}) {
    ProblemSpec argument = small_problem();
    argument.causal = true;
    ProblemSpec causal = with_mask(mask_named("causal")), window = with_mask(mask_named("causal_window"));
    argument.seqlen_q = causal.seqlen_q = window.seqlen_q = queries;
    expect_same(argument, causal, {});
    argument.window_left = 20;
    expect_same(argument, window, {});
  }
}
/// Queries see no key behind them, as those are outside the tensor.
TEST(SameAsArgument, CausalByElementsOutside) {
  ProblemSpec argument = small_problem(), expression = with_mask(mask_named("past"));
  argument.seqlen_q = argument.seqlen_k = expression.seqlen_q = expression.seqlen_k = 40;
  argument.causal = true;
  argument.mask = true;  // to have something to copy: all ones
  argument.mask_broadcast = 0b0111;
  expect_same(argument, expression, {{Role::kMask, named_role(0)}}, [](OwnedProblem& x) {
    x[Role::kMask].assign(std::vector<double>(static_cast<size_t>(x[Role::kMask].count()), 1.0));
  });
}

// --- pairs that are not valid ---

/// Indices outside the tensor of weights, and one row of them in the last dimension.
void spoil_distances(OwnedProblem& x) {
  OwnedTensor& distance = x[x.named("distance")];
  distance.set({0, 5, 7}, 12);
  distance.set({0, 20, 52}, 100);
  distance.set({1, 36, 0}, 127);
}
TEST(InvalidPairs, ElementsOutsideMakeTheRowNan) {
  const ProblemSpec spec = with_score(score_named("looked_up_distance"));
  expect_conformance_of_all_types(spec, {}, spoil_distances);
  ProblemSpec causal = spec;
  causal.causal = true;  // hides some of them
  expect_conformance_of_all_types(causal, {}, spoil_distances);
}
TEST(InvalidPairs, TheRowAndNoOther) {
  const OwnedProblem x(with_score(score_named("looked_up_distance")));
  x[x.named("distance")].set({0, 5, 7}, 12);
  for (const std::string& backend : backends_under_test()) {
    const RunResult result = run_pass(x, FOVEA_FORWARD, {backend});
    if (result.unsupported) continue;
    ASSERT_EQ(result.failure, "") << backend;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < x.spec.seqlen_q; ++i) {
        const bool invalid = b == 0 && i == 5;
        EXPECT_EQ(std::isnan(x[Role::kO].get({b, i, 3, 2})), invalid) << backend << " " << b << " " << i;
        EXPECT_EQ(std::isnan(x[Role::kLse].get({b, 3, i})), invalid) << backend << " " << b << " " << i;
      }
    }
  }
}

const KnownExpression& division_by_zero() {
  static const KnownExpression score = {.name = "division_by_zero",
                                        .text = "s + float(q / (k - 3)) / 64",
                                        .score = [](NamedValues&, const Pair& p, float s) {
                                          if (p.k == 3) return Scored{static_cast<float>(kNan), 1};
                                          const int64_t quotient = detail::floor_divided(p.q, p.k - 3);
                                          return Scored{s + detail::real(quotient) / 64, 1};
                                        }};
  return score;
}
TEST(InvalidPairs, DivisionByZero) {
  ProblemSpec spec = with_score(division_by_zero());
  spec.seqlen_q = 53;
  spec.causal = true;  // the first three rows do not see the key
  expect_conformance_of_all_types(spec);

  const KnownExpression mask = {
      .name = "division_by_zero", .text = "q / (k - 3) >= -2", .sees = [](NamedValues&, const Pair& p) {
        return p.k != 3 && detail::floor_divided(p.q, p.k - 3) >= -2;
      }};
  expect_conformance_of_all_types(with_mask(mask));
  // What hides the key keeps the row valid.
  spec.sees = &mask;
  expect_conformance_of_all_types(spec);
}
TEST(InvalidPairs, WhatIsNotChosenIsNotNeeded) {
  const KnownExpression score = {
      .name = "guarded",
      .text = "where(k == 3, s, s + float(q / (k - 3)) / 64)",
      .score = [](NamedValues&, const Pair& p, float s) {
        return Scored{p.k == 3 ? s : s + detail::real(detail::floor_divided(p.q, p.k - 3)) / 64, 1};
      }};
  expect_conformance_of_all_types(with_score(score));
}
TEST(InvalidPairs, NanInATensor) {
  for (const char* name : {"bias", "temperature", "gain_and_shift"}) {
    ProblemSpec spec = with_score(score_named(name));
    expect_conformance_of_all_types(spec, {}, [](OwnedProblem& x) {
      OwnedTensor& t = x[named_role(0)];
      t.set(Sizes(t.shape().size(), 0), kNan);
    });
  }
}

// --- rows that see nothing, keys that nobody sees ---

TEST(EmptyRows, BySees) {
  const KnownExpression mask = {.name = "two_of_three",
                                .text = "q % 3 != 1",
                                .sees = [](NamedValues&, const Pair& p) { return p.q % 3 != 1; }};
  const KnownExpression nothing = {
      .name = "nothing", .text = "false", .sees = [](NamedValues&, const Pair&) { return false; }};
  for (const KnownExpression* sees : {&mask, &nothing}) {
    ProblemSpec spec = with_mask(*sees);
    spec.score = &score_named("relative_positions");
    expect_conformance_of_all_types(spec);
    spec.sink = spec.dsink = spec.dlse = true;
    expect_conformance_of_all_types(spec);
  }
}
TEST(EmptyRows, ByScoresOfMinusInfinity) {
  const KnownExpression score = {.name = "two_of_three",
                                 .text = "where(q % 3 == 1, -1.0 / 0, s)",
                                 .score = [](NamedValues&, const Pair& p, float s) {
                                   if (p.q % 3 != 1) return Scored{s, 1};
                                   return Scored{static_cast<float>(-kInfinity), 0};
                                 }};
  ProblemSpec spec = with_score(score);
  expect_conformance_of_all_types(spec);
  spec.sink = spec.dsink = spec.dlse = true;
  expect_conformance_of_all_types(spec);
}
/// A bias of -inf is part of s: 5 * tanh(-inf) is a score like any other.
TEST(EmptyRows, TheExpressionDecidesOverABiasOfMinusInfinity) {
  for (const char* name : {"relative_positions", "softcap"}) {
    ProblemSpec spec = with_score(score_named(name));
    spec.bias = true;
    for (const BiasValues values : {BiasValues::kSomeMinusInfinity, BiasValues::kRowsMinusInfinity}) {
      spec.bias_values = values;
      expect_conformance_of_all_types(spec);
    }
  }
}

/// NaN in keys that no query sees reaches no result.
TEST(HiddenByExpression, NanStaysAway) {
  const auto spoil = [](Role role) {
    return [role](OwnedProblem& x) {
      OwnedTensor& keep = x[named_role(0)];
      for (int64_t b = 0; b < 2; ++b) {
        for (const int64_t j : {int64_t{0}, int64_t{17}, int64_t{52}}) {
          if (keep.shape().size() == 2) keep.set({b, j}, 0);
          for (int64_t i = 0; keep.shape().size() == 3 && i < x.spec.seqlen_q; ++i) keep.set({b, i, j}, 0);
          for (int64_t c = 0; c < 16; ++c) x[role].set({b, j, 1, c}, kNan);
        }
      }
    };
  };
  for (const Role role : {Role::kK, Role::kV}) {
    expect_conformance_of_all_types(with_mask(mask_named("tree")), {}, spoil(role));
    expect_conformance_of_all_types(with_score(score_named("minus_infinity")), {}, spoil(role));
  }
}

/// Where a bias has queries as rows (AMX), the blocks with such keys are computed with queries on lanes, behind others whose results lie in rows.
TEST(HiddenByExpression, NanStaysAwayFromABias) {
  const KnownExpression gap = {.name = "gap",
                               .text = "k < 2100 || k > 2140",
                               .sees = [](NamedValues&, const Pair& p) { return p.k < 2100 || p.k > 2140; }};
  ProblemSpec spec = with_mask(gap);
  spec.batch = 1;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = 70;
  spec.seqlen_k = 2300;
  spec.head_dim = spec.head_dim_v = 64;
  spec.bias = true;
  const auto spoil = [](OwnedProblem& x) {
    for (int64_t c = 0; c < 64; ++c) x[Role::kV].set({0, 2110, 1, c}, kNan);
  };
  for (const int32_t window : {-1, 40}) {
    spec.window_left = window;
    expect_conformance_of_all_types(spec, without_repetitions(), spoil);
  }
}

// --- gradients ---

/// A tensor that the score does not read, or does not depend on, has a gradient of zeros.
TEST(NamedGradients, AreZeroWhereTheScoreDoesNotDependOnTheTensor) {
  const KnownTensor importance = mask_named("important_keys").tensors[0];
  const KnownExpression unread = {.name = "unread",
                                  .text = "s - 1",
                                  .tensors = {importance},
                                  .score = [](NamedValues&, const Pair&, float s) {
                                    return Scored{s - 1, 1};
                                  }};
  const KnownExpression step = {.name = "step",
                                .text = "where(importance[hk, k] > 0.25, s, s - 2)",
                                .tensors = {importance},
                                .score = [](NamedValues& t, const Pair& p, float s) {
                                  return Scored{t.real(0, {p.hk, p.k}) > 0.25f ? s : s - 2, 1};
                                }};
  for (const KnownExpression* score : {&unread, &step}) {
    for (const KnownExpression* sees :
         {static_cast<const KnownExpression*>(nullptr), &mask_named("important_keys")}) {
      ProblemSpec spec = with_score(*score);
      spec.sees = sees;
      expect_conformance_of_all_types(spec);
      OwnedProblem x(spec);
      ASSERT_EQ(run_pass(x, FOVEA_FORWARD, {kOracle}).failure, "");
      ASSERT_EQ(run_pass(x, FOVEA_BACKWARD, {kOracle}).failure, "");
      for (const double gradient : x[gradient_role(0)].values()) ASSERT_EQ(gradient, 0);
    }
  }
}

/// A backend that has the gradients has them with `deterministic`, too. Tensors with an element for each head, pair or position,
/// with one for all, and with elements that are looked up.
/// Of a bias too large for caches, of which a band leaves blocks out.
TEST(NamedGradients, OfManyPairs) {
  ProblemSpec spec = small_problem();
  spec.batch = 1;
  spec.seqlen_q = 900;
  spec.seqlen_k = 1312;
  spec.bias = spec.dbias = true;
  spec.window_left = 300;
  spec.window_right = 200;
  expect_conformance_of_all_types(spec, without_repetitions());
}
TEST(NamedGradients, HaveTheSameBitsEachTime) {
  for (const char* name :
       {"relative_positions", "looked_up_distance", "gain_and_shift", "product_of_elements", "bias"}) {
    for (const Type type : {Type::kF32, Type::kBF16}) {
      ProblemSpec spec = with_score(score_named(name));
      spec.type = type;
      spec.seqlen_q = 150;  // several CTAs add to each of most elements
      spec.seqlen_k = 170;
      expect_same_bits_each_time(spec);
      spec.list_size = 60;
      expect_same_bits_each_time(spec);
    }
  }
}

TEST(NamedGradients, AsManyTensorsAsAreAllowed) {
  std::vector<KnownTensor> eight;
  for (const char* name : {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"})
    eight.push_back({name, Elements::kReal, {kHeads, kKeys}, detail::some_normal});
  // The catalogue's scores read two elements at most: of eight tensors the first and the last.
  const KnownExpression score = {
      .name = "eight",
      .text = "s + t0[h, k] - 0.5 * t7[h, k]",
      .tensors = eight,
      .score = [](NamedValues& t, const Pair& p, float s) {
        const Index at = {p.h, p.k};
        return Scored{s + t.real(0, at) - 0.5f * t.real(7, at), 1, {{{0, at, 1}, {7, at, -0.5f}}}};
      }};
  expect_conformance_of_all_types(with_score(score));
}

}  // namespace
}  // namespace fovea::conformance
