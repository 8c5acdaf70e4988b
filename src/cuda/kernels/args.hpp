// What launches pass to kernels beside the problem: how the work is split, and where intermediate results
// lie. Plain data, by value.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// A tile of queries is kTileM rows of one sequence and key head. With `pack_group` queries of the `group`
/// heads that share the key head are packed into it, row r being query r / group of head r % group: K and V
/// are then read once for all of them.
struct ForwardArgs {
  tile::AttentionParams p;
  bool pack_group = false;
  /// With pack_group: floor(2^32 / group) + 1, so that the upper half of row * query_magic is row / group.
  /// Exact while row * group < 2^32, which is when the launch may pack.
  uint32_t query_magic = 0;
  /// Heads (of q, or of k with pack_group) whose tiles run at the same time: as many as have K and V that fit
  /// the L2 cache together. At least 1.
  int heads_at_once = 1;
  /// Keys are divided among this many CTAs a query tile. With 1 the kernel writes o and lse; else float32
  /// parts:
  ///   part_o   (num_splits, batch, heads_q, rows, head_dim_v)     normalised within the split
  ///   part_lse (num_splits, batch, heads_q, rows)                 natural logarithm, -inf without a key;
  ///   without the sink
  /// of `rows` = p.seqlen_q rows a sequence, which fwd_combine merges (and where the sink enters).
  int num_splits = 1;
  float* part_o = nullptr;
  float* part_lse = nullptr;
};

/// The backward is three launches: bwd_prepare (delta, and zeros where sums are accumulated), the main kernel
/// over key blocks, bwd_finish (dq from its float32 sums; the unused rows of dq). dbias and dsink have
/// kernels of their own.
struct BackwardArgs {
  tile::AttentionParams p;
  /// Float32 row statistics, (batch, heads_q, rows) with rows = seqlen_q rounded up to kRowPadding:
  ///   lse_log2  lse * log2(e), and +inf for rows that take no part, so that their weights are exp2(-inf) = 0
  ///   delta     rowsum(dO * O) - dlse, 0 for rows that take no part
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  /// Float32 sums of dq before the factor `scale`, (num_splits, batch, heads_q, rows, head_dim padded to the
  /// kernel's): the layout inside a tile belongs to the main kernel and bwd_finish alone.
  float* dq_sum = nullptr;
  /// CTAs that share the key blocks of one (sequence, key head); CTA s takes blocks s, s + num_splits, ...
  /// With `deterministic` each has sums of its own in dq_sum, added in order by bwd_finish; else all add to
  /// the first.
  int num_splits = 1;
  bool deterministic = false;
  int64_t rows = 0;    ///< rows a (batch, head) of the buffers above
  int dq_columns = 0;  ///< head_dim as the main kernel pads it: the width of dq_sum

  static constexpr int kRowPadding = 128;  ///< the largest query tile of any main kernel
};

}  // namespace fovea::cuda
