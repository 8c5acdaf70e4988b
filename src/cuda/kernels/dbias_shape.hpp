// How the gradient of a bias is cut into tiles, for its kernels.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The extents of dbias, and its tiles of so many queries and keys.
struct DBiasShape {
  int batch, heads, seqlen_q, seqlen_k, tiles_q, tiles_k;

  /// A dimension of stride 0 has one element, the sum over the whole dimension.
  constexpr DBiasShape(const tile::AttentionParams& p, int tile_m, int tile_n)
      : batch(p.dbias.batch != 0 ? p.batch : 1),
        heads(p.dbias.head != 0 ? p.heads_q : 1),
        seqlen_q(p.dbias.row != 0 ? p.seqlen_q : 1),
        seqlen_k(p.dbias.column != 0 ? p.seqlen_k : 1),
        tiles_q((seqlen_q + tile_m - 1) / tile_m),
        tiles_k((seqlen_k + tile_n - 1) / tile_n) {}

  constexpr int64_t elements() const { return int64_t{batch} * heads * seqlen_q * seqlen_k; }
  constexpr int64_t tiles() const { return static_cast<int64_t>(batch) * heads * tiles_q * tiles_k; }
};

}  // namespace fovea::cuda
