// Products of blocks as integers, for processors that multiply bytes and words (AVX512-VNNI): numbers of blocks are never converted.
//
//   q . k   q = unit * (128 * high + low), 15 bits in two bytes; 16 keys are lanes, four of their bytes a lane:
//           a block's 32 products of 16 keys are 8 instructions for each of the two, and one conversion
//   p v     p * scale of v's block = weight * unit, a word; numbers of two keys side by side are words:
//           the sums of a step are exact
//   leasts  the sum of a block of a query times the least of a key's block, the sum of p * least of v's block
#pragma once

#if defined(__x86_64__)

#include <cstdint>
#include <vector>

#include "block_rows.hpp"
#include "block_steps.hpp"

namespace fovea_ggml {

/// A block of a query: its high and its low bytes, four of them a lane.
struct alignas(64) QueryBlock {
  int32_t high[8], low[8];
};

/// Products of bytes and words. Needs AVX-512 F, BW, DQ, VL and VNNI, and queries and scales that are finite. The bytes of a query are right to
/// 1 / 32,512 of its largest element, the words of weights to 1 / 65,534 of the largest of a step and a block.
class IntegerProducts {
 public:
  explicit IntegerProducts(const BlockAttention& attention);

  /// Of a head and a step.
  int64_t points() const;
  /// What scores of a row, counted over all heads, are multiplied by.
  float unit(int64_t row) const { return units_[static_cast<size_t>(row)]; }

  /// step.scores = products of the rows of a head with the keys of a step, in units of their row.
  void dots(int64_t head, Step& step, Ahead& ahead) const;
  /// o = o * step.alpha + sum over the keys of step.scores, which are weights now, times the values.
  void sums(int64_t head, const Step& step, Ahead& ahead) const;

 private:
  const BlockAttention& a_;
  int64_t blocks_;
  std::vector<QueryBlock> queries_;  ///< of each row
  std::vector<int32_t> sums_;        ///< of each of them: of its elements
  std::vector<float> units_;         ///< of each row
};

}  // namespace fovea_ggml
#endif
