// Writes float32 operands as bf16x3: x = x0 + x1 + x2, three bfloat16 values each, with an error below 2^-24 of x.
// wgmma has no float32 instruction, so fwd_sm90 and bwd_sm90_bf16x3 multiply these. A kernel of its own writes them: many
// tiles read each operand, which is then converted once.
//
// The backward multiplies pairs that do not see each other, too, by weights of 0, and 0 times NaN is NaN. So it gets zeros
// for rows of q and d_o whose lse is not finite (their weights alone tell what they give), and finite numbers for k: a
// row that sees a NaN in k has lse NaN whatever k holds, and the largest number gives the weights 0 or NaN that infinity
// would give. What is left in v and d_o makes rows of gradients NaN, which bwd_postprocess_exact then computes again.
//
// Grid: to_bf16x3_grid, y being q, k, v (or d_o). Block: kBf16x3Threads threads, four columns of a row each.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bf16x3.hpp"
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

/// Of `operands` tensors, whose copies have `columns` columns.
template <class Grid>
constexpr Grid to_bf16x3_grid(const tile::AttentionParams& p, int columns, int operands) {
  const int64_t q = bf16x3_rows_q(p), k = bf16x3_rows_k(p);
  const int64_t threads = (q > k ? q : k) * (columns / kBf16x3Columns);
  return {(threads + kBf16x3Threads - 1) / kBf16x3Threads, operands};
}

/// One of the tensors: where it is, and its copy.
struct Bf16x3Operand {
  const tile::RowsView& from;
  char* to;
  bool of_queries;
  int size;  ///< columns that it has
  uint32_t aligned_bit;
};

/// Four columns of a row of a tensor.
struct Bf16x3Place {
  bool exists;
  int64_t row;  ///< of the copy, that is of all heads
  int64_t batch, position;
  int head, column;
};

__device__ __forceinline__ Bf16x3Place bf16x3_place(const tile::AttentionParams& p,
                                                    const Bf16x3Operand& operand, int columns) {
  const bool is_q = operand.of_queries;
  const int heads = is_q ? p.heads_q : p.heads_kv;
  const bool packed = (is_q ? p.cu_seqlens_q : p.cu_seqlens_k) != nullptr;
  const int64_t length = packed ? (is_q ? p.total_q : p.total_k) : (is_q ? p.seqlen_q : p.seqlen_k);
  const int64_t rows = is_q ? bf16x3_rows_q(p) : bf16x3_rows_k(p);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBf16x3Threads + threadIdx.x;
  const int threads_a_row = columns / kBf16x3Columns;
  const int64_t row = thread / threads_a_row;
  if (row >= rows) return {};
  const int64_t position = row / heads, batch = position / length;
  return {true,
          row,
          batch,
          position - batch * length,
          static_cast<int>(row - position * heads),
          static_cast<int>(thread % threads_a_row) * kBf16x3Columns};
}

/// Columns that the tensor does not have are zeros.
__device__ __forceinline__ float4 read_float32(const tile::AttentionParams& p, const Bf16x3Operand& operand,
                                               const Bf16x3Place& at) {
  const float* const x = reinterpret_cast<const float*>(operand.from.data) +
                         operand.from.offset(at.batch, at.position, at.head) + at.column;
  if ((p.aligned16 & operand.aligned_bit) != 0 && at.column < operand.size)
    return *reinterpret_cast<const float4*>(x);
  const auto element = [&](int i) { return at.column + i < operand.size ? x[i] : 0.0f; };
  return {element(0), element(1), element(2), element(3)};
}

__device__ __forceinline__ void write_bf16x3(const Bf16x3Operand& operand, const Bf16x3Place& at, int columns,
                                             float4 rest) {
#pragma unroll
  for (int part = 0; part < kBf16x3Parts; ++part) {
    const uint32_t low = pack<__nv_bfloat16>(rest.x, rest.y), high = pack<__nv_bfloat16>(rest.z, rest.w);
    *reinterpret_cast<uint2*>(operand.to + ((at.row * kBf16x3Parts + part) * columns + at.column) * 2) =
        make_uint2(low, high);
    const float2 a = unpack<__nv_bfloat16>(low), b = unpack<__nv_bfloat16>(high);
    rest.x -= a.x;
    rest.y -= a.y;
    rest.z -= b.x;
    rest.w -= b.y;
  }
}

/// Writes `args.bf16x3_columns` columns of each of q, k and v. `Tag` makes the kernel a template, as all kernels are.
template <class Tag>
__global__ void __launch_bounds__(kBf16x3Threads) to_bf16x3(const __grid_constant__ ForwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const bool is_q = blockIdx.y == 0, is_v = blockIdx.y == 2;
  const Bf16x3Operand operand{
      is_q ? p.q : (is_v ? p.v : p.k), is_q ? args.bf16x3_q : (is_v ? args.bf16x3_v : args.bf16x3_k), is_q,
      is_v ? p.head_dim_v : p.head_dim, is_q ? tile::kAlignedQ : (is_v ? tile::kAlignedV : tile::kAlignedK)};
  const Bf16x3Place at = bf16x3_place(p, operand, args.bf16x3_columns);
  if (at.exists) write_bf16x3(operand, at, args.bf16x3_columns, read_float32(p, operand, at));
}

/// The sequence that a row of packed queries belongs to: the last that begins at or before it.
__device__ __forceinline__ int sequence_of_query(const tile::AttentionParams& p, int64_t position) {
  int first = 0, behind = p.batch;
  while (behind - first > 1) {
    const int middle = (first + behind) / 2;
    if (p.cu_seqlens_q[middle] <= position) {
      first = middle;
    } else {
      behind = middle;
    }
  }
  return first;
}

/// Whether a row of q and d_o has a finite lse, behind bwd_preprocess.
__device__ __forceinline__ bool query_takes_part(const BackwardArgs& args, const Bf16x3Place& at) {
  const tile::AttentionParams& p = args.p;
  const int batch =
      p.cu_seqlens_q != nullptr ? sequence_of_query(p, at.position) : static_cast<int>(at.batch);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const int64_t row = at.position - span.row_q;
  if (row >= span.used_q) return false;
  return fabsf(args.lse_log2[(int64_t{batch} * p.heads_q + at.head) * args.rows + row]) < INFINITY;
}

/// NaN becomes 0, infinities the largest number whose first part is finite.
__device__ __forceinline__ float finite(float x) {
  constexpr float kLargest = 3.38953139e38f;  // of bfloat16
  return x != x ? 0.0f : fminf(fmaxf(x, -kLargest), kLargest);
}

/// The same for the backward: q, k, v and d_o.
template <class Tag>
__global__ void __launch_bounds__(kBf16x3Threads) bwd_to_bf16x3(const __grid_constant__ BackwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const bool is_q = blockIdx.y == 0, is_k = blockIdx.y == 1, is_v = blockIdx.y == 2;
  const Bf16x3Operand operand{
      is_q ? p.q : (is_k ? p.k : (is_v ? p.v : p.d_o)),
      is_q ? args.bf16x3_q : (is_k ? args.bf16x3_k : (is_v ? args.bf16x3_v : args.bf16x3_do)), !is_k && !is_v,
      is_q || is_k ? p.head_dim : p.head_dim_v,
      is_q ? tile::kAlignedQ : (is_k ? tile::kAlignedK : (is_v ? tile::kAlignedV : tile::kAlignedDO))};
  const Bf16x3Place at = bf16x3_place(p, operand, args.bf16x3_columns);
  if (!at.exists) return;
  float4 x = {0, 0, 0, 0};
  if (!operand.of_queries || query_takes_part(args, at)) x = read_float32(p, operand, at);
  if (is_k) x = {finite(x.x), finite(x.y), finite(x.z), finite(x.w)};
  write_bf16x3(operand, at, args.bf16x3_columns, x);
}

}  // namespace fovea::cuda
