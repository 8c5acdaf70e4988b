// Writes V of 8 bits with its keys side by side (transposed_values.hpp), before fwd_sm90 multiplies it. A kernel of its own: each of
// the many tiles of queries would transpose it again, and the CTA of a tile has no shared memory's bandwidth to spare.
//
// Each lane transposes 16 keys of 4 columns: a warp reads 128 bytes of each row, and writes 2 KB side by side, by way of shared
// memory (lanes that write the 64 bytes of their own columns take 1.3 times as long).
// Grid: transpose_values_grid, a CTA for each block of keys, key head and sequence.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/transposed_values.hpp"
#include "cuda/ptx/grid.cuh"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

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

/// 16 keys of columns `column` to column + 3, whose first key is `key`; 0 behind the last key or column.
__device__ __forceinline__ void load_quad(const tile::AttentionParams& p, const tile::KeyRows& rows,
                                          int used_k, int key, int column, uint32_t (&row)[kKeysOfChunk]) {
#pragma unroll
  for (int at = 0; at < kKeysOfChunk; ++at) {  // in the order of places
    const int k = key + tile::key_at_place(at);
    row[at] =
        k < used_k && column < p.head_dim_v ? *reinterpret_cast<const uint32_t*>(rows.row(k) + column) : 0u;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) transpose_values(const __grid_constant__ ForwardArgs args) {
  ptx::wait_for_launches_before();  // they may have written lengths and V, and read what this one overwrites
  ptx::let_next_launch_begin();     // it waits for this one before it loads
  const tile::AttentionParams& p = args.p;
  const TransposedValues& to = args.transposed_v;
  const int n = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::cached_span(p, batch);
  if (n * to.tile >= span.used_k) return;
  const tile::KeyRows rows = tile::key_rows(p, p.v, span, batch, head, 1);
  uint4* const block = reinterpret_cast<uint4*>(to.block(p, batch, head, n));
  // Of each warp 128 columns; the place of a column is such that eight lanes meet all banks.
  __shared__ uint4 staged[kThreads * 4];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, quads = to.columns / 4;
  uint4* const mine = staged + thread / 32 * 128;
  const auto place = [&](int column) -> uint4& { return mine[column ^ (column / 8 % 4)]; };
  // A multiple of 32: lanes of a warp stay together.
  for (int i = thread; i < to.tile / kKeysOfChunk * quads; i += kThreads) {
    uint32_t row[kKeysOfChunk];
    load_quad(p, rows, span.used_k, n * to.tile + i / quads * kKeysOfChunk, i % quads * 4, row);
    __syncwarp();  // every lane has read what was there
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w)
        words[w] = column_of_rows({row[4 * w], row[4 * w + 1], row[4 * w + 2], row[4 * w + 3]}, c);
      place(4 * lane + static_cast<int>(c)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();  // all columns are there
#pragma unroll
    for (int c = 0; c < 4; ++c) block[(i - lane) * 4 + c * 32 + lane] = place(c * 32 + lane);
  }
}

}  // namespace fovea::cuda
