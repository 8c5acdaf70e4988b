// The end of a tile of fwd_sm90: 64 rows of O and lse of a consumer.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"

namespace fovea::cuda {

/// A consumer writes its tile from registers; rows whose output is not finite again, and exactly. `acc_o`:
/// before normalisation, the row sum in the last eight columns with row_sum_in_mma.
template <class Instance, class Rows, int kRegsO>
__device__ __forceinline__ void fwd_sm90_write(const TmaForwardArgs& args, const FwdSm90Place& place,
                                               const float (&acc_o)[kRegsO], const Rows& rows) {
  using T = typename Instance::Element;
  constexpr FwdSm90Config kConfig = Instance::kConfig;
  constexpr int kDimV = kConfig.head_dim_v, kTileN = kConfig.tile_n;
  const ForwardArgs& f = args.f;
  const tile::AttentionParams& p = f.p;
  const int thread = static_cast<int>(ptx::thread_index());  // asked for here: see the mainloop
  const int warp = thread / 32 % 4, lane = thread % 32, lane_column = 2 * (lane % 4);
  const int columns = p.head_dim_v, group = f.pack_group ? p.group : 1;
  const int warp_row = place.first_row + 16 * warp, end_row = place.end_row,
            used_row = place.span.used_q * group;
  const auto head_of = [&](int row) {
    return f.pack_group ? place.head * group + row - query_of_row(f, row) * group : place.head;
  };
  const auto part_of = [&](int i, int head) {
    return ((static_cast<int64_t>(place.split) * p.batch + place.batch) * p.heads_q + head) * p.seqlen_q + i;
  };
  /// Writes lse and returns the factor of acc_o; a row without keys, or behind the last query, gets -inf
  /// and 0.
  const auto finish_row = [&](int row, float base, float sum, bool writes) {
    const int i = query_of_row(f, row), head = head_of(row);
    const float sink =
        row < used_row && p.sink != nullptr && f.num_splits == 1 ? p.sink[head] * kLog2e : -INFINITY;
    const RowEnd done = row < used_row ? end_of_row(base, sum, sink) : RowEnd{};
    if (writes) {
      if (f.num_splits > 1) {
        if (row < used_row) f.part_lse[part_of(i, head)] = done.lse_log2 * kLn2;
      } else if (p.lse.data != nullptr) {
        p.lse.data[p.lse.offset(place.batch, head, place.span.row_q + i)] = done.lse_log2 * kLn2;
      }
    }
    return done.factor;
  };
  const bool as_f32 = f.num_splits > 1 || p.o_is_f32;
  const auto f32_row = [&](int row) {
    const int i = query_of_row(f, row), head = head_of(row);
    return f.num_splits > 1
               ? f.part_o + part_of(i, head) * columns
               : reinterpret_cast<float*>(p.o.data) + p.o.offset(place.batch, place.span.row_q + i, head);
  };
  const auto element_row = [&](int row) {
    return reinterpret_cast<T*>(p.o.data) +
           p.o.offset(place.batch, place.span.row_q + query_of_row(f, row), head_of(row));
  };

  float probe[4] = {};  // NaN when any output of the warp is not finite: 0 * NaN and 0 * Inf are
#pragma unroll
  for (int i = 0; i < kDimV / 2; ++i) probe[i % 4] = fmaf(acc_o[i], 0.0f, probe[i % 4]);
  const bool odd = __any_sync(0xffffffffu, (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f);
  if (odd) {
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int row = warp_row + r;
      if (row >= end_row) break;
      const int i = query_of_row(f, row), head = head_of(row), head_kv = head / p.group;
      const auto* k =
          reinterpret_cast<const T*>(p.k.data) + p.k.offset(place.batch, place.span.row_k, head_kv);
      const auto* v =
          reinterpret_cast<const T*>(p.v.data) + p.v.offset(place.batch, place.span.row_k, head_kv);
      ExactRow<kDimV> exact;
      exact.add(p, RowTerms<T>(p, place.span, place.batch, head, i), tile::Dropout(),
                reinterpret_cast<const T*>(p.q.data) + p.q.offset(place.batch, place.span.row_q + i, head), k,
                v, columns, row < used_row ? tile::keys_of(p, place.span, i) : tile::Span32{},
                place.load_begin * kTileN, place.load_end * kTileN);
      const float base = exact.maximum == -INFINITY ? 0.0f : exact.maximum * kLog2e;
      const float factor = finish_row(row, base, exact.sum, lane == 0);
#pragma unroll
      for (int c32 = 0; c32 < ExactRow<kDimV>::kPerLane; ++c32) {
        const int c = lane + 32 * c32;
        if (c >= columns) break;
        if (as_f32) {
          if (f.num_splits == 1 || row < used_row) f32_row(row)[c] = exact.o[c32] * factor;
        } else {
          element_row(row)[c] = static_cast<T>(exact.o[c32] * factor);
        }
      }
    }
  } else {
    float factor[2], sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = kConfig.row_sum_in_mma ? acc_o[kDimV / 2 + 2 * half] : rows.sum_of_row(half);
    if (f.num_splits == 1 && p.lse.data == nullptr && p.sink == nullptr) {  // the usual, and much shorter
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[half] =
            warp_row + lane / 4 + 8 * half < used_row && sum[half] != 0.0f ? ptx::rcp(sum[half]) : 0.0f;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + lane / 4 + 8 * half;
        factor[half] = row < end_row ? finish_row(row, rows.base(half), sum[half], lane % 4 == 0) : 0.0f;
      }
    }
    if (args.o_in_vectors) {
      if constexpr (sizeof(T) == 2) {  // never for float32
        // The four lanes of a row have two columns each of every 8. By swaps with one neighbour and then the
        // other, a lane gets 8 columns side by side of every 32.
        static_assert(kDimV % 32 == 0);
        const bool odd_lane = lane % 2 != 0, upper = lane % 4 >= 2;
        const int first_column = (upper ? 16 : 0) + (odd_lane ? 8 : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + lane / 4 + 8 * half;
          T* const to = element_row(row) + first_column;
          const int left = row < end_row ? columns - first_column : 0;
#pragma unroll
          for (int n32 = 0; n32 < kDimV / 32; ++n32) {
            uint32_t words[2][2];  // of 16 columns each
#pragma unroll
            for (int n16 = 0; n16 < 2; ++n16) {
              const float* o = acc_o + (2 * n32 + n16) * 8 + 2 * half;
              const uint32_t low = pack<T>(o[0] * factor[half], o[1] * factor[half]),
                             high = pack<T>(o[4] * factor[half], o[5] * factor[half]);
              const uint32_t other = __shfl_xor_sync(0xffffffffu, odd_lane ? low : high, 1);
              words[n16][0] = odd_lane ? other : low, words[n16][1] = odd_lane ? high : other;
            }
            const uint32_t x = __shfl_xor_sync(0xffffffffu, upper ? words[0][0] : words[1][0], 2),
                           y = __shfl_xor_sync(0xffffffffu, upper ? words[0][1] : words[1][1], 2);
            const uint4 out =
                upper ? uint4{x, y, words[1][0], words[1][1]} : uint4{words[0][0], words[0][1], x, y};
            if (n32 * 32 < left) *reinterpret_cast<uint4*>(to + n32 * 32) = out;
          }
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + lane / 4 + 8 * half;
        if (row >= end_row || (f.num_splits > 1 && row >= used_row)) continue;
        const int left = columns - lane_column;
        const auto store = [&](auto* to) {
          using Out = std::remove_pointer_t<decltype(to)>;
#pragma unroll
          for (int n8 = 0; n8 < kDimV / 8; ++n8) {
            if (n8 * 8 < left) to[n8 * 8] = static_cast<Out>(acc_o[4 * n8 + 2 * half] * factor[half]);
            if (n8 * 8 + 1 < left)
              to[n8 * 8 + 1] = static_cast<Out>(acc_o[4 * n8 + 2 * half + 1] * factor[half]);
          }
        };
        if (as_f32) {
          store(f32_row(row) + lane_column);
        } else {
          store(element_row(row) + lane_column);
        }
      }
    }
  }
}

}  // namespace fovea::cuda
