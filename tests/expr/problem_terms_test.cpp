// Terms of a problem as parts of its expressions.
#include "expr/problem_terms.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "expr/cuda_text.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"

namespace fovea::expr {
namespace {

TensorDesc pairs(DType dtype, std::array<int64_t, kMaxRank> stride) {
  return {.present = true, .dtype = dtype, .ndim = 4, .shape = {2, 4, 100, 100}, .stride = stride};
}
constexpr std::array<int64_t, kMaxRank> kDense = {40000, 10000, 100, 1}, kOfAllHeads = {0, 0, 100, 1};

AttentionProblem problem() {
  AttentionProblem p;
  p.dtype = DType::kBF16;
  p.batch = 2, p.heads_q = p.heads_kv = 4, p.head_dim = p.head_dim_v = 64;
  p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = 100;
  return p;
}

NamedTensor named(const char* name, const TensorDesc& tensor) {
  NamedTensor made;
  made.name = name;
  made.tensor = tensor;
  return made;
}

/// What broadcasts over sequences and heads depends on neither, so that GPUs look at its pairs once.
TEST(ProblemTerms, BroadcastDimensionsAreIndexedByZero) {
  AttentionProblem p = problem();
  p.tensors[index_of(Role::kMask)] = pairs(DType::kBool, kOfAllHeads);
  const auto composed = with_terms_in_expressions(p);
  ASSERT_TRUE(composed);
  EXPECT_FALSE(depends_on(*composed->expressions->sees, {Variable::kB, Variable::kH}));
  p.tensors[index_of(Role::kMask)] = pairs(DType::kBool, kDense);
  EXPECT_TRUE(depends_on(*with_terms_in_expressions(p)->expressions->sees, {Variable::kB, Variable::kH}));
}

/// A user's bools, too: bytes beside the mask's.
TEST(ProblemTerms, BoolsAreReadAsBytes) {
  AttentionProblem p = problem();
  p.tensors[index_of(Role::kMask)] = pairs(DType::kBool, kOfAllHeads);
  p.named.push_back(named("keep", pairs(DType::kBool, kDense)));
  PairExpressions user;
  user.sees = std::get<Expression>(
      parse("keep[b, h, q, k] != 0", Use::kSees, std::vector<TensorDeclaration>{{"keep", DType::kU8, 4}}));
  p.expressions = std::make_shared<const PairExpressions>(user);
  const auto composed = with_terms_in_expressions(p);
  ASSERT_TRUE(composed);
  for (const TensorDeclaration& tensor : composed->expressions->sees->tensors)
    EXPECT_EQ(tensor.dtype, DType::kU8) << tensor.name;
  CudaTextInput input;
  input.sees = &*composed->expressions->sees;
  input.has_terms = composed->expressions->has_terms;
  const std::string text = cuda_text(input);
  EXPECT_EQ(text.find("const float*"), std::string::npos) << text;
  EXPECT_NE(text.find("kHasTerms = true"), std::string::npos) << text;
}

/// dbias_sm90 loads the bias as the elements of pairs, whatever else the user's score reads.
TEST(ProblemTerms, TheBiasIsWhatIsReadPairByPair) {
  AttentionProblem p = problem();
  p.tensors[index_of(Role::kBias)] = pairs(DType::kBF16, kOfAllHeads);
  p.named.push_back(named("t", pairs(DType::kBF16, kDense)));
  const std::vector<TensorDeclaration> declared = {{"t", DType::kBF16, 4}};
  PairExpressions user;
  user.score = std::get<Expression>(parse("t[b, h, q, k] + s", Use::kScore, declared));
  p.expressions = std::make_shared<const PairExpressions>(user);
  const auto composed = with_terms_in_expressions(p);
  ASSERT_TRUE(composed);
  ASSERT_EQ(composed->named.size(), 2u);
  ASSERT_EQ(composed->named[1].name, "bias");
  CudaTextInput input;
  input.score = &*composed->expressions->score;
  for (const NamedTensor& tensor : composed->named) {
    input.extents.push_back(tensor.tensor.shape);
    input.strides.push_back(tensor.tensor.stride);
  }
  EXPECT_EQ(composed->named[1].place, index_of(Role::kBias));
  input.pairs_of = 1;
  const std::string text = cuda_text(input);
  const size_t step = text.find("pair_row_step");
  ASSERT_NE(step, std::string::npos);
  EXPECT_NE(text.find("head.t.at[1].stride[2]", step), std::string::npos) << text;
}

/// The window and the rest of a problem's `sees`: "left, right: rest", "nothing" where no expression is left.
std::string windows_of(AttentionProblem p, const char* sees, const char* score = nullptr) {
  const std::vector<TensorDeclaration> tensors = {{"doc", DType::kI32, 2}};
  PairExpressions all;
  all.sees = std::get<Expression>(parse(sees, Use::kSees, tensors));
  if (score) all.score = std::get<Expression>(parse(score, Use::kScore, tensors));
  p.expressions = std::make_shared<const PairExpressions>(all);
  const AttentionProblem with = with_windows(p);
  const std::string ends = std::to_string(with.window_left) + ", " + std::to_string(with.window_right) + ": ";
  if (!with.expressions) return ends + "nothing";
  return ends + (with.expressions->sees ? print(*with.expressions->sees) : "only a score");
}

TEST(ProblemTerms, WindowsOfSeesAreWindows) {
  EXPECT_EQ(windows_of(problem(), "k <= q && q - k <= 30"), "30, 0: nothing");
  EXPECT_EQ(windows_of(problem(), "k <= q", "s * 2.0"), "-1, 0: only a score");
  EXPECT_EQ(windows_of(problem(), "doc[b, q] == doc[b, k] && abs(q - k) < 9"),
            "8, 8: doc[b, q] == doc[b, k]");
  EXPECT_EQ(windows_of(problem(), "doc[b, q] == doc[b, k]"), "-1, -1: doc[b, q] == doc[b, k]");
  EXPECT_EQ(windows_of(problem(), "q - k <= 100 && k - q < 100"), "-1, 99: nothing")
      << "as wide as the sequence";
  AttentionProblem p = problem();
  p.window_left = 20;
  p.window_right = 5;
  EXPECT_EQ(windows_of(p, "q - k <= 30 && k <= q"), "20, 0: nothing") << "the closer ends";
}

/// Only the GPU knows how long a sequence is: then q and k alone say nothing of the diagonal.
TEST(ProblemTerms, WindowsOfUnknownLengthsNameThem) {
  for (const Role role : {Role::kSeqUsedQ, Role::kSeqUsedK, Role::kLeftPadK, Role::kKNew}) {
    AttentionProblem p = problem();
    p.tensors[index_of(role)].present = true;
    EXPECT_EQ(windows_of(p, "k <= q"), "-1, -1: k <= q") << name_of(role);
    EXPECT_EQ(windows_of(p, "k <= q + nk - nq"), "-1, 0: nothing") << name_of(role);
  }
  for (bool AttentionProblem::*packed : {&AttentionProblem::packed, &AttentionProblem::packed_k}) {
    AttentionProblem p = problem();
    p.*packed = true;
    EXPECT_EQ(windows_of(p, "k <= q"), "-1, -1: k <= q");
  }
}

/// The slopes of a problem with this score, as strides of batch and heads; "score" where it stays one.
std::string slopes_of_score(AttentionProblem p, const char* score, DType dtype = DType::kF32,
                            int64_t slopes = 0) {
  const std::vector<TensorDeclaration> tensors = {{"slope", dtype, 1}, {"each", dtype, 2}};
  TensorDesc slope, each;
  slope.present = each.present = true;
  slope.dtype = each.dtype = dtype;
  slope.ndim = 1;
  slope.shape = {slopes > 0 ? slopes : p.heads_q};
  slope.stride = {3};
  each.ndim = 2;
  each.shape = {p.batch, p.heads_q};
  each.stride = {7, 2};
  p.named = {named("slope", slope), named("each", each)};
  PairExpressions all;
  all.score = std::get<Expression>(parse(score, Use::kScore, tensors));
  p.expressions = std::make_shared<const PairExpressions>(all);
  const AttentionProblem with = with_slopes(p);
  if (with.expressions) return with.has(Role::kAlibi) ? "both" : "score";
  const TensorDesc& alibi = with[Role::kAlibi];
  if (!alibi.present || alibi.shape[0] != p.batch || alibi.shape[1] != p.heads_q) return "neither";
  return with.named[static_cast<size_t>(with.named_slopes)].name + ": " + std::to_string(alibi.stride[0]) +
         ", " + std::to_string(alibi.stride[1]);
}

TEST(ProblemTerms, ScoresThatAreAlibisAreSlopes) {
  AttentionProblem p = problem();
  p.seqlen_q = p.seqlen_k;
  EXPECT_EQ(slopes_of_score(p, "s - slope[h] * abs(q + nk - nq - k)"), "slope: 0, 3");
  EXPECT_EQ(slopes_of_score(p, "s - slope[h] * abs(q - k)"), "slope: 0, 3");
  EXPECT_EQ(slopes_of_score(p, "-each[b, h] * abs(k - q) + s"), "each: 7, 2");
  EXPECT_EQ(slopes_of_score(p, "s + abs(float(k - q)) * -slope[h]"), "slope: 0, 3");
  for (const char* other :
       {"s + slope[h] * abs(q - k)", "s - slope[h] * (q - k)", "s - slope[h] * abs(q - k - 1)",
        "s - slope[h] * abs(q + k)", "s - slope[h] * abs(2 * (q - k))", "s - slope[0] * abs(q - k)",
        "2.0 * s - slope[h] * abs(q - k)", "s - each[h, b] * abs(q - k)", "s - slope[h]",
        "slope[h] * abs(q - k)"})
    EXPECT_EQ(slopes_of_score(p, other), "score") << other;
  EXPECT_EQ(slopes_of_score(p, "s - slope[h] * abs(q - k)", DType::kBF16), "score");
  AttentionProblem wider = p;
  wider.heads_q *= 2;
  EXPECT_EQ(slopes_of_score(wider, "s - slope[h] * abs(q - k)", DType::kF32, p.heads_q), "score")
      << "too few";
  EXPECT_EQ(slopes_of_score(wider, "s - slope[h] * abs(q - k)", DType::kF32, 1), "slope: 0, 0")
      << "one for all";
  AttentionProblem longer = p;
  longer.seqlen_k += 5;
  EXPECT_EQ(slopes_of_score(longer, "s - slope[h] * abs(q - k)"), "score") << "that is no distance";
  EXPECT_EQ(slopes_of_score(longer, "s - slope[h] * abs(q + nk - nq - k)"), "slope: 0, 3");
  p.tensors[index_of(Role::kSeqUsedK)].present = true;
  EXPECT_EQ(slopes_of_score(p, "s - slope[h] * abs(q - k)"), "score") << "lengths that nobody knows";
}

/// No key lies behind a query's place.
TEST(ProblemTerms, UnderACausalMaskDistancesAreNegative) {
  AttentionProblem p = problem();
  p.seqlen_q = p.seqlen_k;
  p.window_right = 0;
  for (const char* alibi : {"s + slope[h] * (k - q)", "s - slope[h] * (q - k)", "s + -slope[h] * (q - k)",
                            "s + slope[h] * -(q - k)", "s - slope[h] * abs(q - k)"})
    EXPECT_EQ(slopes_of_score(p, alibi), "slope: 0, 3") << alibi;
  for (const char* other : {"s - slope[h] * (k - q)", "s + slope[h] * (q - k)"})
    EXPECT_EQ(slopes_of_score(p, other), "score") << other;
}

}  // namespace
}  // namespace fovea::expr
