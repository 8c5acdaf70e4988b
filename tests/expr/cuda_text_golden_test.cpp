// What CUDA texts say, and what they leave out: registers limit the kernels.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "text_cases.hpp"

namespace fovea::expr {
namespace {

std::string text_of(std::string_view score, std::string_view sees, int64_t positions = int64_t{1} << 30) {
  std::optional<Expression> a, b;
  CudaTextInput input;
  input.positions = positions;
  if (!score.empty()) input.score = &a.emplace(text_expression(std::string(score), Use::kScore));
  if (!sees.empty()) input.sees = &b.emplace(text_expression(std::string(sees), Use::kSees));
  return cuda_text(input);
}

/// The lines between `begin` and the end of its block, without spaces around them.
std::string block(const std::string& text, const std::string& begin) {
  size_t at = text.find(begin);
  if (at == std::string::npos) return "no " + begin;
  const size_t start = text.rfind('\n', at) + 1;
  const std::string indent(text.find_first_not_of(' ', start) - start, ' ');
  const size_t end = text.find("\n" + indent + "}", at);
  std::string result;
  while ((at = text.find('\n', at)) < end) {
    at = text.find_first_not_of(' ', at + 1);
    result += text.substr(at, text.find('\n', at) - at) + "\n";
  }
  return result;
}

TEST(CudaTextGolden, AlibiKeepsASlopeAndThePositionsAsFloats) {
  const std::string text = text_of("s - slope[h] * abs(q + nk - nq - k)", "", int64_t{1} << 21);
  EXPECT_EQ(block(text, "struct Head"),
            "float h_6;\n"
            "int h_11;\n"
            "__device__ __forceinline__ Head(const tile::ExpressionTensors& t, int b, int h, int hk, int nq, "
            "int nk) {\n"
            "h_6 = __ldg(reinterpret_cast<const float*>(t.at[0].data) + (static_cast<long long>(h) * "
            "t.at[0].stride[0]));\n"
            "h_11 = nk - nq;\n"
            "}\n");
  EXPECT_EQ(block(text, "struct Query"),
            "float q_15;\n"
            "__device__ __forceinline__ Query(const Head& head, int q) {\n"
            "q_15 = __int_as_float((q + head.h_11) + 0x4b400000);\n"
            "}\n"
            "__device__ __forceinline__ bool alike(const Query& other) const { return true; }\n");
  EXPECT_EQ(block(text, "struct Key"),
            "float k_16;\n"
            "__device__ __forceinline__ Key(const Head& head, int k) {\n"
            "k_16 = __int_as_float(k + 0x4b400000);\n"
            "}\n"
            "__device__ __forceinline__ bool alike(const Key& other) const { return true; }\n");
  EXPECT_NE(text.find("return s - (head.h_6 * fabsf(query.q_15 - key.k_16));"), std::string::npos) << text;
  EXPECT_NE(text.find("kSlopeIsOne = true"), std::string::npos);
}

/// 2^22 positions are too many for the bits of a float, and 2^23 for floats.
TEST(CudaTextGolden, DistancesAreFloatsWhereTheseAreExact) {
  const std::string score = "s - slope[h] * abs(q + nk - nq - k)";
  const std::string bits = "__int_as_float(k + 0x4b400000)", floats = "static_cast<float>(k)",
                    ints = "fabsf(static_cast<float>(query.";
  const auto has = [&](int64_t positions, const std::string& part) {
    return text_of(score, "", positions).find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(int64_t{1} << 21, bits));
  EXPECT_TRUE(has(int64_t{1} << 22, floats));
  EXPECT_FALSE(has(int64_t{1} << 22, bits));
  EXPECT_TRUE(has(int64_t{1} << 23, ints));
  EXPECT_FALSE(has(int64_t{1} << 23, floats));
}

/// The largest texts that parse, and their derivatives.
TEST(CudaTextGolden, LargeExpressions) {
  std::string chain = "s", deep = "s";
  while (chain.size() < 4000) chain += " * tanh(s) + k";
  for (int i = 0; i < 60; ++i) deep = "tanh(" + deep + " * s)";
  EXPECT_GT(text_of(chain, "").size(), 1000u);
  EXPECT_GT(text_of(deep, "").size(), 1000u);
}

TEST(CudaTextGolden, CausalWindowsCompareIntsOf32Bits) {
  const std::string text = text_of("", "k <= q + nk - nq && q + nk - nq - k <= 1023");
  EXPECT_EQ(text.find("long long"), std::string::npos) << text;
  EXPECT_EQ(block(text, "static bool sees"),
            "return (key.k_1 <= query.q_6) && (key.k_1 >= (query.q_6 - 1023));\n");
}

TEST(CudaTextGolden, OnlyWhatIsNeeded) {
  const std::string text = text_of("30 * tanh(s / 30)", "doc[b, q] == doc[b, k]");
  EXPECT_EQ(text.find("valid"), std::string::npos);
  EXPECT_EQ(text_of("30 * tanh(s / 30)", "").find("& t;"), std::string::npos);
  EXPECT_NE(text.find("return 30.0f * tanhf(s * 0.033333335f);"), std::string::npos) << text;
  EXPECT_NE(text.find("kReadsByKey = true"), std::string::npos);
  EXPECT_EQ(text_of("", "").find("static_cast"), std::string::npos);
}

/// The score's members do not count, nor do positions that sees does not read. Numbers are compared by their bits.
TEST(CudaTextGolden, AlikeIsWhatSeesCannotTellApart) {
  const auto returned = [](const std::string& sees, const std::string& object) {
    const std::string text = block(text_of("s - slope[h] * abs(q - k)", sees), "struct " + object);
    const size_t at = text.find("return ", text.find(" alike("));
    return text.substr(at, text.find(';', at) - at);
  };
  const auto compares = [&](const std::string& sees, const std::string& object) {
    const std::string text = returned(sees, object);
    return text.find("==") == std::string::npos ? 0 : text.find("&&") == std::string::npos ? 1 : 2;
  };
  EXPECT_EQ(returned("", "Query"), "return true");
  EXPECT_EQ(compares("doc[b, q] == doc[b, k]", "Query"), 1);
  EXPECT_EQ(compares("doc[b, q] == doc[b, k]", "Key"), 1);
  EXPECT_EQ(compares("doc[b, q] == doc[b, k] && k <= q", "Query"), 2);
  EXPECT_EQ(compares("doc[b, 0] > 0", "Key"), 0);
  EXPECT_NE(returned("float(q) < 0.5 * float(k)", "Query").find("__builtin_bit_cast(unsigned, "),
            std::string::npos)
      << returned("float(q) < 0.5 * float(k)", "Query");
}

TEST(CudaTextGolden, EqualFactsGiveEqualTexts) {
  const std::string score = "s + table[h, clamp(k - q, -12, 11) + 12]";
  EXPECT_EQ(text_of(score, "k <= q"), text_of(" s + table[h,clamp(k-q,-12,11)+12]", "(k <= q)"));
  EXPECT_EQ(text_of(score, "k <= q", 1000), text_of(score, "k <= q", 2000000));
  const Expression expression = text_expression(score, Use::kScore);
  const auto with = [&](int64_t extent, int64_t stride) {
    CudaTextInput input;
    input.score = &expression;
    input.extents.assign(kTextTensors.size(), {2, extent, -1, -1});
    input.strides.assign(kTextTensors.size(), {stride, 1, -1, -1});
    return cuda_text(input);
  };
  EXPECT_EQ(with(24, 24), with(100, 128));
  EXPECT_NE(with(24, 24), with(23, 24));  // 23 is outside
  EXPECT_EQ(with(24, 24).find("extent"), std::string::npos);
}

/// A bias in 16 bits whose rows lie in one piece may come from somewhere else; others are read where they lie.
TEST(CudaTextGolden, ElementsOfPairs) {
  const auto text = [](const char* score, DType dtype, int64_t last_stride) {
    const std::vector<TensorDeclaration> tensors = {{"bias", dtype, 3}};
    const auto parsed = parse(score, Use::kScore, tensors);
    CudaTextInput input;
    input.score = &std::get<Expression>(parsed);
    input.extents = {{8, 100, 100, -1}};
    input.strides = {{10000, 100, last_stride, -1}};
    return cuda_text(input);
  };
  const std::string bias = text("s + bias[h, q, k] - 1.0", DType::kBF16, 1);
  EXPECT_NE(bias.find("kReadsPairs = true"), std::string::npos);
  EXPECT_NE(bias.find("using PairElement = __nv_bfloat16;"), std::string::npos);
  EXPECT_EQ(block(bias, "static float score_with"), "return (s + pair) - 1.0f;\n");
  EXPECT_EQ(block(bias, "static int64_t pair_row_step"), "return head.t.at[0].stride[1];\n");
  EXPECT_NE(text("s + bias[h, q, k]", DType::kF16, 1).find("PairElement = __half"), std::string::npos);
  EXPECT_NE(text("s + bias[0, q, k]", DType::kF16, 1).find("kReadsPairs = true"), std::string::npos);
  EXPECT_NE(text("s + bias[h, q, k]", DType::kF32, 1).find("kReadsPairs = false"), std::string::npos);
  EXPECT_NE(text("s + bias[h, q, k]", DType::kBF16, 2).find("kReadsPairs = false"), std::string::npos);
  EXPECT_NE(text("s + bias[h, k, q]", DType::kBF16, 1).find("kReadsPairs = false"), std::string::npos);
  EXPECT_NE(text("s + bias[h, q, k % 7]", DType::kBF16, 1).find("kReadsPairs = false"), std::string::npos);
}

/// Who has loaded elements of pairs asks score_with: that sees reads some is not the score's.
TEST(CudaTextGolden, ElementsOfPairsThatOnlySeesReads) {
  const std::vector<TensorDeclaration> tensors = {{"weight", DType::kBF16, 2}};
  const auto score = std::get<Expression>(parse("s * 0.5", Use::kScore, tensors)),
             sees = std::get<Expression>(parse("weight[q, k] > 0.0", Use::kSees, tensors));
  CudaTextInput input;
  input.extents = {{100, 100, -1, -1}};
  input.strides = {{100, 1, -1, -1}};
  input.sees = &sees;
  EXPECT_NE(cuda_text(input).find("kReadsPairs = false"), std::string::npos);
  input.score = &score;
  EXPECT_NE(cuda_text(input).find("kReadsPairs = false"), std::string::npos);
}

}  // namespace
}  // namespace fovea::expr
