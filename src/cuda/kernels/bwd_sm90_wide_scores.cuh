// What a consumer of bwd_sm90_wide does with scores: the products S and dP, P and dS with the terms of the score, the mask, and what is not
// finite.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_wide_config.cuh"
#include "cuda/kernels/bwd_sm90_wide_pairs.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/log2.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Named barriers; barrier 0 is __syncthreads().
enum BwdSm90WideBarrier : int {
  kBwdSm90WideOwn = 1,  ///< + consumer: among its four warps
};

template <class Instance, int kConsumer>
struct BwdSm90WideScores {
  using T = typename Instance::Element;
  using Memory = BwdSm90WideMemory<Instance>;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr BwdSm90WideConfig kConfig = Instance::kConfig;
  static constexpr auto kSwizzle = tile::SwizzleMode::k128;
  static constexpr int kN = kConfig.streamed, kRowBytes = kConfig.kRowBytes;
  static constexpr bool kMakesP = kConsumer == 0, kMakesDs = kConsumer == 1 && kConfig.has_dp();
  /// Who finishes the weights of the sums, and masks them.
  static constexpr bool kMasks = kMakesDs || (kMakesP && !kConfig.has_dp());
  using Scores = float[kN / 2];  ///< (64 rows of X, kN of Z)
  using Pairs = BwdSm90WidePairs<kConfig.queries_stay()>;
  static_assert(kConfig.expression == (Expression::kHasScore || Expression::kHasSees));
  /// Whether dropout's choice is found and entered here.
  static constexpr bool kDrops = kMakesP && kConfig.dropout;

  const TmaBackwardArgs& args;
  const Memory& memory;
  int base16;  ///< where shared memory starts, in units of 16 bytes, without the CTA's rank above 2^18; uniform
  typename Memory::RingZ ring_z;
  typename Memory::RingW ring_w;
  uint32_t t = 0;  ///< number of the step
  int head;        ///< of the step's queries
  /// Beside an expression few registers are left: descriptors are made anew in each step, as the compiler would keep and spill them,
  /// and lse of a column is read when it is used.
  static constexpr bool kFewRegisters = kConfig.expression && kMakesP,
                        kReadsLate = kFewRegisters && !kConfig.queries_stay();
  /// lse (consumer 0), or delta: of the lane's rows where queries stay, else of its columns of the step.
  float statistics[kConfig.queries_stay() ? 2 : kReadsLate ? 1 : kN / 4];
  bool odd = false;  ///< the step has queries whose lse is not finite
  /// The last strips of X (consumer 0) or Y as operand A, in steps of 16 columns.
  static constexpr int kKeptSteps = kMakesP || kMakesDs ? kConfig.kept_strips * 4 : 0;
  uint32_t kept[kKeptSteps > 0 ? kKeptSteps : 1][4];
  tile::Dropout dropout;
  KeptWeights<kDrops ? kN / 16 : 1> kept_weights;  ///< of the step

  __device__ __forceinline__ BwdSm90WideScores(const TmaBackwardArgs& args_, const Memory& memory_)
      : args(args_),
        memory(memory_),
        base16(base16_again()),
        head(uniform(kConfig.queries_stay() ? work().head_x : work().head_z)),
        dropout(kDrops ? uniform_dropout(args_.b.p) : tile::Dropout()) {}

  static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::thread_index() % 32); }
  static __device__ __forceinline__ int warp() { return static_cast<int>(ptx::thread_index() / 32 % 4); }
  /// A shuffle from lane 0 marks a value warp-uniform: loops bounded by it keep their counters, and descriptors made of
  /// these, in uniform registers.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
  __device__ __forceinline__ const BwdSm90WideWork& work() const { return memory.work(); }
  /// The lane's row of X in its sequence.
  __device__ __forceinline__ int row_x(int half) const {
    return work().first + ptx::cta_rank() * kConfig.kRows + warp() * 16 + lane() / 4 + 8 * half;
  }

  /// Before the first step: what stays is there, and finite where it has to be.
  __device__ __forceinline__ void open() {
    if constexpr (kKeptSteps > 0) load_kept();
    if constexpr (kMakesP) {
      ptx::mbarrier_wait(memory.full_x(), 0);
      if constexpr (!kConfig.queries_stay()) make_keys_finite();
    }
    if constexpr (kMakesDs) ptx::mbarrier_wait(memory.full_y(), 0);
    if constexpr (kConfig.queries_stay()) {
      const float* const of = (kMakesP ? args.b.lse_log2 : args.b.delta) +
                              (int64_t{work().batch} * args.b.p.heads_q + work().head_x) * args.b.rows;
#pragma unroll
      for (int half = 0; half < 2; ++half) statistics[half] = of[row_x(half)];
    }
  }

  /// Reads the strips that registers keep. What lies behind the last row belongs to rows that nobody writes.
  __device__ __forceinline__ void load_kept() {
    const tile::AttentionParams& p = args.b.p;
    constexpr bool kQueries = kConfig.queries_stay();
    const tile::RowsView& view = kQueries ? (kMakesP ? p.q : p.d_o) : (kMakesP ? p.k : p.v);
    const int columns = kMakesP ? p.head_dim : p.head_dim_v;
    const int first =
        kConfig.shared_strips(kMakesP ? kConfig.strips_x() : kConfig.strips_y()) * kConfig.kStrip;
    const T* const rows =
        reinterpret_cast<const T*>(view.data) + view.offset(work().batch, work().row_x, work().head_x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_x(half);
      const int exist = row < (kQueries ? work().used_q : work().used_k) ? columns : 0;
      const T* const from = rows + row * view.row;
#pragma unroll
      for (int i = 0; i < 2 * kKeptSteps; ++i) {
        const int column = first + i * 8 + 2 * (lane() % 4);
        uint32_t word = column < exist ? __ldg(reinterpret_cast<const uint32_t*>(from + column)) : 0u;
        if (kMakesP && !kQueries) word = finite_word(word);
        kept[i / 2][i % 2 * 2 + half] = word;
      }
    }
  }

  template <bool kOfZ>
  __device__ __forceinline__ auto ring_of() const {
    if constexpr (kOfZ) {
      return ring_z;
    } else {
      return ring_w;
    }
  }

  // --- products ---

  __device__ __forceinline__ int base16_again() const {
    return uniform(static_cast<int>(tile::wgmma_start_step(memory.base)));
  }
  /// base16, for the products of a step.
  __device__ __forceinline__ int base16_of_step() const {
    return kFewRegisters ? base16_again() : base16;
  }

  /// acc = X Z^T (kOfZ) or Y W^T of block n, piece by piece as they come. Pieces that no sum reads are given back.
  template <bool kOfZ>
  __device__ __forceinline__ void multiply_rows(Scores& acc, int n) {
    constexpr int kStrips = kOfZ ? kConfig.strips_x() : kConfig.strips_y(), kPieces = kConfig.pieces(kStrips);
    constexpr bool kReleases = kOfZ != kConfig.has_dp();
    constexpr int kSteps = kConfig.kPieceStrips * 4;  // of a piece, 16 columns each
    constexpr int kSharedSteps = kConfig.shared_strips(kStrips) * 4;
    const int base = base16_of_step();
    const uint64_t a = tile::wgmma_k_major(kOfZ ? 0 : kConfig.y_at(), kSwizzle).encode_from(base);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int slot = kOfZ ? ring_z.slot(piece) : ring_w.slot(piece);
      const int at = (kOfZ ? kConfig.z_at() : kConfig.w_at()) + slot * kConfig.piece_bytes();
      const uint64_t b = tile::wgmma_k_major(0, kSwizzle).encode_from(base + at / 16);
      ptx::mbarrier_wait(kOfZ ? memory.full_z(slot) : memory.full_w(slot),
                         kOfZ ? ring_z.phase_of(piece) : ring_w.phase_of(piece));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kConfig.strips_of(kStrips, piece) * 4; ++i) {
        const int step = piece * kSteps + i;
        const uint64_t a_step =
            a + tile::wgmma_start_step(step / 4 * kConfig.kResidentStripBytes + step % 4 * 32);
        const uint64_t b_step = b + tile::wgmma_start_step(i / 4 * kConfig.strip_bytes() + i % 4 * 32);
        if (step == 0) {
          ptx::Wgmma<kN>::template ss<T, WgmmaStart::kZero, WgmmaMajor::kK>(acc, a_step, b_step);
        } else if (step >= kSharedSteps) {
          ptx::Wgmma<kN>::template rs<T, WgmmaStart::kAccumulate, WgmmaMajor::kK>(
              acc, kept[step - kSharedSteps], b_step);
        } else {
          ptx::Wgmma<kN>::template ss<T, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc, a_step, b_step);
        }
      }
      ptx::wgmma_commit();
      if (kReleases && piece > 0) {
        ptx::wgmma_wait<1>();
        release(kOfZ ? memory.empty_z(ring_z.slot(piece - 1)) : memory.empty_w(ring_w.slot(piece - 1)));
      }
    }
    read_statistics();
    if constexpr (kDrops) find_kept_weights(n);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc);
    if constexpr (kReleases) release_pieces<kOfZ, kPieces - 1, kPieces>();
  }

  /// This warp reads the slot no more, as far as all CTAs of the cluster are concerned that load it.
  __device__ __forceinline__ static void release(uint32_t barrier) {
    const uint32_t there =
        ptx::address_in_cta(barrier, lane() % kConfig.kCluster);  // of all lanes: no branch
    if (lane() < kConfig.kCluster) ptx::mbarrier_arrive_in_cta(there);
  }
  /// The same of pieces [kBegin, kEnd) of the tile at once.
  template <bool kOfZ, int kBegin, int kEnd>
  __device__ __forceinline__ void release_pieces() const {
    const int piece = min(kBegin + lane() / kConfig.kCluster, kEnd - 1);
    const uint32_t barrier = kOfZ ? memory.empty_z(ring_z.slot(piece)) : memory.empty_w(ring_w.slot(piece));
    const uint32_t there = ptx::address_in_cta(barrier, lane() % kConfig.kCluster);
    if (lane() < (kEnd - kBegin) * kConfig.kCluster) ptx::mbarrier_arrive_in_cta(there);
  }
  /// All of W is there.
  __device__ __forceinline__ void wait_for_w() const {
#pragma unroll
    for (int piece = 0; piece < Memory::kPiecesW; ++piece)
      ptx::mbarrier_wait(memory.full_w(ring_w.slot(piece)), ring_w.phase_of(piece));
  }

  // --- P and dS ---

  /// S -> P = exp2(scale_log2 S - lse_log2), or P of what the expression makes of it: the weights of dV, or what the other
  /// consumer makes dS of.
  __device__ __forceinline__ void weigh(Scores& s, int n, bool masked) {
    if constexpr (kConfig.queries_stay()) {
      if (!__all_sync(0xffffffffu, all_finite(s))) make_streamed_keys_finite();
    }
    if constexpr (kConfig.expression) {
      weigh_pairs(s, n);
    } else {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s[i] = ptx::ex2(fmaf(s[i], args.scale_log2, -statistic_of(i)));
    }
    if (kMasks && masked) mask(s, n);
    ptx::mbarrier_wait(memory.empty_weights(), (t & 1) ^ 1);
    store_weights(s);
    if constexpr (kConfig.has_dp()) {
      hand_over(memory.full_p());
    } else {
      hand_over_to_products();
    }
  }
  /// S -> P by the expression, which may exclude pairs; for dS times the score's derivative by S.
  __device__ __forceinline__ void weigh_pairs(Scores& s, int n) const {
    constexpr bool kHasSlope = kConfig.has_dp() && !Expression::kSlopeIsOne;
    const Pairs pairs(args.b.p, work().span(), work().batch, head, row_x(0), n * kN + 2 * (lane() % 4));
    float lse = 0.0f;
    pairs.template each<kN>([&](int i, const Expression::Query& query, const Expression::Key& key) {
      if constexpr (kReadsLate) {
        if (i / 2 % 2 == 0)  // the first of the column's two
          lse =
              __uint_as_float(ptx::ld_shared_4(memory.lse_z(t) + (i / 4 * 8 + i % 2 + 2 * (lane() % 4)) * 4));
      } else {
        lse = statistic_of(i);
      }
      float slope = 1.0f;
      const float scaled = s[i] * args.b.p.scale;
      const float score = kHasSlope ? Expression::score(pairs.head, query, key, scaled, slope)
                                    : Expression::score(pairs.head, query, key, scaled);
      float weight = ptx::ex2(fmaf(score, tile::kLog2e, -lse));
      if (Expression::kHasSees && !Expression::sees(pairs.head, query, key)) weight = 0.0f;
      s[i] = kHasSlope && weight != 0.0f ? weight * slope : weight;
    });
  }
  /// dP -> dS = P (dP - delta), in the place of P.
  __device__ __forceinline__ void score_gradients(Scores& dp, int n, bool masked) {
    if constexpr (!kConfig.dropout) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) dp[i] -= statistic_of(i);
    }
    ptx::mbarrier_wait(memory.full_p(), t & 1);
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, weights_of_lane(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 p = unpack<T>(words[j]);
        const int at = 8 * i + 2 * j;
        dp[at] = score_gradient(p.x, dp[at], at), dp[at + 1] = score_gradient(p.y, dp[at + 1], at + 1);
      }
    }
    if (masked) mask(dp, n);
    store_weights(dp);
    hand_over_to_products();
    if constexpr (kConfig.adds_dbias()) {
      if (args.b.adds_dbias) add_to_dbias(n);
    }
  }
  /// The warp's dS of block n, which it has handed over, to the gradient of the bias, eight keys of a query at a time. Rows hold whole
  /// vectors, so one that begins before their end ends there.
  __device__ __forceinline__ void add_to_dbias(int n) const {
    const tile::PairsView& dbias = args.b.p.dbias;
    const int row = lane() % 16, query = row_x(0) - lane() / 4 + row;
    const int keys_left = (query < work().used_q ? work().used_k : 0) - n * kN;
    T* const to = reinterpret_cast<T*>(dbias.data) + dbias.offset(work().batch, head, query, n * kN);
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      const int key = (2 * i + lane() / 16) * 8;
      if (key < keys_left) ptx::red_add_16(to + key, ptx::ld_shared_16(weights_of_lane(i)));
    }
  }
  /// dS of element i from what the other consumer made of its score, and dP - delta, or with dropout dP.
  __device__ __forceinline__ float score_gradient(float factor, float dp, int i) const {
    if constexpr (kConfig.dropout) {
      const float kept_dp = zero_where_negative(factor, dp);
      return fabsf(factor) * fmaf(kept_dp, args.b.p.dropout_keep_scale, -statistic_of(i));
    } else {
      // The expression may have excluded the pair, whose dP may be anything.
      return kConfig.expression && factor == 0.0f ? 0.0f : factor * dp;
    }
  }
  /// That of element i of a thread's scores.
  __device__ __forceinline__ float statistic_of(int i) const {
    return statistics[kConfig.queries_stay() ? i / 2 % 2 : i / 4 * 2 + i % 2];
  }
  __device__ __forceinline__ void store_weights(const Scores& x) const {
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        words[r] = pack<T>(x[8 * i + 2 * r], x[8 * i + 2 * r + 1]);
        if constexpr (kDrops) words[r] = drop(words[r], kept_weights.signs(i, r));
      }
      ptx::stmatrix_x4(weights_of_lane(i), words);
    }
  }
  /// Which weights of block n dropout keeps, while scores are computed.
  __device__ __forceinline__ void find_kept_weights(int n) {
    const uint32_t of_head = tile::dropout_head(args.b.p, work().batch, head);
    const int first_row = row_x(0) - lane() / 4, column = n * kN;
    if constexpr (kConfig.queries_stay()) {
      kept_weights.template of_queries<1>(dropout, of_head, lane(), [&](int i) {
        return FirstPair{first_row, column + 16 * i};
      });
    } else {
      kept_weights.template of_keys<1>(dropout, of_head, lane(), [&](int i) {
        return FirstPair{column + 16 * i, first_row};
      });
    }
  }
  /// Two weights as dV needs them, but for the factor 1 / (1 - p), or as dS does.
  __device__ __forceinline__ static uint32_t drop(uint32_t weights, uint32_t kept) {
    return kConfig.has_dp() ? with_dropped_negative(weights, kept) : weights & ptx::halves_by_signs(kept);
  }
  /// Where the lane's row of step i of the sums' k lies.
  __device__ __forceinline__ uint32_t weights_of_lane(int i) const {
    const int row = 16 * warp() + lane() % 16;
    return memory.weights() + row * kRowBytes + ((2 * i + lane() / 16) ^ row % 8) * 16;
  }
  /// What the warp has written is there for the other consumer.
  __device__ __forceinline__ static void hand_over(uint32_t barrier) {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void hand_over_to_products() const {
    ptx::async_proxy_fence();
    hand_over(memory.full_weights());
  }

  /// Zero for pairs that are not seen, whatever they hold.
  __device__ __forceinline__ void mask(Scores& x, int n) const {
    const tile::AttentionParams& p = args.b.p;
    const tile::SequenceSpan span = work().span();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_x(half);
      tile::Span32 seen;
      if constexpr (kConfig.queries_stay()) {
        seen = tile::keys_of(p, span, row);
      } else if (row < span.used_k) {
        seen = tile::queries_of_any(p, span, row, row + 1);
      }
      const int first = n * kN + 2 * (lane() % 4);
      const int begin = seen.begin - first, end = seen.end - first;
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& of_pair = x[i / 2 * 4 + 2 * half + i % 2];
        of_pair = column >= begin && column < end ? of_pair : 0.0f;
      }
    }
  }

  // --- what is not finite (bwd_sm90_wide.cuh) ---

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(ptx::thread_index() % 128);
  }
  __device__ __forceinline__ static void own_barrier() {
    ptx::barrier_wait(kBwdSm90WideOwn + kConsumer, 128);
  }

  __device__ __forceinline__ static uint32_t finite_word(uint32_t pair) {
    return finite_half<T>(pair & 0xffffu) | finite_half<T>(pair >> 16) << 16;
  }
  __device__ __forceinline__ static void make_word_finite(uint32_t at) {
    ptx::st_shared_4(at, finite_word(ptx::ld_shared_4(at)));
  }
  /// K, which stays.
  __device__ __forceinline__ void make_keys_finite() const {
    constexpr int kBytes = kConfig.shared_strips(kConfig.strips_x()) * kConfig.kResidentStripBytes;
    NonFinite<T> bad;
#pragma unroll 4
    for (int at = thread() * 16; at < kBytes; at += 128 * 16) {
      const uint4 x = ptx::ld_shared_16(memory.x(0) + at);
      bad.look(x.x), bad.look(x.y), bad.look(x.z), bad.look(x.w);
    }
    if (bad.any()) {
#pragma unroll 1
      for (int at = thread() * 16; at < kBytes; at += 128 * 16) {
#pragma unroll 1
        for (int word = 0; word < 16; word += 4) make_word_finite(memory.x(0) + at + word);
      }
    }
    ptx::async_proxy_fence();
    own_barrier();
  }
  /// Whether the lane's scores are: all of a key that is not finite are not.
  __device__ __forceinline__ static bool all_finite(const Scores& s) {
    float zero[4] = {};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) zero[i % 4] = fmaf(s[i], 0.0f, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] == 0.0f;
  }
  /// K of the step, before the sums multiply it: by each warp that has seen that it is to be done, with the same result.
  __device__ __forceinline__ void make_streamed_keys_finite() const {
#pragma unroll 1
    for (int piece = 0; piece < Memory::kPiecesZ; ++piece) {
      const int bytes = kConfig.strips_of(kConfig.strips_x(), piece) * kConfig.strip_bytes();
#pragma unroll 1
      for (int at = lane() * 4; at < bytes; at += 32 * 4) make_word_finite(memory.z(ring_z.slot(piece)) + at);
    }
    ptx::async_proxy_fence();
  }
  /// Whether the step, or with kNext the step behind it, of block n, is odd.
  template <bool kNext>
  __device__ __forceinline__ void look_ahead(int n) {
    if constexpr (kConfig.queries_stay()) return;
    auto ring = this->template ring_of<kMakesP>();
    if (kNext) ring.next();
    ptx::mbarrier_wait(kMakesP ? memory.full_z(ring.first) : memory.full_w(ring.first), ring.phase);
    const uint32_t step = t + (kNext ? 1 : 0), lse = kMakesP ? memory.lse_z(step) : memory.lse_w(step);
    bool any = false;
#pragma unroll
    for (int i = 0; i < kN; i += 32) any |= lane() + i < kN && is_odd(lse, n, lane() + i);
    odd = __any_sync(0xffffffffu, any);
  }
  /// lse or delta of the step's queries, while scores are computed.
  __device__ __forceinline__ void read_statistics() {
    if constexpr (!kConfig.queries_stay() && !kReadsLate) {
      const uint32_t from = (kMakesP ? memory.lse_z(t) : memory.delta(t)) + lane() % 4 * 8;
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const uint2 x = ptx::ld_shared_8(from + i * 32);
        statistics[2 * i] = __uint_as_float(x.x), statistics[2 * i + 1] = __uint_as_float(x.y);
      }
    }
  }
  /// Statistics end with the last full 128 rows: behind them there are none.
  __device__ __forceinline__ bool is_odd(uint32_t lse, int n, int query) const {
    if (BackwardArgs::kRowPadding % kN != 0 && n * kN + query >= work().used_q) return true;
    return !(fabsf(__uint_as_float(ptx::ld_shared_4(lse + query * 4))) < INFINITY);
  }
  /// Queries whose lse is not finite become zeros in what this consumer's products read first: Q for S, dO for dP, or where there
  /// is no dP dO for the sums, by both.
  __device__ __forceinline__ void clear_odd_rows(int n) const {
    if constexpr (kMakesP) clear_odd_rows_of<true>(n, memory.lse_z(t));
    if constexpr (kMakesDs || !kConfig.has_dp())
      clear_odd_rows_of<false>(n, kMakesP ? memory.lse_z(t) : memory.lse_w(t));
    ptx::async_proxy_fence();
    own_barrier();
  }
  template <bool kOfZ>
  __device__ __forceinline__ void clear_odd_rows_of(int n, uint32_t lse) const {
    constexpr int kStrips = kOfZ ? kConfig.strips_x() : kConfig.strips_y();
#pragma unroll 1
    for (int piece = 0; piece < kConfig.pieces(kStrips); ++piece) {
      const int slot = kOfZ ? ring_z.slot(piece) : ring_w.slot(piece);
      ptx::mbarrier_wait(kOfZ ? memory.full_z(slot) : memory.full_w(slot),
                         kOfZ ? ring_z.phase_of(piece) : ring_w.phase_of(piece));
      const uint32_t tile = kOfZ ? memory.z(slot) : memory.w(slot);
#pragma unroll 1
      for (int at = thread() * 16; at < kConfig.strips_of(kStrips, piece) * kConfig.strip_bytes();
           at += 128 * 16) {
        if (is_odd(lse, n, at / kRowBytes % kN)) ptx::st_shared_16(tile + at, uint4{0, 0, 0, 0});
      }
    }
  }
};

}  // namespace fovea::cuda
