// The forward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S = Q K^T        O = softmax(scale S + terms) V        lse = log sum exp
//
// A CTA owns kTileM rows of queries of one head and walks over the blocks of kTileN keys that they see. Each
// warp owns kWarpM of the rows: scores, weights and outputs of a row never leave the four lanes that hold it.
//
// Shared memory
//   sQ (kTileM, D), later the tile of O; sK, sV (stages, kTileN, D or Dv); swizzled 16-byte chunks
// Registers
//   acc_o kWarpM Dv / 32, acc_s kWarpM kTileN / 32 a lane; P lives in the registers of acc_s
// Barriers
//   With two stages one a key block: behind it block n has arrived for everyone (each thread waited for its
//   own copies), and nobody reads block n + 1 any more, so that its stage takes block n - 1. With one stage
//   two a block, one for K and one for V, alike.
//
// The maximum of a row is raised only when it would grow by more than 2^kLazyLog2, for all rows of the warp
// at once: softmax does not depend on the maximum taken, weights are then at most 2^kLazyLog2, and the
// multiplication of acc_o is skipped in almost every block (the idea: FlashAttention-4). And bfloat16 holds
// what float holds: there, blocks without a mask do not look for their maximum at all. Weights are relative
// to that of the blocks before, and only when a row's sum has become large, its maximum is raised by as much.
// (Weights that exceed float come out as rows that are not finite: see below.)
//
// NaN and Inf in the V of keys that a row does not see: their weights are 0, and 0 * NaN is NaN. So a warp
// with any output that is not finite computes its rows again without matrix products (warp/exact_row.cuh).
//
// Launch
//   grid    fwd_mma_grid (fwd_mma_place.cuh)
//   block   threads()
//   shared  shared_bytes(), dynamic
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/fwd_mma_epilogue.cuh"
#include "cuda/kernels/fwd_mma_place.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/score_terms.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// Growth of the maximum, as a power of 2, that weights are let to exceed 1 by: float16 holds 2^8 * 2^-24
/// still.
inline constexpr float kLazyLog2 = 8.0f;
/// What a lane's sum may reach before that of its row becomes 1 again: 2^60 leaves one block as much and
/// more.
inline constexpr float kLargeSum = 1152921504606846976.0f;

/// An instance is a type that names its element type and its configuration:
///   struct Example { using Element = __half; static constexpr FwdMmaConfig kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_mma(const __grid_constant__ ForwardArgs args) {
  using T = typename Instance::Element;
  constexpr FwdMmaConfig kConfig = Instance::kConfig;
  constexpr bool kGeneral = kConfig.general, kAligned = !kGeneral;
  constexpr MmaShape kMma = kConfig.mma;
  constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n, kThreads = kConfig.threads();
  constexpr int kDim = kConfig.head_dim, kDimV = kConfig.value_slice;
  constexpr int kMTiles = kConfig.warp_m() / 16;  ///< m16 tiles of a warp
  constexpr int kSTiles = kTileN / 8, kOTiles = kDimV / 8;
  constexpr int kStages = kConfig.stages;
  static_assert(kStages == 1 || kStages == 2);
  using tile::kLn2, tile::kLog2e;
  using TileQ = SharedTile<kTileM, kDim>;
  using TileK = SharedTile<kTileN, kDim>;
  using TileV = SharedTile<kTileN, kDimV>;
  using TileO = SharedTile<kTileM, kDimV>;

  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t sQ = ptx::shared_address(shared);
  const uint32_t sO = sQ;
  const uint32_t sK =
      sQ + static_cast<uint32_t>(TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes);
  const uint32_t sV = sK + kStages * TileK::kBytes;

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int lane_row = lane / 4, lane_column = 2 * (lane % 4);

  using Place = FwdMmaPlace<kConfig>;
  const Place place = Place::of(args);
  // Again, for the epilogue, so that the mainloop need not keep it in registers.
  static_assert(sizeof(place) <= FwdMmaConfig::kPlaceBytes);
  auto* sPlace = reinterpret_cast<Place*>(shared + kConfig.shared_bytes() - FwdMmaConfig::kPlaceBytes);
  if (thread == 0) *sPlace = place;
  const auto row_at = [&](int first_row, int mt, int half) {
    return first_row + warp * kConfig.warp_m() + mt * 16 + half * 8 + lane_row;
  };
  if (kGeneral && p.rng_state != nullptr && !p.rng_state_is_input && thread == 0 &&
      blockIdx.x + blockIdx.y + blockIdx.z == 0) {
    p.rng_state[0] = static_cast<int64_t>(p.seed);
    p.rng_state[1] = static_cast<int64_t>(p.offset);
  }
  if (args.num_splits == 1 && place.span.used_q < place.span.length_q)
    write_unused_rows<kConfig>(args, place);
  if (place.first_row >= place.end_row) return;

  const auto copy_q = [&] {
    const bool aligned = (p.aligned16 & tile::kAlignedQ) != 0;
    if (args.pack_group) {
      gather_tile<TileQ, kThreads>(sQ, p.head_dim, aligned, thread, [&](int r) -> const char* {
        const int row = place.first_row + r;
        if (row >= place.end_row) return nullptr;
        return p.q.data + p.q.offset(place.batch, place.span.row_q + place.query_of(args, row),
                                     place.head_of(args, row)) *
                              2;
      });
    } else {
      const RowSource gQ = {p.q.data + p.q.offset(place.batch, place.span.row_q, place.head) * 2, p.q.row * 2,
                            place.end_row, p.head_dim, aligned};
      copy_tile<TileQ, kThreads, true, kAligned>(sQ, gQ, place.first_row, thread);
    }
  };
  /// Only the first block copied, the last of the sequence, may have rows behind the last key.
  const auto copy_k = [&](const Place& from, int n, auto may_end) {
    const RowSource gK = {from.k, args.p.k.row * 2, from.span.used_k, args.p.head_dim,
                          (args.p.aligned16 & tile::kAlignedK) != 0};
    copy_tile<TileK, kThreads, decltype(may_end)::value, kAligned>(sK + n % kStages * TileK::kBytes, gK,
                                                                   n * kTileN, thread);
  };
  const auto copy_v = [&](const Place& from, int n, auto may_end) {
    const RowSource gV = {from.v, args.p.v.row * 2, from.span.used_k, args.p.head_dim_v - from.first_column,
                          (args.p.aligned16 & tile::kAlignedV) != 0};
    copy_tile<TileV, kThreads, decltype(may_end)::value, kAligned>(sV + n % kStages * TileV::kBytes, gV,
                                                                   n * kTileN, thread);
  };

  const FragmentAddresses<TileQ, LdmatrixOrder::kDownFirst> q_fragments(lane);
  const FragmentAddresses<TileK, LdmatrixOrder::kAcrossFirst> k_fragments(lane);
  const FragmentAddresses<TileV, LdmatrixOrder::kDownFirst> v_fragments(lane);
  const uint32_t warp_q = sQ + static_cast<uint32_t>(warp * kConfig.warp_m() * TileQ::kRowBytes);

  // Scores enter the softmax as exponents of 2: the plain kernel folds scale * log2(e) into the exponent's
  // fma, the general one has multiplied already.
  const float scale_log2 = kGeneral ? 1.0f : p.scale * kLog2e;
  const float lazy_growth = kLazyLog2 / scale_log2;
  constexpr bool kStale = !kGeneral && std::is_same_v<T, __nv_bfloat16>;
  const tile::Dropout dropout = kGeneral ? tile::dropout_of(p) : tile::Dropout();

  float acc_o[kMTiles][kOTiles][4];
  float row_max[kMTiles][2], row_sum[kMTiles][2];  // row_sum: of this lane's columns, until the epilogue
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    row_max[mt][0] = row_max[mt][1] = -INFINITY;
    row_sum[mt][0] = row_sum[mt][1] = 0.0f;
  }
  // What the mainloop needs of its place it reads from shared memory: registers are what limits this kernel.
  const auto mask = [&](float(&acc_s)[kMTiles][kSTiles][4], int n) {
    const Place& here = *sPlace;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const tile::Span32 seen =
            tile::keys_of(p, here.span, here.query_of(args, row_at(here.first_row, mt, half)));
        const int first_key = n * kTileN + lane_column;
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = first_key + nt * 8 + e;
            if (j < seen.begin || j >= seen.end) acc_s[mt][nt][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  };

  const auto apply_terms = [&](float(&acc_s)[kMTiles][kSTiles][4], int n) {
    const Place& here = *sPlace;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(here.first_row, mt, half);
        const int i = here.query_of(args, row);
        const tile::Span32 seen = row < here.end_row ? tile::keys_of(p, here.span, i) : tile::Span32{};
        const RowTerms<T> terms(p, here.span, here.batch, here.head_of(args, row), i);
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = n * kTileN + nt * 8 + lane_column + e;
            float& s = acc_s[mt][nt][2 * half + e];
            s = j >= seen.begin && j < seen.end && terms.sees(p, j) ? terms.score(p, s, j) * kLog2e
                                                                    : -INFINITY;
          }
        }
      }
    }
  };

  const auto drop = [&](float(&acc_s)[kMTiles][kSTiles][4], int n) {
    const Place& here = *sPlace;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(here.first_row, mt, half);
        const RowTerms<T> terms(p, here.span, here.batch, here.head_of(args, row), here.query_of(args, row));
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
          const float2 keep = terms.keep_pair(dropout, n * kTileN + nt * 8 + lane_column);
          acc_s[mt][nt][2 * half] *= keep.x;
          acc_s[mt][nt][2 * half + 1] *= keep.y;
        }
      }
    }
  };

  /// S = Q K^T of a block.
  const auto scores = [&](float(&acc_s)[kMTiles][kSTiles][4], int n) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[mt][nt][e] = 0.0f;
      }
    }
    const uint32_t stage_k = sK + static_cast<uint32_t>(n % kStages * TileK::kBytes);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t q[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) ptx::ldmatrix_x4(q[mt], q_fragments.at(warp_q, 16 * mt, step));
#pragma unroll
      for (int n16 = 0; n16 < kTileN / 16; ++n16) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, k_fragments.at(stage_k, 16 * n16, step));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          mma<T, kMma>(acc_s[mt][2 * n16], q[mt], k[0], k[1]);
          mma<T, kMma>(acc_s[mt][2 * n16 + 1], q[mt], k[2], k[3]);
        }
      }
    }
  };

  /// And with it rescales what has been summed up.
  const auto set_maximum = [&](int mt, int half, float now) {
    const float alpha = now == -INFINITY ? 1.0f : ptx::ex2((row_max[mt][half] - now) * scale_log2);
    row_max[mt][half] = now;
    row_sum[mt][half] *= alpha;
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
      acc_o[mt][ot][2 * half] *= alpha;
      acc_o[mt][ot][2 * half + 1] *= alpha;
    }
  };
  /// Raises row_max where it has to be.
  const auto raise_maximum = [&](const float(&acc_s)[kMTiles][kSTiles][4]) {
    float block_max[kMTiles][2];
    bool raise = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = fmaxf(acc_s[mt][0][2 * half], acc_s[mt][0][2 * half + 1]);
#pragma unroll
        for (int nt = 1; nt < kSTiles; ++nt) {
          largest = fmaxf(largest, fmaxf(acc_s[mt][nt][2 * half], acc_s[mt][nt][2 * half + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        block_max[mt][half] = largest;
        raise |= largest > row_max[mt][half] + lazy_growth;
      }
    }
    if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          set_maximum(mt, half, fmaxf(row_max[mt][half], block_max[mt][half]));
      }
    }
  };
  const auto all_have_a_maximum = [&] {
    bool all = true;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt)
      all = all && row_max[mt][0] != -INFINITY && row_max[mt][1] != -INFINITY;
    return __all_sync(0xffffffffu, all) != 0;
  };
  /// Raises row_max of rows whose weights add up to much, by as much.
  const auto raise_by_sum = [&] {
    bool large = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) large |= row_sum[mt][0] > kLargeSum || row_sum[mt][1] > kLargeSum;
    if (__any_sync(0xffffffffu, large)) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = row_sum[mt][half];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          set_maximum(mt, half, row_max[mt][half] + fmaxf(ptx::lg2(sum), 0.0f) * (lazy_growth / kLazyLog2));
        }
      }
    }
  };

  /// One block of keys: S = Q K^T, P = exp2(S - m), O += P V.
  const auto kv_step = [&](int n, auto masked) {
    [[maybe_unused]] constexpr bool kMasked = decltype(masked)::value;
    float acc_s[kMTiles][kSTiles][4];
    scores(acc_s, n);
    if constexpr (kGeneral) {
      apply_terms(acc_s, n);
    } else if constexpr (kMasked) {
      if (!kStale || n >= place.n_masked) mask(acc_s, n);
    }
    if constexpr (!kStale || kMasked) raise_maximum(acc_s);
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V of block n is there for everyone; nobody reads K of block n any more
      if (n > place.n_begin) copy_k(*sPlace, n - 1, std::false_type{});
      ptx::cp_async_commit();
    }

    float base[kMTiles][2];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        base[mt][half] = row_max[mt][half] == -INFINITY ? 0.0f : row_max[mt][half] * scale_log2;
      }
    }
    const auto exponentiate = [&](int nt) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[mt][nt][e] = ptx::ex2(fmaf(acc_s[mt][nt][e], scale_log2, -base[mt][e / 2]));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          row_sum[mt][half] += acc_s[mt][nt][2 * half] + acc_s[mt][nt][2 * half + 1];
      }
    };
    if constexpr (kGeneral) {  // all weights first
#pragma unroll
      for (int nt = 0; nt < kSTiles; ++nt) exponentiate(nt);
      if (p.dropout_threshold != 0) drop(acc_s, n);
    }
    const uint32_t stage_v = sV + static_cast<uint32_t>(n % kStages * TileV::kBytes);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      if constexpr (!kGeneral) {
        exponentiate(2 * step);
        exponentiate(2 * step + 1);
      }
      uint32_t weights[kMTiles][4];  // accumulators of two n8 tiles are the A operand of a k16 step
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float(&s)[4] = acc_s[mt][2 * step + r / 2];
          weights[mt][r] = pack<T>(s[r % 2 * 2], s[r % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n16 = 0; n16 < kDimV / 16; ++n16) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, v_fragments.at(stage_v, 16 * step, n16));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          mma<T, kMma>(acc_o[mt][2 * n16], weights[mt], v[0], v[1]);
          mma<T, kMma>(acc_o[mt][2 * n16 + 1], weights[mt], v[2], v[3]);
        }
      }
    }
    if constexpr (kStale && !kMasked) raise_by_sum();
  };

  // --- prologue ---
  copy_q();
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_o[mt][ot][e] = 0.0f;
    }
  }
  if (place.n_begin < place.n_end) {
    copy_k(place, place.n_end - 1, std::true_type{});
    if constexpr (kStages == 2) copy_v(place, place.n_end - 1, std::true_type{});
  }
  ptx::cp_async_commit();

  // --- mainloop: from the last block to the first, those that need a mask before the others ---
  int n = place.n_end - 1;
  const auto steps_down_to = [&](int end, auto masked) {
    // Each row has to have a maximum before it can be stale. Warps may find that at different blocks: in
    // either loop a block is as many barriers.
    const auto lacks_a_maximum = [&] {
      return kStale && decltype(masked)::value && n >= place.n_begin && !all_have_a_maximum();
    };
#pragma unroll 1
    for (; n >= end || lacks_a_maximum(); --n) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // block n (with one stage its K), and Q, is there for everyone; nobody reads block n
                        // + 1 any more
      if constexpr (kStages == 1) {
        copy_v(*sPlace, n, masked);  // full blocks are whole
      } else if (n > place.n_begin) {
        copy_k(*sPlace, n - 1, std::false_type{});
        copy_v(*sPlace, n - 1, std::false_type{});
      }
      ptx::cp_async_commit();
      kv_step(n, masked);
    }
  };
  if constexpr (!kGeneral) steps_down_to(place.n_masked, std::true_type{});
  steps_down_to(place.n_begin, std::bool_constant<kGeneral>{});

  // --- epilogue ---
  ptx::cp_async_wait<0>();  // a tile without keys still has Q on its way, to where O goes
  __syncthreads();          // sQ and sK are free: O and row statistics may be written there
  const Place& here = *sPlace;
  const int columns = min(kDimV, p.head_dim_v - here.first_column);
  const bool as_f32 = args.num_splits > 1 || p.o_is_f32();
  const auto f32_row = [&](int i, int head) {
    return (args.num_splits > 1
                ? args.part_o + here.part_of(args, i, head) * p.head_dim_v
                : reinterpret_cast<float*>(p.o.data) + p.o.offset(here.batch, here.span.row_q + i, head)) +
           here.first_column;
  };
  /// Writes lse and returns the factor of acc_o of a row whose weights, relative to 2^base, add up to `sum`;
  /// a sink is one more key, without a value.
  const auto finish_row = [&](int i, int head, float base, float sum) {
    const float sink = p.sink != nullptr && args.num_splits == 1 ? p.sink[head] * kLog2e : -INFINITY;
    float factor = 0, lse_log2 = sink;
    if (sum != 0.0f) {
      const float top = fmaxf(base, sink);
      const float whole = sink == -INFINITY ? sum : sum * exp2f(base - top) + exp2f(sink - top);
      factor = (sink == -INFINITY ? 1.0f : exp2f(base - top)) / whole;
      lse_log2 = (sink == -INFINITY ? base : top) + log2f(whole);
    }
    if (here.first_column == 0) {
      if (args.num_splits > 1) {
        args.part_lse[here.part_of(args, i, head)] = lse_log2 * kLn2;
      } else if (p.lse.data != nullptr) {
        p.lse.data[p.lse.offset(here.batch, head, here.span.row_q + i)] = lse_log2 * kLn2;
      }
    }
    return factor;
  };

  float probe[4] = {};  // NaN when any output of the warp is not finite: 0 * NaN and 0 * Inf are
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
#pragma unroll
      for (int e = 0; e < 4; ++e) probe[e] = fmaf(acc_o[mt][ot][e], 0.0f, probe[e]);
    }
  }
  if (__any_sync(0xffffffffu, (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f)) {
    store_exact_rows<Instance>(args, here, dropout, warp, lane, columns, as_f32, f32_row, finish_row);
    return;
  }

  store_rows<Instance>(args, here, scale_log2, acc_o, row_max, row_sum, sO, sK, warp, lane, columns, as_f32,
                       f32_row, finish_row);
}

}  // namespace fovea::cuda
