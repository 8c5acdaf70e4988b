// The forward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S = Q K^T        O = softmax(scale S + terms) V        lse = log sum exp
//
// A CTA owns kTileM rows of queries of one head and walks over the blocks of kTileN keys that they see. Each
// warp owns kWarpM of the rows: scores, weights and outputs of a row stay in the four lanes that hold it.
//
// Files
//   fwd_mma_config.cuh    configuration, grid, the work of a CTA
//   fwd_mma_scores.cuh    masks and terms of the score, and dropout
//   fwd_mma_epilogue.cuh  O and lse
// Shared memory
//   sQ (kTileM, D), later the tile of O; sK, sV (stages, kTileN, D or Dv); swizzled 16-byte chunks. With keys of 8 bits the next block of
//   K and V as it comes
// Registers
//   acc_o kWarpM Dv / 32, acc_s kWarpM kTileN / 32 a lane; P lives in the registers of acc_s
// Barriers
//   With two stages one a key block: behind it block n has arrived for everyone (each thread waited for its
//   own copies), and nobody reads block n + 1 any more, so that its stage takes block n - 1. With one stage
//   two a block, one for K and one for V, alike. With keys of 8 bits two, around their widening: nobody reads the block before any more,
//   and block n is there for everyone.
//
// The maximum of a row is raised only when a weight would exceed 2^kLazyGrowthLog2, for all rows of the warp at
// once: softmax does not depend on the maximum taken, and the multiplication of acc_o is skipped in almost every
// block (the idea: FlashAttention-4). bfloat16 has the range of float32: there, blocks without a mask do not
// look for their maximum at all, but in kernels with a term, whose scores may grow by any amount. Their weights are relative to that of the blocks before, and only when a row's
// sum has become large (kLargeSum), its maximum is raised by as much. (Weights that exceed float32 show as rows
// that are not finite: see below.)
//
// NaN and Inf in the V of keys that a row does not see: their weights are 0, and 0 * NaN is NaN. So a warp
// with any output that is not finite computes its rows again without matrix products (warp/exact_row.cuh).
//
// Launch
//   grid    fwd_mma_grid (fwd_mma_config.cuh)
//   block   threads()
//   shared  shared_bytes(), dynamic
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_mma_config.cuh"
#include "cuda/kernels/fwd_mma_epilogue.cuh"
#include "cuda/kernels/fwd_mma_scores.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/score_row.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "cuda/warp/widened_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// What a lane's sum may reach before that of its row becomes 1 again: 2^60 leaves room for one more block of as
/// much.
inline constexpr float kLargeSum = 1152921504606846976.0f;

/// The registers of a thread, and the steps of the kernel. All steps are inlined, so that the arrays stay in
/// registers. Every thread of the CTA calls every step.
template <class Instance>
struct FwdMma : FwdMmaScores<Instance> {
  using T = typename Instance::Element;
  using Base = FwdMmaScores<Instance>;
  using Base::args, Base::p, Base::shared_work;
  using Base::kConfig, Base::kTileN, Base::kMTiles, Base::kSTiles;
  using typename Base::AccS, typename Base::WorkTile;
  static constexpr bool kGeneral = kConfig.general, kAligned = !kGeneral, kHasTerm = kConfig.has_term();
  static constexpr MmaShape kMma = kConfig.mma;
  static constexpr int kTileM = kConfig.tile_m, kThreads = kConfig.threads();
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.value_slice, kStages = kConfig.stages;
  static constexpr int kOTiles = kDimV / 8;
  /// Whether blocks without a mask are weighed against the maxima of the blocks before.
  static constexpr bool kStale = !kGeneral && !kHasTerm && std::is_same_v<T, __nv_bfloat16>;
  /// Three CTAs an SM leave 168 registers a thread: the mainloop then reads its bounds from shared memory.
  static constexpr bool kFewRegisters = kConfig.min_ctas > 2;
  static_assert(kStages == 1 || kStages == 2);
  using TileQ = SharedTile<kTileM, kDim>;
  using TileK = SharedTile<kTileN, kDim>;
  using TileV = SharedTile<kTileN, kDimV>;
  using TileO = SharedTile<kTileM, kDimV>;
  using RawK = WidenedTile<TileK, kThreads>;
  using RawV = WidenedTile<TileV, kThreads>;
  static constexpr bool kWidens = kConfig.e4m3;
  static_assert(!kWidens || (kStages == 1 && !kGeneral && !kHasTerm));

  const WorkTile& work;  ///< of the entry, as long as registers last
  const uint32_t sQ, sK, sV;
  /// Of this lane's first fragments: of the warp's rows of Q, and of stage 0 of K and V.
  uint32_t q_address, k_address, v_address;
  const float scale_log2;   ///< from what acc_s holds to exponents of 2
  const float lazy_growth;  ///< kLazyGrowthLog2 in units of scores

  float acc_o[kMTiles][kOTiles][4];
  // What OnlineRows holds, with a criterion of its own: `largest > row_max + lazy_growth` is one addition a row,
  // OnlineRows::outgrown a product and an fma.
  float row_max[kMTiles][2];          ///< of scores; -inf before the row's first key
  float row_sum[kMTiles][2];          ///< of weights relative to row_max, of this lane's columns
  typename Base::Kept kept[kMTiles];  ///< which weights of the block that comes next dropout keeps

  __device__ __forceinline__ FwdMma(const ForwardArgs& args_, const WorkTile& work_,
                                    const WorkTile* shared_work_, uint32_t shared)
      : Base(args_, shared_work_),
        work(work_),
        sQ(shared),
        sK(sQ + static_cast<uint32_t>(TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes)),
        sV(sK + kStages * TileK::kBytes),
        q_address(sQ + static_cast<uint32_t>(this->warp() * kConfig.warp_m() * TileQ::kRowBytes) +
                  FragmentAddresses<TileQ, LdmatrixOrder::kDownFirst>(this->lane()).offset),
        k_address(sK + fragment_of_k()),
        v_address(sV + fragment_of_v()),
        scale_log2(kWidens ? Base::scale_log2_of(args_.p) *
                                 descale_of_products(args_.p, work_.batch, head_of_keys(args_, work_))
                           : Base::scale_log2_of(args_.p)),
        lazy_growth(kLazyGrowthLog2 / scale_log2) {
    // One register each. Else the compiler keeps the terms that they have in common: at head size 128, where all
    // 255 registers are taken, the mainloop spills.
    ptx::make_opaque(q_address);
    ptx::make_opaque(k_address);
    ptx::make_opaque(v_address);
  }

  /// Starts the copies of Q and of the last block; O and the rows' statistics start empty.
  __device__ __forceinline__ void prologue() {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
      row_max[mt][0] = row_max[mt][1] = -INFINITY;
      row_sum[mt][0] = row_sum[mt][1] = 0.0f;
    }
    copy_q();
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_o[mt][ot][e] = 0.0f;
      }
    }
    if (const int first = first_block(work); work.n_begin <= first && kWidens) {
      copy_raw(work, first);
    } else if (work.n_begin <= first) {
      copy_k(work, first, stage_of(first, 0), std::true_type{});
      if constexpr (kStages == 2) copy_v(work, first, stage_of(first, 0), std::true_type{});
    }
    ptx::cp_async_commit();
    // shared_work is there for everyone: bounds() and steps_of_terms() read it before the first block has arrived.
    if constexpr (kFewRegisters || kHasTerm) __syncthreads();
  }

  /// From the last block to the first: those that need a mask come before the others.
  __device__ __forceinline__ void mainloop() {
    if constexpr (kHasTerm) {
      steps_of_terms();
    } else {
      int n = bounds().n_end - 1;
      if constexpr (!kGeneral) steps_down_to(n, &WorkTile::n_masked, std::true_type{});
      steps_down_to(n, &WorkTile::n_begin, std::bool_constant<kGeneral>{});
    }
  }

  /// O and lse, from registers through shared memory.
  __device__ __forceinline__ void epilogue() {
    ptx::cp_async_wait<0>();  // a tile without keys still has Q on its way, to where O goes
    __syncthreads();          // sQ and sK are free: O and row statistics may be written there
    FwdMmaEpilogue<Instance>{args, *shared_work, Base::warp(), Base::lane(), sQ, sK}.write(
        acc_o, row_max, row_sum, scale_log2, this->whole_dropout());
  }

 private:
  /// The CTA's work, for the bounds of the mainloop.
  __device__ __forceinline__ const WorkTile& bounds() const {
    if constexpr (kFewRegisters) return *shared_work;
    return work;
  }
  /// The first block, the last of those that are seen; n_begin - 1 where there is none.
  __device__ __forceinline__ static int first_block(const WorkTile& of) {
    return of.seen.before(of.n_end, of.n_begin);
  }
  /// Where block n lies, which step number `count` works on. Blocks that are passed over have no place.
  __device__ __forceinline__ static int stage_of(int n, int count) {
    return (kHasTerm ? count : n) % kStages;
  }

  // --- copies ---

  __device__ __forceinline__ void copy_q() const {
    const bool aligned = (p.aligned16 & tile::kAlignedQ) != 0;
    if (kWidens && p.e4m3_queries) {
      copy_e4m3_q();
    } else if (args.pack_group) {
      gather_tile<TileQ, kThreads>(sQ, p.head_dim, aligned, Base::thread(), [&](int r) -> const char* {
        const int row = work.first_row + r;
        if (row >= work.end_row) return nullptr;
        const QueryRow of_head = query_row(args, work, row);
        return p.q.data + p.q.offset(work.batch, work.span.row_q + of_head.query, of_head.head) * 2;
      });
    } else {
      const RowSource gQ = {p.q.data + p.q.offset(work.batch, work.span.row_q, work.head) * 2, p.q.row * 2,
                            work.end_row, p.head_dim, aligned};
      copy_tile<TileQ, kThreads, true, kAligned>(sQ, gQ, work.first_row, Base::thread());
    }
  }
  /// Q of 8 bits, which is widened on its way through registers.
  __device__ __forceinline__ void copy_e4m3_q() const {
    constexpr int kChunks = kDim / 16;
#pragma unroll 1
    for (int index = Base::thread(); index < kTileM * kChunks; index += kThreads) {
      const int r = index / kChunks, chunk = index % kChunks, row = work.first_row + r;
      uint4 x = {};
      if (row < work.end_row && chunk * 16 < p.head_dim) {
        const QueryRow of_head = query_row(args, work, row);
        x = __ldg(reinterpret_cast<const uint4*>(
            p.q.data + p.q.offset(work.batch, work.span.row_q + of_head.query, of_head.head) + chunk * 16));
      }
      ptx::st_shared_16(sQ + TileQ::offset(r, 2 * chunk), eight_of_e4m3<T>(x.x, x.y));
      ptx::st_shared_16(sQ + TileQ::offset(r, 2 * chunk + 1), eight_of_e4m3<T>(x.z, x.w));
    }
  }
  /// K and V of block n as they come.
  __device__ __forceinline__ void copy_raw(const WorkTile& from, int n) const {
    const auto copy = [&](auto raw, uint32_t to, const char* data, const tile::RowsView& view, int columns) {
      const tile::KeyRows rows = {p, view, data, from.batch, 1, static_cast<int>(from.span.row_k)};
      raw.copy(to, columns, Base::thread(), [&](int r) -> const char* {
        const int j = n * kTileN + r;
        return j < from.span.used_k ? rows.row(j) : nullptr;
      });
    };
    copy(RawK{}, raw_k(), from.k, p.k, p.head_dim);
    copy(RawV{}, raw_k() + RawK::kBytes, from.v, p.v, p.head_dim_v - from.first_column);
  }
  __device__ __forceinline__ uint32_t raw_k() const {
    return sV + kStages * TileV::kBytes;
  }
  /// What this thread has copied of a block, to sK and sV.
  __device__ __forceinline__ void widen_raw() const {
    RawK::template widen<T>(raw_k(), sK, Base::thread());
    RawV::template widen<T>(raw_k() + RawK::kBytes, sV, Base::thread());
  }
  /// K of block n to its stage. Only the first block copied, the last of the sequence, may have rows behind the
  /// last key.
  template <bool kMayEnd>
  __device__ __forceinline__ void copy_k(const WorkTile& from, int n, int stage,
                                         std::bool_constant<kMayEnd>) const {
    copy_keys<TileK, kMayEnd>(sK + stage * TileK::kBytes, from, from.k, p.k, p.head_dim, tile::kAlignedK, n);
  }
  /// V, likewise.
  template <bool kMayEnd>
  __device__ __forceinline__ void copy_v(const WorkTile& from, int n, int stage,
                                         std::bool_constant<kMayEnd>) const {
    copy_keys<TileV, kMayEnd>(sV + stage * TileV::kBytes, from, from.v, p.v, p.head_dim_v - from.first_column,
                              tile::kAlignedV, n);
  }
  template <class Tile, bool kMayEnd>
  __device__ __forceinline__ void copy_keys(uint32_t to, const WorkTile& from, const char* data,
                                            const tile::RowsView& view, int columns, uint32_t aligned_bit,
                                            int n) const {
    const bool aligned = kAligned || (p.aligned16 & aligned_bit) != 0;
    if (kConfig.paged || (kGeneral && p.page_table.data != nullptr)) {
      const tile::KeyRows rows = {p, view, data, from.batch, 2, static_cast<int>(from.span.row_k)};
      gather_tile<Tile, kThreads>(to, columns, aligned, Base::thread(), [&](int r) -> const char* {
        const int j = n * kTileN + r;
        return j < from.span.used_k ? rows.row(j) : nullptr;
      });
    } else {
      const RowSource rows = {data, view.row * 2, from.span.used_k, columns, aligned};
      copy_tile<Tile, kThreads, kMayEnd, kAligned>(to, rows, n * kTileN, Base::thread());
    }
  }

  /// Of this lane's first fragments in stage 0.
  __device__ __forceinline__ uint32_t k_of_lane() const {
    return kConfig.dropout ? sK + fragment_of_k() : k_address;
  }
  __device__ __forceinline__ uint32_t v_of_lane() const {
    return kConfig.dropout ? sV + fragment_of_v() : v_address;
  }
  __device__ __forceinline__ static uint32_t fragment_of_k() {
    return FragmentAddresses<TileK, LdmatrixOrder::kAcrossFirst>(Base::lane()).offset;
  }
  __device__ __forceinline__ static uint32_t fragment_of_v() {
    return FragmentAddresses<TileV, LdmatrixOrder::kDownFirst>(Base::lane()).offset;
  }

  // --- the mainloop ---

  /// Blocks n, n - 1, ... down to `end`; in the masked loop further, until each row of the warp has a maximum,
  /// without which it cannot be weighed against a stale one. Warps may find that at different blocks: in either
  /// loop a block is as many barriers.
  template <bool kMasked>
  __device__ __forceinline__ void steps_down_to(int& n, int WorkTile::*end,
                                                std::bool_constant<kMasked> masked) {
    const auto lacks_a_maximum = [&] {
      return kStale && kMasked && n >= bounds().n_begin && !all_have_maxima();
    };
#pragma unroll 1
    for (; n >= bounds().*end || lacks_a_maximum(); --n) step(n, n - 1, 0, masked);
  }
  /// All blocks that the rows see, some of which may need a mask.
  __device__ __forceinline__ void steps_of_terms() {
    int count = 0;
    if constexpr (kConfig.dropout) find_kept(first_block(bounds()));
#pragma unroll 1
    for (int n = first_block(bounds()); n >= bounds().n_begin; ++count) {
      const int next = shared_work->seen.before(n, shared_work->n_begin);
      step(n, next, count, std::true_type{});
      n = next;
    }
  }

  /// Block n, with copies of block `next` on their way beside it.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n, int next, int count, std::bool_constant<kMasked> masked) {
    const int stage = stage_of(n, count), next_stage = stage_of(next, count + 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // block n (with one stage its K), and Q, is there for everyone; nobody reads the block before it
    if constexpr (kWidens) {
      widen_raw();
      if (next >= bounds().n_begin) copy_raw(*shared_work, next);
      __syncthreads();  // block n is there for everyone
    } else if constexpr (kStages == 1) {
      copy_v(*shared_work, n, stage, masked);  // full blocks are whole
    } else if (next >= bounds().n_begin) {
      copy_k(*shared_work, next, next_stage, std::false_type{});
      copy_v(*shared_work, next, next_stage, std::false_type{});
    }
    ptx::cp_async_commit();
    kv_step(n, next, stage, masked);
  }

  /// One block of keys: S = Q K^T, P = exp2(S - m), O += P V.
  template <bool kMasked>
  __device__ __forceinline__ void kv_step(int n, int next, int stage, std::bool_constant<kMasked>) {
    AccS acc_s;
    const typename Base::Seen seen = this->seen_of(n);
    multiply_qk(acc_s, stage);
    if constexpr (kGeneral) {
      this->add_terms(acc_s, n);
    } else if constexpr (kHasTerm) {
      this->apply_term(acc_s, n, seen);
    } else if constexpr (kMasked) {
      if (!kStale || n >= bounds().n_masked) this->mask(acc_s, n);
    }
    if constexpr (!kStale || kMasked) raise_maxima(acc_s);
    if constexpr (kStages == 1 && !kWidens) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V of block n is there for everyone; nobody reads K of block n any more
      if (next >= bounds().n_begin) copy_k(*shared_work, next, 0, std::false_type{});
      ptx::cp_async_commit();
    }
    weigh_and_multiply_pv(acc_s, n, next, stage);
    if constexpr (kStale && !kMasked) raise_maxima_by_sums();
  }

  /// S = Q K^T of the block in a stage.
  __device__ __forceinline__ void multiply_qk(AccS& acc_s, int stage) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[mt][nt][e] = 0.0f;
      }
    }
    const uint32_t stage_k = k_of_lane() + static_cast<uint32_t>(stage * TileK::kBytes);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t q[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt)
        ptx::ldmatrix_x4(q[mt], TileQ::moved(q_address, 16 * mt, 2 * step));
#pragma unroll
      for (int n16 = 0; n16 < kTileN / 16; ++n16) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, TileK::moved(stage_k, 16 * n16, 2 * step));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          mma<T, kMma>(acc_s[mt][2 * n16], q[mt], k[0], k[1]);
          mma<T, kMma>(acc_s[mt][2 * n16 + 1], q[mt], k[2], k[3]);
        }
      }
    }
  }

  /// Scores of block n become weights, and O += P V. The plain kernel takes exponentials 16 keys ahead of their
  /// product, so that they run beside it.
  __device__ __forceinline__ void weigh_and_multiply_pv(AccS& acc_s, int n, int next, int stage) {
    float base[kMTiles][2];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) base[mt][half] = base_of(row_max[mt][half], scale_log2);
    }
    if constexpr (kGeneral) {  // all weights first
#pragma unroll
      for (int nt = 0; nt < kSTiles; ++nt) exponentiate(acc_s, nt, base);
      if (p.dropout_threshold != 0) this->drop(acc_s, n);
    }
    const uint32_t stage_v = v_of_lane() + static_cast<uint32_t>(stage * TileV::kBytes);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      if constexpr (!kGeneral) {
        exponentiate(acc_s, 2 * step, base);
        exponentiate(acc_s, 2 * step + 1, base);
      }
      uint32_t weights[kMTiles][4];  // accumulators of two n8 tiles are the A operand of a k16 step
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float(&s)[4] = acc_s[mt][2 * step + r / 2];
          weights[mt][r] = pack<T>(s[r % 2 * 2], s[r % 2 * 2 + 1]);
        }
        if constexpr (kConfig.dropout) this->drop(weights[mt], kept[mt], step);
      }
      if constexpr (kConfig.dropout) {  // its place is free now, and so are registers; products run beside it
        if (step == kTileN / 16 - 1) find_kept(next);
      }
#pragma unroll
      for (int n16 = 0; n16 < kDimV / 16; ++n16) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, TileV::moved(stage_v, 16 * step, 2 * n16));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          mma<T, kMma>(acc_o[mt][2 * n16], weights[mt], v[0], v[1]);
          mma<T, kMma>(acc_o[mt][2 * n16 + 1], weights[mt], v[2], v[3]);
        }
      }
    }
  }
  /// Which weights of block n dropout keeps.
  __device__ __forceinline__ void find_kept(int n) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) this->find_kept_of_rows(kept[mt], mt, n);
  }

  // --- softmax ---

  /// Eight keys: weights relative to 2^base, and their sums.
  __device__ __forceinline__ void exponentiate(AccS& acc_s, int nt, const float (&base)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        acc_s[mt][nt][e] = ptx::ex2(fmaf(acc_s[mt][nt][e], scale_log2, -base[mt][e / 2]));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        row_sum[mt][half] += acc_s[mt][nt][2 * half] + acc_s[mt][nt][2 * half + 1];
    }
  }

  /// Raises a row's maximum to `now`; what was summed follows.
  __device__ __forceinline__ void raise_to(int mt, int half, float now) {
    const float alpha = now == -INFINITY ? 1.0f : ptx::ex2((row_max[mt][half] - now) * scale_log2);
    row_max[mt][half] = now;
    row_sum[mt][half] *= alpha;
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
      acc_o[mt][ot][2 * half] *= alpha;
      acc_o[mt][ot][2 * half + 1] *= alpha;
    }
  }
  /// Raises the maxima to those of the block if any row of the warp needs it.
  __device__ __forceinline__ void raise_maxima(const AccS& acc_s) {
    float largest[kMTiles][2];
    bool grows = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[mt][half] = largest_of<kSTiles>(acc_s[mt], half);
        grows |= largest[mt][half] > row_max[mt][half] + lazy_growth;
      }
    }
    if (!__any_sync(0xffffffffu, grows)) return;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) raise_to(mt, half, fmaxf(row_max[mt][half], largest[mt][half]));
    }
  }
  /// Raises the maxima of a warp that has a large sum, so that its rows' sums become 1.
  __device__ __forceinline__ void raise_maxima_by_sums() {
    bool large = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) large |= row_sum[mt][0] > kLargeSum || row_sum[mt][1] > kLargeSum;
    if (!__any_sync(0xffffffffu, large)) return;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float growth = growth_of_sum(row_sum[mt][half]);
        raise_to(mt, half, row_max[mt][half] + growth * (lazy_growth / kLazyGrowthLog2));
      }
    }
  }
  /// Whether every row of the warp has seen a key.
  __device__ __forceinline__ bool all_have_maxima() const {
    bool all = true;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt)
      all = all && row_max[mt][0] != -INFINITY && row_max[mt][1] != -INFINITY;
    return __all_sync(0xffffffffu, all) != 0;
  }
};

/// An instance is a type that names its element type and its configuration:
///   struct Example { using Element = __half; static constexpr FwdMmaConfig kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_mma(const __grid_constant__ ForwardArgs args) {
  using Kernel = FwdMma<Instance>;
  using WorkTile = typename Kernel::WorkTile;
  constexpr FwdMmaConfig kConfig = Instance::kConfig;
  extern __shared__ __align__(1024) unsigned char shared[];

  const WorkTile work = WorkTile::of(args);
  // A copy for the mainloop and the epilogue: registers are what limits this kernel.
  auto* const shared_work =
      reinterpret_cast<WorkTile*>(shared + kConfig.shared_bytes() - kConfig.work_tile_bytes());
  if (threadIdx.x == 0) *shared_work = work;
  if (kConfig.general || kConfig.dropout) write_rng_state(args.p);
  if (args.num_splits == 1 && work.span.used_q < work.span.length_q) {
    const int tiles = static_cast<int>(gridDim.y), tile = tiles - 1 - static_cast<int>(blockIdx.y);
    write_unused_rows<typename Instance::Element, kConfig.threads()>(
        args, work, tile, tiles, work.first_column,
        min(kConfig.value_slice, args.p.head_dim_v - work.first_column));
  }
  if (work.first_row >= work.end_row) return;

  Kernel kernel(args, work, shared_work, ptx::shared_address(shared));
  kernel.prologue();
  kernel.mainloop();
  kernel.epilogue();
}

}  // namespace fovea::cuda
