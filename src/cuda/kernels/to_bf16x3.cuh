// Writes float32 operands as bf16x3: x = x0 + x1 + x2, three bfloat16 values each, with an error below 2^-24 of x.
// wgmma has no float32 instruction, so fwd_sm90 multiplies these. A kernel of its own writes them: many tiles
// read each operand, which is then converted once.
//
// Grid: to_bf16x3_grid, y being q, k or v. Block: kBf16x3Threads threads, four columns of a row each.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"

namespace fovea::cuda {

inline constexpr int kBf16x3Threads = 256, kBf16x3Columns = 4;

/// Rows (of all heads) of q, and of k and v.
constexpr int64_t bf16x3_rows_q(const tile::AttentionParams& p) {
  return (p.cu_seqlens_q != nullptr ? p.total_q : int64_t{p.batch} * p.seqlen_q) * p.heads_q;
}
constexpr int64_t bf16x3_rows_k(const tile::AttentionParams& p) {
  return (p.cu_seqlens_k != nullptr ? p.total_k : int64_t{p.batch} * p.seqlen_k) * p.heads_kv;
}

template <class Grid>
constexpr Grid to_bf16x3_grid(const ForwardArgs& args) {
  const int64_t q = bf16x3_rows_q(args.p), k = bf16x3_rows_k(args.p);
  const int64_t threads = (q > k ? q : k) * (args.bf16x3_columns / kBf16x3Columns);
  return {(threads + kBf16x3Threads - 1) / kBf16x3Threads, 3};
}

/// Writes `args.bf16x3_columns` columns of each of the three; columns that the tensor does not have are zeros.
/// `Tag` makes the kernel a template, as all kernels are.
template <class Tag>
__global__ void __launch_bounds__(kBf16x3Threads) to_bf16x3(const __grid_constant__ ForwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const bool is_q = blockIdx.y == 0, is_v = blockIdx.y == 2;
  const tile::RowsView& from = is_q ? p.q : (is_v ? p.v : p.k);
  char* to = is_q ? args.bf16x3_q : (is_v ? args.bf16x3_v : args.bf16x3_k);
  const int columns = args.bf16x3_columns, size = is_v ? p.head_dim_v : p.head_dim;
  const int heads = is_q ? p.heads_q : p.heads_kv;
  const bool packed = (is_q ? p.cu_seqlens_q : p.cu_seqlens_k) != nullptr;
  const int64_t length = packed ? (is_q ? p.total_q : p.total_k) : (is_q ? p.seqlen_q : p.seqlen_k);
  const int64_t rows = is_q ? bf16x3_rows_q(p) : bf16x3_rows_k(p);

  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBf16x3Threads + threadIdx.x;
  const int threads_a_row = columns / kBf16x3Columns;
  const int64_t row = thread / threads_a_row;
  if (row >= rows) return;
  const int column = static_cast<int>(thread % threads_a_row) * kBf16x3Columns;
  const int64_t position = row / heads, batch = position / length;
  const float* x = reinterpret_cast<const float*>(from.data) +
                   from.offset(batch, position - batch * length, row - position * heads) + column;
  float rest[kBf16x3Columns];
#pragma unroll
  for (int i = 0; i < kBf16x3Columns; ++i) rest[i] = column + i < size ? x[i] : 0.0f;
#pragma unroll
  for (int part = 0; part < kBf16x3Parts; ++part) {
    const uint32_t low = pack<__nv_bfloat16>(rest[0], rest[1]), high = pack<__nv_bfloat16>(rest[2], rest[3]);
    *reinterpret_cast<uint2*>(to + ((row * kBf16x3Parts + part) * columns + column) * 2) =
        make_uint2(low, high);
    const float2 a = unpack<__nv_bfloat16>(low), b = unpack<__nv_bfloat16>(high);
    rest[0] -= a.x;
    rest[1] -= a.y;
    rest[2] -= b.x;
    rest[3] -= b.y;
  }
}

}  // namespace fovea::cuda
