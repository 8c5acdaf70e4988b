// Writes V of 8 bits with its keys side by side (transposed_values.hpp), before fwd_sm90 multiplies it. A kernel of its own: each of
// the many tiles of queries would transpose it again, and the CTA of a tile has no shared memory's bandwidth to spare.
//
// Each lane transposes 16 keys of 4 columns: it reads 4 bytes of 16 rows, a warp 128 bytes of each, and writes 16 bytes for each
// of its columns, 64 side by side.
// Grid: transpose_values_grid, a CTA for each block of keys, key head and sequence.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/transposed_values.hpp"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

inline constexpr int kTransposeThreads = 128;

template <class Grid>
constexpr Grid transpose_values_grid(const ForwardArgs& args) {
  const int tile = args.transposed_v.tile;
  return {(int64_t{args.p.seqlen_k} + tile - 1) / tile, args.p.heads_kv, args.p.batch};
}

/// Byte `column` of four rows, the first in the lowest byte.
__device__ __forceinline__ uint32_t column_of_rows(const uint32_t (&rows)[4], uint32_t column) {
  const uint32_t of_pair = column | (column + 4) << 4;  // of two rows
  const uint32_t low = __byte_perm(rows[0], rows[1], of_pair), high = __byte_perm(rows[2], rows[3], of_pair);
  return __byte_perm(low, high, 0x5410);
}

/// `Tag` makes the kernel a template, as all kernels are.
template <class Tag>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_values(const __grid_constant__ ForwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const TransposedValues& to = args.transposed_v;
  const int n = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::cached_span(p, batch);
  const int first = n * to.tile;
  if (first >= span.used_k) return;
  const tile::KeyRows rows = tile::key_rows(p, p.v, span, batch, head, 1);
  char* const block = to.block(p, batch, head, n);
  const int quads = to.columns / 4;
  for (int i = static_cast<int>(threadIdx.x); i < to.tile / kKeysOfChunk * quads; i += kTransposeThreads) {
    const int chunk = i / quads, column = i % quads * 4;
    const int key = first + chunk * kKeysOfChunk;
    uint32_t row[kKeysOfChunk] = {};  // in the order of places
    if (column < p.head_dim_v) {
#pragma unroll
      for (int at = 0; at < kKeysOfChunk; ++at) {
        const int k = key + key_at_place(at);
        if (k < span.used_k) row[at] = *reinterpret_cast<const uint32_t*>(rows.row(k) + column);
      }
    }
    // By way of shared memory lanes write side by side.
    __shared__ uint4 staged[kTransposeThreads * 4];
    uint4* const mine = staged + threadIdx.x / 32 * 128;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = column_of_rows({row[4 * w], row[4 * w + 1], row[4 * w + 2], row[4 * w + 3]}, c);
      mine[(4 * lane + c) ^ (lane / 2 % 4)] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
    uint4* const out = reinterpret_cast<uint4*>(block) + (i - lane) * 4;
#pragma unroll
    for (int c = 0; c < 4; ++c) out[c * 32 + lane] = mine[(c * 32 + lane) ^ ((c * 8 + lane / 4) / 2 % 4)];
  }
}

}  // namespace fovea::cuda
