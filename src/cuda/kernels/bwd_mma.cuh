// The backward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
//
// A CTA owns kTileN keys of one key head and walks over the blocks of kTileM queries that see any of them,
// head by head of the group: dK and dV need no atomics and no buffer per query head. S and dP are computed
// transposed, keys in rows, so that P^T and dS^T have the shape in which dV and dK want their left operands.
// Three GEMMs, three ways to share them out:
//
//   S^T, dP^T   warp (n, q) has 32 keys (n) and kSliceM queries (q), kChunkM at a time
//   dV, dK      warp (n, q) has the same 32 keys and every kWarpsQ-th 16 columns from 16 q on
//   dQ          kWarpsDqM x kWarpsDqD warps over queries x columns
//
// With kWarpsQ = 1 P^T and dS^T go from accumulator to operand in registers; else through shared memory.
// 32 keys a warp: each B fragment that ldmatrix brings feeds two mma; with 16 shared memory (128 B a clock)
// would take longer than the mma. With `stream` (wide heads) a CTA owns a slice of the columns of dK, dV, dQ,
// and all columns of Q, K, dO, V pass through shared memory for S and dP.
//
// Shared memory
//   sK, sV     (kTileN, D | Dv), later the tiles of dK and dV; sV with `stream`: chunks on their way
//   sQ, sdO    (kTileM, D | Dv), 1 or 2 stages
//   sdS^T      (kTileN, kTileM); sP^T likewise, only where kWarpsQ > 1
//   lse_log2 and delta of two blocks; BwdWork
// Registers
//   acc_dk, acc_dv 32 (D + Dv) / kWarpsQ / 32 a lane; acc_s, acc_dp kChunkM each
//
// Barriers of a step
//   A  the block's Q, dO, lse, delta have arrived for everyone (each thread waited for its own copies), and
//      nobody reads the last step's P, dS, Q, dO any more: their second stages take the next block. All have
//      added to the last step's dQ: the turn can be passed on
//   B  P and dS of all warps can be read, and it is this CTA's turn to add to dQ
//   C  nobody reads dO any more (only where Q has two stages and dO one)
//   D  nobody reads Q (and dO) any more (only where Q has one stage)
//
// What is not finite. K is made finite once a CTA: a row that sees a NaN in K has lse NaN, hence P = NaN,
// whatever K holds; an infinity becomes the largest finite number, which gives the weights 0 or NaN that
// infinity would give. Q and dO of rows whose lse is not finite become 0 before they are used (P of the keys
// that such a row sees is NaN, or 0 where the row takes no part). V only enters dP, which is a number of one
// pair: pairs that take no part get dS = 0 by selection.
//
// Launch
//   grid    bwd_mma_grid: (key_blocks * heads_kv * batch, slices or 1, 1)
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_prepare (lse_log2, delta, zeros in dq_sum and turns)
//   after   bwd_finish (dq; zeros in rows of dk, dv beyond used_k)
//
// CTA x has key block x % key_blocks of key head x / key_blocks % heads_kv, so that CTAs that run together
// share a head's Q, dO and dq_sum in L2. Key block 0, first in a head, has most queries under causal: longest
// first.
//
// With `turns` key blocks add to a tile of dQ one after the other, from the last that sees it to the first:
// the same bits each time. A CTA then takes its number when it begins, so that those that it waits for have
// begun before it, in whatever order CTAs start. A head has room for one more block for each tile that the
// one before has left: numbers go round as many heads as keep CTAs from waiting (heads_at_once).
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/kernels/bwd_mma_weights.cuh"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// An instance is a type that names its element type and its configuration:
///   struct Example { using Element = __half; static constexpr BwdConfig kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    bwd_mma(const __grid_constant__ BackwardArgs args) {
  using T = typename Instance::Element;
  using B = BwdMma<Instance>;
  using TileDO = typename B::TileDO;
  using TileK = typename B::TileK;
  using TileP = typename B::TileP;
  using TileQ = typename B::TileQ;
  using TileV = typename B::TileV;
  using Place = typename B::Place;
  constexpr int kM = B::kM, kN = B::kN, kThreads = B::kThreads, kChunkN8 = B::kChunkN8;
  constexpr float kLog2E = 1.4426950408889634f;

  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const s_q = shared + B::kC.offset_q();
  unsigned char* const s_do = shared + B::kC.offset_do();
  float* const s_stats = reinterpret_cast<float*>(shared + B::kC.offset_stats());  // [2][lse_log2, delta][kM]
  BwdWork& work = *reinterpret_cast<BwdWork*>(shared + B::kC.offset_work());
  const uint32_t shared_base = ptx::shared_address(shared);
  const uint32_t a_k = shared_base + B::kC.offset_k(), a_v = shared_base + B::kC.offset_v(),
                 a_q = shared_base + B::kC.offset_q(), a_do = shared_base + B::kC.offset_do(),
                 a_ds = shared_base + B::kC.offset_ds(), a_p = shared_base + B::kC.offset_p(),
                 a_stats = shared_base + B::kC.offset_stats();

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x);
  // `thread` for what is not in every product's way: asked for anew, as registers are what limits this
  // kernel.
  const auto index_again = [] { return static_cast<int>(ptx::thread_index()); };
  if (thread == 0) {
    const bool in_turn = args.turns != nullptr;
    const int number = in_turn ? atomicAdd(args.turns + blockIdx.y, 1) : static_cast<int>(blockIdx.x);
    const int first_head = number / (args.heads_at_once * args.key_blocks) * args.heads_at_once;
    const int heads = min(args.heads_at_once, p.heads_kv * p.batch - first_head);
    const int place = number - first_head * args.key_blocks, head_index = first_head + place % heads;
    work.head_kv = head_index % p.heads_kv;
    work.batch = head_index / p.heads_kv;
    work.block = in_turn ? args.key_blocks - 1 - place / heads : place / heads;
    work.j0 = work.block * kN;
    work.span = tile::sequence_span(p, work.batch);
    const auto blocks_of_queries = [&](int j0) {
      const tile::Span32 queries =
          j0 < work.span.used_k ? tile::queries_of_any(p, work.span, j0, min(j0 + kN, work.span.used_k))
                                : tile::Span32{};
      return queries.empty() ? tile::Span32{} : tile::Span32{queries.begin / kM, (queries.end + kM - 1) / kM};
    };
    const tile::Span32 mine = blocks_of_queries(work.j0), before = blocks_of_queries(work.j0 + kN);
    work.m_first = mine.begin, work.m_end = mine.end;
    work.before_first = before.begin, work.before_end = before.end;
    work.not_finite[0] = work.not_finite[1] = false;
    work.turn[1] = nullptr;
    if constexpr (B::kC.general) work.dropout = tile::dropout_of(p);
  }
  __syncthreads();  // the work is known
  if (work.j0 >= work.span.used_k) return;

  const auto rows_of = [&](const tile::RowsView& view, int64_t row, int head, int used, int columns,
                           uint32_t bit) {
    return RowTarget{view.data + view.offset(work.batch, row, head) * 2, view.row * 2, used, columns,
                     (p.aligned16 & bit) != 0};
  };
  // Columns from `first` on: those of this CTA's slice, or a chunk that is streamed.
  const auto columns_from = [](RowTarget rows, int first) {
    rows.data += first * 2;
    rows.columns -= first;
    return rows;
  };
  const auto slice_at = [](int width) { return B::kC.stream > 0 ? static_cast<int>(blockIdx.y) * width : 0; };
  const auto k_rows = [&](const tile::RowsView& view, int columns, uint32_t bit) {
    return rows_of(view, work.span.row_k, work.head_kv, work.span.used_k, columns, bit);
  };
  const auto q_rows = [&](const tile::RowsView& view, int head, int columns, uint32_t bit) {
    return rows_of(view, work.span.row_q, head, work.span.used_q, columns, bit);
  };

  const float scale_log2 = p.scale * kLog2E;
  int head = work.head_kv * p.group, m_block = work.m_first;
  const bool any_step = m_block < work.m_end;

  // Q, dO, and a row's statistics of one step.
  const auto load_q = [&](int head, int block, int stage) {
    copy_tile_either<TileQ, kThreads>(
        a_q + stage * TileQ::kBytes,
        columns_from(q_rows(p.q, head, p.head_dim, tile::kAlignedQ), slice_at(B::kD)), block * kM,
        index_again());
  };
  const auto load_do = [&](int head, int block, int stage) {
    copy_tile_either<TileDO, kThreads>(
        a_do + stage * TileDO::kBytes,
        columns_from(q_rows(p.d_o, head, p.head_dim_v, tile::kAlignedDO), slice_at(B::kDv)), block * kM,
        index_again());
  };
  // lse_log2 of row `thread`, or delta of row `thread - kM`.
  const auto load_statistics = [&](int head, int block, int parity) {
    const int thread = index_again();
    if (thread < 2 * kM) {
      const float* const from = thread < kM ? args.lse_log2 : args.delta;
      ptx::cp_async_4(
          a_stats + static_cast<uint32_t>(parity * 2 * kM + thread) * 4,
          from + (static_cast<int64_t>(work.batch) * p.heads_q + head) * args.rows + block * kM + thread % kM,
          true);
    }
  };

  if (any_step) {
    copy_tile_either<TileK, kThreads>(
        a_k, columns_from(k_rows(p.k, p.head_dim, tile::kAlignedK), slice_at(B::kD)), work.j0, index_again());
    load_q(head, m_block, 0);
    if constexpr (B::kC.stream == 0) {
      copy_tile_either<TileV, kThreads>(a_v, k_rows(p.v, p.head_dim_v, tile::kAlignedV), work.j0,
                                        index_again());
    }
    load_do(head, m_block, 0);
    load_statistics(head, m_block, 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    make_finite<T, TileK, kThreads>(a_k, index_again());
  }

  float acc_dk[2][2 * B::kOwnD16][4], acc_dv[2][2 * B::kOwnDv16][4];
  clear(acc_dk);
  clear(acc_dv);

#pragma unroll 1
  for (int parity = 0; any_step; parity ^= 1) {
    const int stage_q = parity % B::kC.stages_q, stage_do = parity % B::kC.stages_do;
    const int i0 = m_block * kM;
    float* const s_lse = s_stats + parity * 2 * kM;
    ptx::cp_async_wait<0>();
    // lse is finite but for rows that are NaN or take no part (those beyond used_q are 0 already).
    if (const int row = index_again();
        row < kM && !(fabsf(s_lse[row]) < INFINITY) && i0 + row < work.span.used_q) {
      work.not_finite[parity] = true;
    }
    __syncthreads();  // A
    if (args.turns != nullptr && index_again() == 0 && work.turn[parity ^ 1] != nullptr)
      ptx::st_release(work.turn[parity ^ 1], work.block + 1);
    if (work.not_finite[parity]) {
      int first = index_again();
      ptx::make_opaque(first);
      for (int index = first; index < kM * (B::kD + B::kDv) / 8; index += kThreads) {
        const int row = index % kM, c = index / kM;
        if (fabsf(s_lse[row]) < INFINITY) continue;
        unsigned char* const chunk =
            c < B::kD / 8 ? s_q + stage_q * TileQ::kBytes + TileQ::offset(row, c)
                          : s_do + stage_do * TileDO::kBytes + TileDO::offset(row, c - B::kD / 8);
        if constexpr (B::kC.general) {
          // A bias of -inf does not take a key out of a row whose q is NaN: the scores are NaN, not -inf.
          const uint4 words = *reinterpret_cast<const uint4*>(chunk);
          NonFinite<T> bad;
          bad.look(words.x), bad.look(words.y), bad.look(words.z), bad.look(words.w);
          if (c < B::kD / 8 && bad.any()) s_lse[kM + row] = INFINITY;
        }
        *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
      }
      __syncthreads();  // such rows are zeros for everyone, and all have read that there are any
      if (index_again() == 0) work.not_finite[parity] = false;
    }
    // Where the step to come is; read anew from `work` behind each barrier, which keeps it out of the
    // registers.
    struct Step {
      int head, block;
      bool exists;
    };
    const auto next_step = [&] {
      const bool wraps = m_block + 1 == work.m_end;
      return Step{head + wraps, wraps ? work.m_first : m_block + 1,
                  head + wraps < (work.head_kv + 1) * p.group};
    };
    if (const Step next = next_step(); next.exists) {
      if constexpr (B::kC.stages_q > 1) load_q(next.head, next.block, (parity ^ 1) % B::kC.stages_q);
      if constexpr (B::kC.stages_do > 1) load_do(next.head, next.block, (parity ^ 1) % B::kC.stages_do);
      load_statistics(next.head, next.block, parity ^ 1);
      ptx::cp_async_commit();
    }

    // acc += rows of `left` times rows of `right` over all columns, in chunks that pass through sV.
    [[maybe_unused]] const auto stream = [&](auto& acc, const RowTarget& left, const RowTarget& right) {
      using StreamN = typename B::StreamN;
      using StreamM = typename B::StreamM;
      const auto load = [&](int c) {
        const uint32_t to = a_v + static_cast<uint32_t>((c & 1) * B::kC.stream_bytes());
        copy_tile_either<StreamN, kThreads>(to, columns_from(left, c * B::kStream), work.j0, index_again());
        copy_tile_either<StreamM, kThreads>(to + StreamN::kBytes, columns_from(right, c * B::kStream), i0,
                                            index_again());
        ptx::cp_async_commit();
      };
      __syncthreads();  // nobody reads the chunks of the last product any more
      load(0);
      const int chunks = (left.columns + B::kStream - 1) / B::kStream;
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // chunk c is here for everyone, chunk c - 1 has been read
        if (c + 1 < chunks) load(c + 1);
        const Place at(thread);
        const uint32_t from = a_v + static_cast<uint32_t>((c & 1) * B::kC.stream_bytes());
        const FragmentAddresses<StreamN, LdmatrixOrder::kDownFirst> a_operand(at.lane, at.warp_n * 32, 0);
        const FragmentAddresses<StreamM, LdmatrixOrder::kAcrossFirst> b_operand(at.lane, at.column0(0), 0);
        multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kStream / 16>(
            acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, a_operand.at(from, m * 16, k)); },
            [&](uint32_t(&b)[4], int k, int n) {
              ptx::ldmatrix_x4(b, b_operand.at(from + StreamN::kBytes, n * 16, k));
            });
      }
    };
    // S, dP, P, dS of this step; dV and dK where they need no others' P and dS.
    const auto front = [&] {
      const uint32_t q_tile = a_q + stage_q * TileQ::kBytes, do_tile = a_do + stage_do * TileDO::kBytes;
#pragma unroll 1
      for (int chunk = 0; chunk < B::kChunks; ++chunk) {
        float acc_s[2][kChunkN8][4];
        clear(acc_s);
        if constexpr (B::kC.stream > 0) {
          stream(acc_s, k_rows(p.k, p.head_dim, tile::kAlignedK),
                 q_rows(p.q, head, p.head_dim, tile::kAlignedQ));
        } else {
          const Place at(thread);
          const FragmentAddresses<TileK, LdmatrixOrder::kDownFirst> left(at.lane, at.warp_n * 32, 0);
          const FragmentAddresses<TileQ, LdmatrixOrder::kAcrossFirst> right(at.lane, at.column0(chunk), 0);
          multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kD / 16>(
              acc_s, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(a_k, m * 16, k)); },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(q_tile, n * 16, k)); });
        }

        // dP right behind S: its mma cover the exponentials.
        float acc_dp[2][kChunkN8][4];
        clear(acc_dp);
        if constexpr (B::kC.stream > 0) {
          stream(acc_dp, k_rows(p.v, p.head_dim_v, tile::kAlignedV),
                 q_rows(p.d_o, head, p.head_dim_v, tile::kAlignedDO));
        } else {
          const Place at(thread);
          const FragmentAddresses<TileV, LdmatrixOrder::kDownFirst> left(at.lane, at.warp_n * 32, 0);
          const FragmentAddresses<TileDO, LdmatrixOrder::kAcrossFirst> right(at.lane, at.column0(chunk), 0);
          multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kDv / 16>(
              acc_dp, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(a_v, m * 16, k)); },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(do_tile, n * 16, k)); });
        }

        uint32_t rounded_p[2][kChunkN8][2], rounded_ds[2][kChunkN8][2];
        uint32_t keep[(B::kC.chunk_m + 31) / 32];
        if constexpr (B::kC.general) {
          const Place at(thread);
          bwd_weights_general<Instance>(args, typename B::Pairs(p, work.span), work, head,
                                        i0 + at.column0(chunk), work.j0 + at.warp_n * 32,
                                        s_lse + at.column0(chunk), at.lane, acc_s, rounded_p, keep);
        }
        if (B::kC.general || !typename B::Pairs(p, work.span).all_see(i0, work.j0)) {
          bwd_weights<Instance, true>(p, work, chunk, i0, scale_log2, s_lse, a_p, a_ds, thread, acc_s, acc_dp,
                                      keep, rounded_p, rounded_ds);
        } else {
          bwd_weights<Instance, false>(p, work, chunk, i0, scale_log2, s_lse, a_p, a_ds, thread, acc_s,
                                       acc_dp, keep, rounded_p, rounded_ds);
        }

        if constexpr (!B::kC.exchanges_p()) {
          const auto from_registers = [](const uint32_t(&source)[2][kChunkN8][2]) {
            return [&source](uint32_t(&a)[4], int k, int m) {
              a[0] = source[m][2 * k][0], a[1] = source[m][2 * k][1];
              a[2] = source[m][2 * k + 1][0], a[3] = source[m][2 * k + 1][1];
            };
          };
          const Place at(thread);
          const FragmentAddresses<TileDO, LdmatrixOrder::kDownFirst> right_do(at.lane, at.column0(chunk), 0);
          multiply<T, B::kC.mma, 2, B::kOwnDv16, kChunkN8 / 2>(
              acc_dv, from_registers(rounded_p), [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right_do.at(do_tile, k * 16, n));
              });
          const FragmentAddresses<TileQ, LdmatrixOrder::kDownFirst> right_q(at.lane, at.column0(chunk), 0);
          multiply<T, B::kC.mma, 2, B::kOwnD16, kChunkN8 / 2>(
              acc_dk, from_registers(rounded_ds), [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right_q.at(q_tile, k * 16, n));
              });
        }
      }
    };
    // What needs the P and dS of all warps.
    const auto back = [&] {
      if constexpr (B::kC.exchanges_p()) {
        const uint32_t q_tile = a_q + stage_q * TileQ::kBytes;
        const uint32_t do_tile = a_do + stage_do * TileDO::kBytes;
        {
          const Place at(index_again());
          const FragmentAddresses<TileP, LdmatrixOrder::kDownFirst> left(at.lane, at.warp_n * 32, 0);
          const FragmentAddresses<TileDO, LdmatrixOrder::kDownFirst> right(at.lane, 0, 2 * at.warp_q);
          multiply<T, B::kC.mma, 2, B::kOwnDv16, kM / 16>(
              acc_dv, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(a_p, m * 16, k)); },
              [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right.at(do_tile, k * 16, B::kC.warps_q * n));
              });
        }
        if constexpr (B::kC.stages_do == 1 && B::kC.stages_q == 2) {
          __syncthreads();  // C
          if (const Step next = next_step(); next.exists) load_do(next.head, next.block, 0);
          ptx::cp_async_commit();
        }
        {
          const Place at(index_again());
          const FragmentAddresses<TileP, LdmatrixOrder::kDownFirst> left(at.lane, at.warp_n * 32, 0);
          const FragmentAddresses<TileQ, LdmatrixOrder::kDownFirst> right(at.lane, 0, 2 * at.warp_q);
          multiply<T, B::kC.mma, 2, B::kOwnD16, kM / 16>(
              acc_dk, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(a_ds, m * 16, k)); },
              [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right.at(q_tile, k * 16, B::kC.warps_q * n));
              });
        }
      }
      if constexpr (B::kC.stages_q == 1) {
        if constexpr (B::kC.exchanges_p()) __syncthreads();  // D; in registers dK and dV were done before B
        if (const Step next = next_step(); next.exists) {
          load_q(next.head, next.block, 0);
          if constexpr (B::kC.stages_do == 1) load_do(next.head, next.block, 0);
        }
        ptx::cp_async_commit();
      } else if constexpr (B::kC.stages_do == 1 && !B::kC.exchanges_p()) {
        if (const Step next = next_step(); next.exists) load_do(next.head, next.block, 0);
        ptx::cp_async_commit();
      }

      // dQ, added to the sums of this head.
      float* const dq =
          args.dq_sum + (static_cast<int64_t>(work.batch) * p.heads_q + head) * args.rows * args.dq_columns;
#pragma unroll 1
      for (int first = 0; first < B::kDqD16; first += B::kDqGroup) {
        float acc[B::kDqM16][2 * B::kDqGroup][4];
        clear(acc);
        const Place at(index_again());
        const FragmentAddresses<TileP, LdmatrixOrder::kAcrossFirst> left(at.lane, 0,
                                                                         at.warp_dq_m * (2 * B::kDqM16));
        const FragmentAddresses<TileK, LdmatrixOrder::kDownFirst> right(
            at.lane, 0, 2 * (at.warp_dq_d + first * B::kWarpsDqD));
        multiply<T, B::kC.mma, B::kDqM16, B::kDqGroup, kN / 16>(
            acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4_trans(a, left.at(a_ds, k * 16, m)); },
            [&](uint32_t(&b)[4], int k, int n) {
              ptx::ldmatrix_x4_trans(b, right.at(a_k, k * 16, B::kWarpsDqD * n));
            });
#pragma unroll
        for (int m = 0; m < B::kDqM16; ++m) {
          const int row16 = m_block * (kM / 16) + at.warp_dq_m * B::kDqM16 + m;
#pragma unroll
          for (int n = 0; n < 2 * B::kDqGroup; ++n) {
            const int column8 =
                2 * (at.warp_dq_d + (first + n / 2) * B::kWarpsDqD) + n % 2 + slice_at(B::kD) / 8;
            if (B::kC.stream > 0 && column8 * 8 >= args.dq_columns)
              continue;  // the last slice may be wider than the heads
            ptx::red_add_v4(dq + dq_fragment(row16, column8, args.dq_columns) + at.lane * 4, acc[m][n][0],
                            acc[m][n][1], acc[m][n][2], acc[m][n][3]);
          }
        }
      }
    };
    front();
    if (args.turns != nullptr && index_again() == 32) {
      int* const turn =
          args.turns + args.turn_at(work.batch, head, m_block * kM, static_cast<int>(blockIdx.y));
      work.turn[parity] = turn;
      if (m_block >= work.before_first && m_block < work.before_end) ptx::wait_for(turn, work.block + 2);
    }
    __syncthreads();  // B
    back();
    const Step next = next_step();
    if (!next.exists) break;
    head = next.head, m_block = next.block;
  }

  __syncthreads();  // nobody reads K, V, Q, dO any more: sK and sV become tiles of dK and dV; all have added
  if (args.turns != nullptr && index_again() == 0 && work.m_first < work.m_end)
    ptx::st_release(work.turn[((work.m_end - work.m_first) * p.group - 1) & 1], work.block + 1);
  stage_gradient<Instance, TileK>(acc_dk, a_k, p.scale, index_again());
  stage_gradient<Instance, TileV>(acc_dv, a_v, 1.0f, index_again());
  __syncthreads();  // the tiles of dK and dV are complete
  store_tile<TileK, kThreads>(a_k, columns_from(k_rows(p.dk, p.head_dim, tile::kAlignedDK), slice_at(B::kD)),
                              work.j0, index_again());
  store_tile<TileV, kThreads>(a_v,
                              columns_from(k_rows(p.dv, p.head_dim_v, tile::kAlignedDV), slice_at(B::kDv)),
                              work.j0, index_again());
}

}  // namespace fovea::cuda
