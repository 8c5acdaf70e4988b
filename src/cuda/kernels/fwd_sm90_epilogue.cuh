// The end of a tile of Hopper's forwards: 64 rows of O and lse of a consumer, straight from registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/row_vectors.cuh"

namespace fovea::cuda {

/// What a thread knows of the 16 rows of its warp, columns [first_column, first_column + columns_o()) of O; it is
/// made at the end of a tile and not before, since anything kept across the mainloop costs a register there.
template <class Instance>
struct FwdSm90Epilogue {
  using T = typename Instance::Element;
  static constexpr auto kConfig = Instance::kConfig;
  using Key = std::conditional_t<kConfig.e4m3, E4M3, T>;
  static constexpr int kColumns = kConfig.columns_o(), kTileN = kConfig.tile_n;
  /// Kernels with one consumer (and a warpgroup of producers) mostly have short tiles in one part, and the code costs them 2 % (64 sequences
  /// of 512 keys).
  static constexpr bool kPartsByTwos =
      kConfig.stream_k || kConfig.multiplies_qv || kConfig.threads() > 2 * 128;

  const TmaForwardArgs& args;
  const ForwardArgs& f;
  const FwdSm90WorkTile& work;
  const int lane;
  const int warp_row;      ///< first of the warp's rows
  const int first_column;  ///< lse is written with column 0

  __device__ __forceinline__ FwdSm90Epilogue(const TmaForwardArgs& args_, const FwdSm90WorkTile& work_,
                                             int first_column_ = 0)
      : FwdSm90Epilogue(args_, work_, first_column_, static_cast<int>(ptx::thread_index())) {}

  /// Writes the warp's rows. `acc_o` is not normalised, and holds the row sums in its last eight columns with
  /// row_sum_in_mma. A warp with any output, or with dropout any sum, that is not finite computes its rows again.
  template <class Rows, int kRegsO>
  __device__ __forceinline__ void write(const float (&acc_o)[kRegsO], const Rows& rows) const {
    if constexpr (kConfig.stream_k) {
      if (warp_row >= work.end_row) return;
    }
    if (any_not_finite(acc_o) || (kConfig.dropout && any_sum_not_finite(rows))) {
      write_exact_rows();
      return;
    }
    float factor[2];
    row_factors(acc_o, rows, factor);
    if (kPartsByTwos && writes_part(f, work)) {
      store_part(acc_o, factor);
    } else if (args.o_in_vectors) {
      store_vectors(acc_o, factor);
    } else {
      store_pairs(acc_o, factor);
    }
  }

 private:
  __device__ __forceinline__ FwdSm90Epilogue(const TmaForwardArgs& args_, const FwdSm90WorkTile& work_,
                                             int first_column_, int thread)
      : args(args_),
        f(args_.f),
        work(work_),
        lane(thread % 32),
        warp_row(work_.first_row + 16 * (thread / 32 % 4)),
        first_column(first_column_) {}

  /// Columns of O from first_column on.
  __device__ __forceinline__ int columns_left() const { return f.p.head_dim_v - first_column; }

  static constexpr int kRowsApart = 8;  ///< a lane's two rows, as wgmma lays out accumulators
  /// Row of half `half` of this lane's accumulators.
  __device__ __forceinline__ int row_at(int half) const { return warp_row + lane / 4 + kRowsApart * half; }

  /// Whether any output of the warp is NaN or infinite: 0 times these is NaN.
  template <int kRegsO>
  __device__ __forceinline__ static bool any_not_finite(const float (&acc_o)[kRegsO]) {
    float probe[4] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) probe[i % 4] = fmaf(acc_o[i], 0.0f, probe[i % 4]);
    return __any_sync(0xffffffffu, (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f);
  }

  /// The same of the sums of weights: an infinite weight that is dropped is in these alone.
  template <class Rows>
  __device__ __forceinline__ static bool any_sum_not_finite(const Rows& rows) {
    return __any_sync(0xffffffffu, fmaf(rows.row_sum[0], 0.0f, rows.row_sum[1] * 0.0f) != 0.0f);
  }

  /// Computes all rows of the warp again, key by key.
  __device__ __forceinline__ void write_exact_rows() const {
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int row = warp_row + r;
      if (row >= work.end_row) break;
      write_exact_row<T, kColumns, Key, kConfig.multiplies_qv>(
          f, work, dropout(), row, first_column, min(kColumns, columns_left()), work.load_begin * kTileN,
          work.load_end * kTileN, arriving());
    }
  }
  __device__ __forceinline__ auto dropout() const {
    if constexpr (kConfig.dropout) {
      return tile::dropout_of(f.p);
    } else {
      return NoDropout{};
    }
  }
  /// Of kernels that know them.
  __device__ __forceinline__ decltype(auto) arriving() const {
    if constexpr (kConfig.arriving) {
      return (args.arriving);
    } else {
      return NoArrivingKeys{};
    }
  }

  /// The factors of this lane's two rows; writes their lse.
  template <class Rows, int kRegsO>
  __device__ __forceinline__ void row_factors(const float (&acc_o)[kRegsO], const Rows& rows,
                                              float (&factor)[2]) const {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = kConfig.row_sum_in_mma ? acc_o[kColumns / 2 + 2 * half] : row_total(rows.row_sum[half]);
    if (f.num_splits == 1 && f.p.sink == nullptr) {  // usual, and much shorter
      const int used_row = work.span.used_q * packed_heads(f);
      bool used[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        used[half] = row_at(half) < used_row && sum[half] != 0.0f;
        factor[half] = used[half] ? ptx::rcp(sum[half]) : 0.0f;
      }
      if (f.p.lse.data != nullptr && first_column == 0) store_lse(rows, sum, used);
    } else {
      // Of the code for a row; two where tiles are so short that one is felt.
      constexpr int kCopies = kConfig.stream_k || kColumns <= 64 ? 2 : 1;
      const float base[2] = {rows.base(0), rows.base(1)};
#pragma unroll(kCopies)
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(half);
        const bool second = half != 0;
        const float of_row = row < work.end_row
                                 ? finish_row(f, work, query_row(f, work, row), second ? base[1] : base[0],
                                              second ? sum[1] : sum[0], lane % 4 == 0 && first_column == 0)
                                 : 0.0f;
        (second ? factor[1] : factor[0]) = of_row;
      }
    }
    if constexpr (kConfig.dropout) {
#pragma unroll
      for (float& x : factor) x *= f.p.dropout_keep_scale;
    }
    if constexpr (kConfig.e4m3) {
      const int head_kv = head_of_keys(f, work);
#pragma unroll
      for (float& x : factor) x *= f.p.v_descale.at(work.batch, head_kv);
    }
  }

  /// Calls visit(half, element offset) for this lane's two rows: offset_of(row) is that of one, `step` from a query to the next. Rows of
  /// one head share their 64-bit products, which 512 tokens feel (docs/kernels/log/fwd_sm90.md, The end of a tile).
  template <class OffsetOf, class Visit>
  __device__ __forceinline__ void for_both_rows(int64_t step, const OffsetOf& offset_of,
                                                const Visit& visit) const {
    const int64_t first = offset_of(query_row(f, work, row_at(0)));
    if constexpr (kConfig.e4m3) {  // whose registers do not hold the second as well
      visit(0, first);
      visit(1, offset_of(query_row(f, work, row_at(1))));
    } else {
      int64_t second = first + kRowsApart * step;
      if (f.pack_group) second = offset_of(query_row(f, work, row_at(1)));
      visit(0, first);
      visit(1, second);
    }
  }

  /// lse of this lane's two rows, which are in one part and without a sink.
  template <class Rows>
  __device__ __forceinline__ void store_lse(const Rows& rows, const float (&sum)[2],
                                            const bool (&used)[2]) const {
    if (lane % 4 != 0) return;
    for_both_rows(
        f.p.lse.row,
        [&](QueryRow r) { return f.p.lse.offset(work.batch, r.head, work.span.row_q + r.query); },
        [&](int half, int64_t at) {
          if (row_at(half) < work.end_row)
            f.p.lse.data[at] =
                used[half] ? (rows.base(half) + log2_of_sum(sum[half])) * tile::kLn2 : -INFINITY;
        });
  }

  /// O in vectors of 16 bytes, or of 8 in float32.
  template <int kRegsO>
  __device__ __forceinline__ void store_vectors(const float (&acc_o)[kRegsO],
                                                const float (&factor)[2]) const {
    for_both_rows(
        f.p.o.row,
        [&](QueryRow r) {
          return f.p.o.offset(work.batch, work.span.row_q + r.query, r.head) + first_column;
        },
        [&](int half, int64_t at) {
          const int columns = row_at(half) < work.end_row ? columns_left() : 0;
          if (sizeof(T) == 4 || f.p.o_is_f32()) {
            store_row_pairs<kColumns>(reinterpret_cast<float*>(f.p.o.data) + at, columns, acc_o, half,
                                      factor[half], lane);
          } else if constexpr (sizeof(T) == 2) {
            store_row_vectors<kColumns>(reinterpret_cast<T*>(f.p.o.data) + at, columns, acc_o, half,
                                        factor[half], lane);
          }
        });
  }

  /// A part of O, whose rows are whole in memory: two elements at a time.
  template <int kRegsO>
  __device__ __forceinline__ void store_part(const float (&acc_o)[kRegsO], const float (&factor)[2]) const {
    if (f.p.head_dim_v % 2 != 0) {
      store_pairs(acc_o, factor);
      return;
    }
    const int used_row = work.span.used_q * packed_heads(f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(half);
      store_row_pairs<kColumns>(f32_row(f, work, query_row(f, work, row)) + first_column,
                                row < used_row ? columns_left() : 0, acc_o, half, factor[half], lane);
    }
  }

  /// O, or this split's part of it, element by element: any alignment, any number of columns.
  template <int kRegsO>
  __device__ __forceinline__ void store_pairs(const float (&acc_o)[kRegsO], const float (&factor)[2]) const {
    const int lane_column = 2 * (lane % 4), left = columns_left() - lane_column;
    const int used_row = work.span.used_q * packed_heads(f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(half);
      if (row >= work.end_row || (writes_part(f, work) && row >= used_row)) continue;
      const auto store = [&](auto* to) {
        using Out = std::remove_pointer_t<decltype(to)>;
#pragma unroll
        for (int n8 = 0; n8 < kColumns / 8; ++n8) {
          if (n8 * 8 < left) to[n8 * 8] = static_cast<Out>(acc_o[4 * n8 + 2 * half] * factor[half]);
          if (n8 * 8 + 1 < left)
            to[n8 * 8 + 1] = static_cast<Out>(acc_o[4 * n8 + 2 * half + 1] * factor[half]);
        }
      };
      const QueryRow r = query_row(f, work, row);
      if (stores_f32(f, work)) {
        store(f32_row(f, work, r) + first_column + lane_column);
      } else {
        store(o_row<T>(f, work, r) + first_column + lane_column);
      }
    }
  }
};

}  // namespace fovea::cuda
