// Softmax over keys that arrive block by block, in base 2: scores are already times log2(e). A row keeps the
// largest score so far and the sum of exp2(score - max); its output is the sum of exp2(score - max) * v. All
// of it is a sum of exponentials relative to a maximum, so parts merge in any grouping.
//
// Scores of -inf leave their key out; NaN and +inf make the row NaN. `Math` gives exp2, log2 and max (which
// returns the other operand where one is NaN): the instructions of the device are not those of the host. In
// CUDA code its functions are __host__ __device__, as constexpr functions count as both.
#pragma once

#include <limits>

namespace fovea::tile {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// What a maximum is subtracted as. A row that has seen no key has the maximum -inf, and -inf - -inf would be
/// NaN.
constexpr float subtracted_max(float max) {
  return max == -kInfinity ? 0.0f : max;
}

template <class Math>
struct SoftmaxRow {
  float max = -kInfinity;
  float sum = 0;

  /// Takes notice of the largest score of a block. What was summed so far, here and in the output, is to be
  /// multiplied by the result: at most 1, and 0 for the first block.
  constexpr float raise_max(float block_max) {
    const float old_max = max;
    max = Math::max(max, block_max);
    const float factor = Math::exp2(old_max - subtracted_max(max));
    sum *= factor;
    return factor;
  }
  /// The weight of a score, after raise_max; it goes into `sum` (of the block, then of the row) and into the
  /// output.
  constexpr float weight(float score) const { return Math::exp2(score - subtracted_max(max)); }

  /// A row of no key has no sum, and 0 for output.
  constexpr float inverse_sum() const { return sum == 0 ? 0.0f : 1.0f / sum; }
  /// Logarithm to base 2 of the sum of exp2(score): -inf for a row of no key.
  constexpr float lse2() const { return sum == 0 ? -kInfinity : subtracted_max(max) + Math::log2(sum); }
};

/// Adds another part of the same row: outputs before normalisation are to be multiplied by the two factors,
/// and added.
struct MergeFactors {
  float mine = 1, other = 1;
};
template <class Math>
constexpr MergeFactors merge(SoftmaxRow<Math>& row, const SoftmaxRow<Math>& other) {
  const float mine = row.raise_max(other.max);
  const float theirs = Math::exp2(other.max - subtracted_max(row.max));
  row.sum += other.sum * theirs;
  return {mine, theirs};
}

/// Adds a part that comes as its lse2 and its normalised output: such a part is a single key of that score.
/// The output of the row is then the sum of weight * part.
template <class Math>
constexpr MergeFactors merge_normalised(SoftmaxRow<Math>& row, float part_lse2) {
  return merge(row, SoftmaxRow<Math>{part_lse2, 1.0f});
}

}  // namespace fovea::tile
