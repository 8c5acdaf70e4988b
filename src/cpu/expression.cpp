// Reads named tensors, and sums their gradients.
#include "cpu/expression.hpp"

namespace fovea::cpu {
namespace {

std::optional<int64_t> offset_of(const TensorDesc& t, std::span<const int64_t> index) {
  int64_t offset = 0;
  for (size_t d = 0; d < index.size(); ++d) {
    if (index[d] < 0 || index[d] >= t.shape[d]) return std::nullopt;
    offset += index[d] * t.stride[d];
  }
  return offset;
}

/// Elements from the first to past the last one.
int64_t extent_of(const TensorDesc& t) {
  int64_t last = 0;
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d) {
    if (t.shape[d] == 0) return 0;
    last += t.stride[d] == 0 ? 0 : (t.shape[d] - 1) * t.stride[d];
  }
  return last + 1;
}

/// Calls visit(offset) for each element of its own.
template <class Visit>
void for_each_offset(const TensorDesc& t, size_t dimension, int64_t offset, Visit&& visit) {
  if (dimension == static_cast<size_t>(t.ndim)) return visit(offset);
  const int64_t size = t.stride[dimension] == 0 ? 1 : t.shape[dimension];
  for (int64_t i = 0; i < size; ++i)
    for_each_offset(t, dimension + 1, offset + i * t.stride[dimension], visit);
}

}  // namespace

std::optional<double> NamedElements::read(size_t tensor, std::span<const int64_t> index) const {
  const TensorDesc& t = problem_.named[tensor].tensor;
  const auto offset = offset_of(t, index);
  if (!offset) return std::nullopt;
  const char* at =
      static_cast<const char*>(buffers_.data[place_of_named(tensor)]) + *offset * size_of(t.dtype);
  switch (t.dtype) {
    case DType::kF32:
      return *reinterpret_cast<const float*>(at);
    case DType::kF16:
      return to_float(*reinterpret_cast<const F16*>(at));
    case DType::kBF16:
      return to_float(*reinterpret_cast<const Bf16*>(at));
    case DType::kI32:
      return *reinterpret_cast<const int32_t*>(at);
    case DType::kU8:
    case DType::kBool:
      return *reinterpret_cast<const uint8_t*>(at);
    case DType::kF64:
    case DType::kI64:
    case DType::kE4M3:
      break;  // refused by validation
  }
  return std::nullopt;
}

std::optional<int64_t> NamedElements::gradient_offset(size_t tensor, std::span<const int64_t> index) const {
  return offset_of(problem_.named[tensor].gradient, index);
}

PairTerms::PairTerms(const AttentionProblem& problem, const Buffers& buffers)
    : problem_(problem), buffers_(buffers), elements_(problem, buffers) {
  if (!problem.expressions) return;
  if (const auto& sees = problem.expressions->sees)
    sees_ = std::make_unique<expr::Evaluator>(*sees, &elements_);
  const auto& score = problem.expressions->score;
  for (size_t i = 0; i < problem.named.size(); ++i) {
    if (!problem.named[i].gradient.present) continue;
    gradients_.push_back(
        {i, {}, std::vector<double>(static_cast<size_t>(extent_of(problem.named[i].gradient)), 0.0)});
  }
  if (!score) return;
  expr::ScoreDerivative derivative = expr::differentiate_by_s(*score);
  score_tree_ = std::move(derivative.score);
  slope_root_ = derivative.by_s;
  for (Gradient& gradient : gradients_)
    gradient.derivatives = expr::differentiate_by_elements(score_tree_, gradient.tensor);
  score_ = std::make_unique<expr::Evaluator>(score_tree_, &elements_);
}

void PairTerms::add_gradients(const expr::Pair& pair, double d_score) {
  for (Gradient& gradient : gradients_) {
    for (const expr::ElementDerivative& d : gradient.derivatives) {
      const expr::Node& element = score_tree_.graph[d.element];
      std::array<int64_t, expr::kMaxRank> index{};
      bool valid = true;
      for (size_t i = 0; i < element.operand_count; ++i) {
        const expr::Value at = score_->value(element.operand[i], pair);
        valid = valid && at.valid;
        index[i] = at.integer;
      }
      if (!valid) continue;
      const auto offset = elements_.gradient_offset(gradient.tensor, {index.data(), element.operand_count});
      const double derivative = score_->score(d.derivative, pair);
      if (offset && derivative != 0) gradient.sums[static_cast<size_t>(*offset)] += d_score * derivative;
    }
  }
}

void PairTerms::write_gradients() const {
  for (const Gradient& gradient : gradients_) {
    if (gradient.sums.empty()) continue;
    auto* to = static_cast<float*>(buffers_.data[place_of_gradient(gradient.tensor)]);
    for_each_offset(problem_.named[gradient.tensor].gradient, 0, 0, [&](int64_t offset) {
      to[offset] = static_cast<float>(gradient.sums[static_cast<size_t>(offset)]);
    });
  }
}

}  // namespace fovea::cpu
