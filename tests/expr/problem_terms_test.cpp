// Terms of a problem as parts of its expressions.
#include "expr/problem_terms.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "expr/cuda_text.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/parse.hpp"

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

}  // namespace
}  // namespace fovea::expr
