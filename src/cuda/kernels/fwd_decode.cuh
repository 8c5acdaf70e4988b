// The forward for few queries and many keys: decoding, on mma.sync, for keys and values of 8 or 16 bits.
//
//   S = Q K^T        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l
//
// What limits it is the read of K and V. So warps take pieces of 16 keys in turn, each for itself: a warp copies them to a ring of its
// own, several stages ahead, makes fragments of 16 bits of them in registers, and keeps a maximum, a sum and an O of its own. Warps
// meet only at the end of a tile, where their results are merged. A tile is all queries of a key head, 16 or 32 rows, of which every warp has
// Q in registers (or shared memory). CTAs have equal shares of all keys (fwd_stream_k.cuh) or of a tile's (fwd_decode_cluster.cuh).
//
// With keys of 8 bits products are of float16, whatever type q has: float16 has all their values, an instruction converts two, and weights
// lose less than in bfloat16. A row of a bfloat16 q is multiplied by a power of two that brings its largest element near the end of float16;
// elements 2^29 times smaller than that lose bits, which no sum in float32 would have kept. A q of 8 bits, of which T has every value,
// becomes one of T where it is loaded.
//
// Scales: those of q and k, and the power of two, multiply the scale of a row's scores; that of v multiplies the rows of O.
//
// Files
//   fwd_decode_config.cuh       configuration, shared memory
//   fwd_decode_rows.cuh         how a warp copies rows of K and V, in one piece or in pages
//   fwd_stream_k.cuh            shares of CTAs, and how their parts are merged
//   warp/key_fragments.cuh      fragments of K and V
// Grid     as many CTAs as the GPU holds (ForwardArgs::num_splits).
// Shared   a ring for each warp; at the end of a tile rows of O lie over them.
// Barriers of the CTA, at the end of a tile:
//   0  (q_in_shared) the largest elements of Q, then its fragments are in shared memory
//   1  the results of all warps are in shared memory
//   2  nobody reads them any more: the rings are free
//
// NaN and Inf in V of keys that a row does not see: a row of O that is not finite is computed again (warp/exact_row.cuh).
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_decode_config.cuh"
#include "cuda/kernels/fwd_decode_results.cuh"
#include "cuda/kernels/fwd_decode_rows.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"

namespace fovea::cuda {

/// What happens beside the steps of a tile: nothing where all that it reads is there before it begins.
struct ReadsInOrder {
  static constexpr bool kReadsEarly = false;
  /// Before pages are looked up and keys are copied.
  __device__ __forceinline__ void before_copies() const {}
  /// Behind the first copies: whether the length of the sequence has changed since it was read.
  __device__ __forceinline__ bool has_other_length(const FwdWorkTile&) const { return false; }
  /// Behind the loads of Q.
  __device__ __forceinline__ void before_keys() const {}
};

/// A warp, and its steps. All are inlined, so that arrays stay in registers.
template <class Instance>
struct FwdDecodeWarp : FwdDecodeRows<Instance> {
  using Rows = FwdDecodeRows<Instance>;
  using T = typename Instance::Element;
  using Rows::f, Rows::memory, Rows::warp, Rows::lane;
  using Rows::kConfig, Rows::kWarps, Rows::kTileN, Rows::kWarpKeys, Rows::kStages, Rows::kWholeWarp;
  using typename Rows::Key, typename Rows::Memory, typename Rows::KeysOfK, typename Rows::KeysOfV;
  using Operand = std::conditional_t<kConfig.e4m3, __half, T>;  ///< of products
  static constexpr int kM16 = kConfig.tile_m / 16, kSteps = kConfig.head_dim / 16,
                       kPairs = kConfig.head_dim_v / 16;

  uint32_t q[kConfig.q_in_shared ? 1 : kM16][kConfig.q_in_shared ? 1 : kSteps][4];
  float acc_o[kM16][2 * kPairs][4];
  OnlineRows rows[kM16];
  tile::Span32 seen[kM16][2];  ///< keys that the lane's rows see
  float scale_log2[kM16][2];   ///< takes scores of a row to exponents of 2

  __device__ __forceinline__ FwdDecodeWarp(const ForwardArgs& args, const Memory& memory_, int warp_,
                                           int lane_)
      : FwdDecodeRows<Instance>{args, memory_, warp_, lane_} {}

  /// The CTA's part of a tile, whose rows go to o or to a part in global memory.
  __device__ __forceinline__ void attend(const FwdWorkTile& of_tile, const tile::KvBlocks& pieces) {
    sum_up(of_tile, pieces, ReadsInOrder{});
    results().write_rows(pieces, of_tile.end_row);
    __syncthreads();  // 2
  }

  __device__ __forceinline__ FwdDecodeResults<Instance> results() const { return {f, memory, warp, lane}; }

  /// The same up to barrier 1: what each warp has found lies in shared memory. `pieces` of 16 keys go to the warps in turn. Whether it is what
  /// was asked for: not if the tile was made of a length that has changed since (Beside::kReadsEarly).
  template <class Beside>
  __device__ __forceinline__ bool sum_up(const FwdWorkTile& of_tile, const tile::KvBlocks& pieces,
                                         const Beside& beside) {
    FwdWorkTile& work = *memory.work_tile(warp);
    if (lane == 0) work = of_tile;
    __syncwarp();  // every lane sees the tile
    const tile::KeyRows k = tile::key_rows(f.p, f.p.k, work.span, work.batch, head_of_keys(f, work),
                                           sizeof(Key)),
                        v = tile::key_rows(f.p, f.p.v, work.span, work.batch, head_of_keys(f, work),
                                           sizeof(Key));
    bool changed = false;
    this->for_layout(k, [&](auto layout) { changed = add_pieces<layout.value>(work, k, v, pieces, beside); });
    ptx::cp_async_wait<0>();
    __syncwarp();  // no copy of any lane is under way: the ring is free
    share_result();
    if constexpr (Beside::kReadsEarly) return !__syncthreads_or(changed);  // 1
    __syncthreads();                                                       // 1
    return true;
  }

 private:
  /// A loop for each layout, so that none steps over the others' instructions. Whether the length has changed (sum_up).
  template <KeyLayout kLayout, class Beside>
  __device__ __forceinline__ bool add_pieces(const FwdWorkTile& work, const tile::KeyRows& k,
                                             const tile::KeyRows& v, const tile::KvBlocks& pieces,
                                             const Beside& beside) {
    const int last_key = work.span.used_k - 1, first = pieces.begin + warp;
    const auto fill = [&](int n, int stage) {
      this->template load<kLayout>(k, v, last_key, n, pieces.end, stage);
    };
    beside.before_copies();
    this->template begin_rows<kLayout>(k, last_key, first);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fill(first + s * kWarps, s);
    const bool changed = beside.has_other_length(work);
    begin_tile(work);
    beside.before_keys();
    int stage = 0;
#pragma unroll 1
    for (int n = first; n < pieces.end; n += kWarps) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // every lane's copies of this stage are there, and all have read the stage that is filled next
      fill(n + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
      const uint32_t rows_k = memory.stage(warp, stage);
      float acc_s[kM16][2][4];
      multiply_qk(acc_s, rows_k);
      if (!pieces.is_full(n)) mask(acc_s, n);
      weigh(acc_s);
      multiply_pv(acc_s, rows_k + kConfig.values_behind());
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    return changed;
  }

  /// Q goes to registers or shared memory; O and the rows' statistics start empty.
  __device__ __forceinline__ void begin_tile(const FwdWorkTile& work) {
    const tile::AttentionParams& p = f.p;
    float scale = p.scale * tile::kLog2e;
    if constexpr (kConfig.e4m3) scale *= descale_of_products(p, work.batch, head_of_keys(f, work));
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
      float factor[2];
      const RowsOfQ from = rows_of_q(work, m);
      if constexpr (kConfig.q_in_shared) {
        share_q(factor, from, m);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_q(q[m][step], from, step);
        factors_of(factor, q[m]);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) to_operand(q[m][step], factor);
      }
      rows[m].start();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + lane / 4 + 8 * half;
        seen[m][half] =
            row < work.end_row ? tile::keys_of(p, work.span, query_of_row(f, row)) : tile::Span32{};
        scale_log2[m][half] = scale / factor[half];
      }
    }
    if constexpr (kConfig.q_in_shared) __syncthreads();  // 0
    clear(acc_o);
  }

  /// The lane's two rows of 16 of Q: null where there is none.
  struct RowsOfQ {
    const char* row[2];
    int lane;  ///< made anew for each tile: places of columns are not kept in registers from one to the next
  };
  __device__ __forceinline__ RowsOfQ rows_of_q(const FwdWorkTile& work, int m) const {
    const tile::AttentionParams& p = f.p;
    const int bytes = kConfig.e4m3 && p.e4m3_queries ? 1 : static_cast<int>(sizeof(T));
    RowsOfQ rows;
    rows.lane = lane;
    ptx::make_opaque(rows.lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + lane / 4 + 8 * half;
      const QueryRow r = query_row(f, work, row);
      rows.row[half] = row < work.end_row
                           ? p.q.data + p.q.offset(work.batch, work.span.row_q + r.query, r.head) * bytes
                           : nullptr;
    }
    return rows;
  }
  /// Fragment `step` of these rows, as it is; zeros where there is none.
  __device__ __forceinline__ void load_q(uint32_t (&fragment)[4], const RowsOfQ& rows, int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) {
        const int column = 16 * step + tile::column_of_step(kConfig.e4m3, rows.lane, reg, 0);
        fragment[2 * reg + half] =
            rows.row[half] != nullptr && column < f.p.head_dim ? two_of_q(rows.row[half], column) : 0u;
      }
    }
  }
  /// Elements `column` and the next of a row of Q.
  __device__ __forceinline__ uint32_t two_of_q(const char* row, int column) const {
    if constexpr (kConfig.e4m3) {
      if (f.p.e4m3_queries) {
        const uint32_t halves = ptx::f16x2_of_e4m3x2(__ldg(reinterpret_cast<const uint16_t*>(row + column)));
        const float2 x = unpack<__half>(halves);
        return std::is_same_v<T, __half> ? halves : pack<T>(x.x, x.y);
      }
    }
    return __ldg(reinterpret_cast<const uint32_t*>(row + column * static_cast<int>(sizeof(T))));
  }
  /// What the lane's two rows of Q are multiplied by: powers of two.
  template <int kCount>
  static __device__ __forceinline__ void factors_of(float (&factor)[2],
                                                    const uint32_t (&fragments)[kCount][4]) {
    float largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kCount; ++i) keep_largest(largest, fragments[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = factor_of(largest[half]);
  }
  static __device__ __forceinline__ void keep_largest(float (&largest)[2], const uint32_t (&fragment)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<T>(fragment[i]);
      largest[i % 2] = fmaxf(largest[i % 2], fmaxf(fabsf(x.x), fabsf(x.y)));
    }
  }
  /// Of a row, from the largest element that this lane has; four lanes share the row.
  static __device__ __forceinline__ float factor_of(float largest) {
    return std::is_same_v<T, Operand> ? 1.0f : tile::factor_to_float16(row_maximum(largest));
  }
  static __device__ __forceinline__ void to_operand(uint32_t (&fragment)[4], const float (&factor)[2]) {
    if constexpr (!std::is_same_v<T, Operand>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack<T>(fragment[i]);
        fragment[i] = pack<Operand>(x.x * factor[i % 2], x.y * factor[i % 2]);
      }
    }
  }
  /// Rows 16 m to 16 m + 15 of Q go to shared memory, every kWarps-th fragment by each warp.
  __device__ __forceinline__ void share_q(float (&factor)[2], const RowsOfQ& from, int m) const {
    constexpr int kOwn = (kSteps + kWarps - 1) / kWarps;
    uint32_t own[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) load_q(own[i], from, warp + i * kWarps);
    float largest[2] = {0, 0};
    if constexpr (!std::is_same_v<T, Operand>) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) keep_largest(largest, own[i]);
      share_largest(largest, m);
    }
    for (int half = 0; half < 2; ++half) factor[half] = factor_of(largest[half]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      to_operand(own[i], factor);
      if (warp + i * kWarps < kSteps)
        ptx::st_shared_16(memory.q(m, warp + i * kWarps, lane),
                          make_uint4(own[i][0], own[i][1], own[i][2], own[i][3]));
    }
  }
  /// The largest elements of the lane's rows, from those that each warp has of them. Where states of rows will lie.
  __device__ __forceinline__ void share_largest(float (&largest)[2], int m) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_warp = row_maximum(largest[half]);
      if (lane % 4 == 0) memory.states(warp)[16 * m + lane / 4 + 8 * half].base = of_warp;
    }
    __syncthreads();  // 0: the largest of all warps are there
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        largest[half] = fmaxf(largest[half], memory.states(w)[16 * m + lane / 4 + 8 * half].base);
    }
  }

  __device__ __forceinline__ void read_q(uint32_t (&fragment)[4], int m, int step) const {
    if constexpr (kConfig.q_in_shared) {
      const uint4 x = ptx::ld_shared_16(memory.q(m, step, lane));
      fragment[0] = x.x, fragment[1] = x.y, fragment[2] = x.z, fragment[3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] = q[m][step][i];
    }
  }

  /// A product waits for the one before it that adds to the same sums: where nothing hides that, even and odd steps are summed apart.
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kM16][2][4], uint32_t rows_k) const {
    constexpr bool kApart = kConfig.cluster && kM16 == 1;
    float odd[1][2][4];
    clear(acc_s);
    clear(odd);
#pragma unroll
    for (int i = 0; i < KeysOfK::kLoads; ++i) {
      uint32_t b[KeysOfK::kAtOnce][2][2];
      KeysOfK::load_k(b, rows_k, i, lane);
#pragma unroll
      for (int s = 0; s < KeysOfK::kAtOnce; ++s) {
        const int step = i * KeysOfK::kAtOnce + s;
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
          uint32_t fragment[4];
          read_q(fragment, m, step);
#pragma unroll
          for (int keys = 0; keys < 2; ++keys)
            ptx::mma_m16n8k16<Operand>(kApart && step % 2 == 1 ? odd[0][keys] : acc_s[m][keys], fragment,
                                       b[s][keys][0], b[s][keys][1]);
        }
      }
    }
    if constexpr (kApart) {
#pragma unroll
      for (int i = 0; i < 8; ++i) acc_s[0][i / 4][i % 4] += odd[0][i / 4][i % 4];
    }
  }

  __device__ __forceinline__ void mask(float (&acc_s)[kM16][2][4], int n) const {
    const int first_key = n * kWarpKeys + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) mask_row(acc_s[m], half, first_key, seen[m][half]);
    }
  }

  /// Scores become weights. Maxima rise only where a weight would outgrow float16, for all rows of the warp at once; each lane looks
  /// at its own scores.
  __device__ __forceinline__ void weigh(float (&acc_s)[kM16][2][4]) {
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        grown = grown || rows[m].outgrown(half, largest_of_lane(acc_s[m], half), scale_log2[m][half]);
    }
    if (__any_sync(kWholeWarp, grown)) raise(acc_s);
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scale_log2[m][half], base = rows[m].base(half, scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = acc_s[m][i / 2][2 * half + i % 2];
          x = ptx::ex2(fmaf(x, scale, -base));
          rows[m].row_sum[half] += x;
        }
      }
    }
  }
  static __device__ __forceinline__ float largest_of_lane(const float (&acc_s)[2][4], int half) {
    return fmaxf(fmaxf(acc_s[0][2 * half], acc_s[0][2 * half + 1]),
                 fmaxf(acc_s[1][2 * half], acc_s[1][2 * half + 1]));
  }
  /// Raises the maxima to those of the scores, and scales what was summed before.
  __device__ __forceinline__ void raise(const float (&acc_s)[kM16][2][4]) {
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = row_maximum(largest_of_lane(acc_s[m], half));
        rows[m].raise_to(half, fmaxf(rows[m].row_max[half], largest), scale_log2[m][half]);
      }
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_o[m][n][e] *= rows[m].factor[e / 2];
      }
    }
  }

  __device__ __forceinline__ void multiply_pv(const float (&acc_s)[kM16][2][4], uint32_t rows_v) {
    uint32_t weights[kM16][4];
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[m][i] = pack<Operand>(acc_s[m][i / 2][2 * (i % 2)], acc_s[m][i / 2][2 * (i % 2) + 1]);
    }
#pragma unroll
    for (int i = 0; i < KeysOfV::kLoads; ++i) {
      uint32_t b[KeysOfV::kAtOnce][2][2];
      KeysOfV::load_v(b, rows_v, i, lane);
#pragma unroll
      for (int pair = 0; pair < KeysOfV::kAtOnce; ++pair) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int m = 0; m < kM16; ++m)
            ptx::mma_m16n8k16<Operand>(acc_o[m][2 * (i * KeysOfV::kAtOnce + pair) + n], weights[m],
                                       b[pair][n][0], b[pair][n][1]);
        }
      }
    }
  }

  // --- the end of a tile ---

  /// The warp's rows go to shared memory.
  __device__ __forceinline__ void share_result() const {
    float* const o = memory.o(warp);
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + lane / 4 + 8 * half;
        const float sum = row_total(rows[m].row_sum[half]);
        const float base =
            rows[m].row_max[half] == -INFINITY ? -INFINITY : rows[m].base(half, scale_log2[m][half]);
        if (lane % 4 == 0) memory.states(warp)[row] = {base, sum};
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          float four[4];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              four[kConfig.e4m3 ? 2 * e + n : 2 * n + e] = acc_o[m][2 * pair + n][2 * half + e];
          }
          float* const to = o + row * kConfig.head_dim_v + 16 * pair;
          if constexpr (kConfig.e4m3) {
            *reinterpret_cast<float4*>(to + tile::column_of_pair(true, lane, 0, 0)) =
                make_float4(four[0], four[1], four[2], four[3]);
          } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
              *reinterpret_cast<float2*>(to + tile::column_of_pair(false, lane, n, 0)) =
                  make_float2(four[2 * n], four[2 * n + 1]);
          }
        }
      }
    }
  }
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    fwd_decode(const __grid_constant__ ForwardArgs args) {
  using T = typename Instance::Element;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdDecodeMemory<Instance> memory{ptx::shared_address(shared), shared};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  ptx::wait_for_launches_before();  // what they have written may be read
  ptx::let_next_launch_begin();     // it waits, and has its CTAs where those of this one end
  count_units(args, memory);
  __syncthreads();  // the units are known
  FwdDecodeWarp<Instance> own(args, memory, warp, lane);
  for_each_tile_of_share(
      args, memory,
      [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks& blocks) {
        own.attend({span, work.batch, work.head, work.split, 0, span.used_q * packed_heads(args)},
                   tile::pieces_of(blocks, Instance::kConfig.warps));
      });
  if (warp == 4) clear_unused_of_share<T>(args.p);
  if (warp < 4) merge_share<T>(args, memory, thread);
}

}  // namespace fovea::cuda
