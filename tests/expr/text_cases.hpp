// The expressions whose CUDA text is compiled for the host and run: write_texts.cpp writes it, cuda_text_test.cpp compares.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "expr/cuda_text.hpp"
#include "random_expression.hpp"
#include "tile/expression_tensors.hpp"

namespace fovea::expr {

/// Those of random expressions first.
inline const std::vector<TensorDeclaration> kTextTensors = [] {
  std::vector<TensorDeclaration> all = kTensors;
  all.push_back({"table", DType::kF32, 2});
  all.push_back({"limit", DType::kI32, 1});
  all.push_back({"half", DType::kF16, 1});
  return all;
}();
inline const std::vector<std::vector<int64_t>> kTextExtents = [] {
  std::vector<std::vector<int64_t>> all = kExtents;
  all.push_back({16, 24});
  all.push_back({2});
  all.push_back({9});
  return all;
}();

/// What the writer of a text knows.
enum class Facts : uint8_t { kNothing, kPositions, kAll };

struct TextCase {
  std::string score, sees;
  Facts facts = Facts::kNothing;
};

/// Deterministic: the writer and the test make the same list.
std::vector<TextCase> text_cases();

inline Expression text_expression(const std::string& text, Use use) {
  auto result = parse(text, use, kTextTensors);
  if (const auto* error = std::get_if<ParseError>(&result)) throw std::runtime_error(error->text());
  return std::get<Expression>(std::move(result));
}

/// Strides in elements: the last dimension is dense where `dense`, and there are holes between the others.
inline std::array<int64_t, kMaxRank> text_strides(size_t tensor, bool dense) {
  std::array<int64_t, kMaxRank> strides{};
  const std::vector<int64_t>& extents = kTextExtents[tensor];
  int64_t stride = dense ? 1 : 2;
  for (size_t d = extents.size(); d-- > 0;) {
    strides[d] = stride;
    stride = stride * extents[d] + 3;
  }
  return strides;
}

inline CudaTextInput text_input(const TextCase& of, const Expression* score, const Expression* sees) {
  CudaTextInput input;
  input.score = score;
  input.sees = sees;
  input.gradients.assign(kTextTensors.size(), true);
  if (of.facts == Facts::kNothing) return input;
  input.positions = int64_t{1} << 21;
  if (of.facts == Facts::kPositions) return input;
  input.batch = input.heads = 2;
  for (size_t tensor = 0; tensor < kTextTensors.size(); ++tensor) {
    std::array<int64_t, kMaxRank> extents = {-1, -1, -1, -1};
    for (size_t d = 0; d < kTextExtents[tensor].size(); ++d) extents[d] = kTextExtents[tensor][d];
    input.extents.push_back(extents);
    input.strides.push_back(text_strides(tensor, true));
    input.gradient_strides.push_back(text_strides(tensor, true));
  }
  return input;
}

/// A text, compiled for the host.
struct CompiledText {
  bool has_score, has_sees, slope_is_one, reads_by_position, has_gradients;
  float (*score)(const tile::ExpressionTensors& tensors, const Pair& pair);
  float (*slope)(const tile::ExpressionTensors& tensors, const Pair& pair);
  bool (*sees)(const tile::ExpressionTensors& tensors, const Pair& pair);
  void (*add_gradients)(const tile::ExpressionTensors& tensors, const Pair& pair, float d_score);
};
std::vector<CompiledText> compiled_texts();

}  // namespace fovea::expr
