// The parameter of the kernel that merges results over disjoint keys (fovea_merge). Plain data, as tile/attention_params.hpp.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "cuda/kernels/columns.hpp"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// One result: o (batch, row, head, column) and lse in the layout of its own.
struct MergePart {
  tile::RowsView o;
  tile::StatsView lse;       ///< no data: not wanted (of the result alone)
  DType type = DType::kF32;  ///< of o: float32, float16 or bfloat16
};

/// Parts that one launch takes: a kernel's parameters hold 4 KB on every driver.
inline constexpr int kMostMergeParts = 48;

struct MergeArgs {
  MergePart parts[kMostMergeParts];
  MergePart result;                          ///< may be one of the parts
  int64_t rows = 0, heads = 0, columns = 0;  ///< rows of a sequence
  int64_t batch = 0;
  int count = 0;
  bool vectors =
      false;  ///< every row of every o starts at a multiple of 16 bytes, and its columns are a multiple of 8
  /// Heads of a row lie side by side: neighbouring warps take these, so that what is read at a time is one piece of memory.
  bool heads_inside = false;
};
static_assert(sizeof(MergeArgs) <= 4096);

inline constexpr int kMergeThreads = 128;
/// CTAs whose registers an SM holds: memory waits for those that have too few reads under way.
inline constexpr int kMergeCtasOfSm = 6;

/// Rows of a head that a warp merges at a time, and columns of each that a lane has: more do not fit the registers of six CTAs.
inline constexpr int kMergeRows = 2, kMergeColumns = 4;

/// What warps take one after the other, of a head with `rows` rows.
constexpr int64_t merge_groups(int64_t rows) {
  return (rows + kMergeRows - 1) / kMergeRows;
}

}  // namespace fovea::cuda
