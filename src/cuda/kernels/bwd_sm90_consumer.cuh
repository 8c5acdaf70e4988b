// A consumer of bwd_sm90: 64 keys of the tile, against all queries that see any of the tile's.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/kernels/bwd_sm90_scores.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"
#include "tile/wgmma_strips.hpp"

namespace fovea::cuda {

template <class Instance, BwdSm90Part kPart>
struct BwdSm90Consumer : BwdSm90Scores<Instance, kPart> {
  using T = typename Instance::Element;
  using Base = BwdSm90Scores<Instance, kPart>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::uniform, Base::warp;
  using Base::consumer, Base::keys, Base::mask, Base::mask_rounded, Base::read_tile;
  using Base::copy_pairs, Base::find_seen, Base::find_kept, Base::mark_dropped, Base::clear_dropped;
  using Base::kConfig, Base::kM, Base::kN, Base::kD, Base::kDv;
  using Base::kDqBehind, Base::kDqLate;
  using Base::kSumsDv, Base::kSumsDk, Base::kBoth, Base::kHasSlope, Base::kDpBesideP, Base::kCopiesPairs;
  using Base::score_gradients;
  using Base::to_operand, Base::hand_over, Base::take_over, Base::store_ds;
  using typename Base::KStrips, typename Base::Strips;
  using Work = BwdSm90Work;
  using Scores = typename Base::Scores;
  using Tile = typename Base::Tile;
  using Statistics = typename Base::Statistics;
  using Operand = typename Base::Operand;
  using Kept = typename Base::Kept;
  using Seen = typename Base::Seen;
  struct Sums {
    float dk[kSumsDk ? kD / 2 : 1], dv[kSumsDv ? kDv / 2 : 1];
  };
  using Dq = BwdSm90Dq<Instance>;

  // --- products, each queued as a group of its own ---

  /// Of K, or else of V: this consumer's 64 rows, as operand A.
  template <bool kK>
  struct Left {
    static constexpr int kColumns = kK ? kD : kDv, kSteps = kK ? kConfig.k_steps : kConfig.v_steps;
    static_assert(16 * kSteps <= kColumns);
    using OwnStrips = tile::WgmmaStrips<kK ? kConfig.k_strip : kConfig.strip>;
    static constexpr bool kWhole = 16 * kSteps == kColumns;  ///< all columns are kept
    uint32_t kept[kSteps > 0 ? kSteps : 1][4];               ///< the first 16 kSteps columns
  };
  /// Reads what is kept of a tile at `from`, in shared memory.
  template <bool kK>
  __device__ __forceinline__ void keep(Left<kK>& left, uint32_t from) const {
    using L = Left<kK>;
    using OwnStrips = typename L::OwnStrips;
#pragma unroll
    for (int step = 0; step < L::kSteps; ++step) {
      ptx::ldmatrix_x4(left.kept[step],
                       from + OwnStrips::operand_a_at(16 * step, kN, keys() * 64 + 16 * warp(), lane()));
    }
  }
  /// acc = (own 64 rows of the tile of keys) (kM x as many columns, a tile of queries)^T.
  template <bool kK>
  __device__ __forceinline__ void issue_keys_by_queries(Scores& acc, const Left<kK>& left, int keys_at,
                                                        int queries_at) const {
    using L = Left<kK>;
    using OwnStrips = typename L::OwnStrips;
    // b first: in the other order the compiler keeps descriptors over the loop, and float16 at 192/128 spills.
    const uint64_t b = descriptor(tile::wgmma_k_major(0, Strips::kSwizzle), queries_at);
    const uint64_t a =
        descriptor(tile::wgmma_k_major(0, OwnStrips::kSwizzle), keys_at + keys() * 64 * OwnStrips::kRowBytes);
    using Product = ptx::Wgmma<kM>;
    constexpr auto kMajor = ptx::WgmmaMajor::kK;
#pragma unroll
    for (int i = 0; i < L::kColumns / 16; ++i) {
      const uint64_t a_step = a + tile::wgmma_start_step(OwnStrips::column_at(16 * i, kN));
      const uint64_t b_step = b + tile::wgmma_start_step(Strips::column_at(16 * i, kM));
      if (i == 0 && L::kSteps > 0) {
        Product::template rs<T, ptx::WgmmaStart::kZero, kMajor>(acc, left.kept[0], b_step);
      } else if (i < L::kSteps) {
        Product::template rs<T, ptx::WgmmaStart::kAccumulate, kMajor>(acc, left.kept[i], b_step);
      } else if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, kMajor>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, kMajor>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }
  /// acc (64 keys, kColumns) += operand (64 keys, kM queries) (kM x kColumns tile of queries).
  template <int kColumns>
  __device__ __forceinline__ void issue_gradient(float (&acc)[kColumns / 2], const Operand& operand,
                                                 int queries_at) const {
    // ptxas wants 158 registers at launch for a product of 256 columns; 512 threads leave 128.
    constexpr int kPartColumns = kColumns == 256 ? 128 : kColumns;
#pragma unroll
    for (int c = 0; c < kColumns; c += kPartColumns) {
      const uint64_t b =
          descriptor(tile::wgmma_mn_major(0, Strips::kSwizzle, kM), queries_at + Strips::column_at(c, kM));
      auto& part = reinterpret_cast<float(&)[kPartColumns / 2]>(acc[c / 2]);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i)
        ptx::Wgmma<kPartColumns>::template rs<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(
            part, operand[i], b + tile::wgmma_start_step(i * 16 * Strips::kRowBytes));
    }
    ptx::wgmma_commit();
  }

  using Order = BwdSm90Order<Instance>;
  __device__ __forceinline__ Order order() const {
    return {args.b};
  }

  // --- before a step ---

  /// The next tile, with K where it has steps: `keys` tiles of this CTA had any.
  __device__ __forceinline__ Tile open(uint32_t number, uint32_t keys) const {
    Tile tile = read_tile(number);
    for (int* edge : {&tile.m_begin, &tile.m_end, &tile.full_begin, &tile.full_end})
      *edge = order().scaled(*edge);
    if constexpr (kConfig.last_writes)
      tile.last_until = order().scaled(uniform(tile.work[Work::kAfterBegin]));
    if (kSumsDv && tile.steps > 0) {
      const RingSlot<kConfig.k_stages> k(keys);
      ptx::mbarrier_wait(memory.full_k(k.index), k.phase);
      make_keys_finite(k.index);
    }
    return tile;
  }
  /// What a step begins with, looked up while the last products of the step before run.
  struct Ahead {
    bool odd;        ///< rows have to be cleared
    Statistics lse;  ///< of its first queries
  };
  __device__ __forceinline__ void look_ahead(Ahead& ahead, uint32_t count) const {
    const RingSlot<kConfig.q_stages> slot(count);
    ptx::mbarrier_wait(memory.full_q(slot.index), slot.phase);
    ahead.odd = any_odd_row(slot.index);
    if constexpr (kBoth) ahead.lse.read(memory.lse(slot.index));
  }

  // --- what is not finite (bwd_sm90.cuh) ---

  /// Makes this consumer's rows of K finite.
  __device__ __forceinline__ void make_keys_finite(int stage) const {
    const int thread = static_cast<int>(ptx::thread_index()) % 128;
    const uint32_t own = memory.k(stage) + keys() * 64 * KStrips::kRowBytes;
    constexpr int kChunks = 64 * KStrips::kRowBytes / 16;  // of a strip's 64 rows
    NonFinite<T> bad;
#pragma unroll
    for (int c = 0; c < KStrips::of(kD) * kChunks / 128; ++c) {
      const uint4 x = ptx::ld_shared_16(own + c * 128 / kChunks * kN * KStrips::kRowBytes +
                                        (c * 128 % kChunks + thread) * 16);
      bad.look(x.x), bad.look(x.y), bad.look(x.z), bad.look(x.w);
    }
    if (bad.any()) {
#pragma unroll 1
      for (int word = 0; word < KStrips::of(kD) * kChunks / 128 * 4; ++word) {
        const int c = word / 4;
        const uint32_t at = own + c * 128 / kChunks * kN * KStrips::kRowBytes +
                            (c * 128 % kChunks + thread) * 16 + word % 4 * 4;
        const uint32_t pair = ptx::ld_shared_4(at);
        ptx::st_shared_4(at, finite_half<T>(pair & 0xffffu) | finite_half<T>(pair >> 16) << 16);
      }
      ptx::async_proxy_fence();
    }
    ptx::barrier_wait(kOwnKeys + keys(),
                      128);  // all four warps' rows are finite: the products of this consumer may begin
  }
  /// Whether lse of any row of the step is not finite. The same for all warps, as each looks at all rows.
  __device__ __forceinline__ bool any_odd_row(int s) const {
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kM / 32; ++i)
      odd |= !(fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + (lane() + 32 * i) * 4))) < INFINITY);
    return __any_sync(0xffffffffu, odd);
  }
  /// Rows of Q and dO whose lse is not finite become zeros, before any product reads them. All consumers.
  __device__ __forceinline__ void clear_odd_rows(int s, uint32_t phase) const {
    ptx::mbarrier_wait(memory.full_do(s), phase);
    clear_odd_chunks<kConfig.q_bytes()>(memory.q(s), s);
    clear_odd_chunks<kConfig.do_bytes()>(memory.d_o(s), s);
    ptx::async_proxy_fence();
    // All rows are zeros for the products of both. The second answers, so that no barrier is used again too early.
    if (consumer == 0) {
      ptx::barrier_arrive(kOddRows, kBothConsumers);
      ptx::barrier_wait(kOddRows + 1, kBothConsumers);
    } else {
      ptx::barrier_wait(kOddRows, kBothConsumers);
      ptx::barrier_arrive(kOddRows + 1, kBothConsumers);
    }
  }
  /// The threads of both consumers share the 16-byte chunks of a tile.
  template <int kBytes>
  __device__ __forceinline__ void clear_odd_chunks(uint32_t tile, int s) const {
    const int thread = consumer * 128 + static_cast<int>(ptx::thread_index()) % 128;
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += kBothConsumers) {
      const int row = i / (Strips::kRowBytes / 16) % kM;
      if (fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + row * 4))) < INFINITY) continue;
      ptx::st_shared_16(tile + i * 16, uint4{0, 0, 0, 0});
    }
  }

  // --- the mainloop ---

  using Place = typename Order::Place;
  __device__ __forceinline__ Place first_place(const Tile& tile) const {
    return order().first(tile.m_begin, tile.m_end);
  }
  __device__ __forceinline__ Place place_behind(const Tile& tile, Place place) const {
    place = order().behind(BwdSm90Walk::of(args.b, tile.work), place, tile.m_begin, tile.m_end);
    if constexpr (Expression::kHasSees) place.at = uniform(place.at);
    return place;
  }

  /// The same the other way, of all blocks, head by head.
  __device__ __forceinline__ static Place place_before(const Tile& tile, Place place) {
    static_assert(Order::kHeadByHead);
    static_assert(!Expression::kHasSees || !kDqBehind);
    return place.at == tile.m_begin ? Place{tile.m_end - 1, place.round - 1}
                                    : Place{place.at - 1, place.round};
  }

  /// What this consumer keeps from step to step.
  struct State {
    Tile tile, next;  ///< `next` is known from the last step of `tile` on
    Place place;      ///< of the step
    Ahead ahead;
    uint32_t steps = 0, tiles = 0;  ///< that this CTA has done; of the tiles those with steps
    bool looked = false;            ///< `ahead` is that of the next step
    bool writes = false;            ///< dQ of the step before is the last part of its sum: it goes to dq
    Sums sums;
    Left<true> k;
    Left<false> v;
  };

  /// Takes what is kept of K and V into registers, at the begin of a tile that has steps.
  __device__ __forceinline__ void keep_keys(State& state) const {
    if constexpr (kSumsDv && kConfig.k_steps > 0)
      keep(state.k, memory.k(RingSlot<kConfig.k_stages>(state.tiles).index));
    if constexpr (kSumsDk && kConfig.v_steps > 0) {
      ptx::mbarrier_wait(memory.full_v(), state.tiles & 1);
      keep(state.v, memory.v());
      if constexpr (Left<false>::kWhole) release(memory.empty_v());
    }
  }
  /// What is found out of a step's pairs while S is computed.
  struct Beside {
    Kept kept;          ///< that dropout keeps
    Seen seen;          ///< that the expression lets see each other, where `cuts`
    bool cuts = false;  ///< whether there are others
  };
  /// Waits for S, with kBehind groups of products behind it: P, and the factor of dS where that is another.
  template <int kBehind>
  __device__ __forceinline__ void weigh_step(State& state, Scores& acc_s, Operand& p, Operand& factor,
                                             const Beside& beside, Place place, bool masked) const {
    const Work& work = state.tile.work;
    const int s = RingSlot<kConfig.q_stages>(state.steps).index;
    if constexpr (kConfig.softcap) {
      Base::template weigh_capped<kBehind>(acc_s, p, factor, state.ahead.lse, s);
      if (masked) mask_rounded(p, work, order().block(place));
      return;
    } else if constexpr (kConfig.alibi) {
      Base::template weigh_alibi<kBehind>(acc_s, state.ahead.lse, s, work, order().block(place),
                                          slope_of(work, order().head(place)));
    } else if constexpr (kConfig.expression) {
      const int buffer = RingSlot<kConfig.kBuffers>(state.steps).index;
      Base::template weigh_expression<kBehind>(acc_s, factor, state.ahead.lse, s, work, order().block(place),
                                               order().head(place), buffer);
    } else {
      Base::template weigh<kBehind>(acc_s, state.ahead.lse, s);
    }
    if (masked) mask(acc_s, work, keys(), order().block(place));
    to_operand(acc_s, p);  // behind the branch: in front of it a step at d64 takes 2 % longer
    if constexpr (Expression::kHasSees) {
      if (beside.cuts) beside.seen.keep(p);
      if (kHasSlope && beside.cuts) beside.seen.keep(factor);
    }
    if constexpr (kConfig.dropout) mark_dropped(p, beside.kept);
  }
  /// A step: block n of the queries of one head of the tile's group, the `first` of its tile, or with `more` behind it. A consumer that sums
  /// both gradients computes in it its share of dQ of the step before, whose dS both consumers have written long ago, and
  /// looks at what comes next while its last products run.
  __device__ __forceinline__ void step(State& state, bool first, bool more) const {
    const Place place = state.place;
    const uint32_t count = state.steps;
    const Tile& tile = state.tile;
    const bool masked = place.at < tile.full_begin || place.at >= tile.full_end;
    const RingSlot<kConfig.k_stages> k(state.tiles);
    const RingSlot<kConfig.kBuffers> buffer(count);
    const RingSlot<kConfig.q_stages> slot(count);
    const int s = slot.index, q_at = kConfig.q_at() + s * kConfig.q_bytes(),
              do_at = kConfig.do_at() + s * kConfig.do_bytes();
    Operand p, ds, slopes;
    Operand& factor = kHasSlope || !kSumsDv ? slopes : p;  // of dS
    typename Dq::Slice acc_dq;
    Scores acc_s, acc_dp;
    if constexpr (!kBoth)
      look_ahead(state.ahead, count);  // in the step before it gains nothing at D = 192 and 256
    if (state.ahead.odd) clear_odd_rows(s, slot.phase);
    [[maybe_unused]] Beside beside;
    if constexpr (kSumsDv) {
      ptx::wgmma_fence();
      issue_keys_by_queries(acc_s, state.k, k.index * kConfig.k_bytes(), q_at);
      if constexpr (kConfig.dropout)
        find_kept(beside.kept, tile.work, order().block(place), order().head(place));
      if constexpr (Expression::kHasSees)
        beside.cuts = find_seen(beside.seen, tile.work, order().block(place), order().head(place));
      if constexpr (!kBoth) state.ahead.lse.read(memory.lse(s));  // while S is computed
    }
    if constexpr (kDpBesideP) issue_dp(acc_dp, state.v, state.tiles, first, slot, do_at);
    constexpr int kBesideP = kBoth && kDpBesideP ? 1 : 0;
    if constexpr (kSumsDv) weigh_step<kBesideP>(state, acc_s, p, factor, beside, place, masked);
    if constexpr (kSumsDk && !kDpBesideP) issue_dp(acc_dp, state.v, state.tiles, first, slot, do_at);
    if constexpr (kDqBehind) issue_gradient<kDv>(state.sums.dv, p, do_at);  // beside it
    if constexpr (!kSumsDk) {
      release(memory.empty_q(s));
      ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);
      hand_over(factor, buffer.index);
      ptx::mbarrier_wait(memory.full_do(s), slot.phase);
    }
    if constexpr (kSumsDk) {
      if constexpr (!kSumsDv) {
        ptx::mbarrier_wait(memory.full_factor(buffer.index), buffer.phase);
        take_over(factor, buffer.index);
      }
      Base::template score_gradients<kDqBehind ? 1 : 0>(factor, acc_dp, ds, s);
      if (!Left<false>::kWhole && !more) release(memory.empty_v());
      if (masked) mask_rounded(ds, tile.work, order().block(place));
      pass_on(ds, buffer);
    }
    if constexpr (kSumsDv && kConfig.dropout) clear_dropped(p);
    if constexpr (kDqLate) issue_dq(acc_dq, count - 1, (first ? k.index ^ 1 : k.index) * kConfig.k_bytes());
    ptx::wgmma_fence();
    if constexpr (kSumsDv && !kDqBehind) issue_gradient<kDv>(state.sums.dv, p, do_at);
    if constexpr (kSumsDk) issue_gradient<kD>(state.sums.dk, ds, q_at);
    if constexpr (kDqBehind) {
      if (more) look_behind(state, true);
      state.looked = more;
    } else if constexpr (kBoth) {
      finish_dq<2>(acc_dq, count - 1, state.writes);
      if (first && state.tiles > 0)
        release(memory.empty_k(k.index ^ 1));  // dQ of the tile before is computed
      look_behind(state, more);
    }
    if constexpr (kSumsDv) {
      ptx::wgmma_wait<kSumsDk ? 1 : 0>();
      ptx::wgmma_done(state.sums.dv);
    }
    release(memory.empty_do(s));
    if constexpr (kSumsDk) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(state.sums.dk);
      release(memory.empty_q(s));
    }
    if constexpr (kDqBehind) {
      if (!first) add_dq(count - 1, tile.work, place_before(tile, place));
      if (!more) add_dq(count, tile.work, place);  // before K leaves
    }
    if constexpr (kConfig.last_writes) state.writes = place.at < tile.last_until;
    ++state.steps;
  }
  /// Where the step behind is, and what it begins with: in the same tile with `more`, else in the next.
  __device__ __forceinline__ void look_behind(State& state, bool more) const {
    const Tile& tile = state.tile;
    if (!more) state.next = open(tile.number + 1, state.tiles + 1);
    state.looked = more || state.next.steps > 0;
    if (!state.looked) return;
    state.place = more ? place_behind(tile, state.place) : first_place(state.next);
    look_ahead(state.ahead, state.steps + 1);
    if constexpr (kCopiesPairs) {
      const Work work = memory.work(more ? tile.number : tile.number + 1);
      copy_pairs(state.steps + 1, work, order().block(state.place), order().head(state.place));
    }
  }
  /// dS to those who compute dQ.
  __device__ __forceinline__ void pass_on(const Operand& ds, const RingSlot<kConfig.kBuffers>& buffer) const {
    if constexpr (kSumsDv) ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);
    store_ds(ds, buffer.index);
    release(memory.full_ds(buffer.index));
  }
  /// Of a head of the tile's group.
  __device__ __forceinline__ float slope_of(const Work& work, int head) const {
    if constexpr (!kConfig.alibi || !kSumsDv) return 0.0f;
    return alibi_slope(args.b.p, work[Work::kBatch], work[Work::kHeadKv] * args.b.p.group + head);
  }
  /// Queues dP, behind the first of a tile's steps V.
  __device__ __forceinline__ void issue_dp(Scores& acc, const Left<false>& v, uint32_t tiles, bool first,
                                           const RingSlot<kConfig.q_stages>& slot, int do_at) const {
    if (kConfig.v_steps == 0 && first) ptx::mbarrier_wait(memory.full_v(), tiles & 1);
    ptx::mbarrier_wait(memory.full_do(slot.index), slot.phase);
    ptx::wgmma_fence();
    issue_keys_by_queries(acc, v, kConfig.v_at(), do_at);
  }
  /// Queues this consumer's slice of dQ of step number `count`; for -1, before the first, of what shared memory happens
  /// to hold: products under a condition would wait for each other.
  __device__ __forceinline__ void issue_dq(typename Dq::Slice& acc, uint32_t count, int k_at) const {
    const RingSlot<kConfig.kBuffers> ds(count);
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // dS, which both consumers have written, for the product
    ptx::wgmma_fence();
    Dq{{args, memory, this->base16}}.issue(acc, ds.index, k_at, consumer);
  }
  /// Adds this consumer's half of the columns of dQ of step number `count`, which is at `place`: a slice at the outer edge and half a slice in
  /// the middle, while no other product of it runs. The sums are zeros: statistics of the step come from the launch that made them so.
  __device__ __forceinline__ void add_dq(uint32_t count, const Work& work, Place place) const {
    constexpr int kSlice = kConfig.kSlice, kHalf = kSlice / 2;
    const RingSlot<kConfig.kBuffers> ds(count);
    const Dq dq{{args, memory, this->base16}};
    const int outer = consumer * 2 * kSlice, middle = kSlice + consumer * kHalf;
    float acc[kSlice / 2], acc_half[kHalf / 2];
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // dS, which both consumers have written, for the products
    ptx::wgmma_fence();
    dq.template issue_columns<kSlice>(acc, ds.index, 0, 0, outer);
    dq.template issue_columns<kHalf>(acc_half, ds.index, 0, 0, middle);
    const int head =
        work[Work::kBatch] * args.b.p.heads_q + work[Work::kHeadKv] * args.b.p.group + order().head(place);
    float* const sums = Dq::sums_of(args.b, head, order().block(place));
    ptx::wgmma_wait<1>();
    ptx::wgmma_done(acc);
    Dq::add_registers(acc, sums, outer);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_half);
    release(memory.empty_ds(ds.index));
    Dq::add_registers(acc_half, sums, middle);
  }
  /// Waits for it, with kBehind groups of products behind it, and stages it for the writer, passes it on, or where this was the last block
  /// to add writes dq.
  template <int kBehind>
  __device__ __forceinline__ void finish_dq(typename Dq::Slice& acc, uint32_t count, bool writes) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc);
    if (count != ~0u) release(memory.empty_ds(RingSlot<kConfig.kBuffers>(count).index));
    const int w = warpgroup() - 1;  // looked up again: `consumer` would take a register of the loop
    if constexpr (kConfig.chain) {
      if (count != ~0u) Dq{{args, memory, this->base16}}.pass(acc, count, w);
      return;
    }
    ptx::mbarrier_wait(memory.empty_dq(w),
                       count & 1);  // the last step's has been read: staging number count + 1
    const bool delivers = kConfig.last_writes && writes;
    if constexpr (kConfig.last_writes) {
      if (delivers) Dq{{args, memory, this->base16}}.deliver(acc, w);
    }
    if (!delivers) Dq::stage(acc, memory.dq(w));
    ptx::barrier_arrive(kDqStaged + w, kConsumerAndWriter);
  }
  __device__ __forceinline__ static int warpgroup() {
    return static_cast<int>(ptx::thread_index() / 128);
  }

  /// Rows of dK or dV of this consumer's keys, times `factor`.
  template <int kColumns>
  __device__ __forceinline__ void write(const tile::RowsView& view, uint32_t aligned_bit, int columns,
                                        const Work& work, const float (&acc)[kColumns / 2],
                                        float factor) const {
    const int row = work[BwdSm90Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4,
              used_k = work[BwdSm90Work::kUsedK];
    const int64_t first =
        view.offset(work[BwdSm90Work::kBatch], work[BwdSm90Work::kRowK], work[BwdSm90Work::kHeadKv]);
    const bool aligned = (args.b.p.aligned16 & aligned_bit) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_gradient_row<kColumns, T>(view.data, first + (row + 8 * half) * view.row, args.b.p.dk_is_f32,
                                      aligned, row + 8 * half < used_k ? columns : 0, acc, half, factor,
                                      lane());
  }

  __device__ __forceinline__ void write_sums(const Tile& tile, const Sums& sums) const {
    if constexpr (kSumsDk)
      write<kD>(args.b.p.dk, tile::kAlignedDK, args.b.p.head_dim, tile.work, sums.dk, args.b.p.scale);
    if constexpr (kSumsDv)
      write<kDv>(args.b.p.dv, tile::kAlignedDV, args.b.p.head_dim_v, tile.work, sums.dv,
                 kConfig.dropout ? args.b.p.dropout_keep_scale : 1.0f);
    release(memory.empty_work(tile.number));
  }

  /// All tiles of this CTA.
  __device__ __forceinline__ void run() const {
    static_assert(!kDqLate || kConfig.k_stages == 2);
    State state;
    state.tile = open(0, 0);
    while (state.tile.steps >= 0) {
      const Tile& tile = state.tile;
#pragma unroll
      for (float& x : state.sums.dk) x = 0.0f;
#pragma unroll
      for (float& x : state.sums.dv) x = 0.0f;
      if (tile.steps > 0) {
        if (!state.looked) {
          state.place = first_place(tile);
          if constexpr (kBoth) look_ahead(state.ahead, state.steps);
          if constexpr (kCopiesPairs)
            copy_pairs(state.steps, tile.work, order().block(state.place), order().head(state.place));
        }
        if constexpr (kConfig.clocks_apart() > 0) {
          if (consumer == 1) ptx::wait_clocks(kConfig.clocks_apart());
        }
        keep_keys(state);
        ptx::wgmma_fence();
#pragma unroll 1
        for (int left = tile.steps; left > 0; --left) {
          step(state, left == tile.steps, left > 1);
          if constexpr (!kBoth) state.place = place_behind(tile, state.place);
        }
        if constexpr (!kSumsDk || kDqBehind)
          release(memory.empty_k(RingSlot<kConfig.k_stages>(state.tiles).index));
        ++state.tiles;
      }
      write_sums(tile, state.sums);
      if (!kDqLate || tile.steps == 0) {
        state.next = open(tile.number + 1, state.tiles);
        state.looked = false;
      }
      state.tile = state.next;
    }
    if (kDqLate && state.steps > 0) {
      typename Dq::Slice acc_dq;
      issue_dq(acc_dq, state.steps - 1,
               RingSlot<kConfig.k_stages>(state.tiles - 1).index * kConfig.k_bytes());
      finish_dq<0>(acc_dq, state.steps - 1, state.writes);
    }
  }
};

}  // namespace fovea::cuda
