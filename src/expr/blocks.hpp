// Which blocks of queries and keys a kernel skips, and which need no mask: `sees` over all pairs of a block at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "expr/graph.hpp"
#include "expr/range.hpp"

namespace fovea::expr {

/// Queries [q0, q1) and keys [k0, k1) of one head of one sequence.
struct Block {
  int64_t q0 = 0, q1 = 0, k0 = 0, k1 = 0;
  int64_t b = 0, h = 0, hk = 0, nq = 0, nk = 0;
};

/// How many pairs of a block are seen. kSome says nothing; the others are certain.
enum class Seen : uint8_t { kNone, kAll, kSome };

/// What is known of tensors over boxes of their elements.
class TensorRanges {
 public:
  virtual ~TensorRanges() = default;
  /// The values of the elements whose indices lie in `index`, one range a dimension, ends included; `number` for float
  /// tensors, `integer` for the others. `invalid` says whether an index of the box may be outside the tensor. Nothing
  /// when the values are not known.
  virtual std::optional<Range> range(size_t tensor, std::span<const IntRange> index) const = 0;
};

/// Ranges of q and k are exact, the other names are constants; each operation takes its operands as independent of each
/// other. So the answer is tight where an expression has q and k once each, and kSome may hide a kNone or a kAll
/// elsewhere; kNone and kAll are never wrong, in float32 as in float64. A block without pairs is kNone.
class BlockAnalysis {
 public:
  /// Both outlive the analysis. Without ranges of tensors, any element may have any value and be outside.
  explicit BlockAnalysis(const Expression& sees, const TensorRanges* tensors = nullptr);
  /// The same in memory of the caller, as many ranges as the expression's graph has nodes.
  BlockAnalysis(const Expression& sees, const TensorRanges* tensors, std::span<Range> memory);
  BlockAnalysis(const BlockAnalysis&) = delete;
  BlockAnalysis& operator=(const BlockAnalysis&) = delete;

  Seen seen(const Block& block);

 private:
  Range leaf(const Node& node, const Block& block) const;
  Range element(const Node& node) const;

  const Expression& expression_;
  const TensorRanges* tensors_;
  std::vector<Range> own_;
  std::span<Range> ranges_;
};

}  // namespace fovea::expr
