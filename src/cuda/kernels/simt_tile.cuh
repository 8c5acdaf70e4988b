// What the SIMT kernels share: tiles of 64 x 64 pairs on CUDA cores, in float32, from operands of any type.
//
//   product     acc[row][col] += X[row][:] Y[col][:]     X, Y: 64 rows, the head size in chunks of 32 columns
//   weights     W[row][col], a function of acc           in shared memory, over the chunks of X and Y
//   accumulate  out[row][:]   += W[row][col] B[col][:]   B: 32 rows at a time, up to kColumns columns
//
// Rows and columns of a tile are queries and keys, or the other way round. A thread has rows ty + 8 r (r < 8) and columns
// tx + kLanesX c of a tile of pairs. Threads that differ by 1 in tx read consecutive rows of Y, whose stride of 36 floats
// spreads a 16-byte column of 8 rows over all banks. All threads of one ty lie in one warp, so sums over a row are
// shuffles, and one warp writes and reads a row of W.
//
// Where queries have lists of keys (kLists), X has the few rows that share a list, r being 0 alone, and Y the rows of the
// keys that 64 entries name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/elements.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// Threads of a CTA, 4 warps: with 8 x 4 pairs a thread, an SM has registers for 3 CTAs.
inline constexpr int kSimtThreads = 128;

/// e^x for x <= 0, as exact as weights need; e^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp_of(float x) {
  return ptx::ex2(x * tile::kLog2e);
}

/// What a tile reads of a (batch, seqlen, heads, size) tensor: consecutive rows of one head.
struct SimtRows {
  const char* data = nullptr;
  int64_t first = 0;    ///< element offset of row 0 of the sequence
  int64_t stride = 0;   ///< between rows
  int columns = 0;      ///< the head size
  bool vector = false;  ///< 16-byte loads are safe
  float scale = 1;      ///< of elements of 8 bits
};

__device__ __forceinline__ SimtRows rows_of(const tile::RowsView& view, int batch, int64_t first_row,
                                            int head, int columns, bool vector) {
  return {view.data, view.offset(batch, first_row, head), view.row, columns, vector};
}

/// The keys that a block of entries names.
template <bool kLists, int kEntries>
struct SimtEntries {};
template <int kEntries>
struct SimtEntries<true, kEntries> {
  int key[kEntries];
};

template <int kThreads_, int kColumns_, bool kLists = false>
struct SimtTile {
  static constexpr int kThreads = kThreads_;
  static constexpr int kColumns = kColumns_;  ///< of an output slice
  static constexpr int kRows = 64;            ///< of Y, and without lists of X
  static constexpr int kLanesY = 8;
  static constexpr int kRowsX = kLists ? kLanesY : kRows;
  static constexpr int kLanesX = kThreads / kLanesY;
  static constexpr int kRowsOf = kRowsX / kLanesY;          ///< rows of a thread
  static constexpr int kColsOf = kRows / kLanesX;           ///< columns of a thread
  static constexpr int kGroups = kColumns / (4 * kLanesX);  ///< 16-byte columns of a thread in the output
  static_assert(kGroups >= 1 && kGroups * 4 * kLanesX == kColumns && kLanesX <= 32);

  /// Loads of 16 bytes in flight: the accumulators leave registers for as many. Of elements of 8 bits one, whose conversions are
  /// 300 instructions before sm_89.
  static constexpr int in_flight(int element_bytes) { return element_bytes == 1 ? 1 : 4; }
  static constexpr int kChunk = 32;        ///< columns of X and Y in shared memory at a time
  static constexpr int kStrideXY = 36;     ///< 8 neighbouring rows lie 4 banks apart
  static constexpr int kStrideW = 72;      ///< the rows of a warp's 4 values of ty lie 8 banks apart
  static constexpr int kHalf = kRows / 2;  ///< rows of B in shared memory at a time
  static_assert((kRowsX + kRows) * kStrideXY >= kRowsX * kStrideW, "W lies over X and Y");

  struct Shared : SimtEntries<kLists, kRows> {
    union {
      struct {
        alignas(16) float x[kRowsX * kStrideXY];
        alignas(16) float y[kRows * kStrideXY];
      };
      alignas(16) float w[kRowsX * kStrideW];
    };
    alignas(16) float b[kHalf * kColumns];
    // The sequence, and what each query row needs: computed once, and kept here because threads have no registers left.
    tile::SequenceSpan span;
    int batch, head, slice, row0;
    int out_batch, tile_q, tile_k;  ///< dbias: its tile, where `batch` and `query_head` are of pairs
    int what;                       ///< the backward: the output of the CTA
    int query_head;                 ///< the backward: the head whose pairs are in work
    float query_scale;              ///< the forward: of the elements of a q of 8 bits
    tile::Span32 others;            ///< the backward: rows of the other side that the tile meets
    int64_t query[kRowsX];          ///< element offset of the row in q
    tile::Span32 seen[kRowsX];      ///< keys under causal and window; none for rows that take no part
    union {
      struct {
        float lse[kRowsX], delta[kRowsX];  ///< the backward
      };
      int64_t query_of_values[kRowsX];  ///< the forward: element offset of the row in qv
      float row_sum[kRowsX];            ///< the forward, when no keys are left
    };
    float row_max[kRowsX];  ///< the forward
  };

  using Pairs = float[kRowsOf][kColsOf];
  using Output = float[kRowsOf][kGroups][4];

  // Lanes i and i ^ 1 have the same tx, lanes i and i ^ 2 the same ty. So pairs of lanes read the same 16 bytes of either
  // side, which shared memory serves as one access.
  static __device__ __forceinline__ int tx() { return static_cast<int>(threadIdx.x) / 2 % kLanesX; }
  static __device__ __forceinline__ int ty() {
    const int thread = static_cast<int>(threadIdx.x);
    return thread % 2 + thread / (2 * kLanesX) * 2;
  }
  /// Combines x over the lanes of a row; all of them get the result.
  template <class Combine>
  static __device__ __forceinline__ float over_row(float x, const Combine& combine) {
#pragma unroll
    for (int lane = 2; lane < 2 * kLanesX; lane *= 2) x = combine(x, __shfl_xor_sync(~0u, x, lane));
    return x;
  }
  static __device__ __forceinline__ int row_of(int r) {
    return ty() + kLanesY * r;
  }
  static __device__ __forceinline__ int col_of(int c) {
    return tx() + kLanesX * c;
  }
  /// First column of a group of the output slice.
  static __device__ __forceinline__ int out_column(int group) {
    return 4 * (tx() + kLanesX * group);
  }

  template <class Array>
  static __device__ __forceinline__ void clear(Array& array) {
    float* x = reinterpret_cast<float*>(&array);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Array) / sizeof(float)); ++i) x[i] = 0;
  }

  template <class T>
  static __device__ __forceinline__ T load_one(const T* at) {
    if constexpr (sizeof(T) == 1) {
      return {__ldg(&at->bits)};
    } else {
      return __ldg(at);
    }
  }

  /// Copies columns [column, column + kWidth) of kCount rows, from offset_of(row) (of column 0) where row <
  /// count, to shared memory; zeros elsewhere. Returns whether all values are finite.
  template <class T, int kCount, int kWidth, int kStride, class OffsetOf>
  static __device__ __forceinline__ bool load(float* to, const SimtRows& from, int count, int column,
                                              const OffsetOf& offset_of) {
    const T* data = reinterpret_cast<const T*>(from.data);
    const int columns = from.columns - column;
    const auto value = [&](T x) { return sizeof(T) == 1 ? to_float(x) * from.scale : to_float(x); };
    constexpr int kAtOnce = in_flight(sizeof(T));
    float check = 0;  // 0 * x is NaN when x is not finite
    if (from.vector) {
      constexpr int kVector = 16 / sizeof(T), kPerRow = kWidth / kVector;
      constexpr int kItems = (kCount * kPerRow + kThreads - 1) / kThreads;
      constexpr bool kAllThreads = kItems * kThreads == kCount * kPerRow;
#pragma unroll(kItems < kAtOnce ? kItems : kAtOnce)
      for (int item = 0; item < kItems; ++item) {
        const int at = static_cast<int>(threadIdx.x) + item * kThreads;
        const int row = at / kPerRow, c = at % kPerRow * kVector;
        if (!kAllThreads && row >= kCount) break;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (row < count && c < columns)
          words = __ldg(reinterpret_cast<const uint4*>(data + offset_of(row) + column + c));
        const T* values = reinterpret_cast<const T*>(&words);
#pragma unroll
        for (int v = 0; v < kVector; v += 4) {
          const float4 x = {value(values[v]), value(values[v + 1]), value(values[v + 2]),
                            value(values[v + 3])};
          check = fmaf(x.x, 0.0f, check) + fmaf(x.y, 0.0f, 0.0f);
          check = fmaf(x.z, 0.0f, check) + fmaf(x.w, 0.0f, 0.0f);
          *reinterpret_cast<float4*>(to + row * kStride + c + v) = x;
        }
      }
    } else {
#pragma unroll(kAtOnce)
      for (int item = 0; item < kCount * kWidth / kThreads; ++item) {
        const int at = static_cast<int>(threadIdx.x) + item * kThreads;
        const int row = at / kWidth, c = at % kWidth;
        float x = 0;
        if (row < count && c < columns) x = value(load_one(data + offset_of(row) + column + c));
        check = fmaf(x, 0.0f, check);
        to[row * kStride + c] = x;
      }
    }
    return check == 0;
  }

  /// Consecutive rows from `row`, of which `count` take part.
  template <class T, int kCount, int kWidth, int kStride>
  static __device__ __forceinline__ bool load_rows(float* to, const SimtRows& from, int row, int count,
                                                   int column) {
    const int64_t first = from.first + row * from.stride;
    return load<T, kCount, kWidth, kStride>(to, from, count, column,
                                            [&](int r) { return first + r * from.stride; });
  }

  /// acc += X Y^T over `width` columns of the chunk in shared memory, rounded up to 4: columns behind hold zeros.
  static __device__ __forceinline__ void multiply(const Shared& s, int width, Pairs& acc) {
    const float* x = s.x + ty() * kStrideXY;
    const float* y = s.y + tx() * kStrideXY;
#pragma unroll 1
    for (int k = 0; k < width; k += 4) {
      // Columns stay in registers while rows pass: a thread has no more columns than rows.
      float4 ry[kColsOf];
#pragma unroll
      for (int c = 0; c < kColsOf; ++c)
        ry[c] = *reinterpret_cast<const float4*>(y + c * kLanesX * kStrideXY + k);
#pragma unroll
      for (int r = 0; r < kRowsOf; ++r) {
        const float4 rx = *reinterpret_cast<const float4*>(x + r * kLanesY * kStrideXY + k);
#pragma unroll
        for (int c = 0; c < kColsOf; ++c) {
          acc[r][c] = fmaf(rx.x, ry[c].x, acc[r][c]);
          acc[r][c] = fmaf(rx.y, ry[c].y, acc[r][c]);
          acc[r][c] = fmaf(rx.z, ry[c].z, acc[r][c]);
          acc[r][c] = fmaf(rx.w, ry[c].w, acc[r][c]);
        }
      }
    }
  }

  static __device__ __forceinline__ void write_pairs(Shared& s, const Pairs& pairs) {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) s.w[row_of(r) * kStrideW + col_of(c)] = pairs[r][c];
    }
  }
  static __device__ __forceinline__ void read_pairs(const Shared& s, Pairs& pairs) {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) pairs[r][c] = s.w[row_of(r) * kStrideW + col_of(c)];
    }
  }

  /// out += W B over rows [first, first + kHalf) of B. `careful`: a weight of 0 keeps NaN and Inf of B away.
  static __device__ __forceinline__ void accumulate(const Shared& s, int first, bool careful, Output& out) {
    if (careful) {
      accumulate_with<true>(s, first, out);
    } else {
      accumulate_with<false>(s, first, out);
    }
  }

 private:
  template <bool kCareful>
  static __device__ __forceinline__ void accumulate_with(const Shared& s, int first, Output& out) {
    const float* w = s.w + ty() * kStrideW + first;
    const float* b = s.b + 4 * tx();
#pragma unroll 1
    for (int k = 0; k < kHalf; k += 4) {
      float rw[kRowsOf][4];
#pragma unroll
      for (int r = 0; r < kRowsOf; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(w + r * kLanesY * kStrideW + k);
        rw[r][0] = x.x, rw[r][1] = x.y, rw[r][2] = x.z, rw[r][3] = x.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const float4 rb = *reinterpret_cast<const float4*>(b + (k + e) * kColumns + g * 4 * kLanesX);
#pragma unroll
          for (int r = 0; r < kRowsOf; ++r) {
            if (kCareful && rw[r][e] == 0) continue;
            out[r][g][0] = fmaf(rw[r][e], rb.x, out[r][g][0]);
            out[r][g][1] = fmaf(rw[r][e], rb.y, out[r][g][1]);
            out[r][g][2] = fmaf(rw[r][e], rb.z, out[r][g][2]);
            out[r][g][3] = fmaf(rw[r][e], rb.w, out[r][g][3]);
          }
        }
      }
    }
  }
};

/// Writes four adjacent values of a row, of which `count` exist, to a tensor of T or float32.
template <class T>
__device__ __forceinline__ void store_four(char* data, int64_t offset, const float (&x)[4], int count,
                                           bool is_f32, bool vector) {
  if (is_f32 || sizeof(T) == 4) {
    float* to = reinterpret_cast<float*>(data) + offset;
    if (vector && count >= 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < count) to[c] = x[c];
      }
    }
    return;
  }
  T* to = reinterpret_cast<T*>(data) + offset;
  if (vector && count >= 4) {
    T values[4] = {T(x[0]), T(x[1]), T(x[2]), T(x[3])};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(values);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < count) to[c] = T(x[c]);
    }
  }
}

/// Whether weights need more than the scale and the window.
template <class T>
__device__ __forceinline__ bool has_terms(const tile::AttentionParams& p) {
  return ScoreOf<T>::says_anything(p) || p.dropout_threshold != 0;
}

}  // namespace fovea::cuda
