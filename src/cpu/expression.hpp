// The expressions of a problem on its own tensors, pair by pair in float64: the oracle's part.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/problem.hpp"
#include "expr/differentiate.hpp"
#include "expr/evaluate.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {

/// The elements of a problem's named tensors.
class NamedElements final : public expr::TensorReader {
 public:
  NamedElements(const AttentionProblem& problem, const Buffers& buffers)
      : problem_(problem), buffers_(buffers) {}
  std::optional<double> read(size_t tensor, std::span<const int64_t> index) const override;
  /// Offset of an element of the gradient; nothing outside the tensor.
  std::optional<int64_t> gradient_offset(size_t tensor, std::span<const int64_t> index) const;

 private:
  const AttentionProblem& problem_;
  const Buffers& buffers_;
};

/// One thread at a time.
class PairTerms {
 public:
  PairTerms(const AttentionProblem& problem, const Buffers& buffers);

  bool sees(const expr::Pair& pair) { return !sees_ || sees_->sees(pair); }
  bool has_score() const { return score_ != nullptr; }
  double score(const expr::Pair& pair) { return score_->score(pair); }
  double slope(const expr::Pair& pair) { return score_->score(slope_root_, pair); }
  /// Adds d_score times the derivative by each element to the gradients that are asked for.
  void add_gradients(const expr::Pair& pair, double d_score);
  /// Writes the gradients, which are summed in float64.
  void write_gradients() const;

 private:
  struct Gradient {
    size_t tensor;
    std::vector<expr::ElementDerivative> derivatives;
    std::vector<double> sums;  ///< by the offset in the gradient
  };
  const AttentionProblem& problem_;
  const Buffers& buffers_;
  NamedElements elements_;
  expr::Expression score_tree_;  ///< with its derivatives
  expr::NodeId slope_root_ = expr::kNoNode;
  std::unique_ptr<expr::Evaluator> score_, sees_;
  std::vector<Gradient> gradients_;
};

}  // namespace fovea::cpu
