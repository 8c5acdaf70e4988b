// Behind bwd_lists: dk and dv from their float32 sums; zeros in rows beyond used_k.
//
// Grid     (any number but 0, heads_kv, batch), best list_gradients_grid.
// Block    kListGradientsThreads threads, a warp for each row. No shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/gradient.cuh"

namespace fovea::cuda {

inline constexpr int kListGradientsThreads = 128;
inline constexpr int kListGradientsRows = kListGradientsThreads / 32;

template <class Grid>
Grid list_gradients_grid(const BackwardArgs& args) {
  const int64_t rows = args.p.seqlen_k > 0 ? args.p.seqlen_k : 1;
  return {(rows + kListGradientsRows - 1) / kListGradientsRows, args.p.heads_kv, args.p.batch};
}

/// Writes a row of `size` columns: factor times `sums`, or zeros where that is null.
template <class T>
__device__ __forceinline__ void write_key_row(char* data, int64_t offset, bool is_f32, const float* sums,
                                              float factor, int size) {
  for (int c = static_cast<int>(threadIdx.x) % 32; c < size; c += 32) {
    const float value = sums != nullptr ? __ldcs(sums + c) * factor : 0.0f;
    store_gradient<T>(data, offset + c, is_f32, value);
  }
}

/// T: float, __half or __nv_bfloat16.
template <class T>
__global__ void __launch_bounds__(kListGradientsThreads)
    list_gradients(const __grid_constant__ BackwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const auto warp = static_cast<int>(threadIdx.x) / 32,
             step = static_cast<int>(gridDim.x) * kListGradientsRows;
  for (int j = static_cast<int>(blockIdx.x) * kListGradientsRows + warp; j < span.length_k; j += step) {
    const bool used = j < span.used_k;
    const int64_t row = args.key_row(span, batch, head, j);
    write_key_row<T>(p.dk.data, p.dk.offset(batch, span.row_k + j, head), p.dk_is_f32,
                     used ? args.dk_sums(row) : nullptr, p.scale, p.head_dim);
    write_key_row<T>(p.dv.data, p.dv.offset(batch, span.row_k + j, head), p.dk_is_f32,
                     used ? args.dv_sums(row) : nullptr, 1.0f, p.head_dim_v);
  }
}

}  // namespace fovea::cuda
