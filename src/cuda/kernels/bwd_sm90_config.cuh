// Configuration of bwd_sm90, its shared memory and barriers, what its warps are told of a tile, and the grid.
#pragma once

#include <cstdint>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/expression.cuh"
#include "tile/alibi_reach.hpp"
#include "tile/key_rounds.hpp"
#include "tile/kv_blocks.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

struct BwdSm90Config {
  int head_dim, head_dim_v;  ///< padded to multiples of 32
  int tile_m;                ///< queries of a step: 64, or 128 where S and dP of 128 fit the registers
  int q_stages = 2, do_stages = 2;
  /// Of K. With two, dQ of a tile's last step is computed in the first step of the next tile, with one behind the last.
  int k_stages = 2;
  /// Whether each consumer sums one gradient, of the same 64 keys: the first dV, the second dK. Else both, of 64 keys of
  /// its own: their accumulators take (D + Dv) / 2 registers.
  bool one_gradient = false;
  /// Of K and V: how many times 16 columns consumers keep in registers, as the left operands of S and dP. A product reads its left operand out
  /// of shared memory again at every step: 2 KB a consumer for 16 columns.
  int k_steps = 0, v_steps = 0;
  /// Queries of which a thread holds lse or delta at a time. Fewer leave registers to others.
  int statistics = 64;
  /// Columns of a strip in shared memory, of K, and of q, v and dO: as many as lie in a swizzled row of 128, 64 or 32 bytes. dQ is cut at
  /// strips of K; strips that divide the head size have no columns of zeros, which would be copied and read.
  int k_strip = 64, strip = 64;
  bool softcap = false;     ///< scores are softcap tanh(scale S / softcap)
  bool alibi = false;       ///< scores are scale S - slope |distance|
  bool dropout = false;     ///< of P; dP of dropped pairs is 0
  bool expression = false;  ///< compiled for warp/expression.cuh
  bool dp_behind_p =
      false;  ///< dP is computed when P is there, not beside it: for terms that take many registers
  /// Whether the blocks of keys of a head are the CTAs of a cluster, through which dQ passes (bwd_sm90_chain.cuh).
  bool chain = false;
  /// Whether dQ is added in a fixed order, and the consumers of the last block to add write dq instead of staging their part: for whole
  /// sequences of which every query sees a key, without windows to the left. A branch in each step, which costs 2 to 6 %.
  bool last_writes = false;
  /// With one gradient a consumer: whether dQ is added in a fixed order, and the first block to add stores its part. last_writes has that, too.
  bool first_stores = false;
  /// Of an operand: kBf16x3Parts for float32, whose consumers add dQ from registers (bwd_sm90_bf16x3.cuh).
  int parts = 1;

  static constexpr int kConsumers = 2, kRows = 64;  ///< warpgroups, and keys of each: the m of wgmma
  constexpr int key_groups() const { return one_gradient ? 1 : kConsumers; }
  constexpr int tile_n() const { return key_groups() * kRows; }
  static constexpr int kDsRowBytes = 128;  ///< 64 keys
  static constexpr int kMostShared = 227 * 1024;
  /// One warpgroup loads, two are consumers, and where these have no registers left for dQ, a fourth computes it.
  constexpr int threads() const { return 128 * (1 + kConsumers + (one_gradient ? 1 : 0)); }

  /// setmaxnreg: of 65536 registers 504 are left a lane of three warpgroups, 512 of four. ptxas wants accumulators to begin
  /// at register 24 or later: 64 for the 32 of a slice of dQ.
  constexpr int producer_registers() const { return dq_behind() ? 24 : one_gradient ? 32 : 40; }
  constexpr int consumer_registers() const { return dq_behind() ? 240 : one_gradient ? 208 : 232; }
  static constexpr int kDqRegisters = 64;

  /// dQ of a step is computed slice by slice: 64 queries x 64 columns, 32 registers a thread; or where strips allow it, half of the columns.
  static constexpr int kSlice = 64;
  constexpr int slice_columns() const { return k_strip == kSlice ? kSlice : head_dim / kConsumers; }
  constexpr int slices_across() const { return (head_dim + slice_columns() - 1) / slice_columns(); }
  constexpr int slices() const { return tile_m / kSlice * slices_across(); }
  constexpr int slice_bytes() const { return kSlice * slice_columns() * 4; }
  /// Whether each consumer sums both gradients and adds its share of dQ from registers, behind a step's other products: where sums of
  /// more than 128 registers leave none for dQ beside these, and shared memory has no room for a second K.
  constexpr bool dq_behind() const { return !one_gradient && parts == 1 && k_stages == 1; }
  /// Whether a warp of its own plans: loaders of 24 registers have none for it.
  constexpr bool plans_apart() const { return dq_behind(); }
  /// Whether consumers stage dQ in shared memory for warps that add it.
  constexpr bool stages_dq() const { return !one_gradient && parts == 1 && !chain && !dq_behind(); }
  /// Clocks by which the second consumer begins a tile later. Where each adds dQ itself behind a step's other products, both fall into step
  /// when they wait for the same Q, and want products and exponentials at the same time; begun apart they stay so. Measured at 192/128
  /// (H200): a tile is 9 % faster by 1,000, 2 to 9 % by 500, 8 % by 2,500. Other kernels gain 1 % or nothing.
  constexpr int clocks_apart() const { return dq_behind() ? 1000 : 0; }
  /// Measured: as fast or faster where TMA adds dQ; with terms, which ask for the head of each step, not tried beside 128 queries. Where
  /// red.v4 adds, CTAs that are at the same rows get in each other's way, unless they wait for one another anyhow; 128 or 192 columns
  /// gain nothing by it, and with terms there are no registers for it.
  constexpr LastQueriesFirst last_queries_first() const {
    if (one_gradient && fixed_order()) return LastQueriesFirst::kNever;
    if (stages_dq() && (tile_m == kSlice || (!alibi && !dropout && !expression)))
      return LastQueriesFirst::kAlways;
    return one_gradient && head_dim > 192 && !alibi && !expression ? LastQueriesFirst::kInTurns
                                                                   : LastQueriesFirst::kNever;
  }
  /// Whether the warps that add dQ can add dS to the gradient of a bias as well.
  constexpr bool adds_dbias() const { return expression && stages_dq(); }
  /// Whether dQ is added in a fixed order in all problems that it takes.
  constexpr bool fixed_order() const { return last_writes || first_stores; }
  /// Slices of the sums of others that are brought ahead of a warpgroup that adds its own and writes dq: two have room beside two stages of K.
  constexpr int inboxes() const { return one_gradient && last_writes ? 2 : 0; }
  /// Whether there is room for a slice of dQ of each consumer: staged here, or by another CTA.
  constexpr bool holds_dq() const { return stages_dq() || chain; }
  constexpr int slices_held() const { return holds_dq() ? kConsumers : inboxes(); }
  /// Of a chain: how many steps' routes are kept. dQ of a step is sent in the step behind it, when Q of two more may have been
  /// asked for.
  static constexpr int kRoutes = 4, kRouteBytes = 16;
  /// Else one for each consumer.
  constexpr int routes() const { return chain ? kRoutes : last_writes ? kConsumers : 0; }
  /// Of dS: one is written while the other is read. With one_gradient the factor of dS passes through them first. In
  /// parts: one for each consumer, which reads it alone.
  static constexpr int kBuffers = 2;
  /// Of 64 keys, whose dS a buffer holds.
  constexpr int ds_groups() const { return parts == 1 ? key_groups() : 1; }

  /// Bytes of a row of `columns`, in strips of `width`.
  static constexpr int row_bytes(int columns, int width) { return (columns + width - 1) / width * width * 2; }
  constexpr int k_bytes() const { return parts * tile_n() * row_bytes(head_dim, k_strip); }
  constexpr int v_bytes() const { return parts * tile_n() * row_bytes(head_dim_v, strip); }
  constexpr int q_bytes() const { return parts * tile_m * row_bytes(head_dim, strip); }
  constexpr int do_bytes() const { return parts * tile_m * row_bytes(head_dim_v, strip); }
  constexpr int ds_bytes() const { return parts * ds_groups() * tile_m * kDsRowBytes; }
  constexpr int statistics_bytes() const { return tile_m * 4; }

  constexpr int v_at() const { return k_stages * k_bytes(); }
  constexpr int q_at() const { return v_at() + v_bytes(); }
  constexpr int do_at() const { return q_at() + q_stages * q_bytes(); }
  constexpr int ds_at() const { return do_at() + do_stages * do_bytes(); }
  /// Staged dQ, or the inboxes: slices_held() slices.
  constexpr int dq_at() const { return ds_at() + kBuffers * ds_bytes(); }
  constexpr int statistics_at() const { return dq_at() + slices_held() * slice_bytes(); }
  constexpr int work_at() const { return statistics_at() + (q_stages + do_stages) * statistics_bytes(); }
  static constexpr int kWorkBytes = 88;  ///< of BwdSm90Work::kFields words
  constexpr int routes_at() const { return work_at() + 2 * kWorkBytes; }
  constexpr int barriers_at() const { return routes_at() + routes() * kRouteBytes; }
  constexpr int barriers() const {
    return 2 + 2 * k_stages + 6 * kBuffers + 4 + 2 * (q_stages + do_stages) + kConsumers +
           (chain ? 3 * kConsumers : 0) + (plans_apart() ? 1 : 0) + 2 * inboxes();
  }
  constexpr int shared_bytes() const { return barriers_at() + barriers() * 8; }
};

/// A slot of a ring, and the phase of its barriers, for use number `use`.
template <int kSlots>
struct RingSlot {
  int index;
  uint32_t phase;
  __device__ __forceinline__ explicit RingSlot(uint32_t use)
      : index(static_cast<int>(use % kSlots)), phase(use / kSlots & 1) {}
};

/// What the warps are told of a tile, in shared memory: tile_n() keys of one key head, and the blocks of queries that see
/// any of them. By address, as a generic pointer would take two registers of every warp that reads it.
struct BwdSm90Work {
  enum Field : int {
    kRowQ,
    kRowK,  ///< first rows of the sequence (0 unless packed)
    kUsedQ,
    kUsedK,  ///< its rows that take part
    kBatch,
    kHeadKv,
    kFirstKey,  ///< of the tile
    kMBegin,
    kMEnd,  ///< blocks of queries
    kFullBegin,
    kFullEnd,  ///< those that need no mask
    kSteps,    ///< blocks times query heads; -1: there is no tile any more
    kBeforeBegin,
    kBeforeEnd,  ///< blocks of queries at which the block of keys that adds before this tile's does, where the order is fixed
    kAfterBegin,
    kAfterEnd,  ///< those at which the block that adds after it does, in a chain; with last_writes it is the last before kAfterBegin
    kUpwards,   ///< whether dQ goes to the rank above, in a chain
    kReach,     ///< of the slopes of the group, with alibi
    kDropout,   ///< Dropout::start, four words: consumers have no registers to keep it in
    kFields = kDropout + 4
  };
  uint32_t at;

  __device__ __forceinline__ int operator[](Field field) const {
    return static_cast<int>(ptx::ld_shared_4(at + 4 * field));
  }
  __device__ __forceinline__ void set(Field field, int x) const {
    ptx::st_shared_4(at + 4 * field, static_cast<uint32_t>(x));
  }
  __device__ __forceinline__ tile::SequenceSpan span() const {
    tile::SequenceSpan span{};
    span.row_q = (*this)[kRowQ], span.row_k = (*this)[kRowK];
    span.used_q = (*this)[kUsedQ], span.used_k = (*this)[kUsedK];
    return span;
  }
  __device__ __forceinline__ void set_dropout(const tile::AttentionParams& p) const {
    const tile::PhiloxWords start = tile::dropout_of(p).start;
#pragma unroll
    for (size_t i = 0; i < 4; ++i) ptx::st_shared_4(at + 4 * (kDropout + static_cast<int>(i)), start[i]);
  }
  __device__ __forceinline__ tile::Dropout dropout(const tile::AttentionParams& p) const {
    tile::Dropout dropout = tile::dropout_without_start(p);
#pragma unroll
    for (size_t i = 0; i < 4; ++i)
      dropout.start[i] = ptx::ld_shared_4(at + 4 * (kDropout + static_cast<int>(i)));
    return dropout;
  }
};

/// The blocks of queries of a tile of keys: all, or those that an expression lets see it.
struct BwdSm90Walk {
  tile::SeenBlocks seen;

  __device__ __forceinline__ static BwdSm90Walk of(const BackwardArgs& b, const BwdSm90Work& work) {
    if constexpr (!Expression::kHasSees) return {};
    return {b.seen.at(work[BwdSm90Work::kBatch], work[BwdSm90Work::kHeadKv],
                      work[BwdSm90Work::kFirstKey] / b.seen.tile_rows)};
  }
  /// The block before block n; begin - 1 where there is none.
  __device__ __forceinline__ int before(int n, int begin) const {
    if constexpr (Expression::kHasSees) return seen.before(n, begin);
    return n - 1;
  }
  /// The block behind block n; `end` where there is none.
  __device__ __forceinline__ int behind(int n, int end) const {
    if constexpr (Expression::kHasSees) return seen.from(n + 1, end);
    return n + 1;
  }
  /// Whether the expression is to be asked for each pair.
  __device__ __forceinline__ bool is_partial(int n) const {
    if constexpr (Expression::kHasSees) return seen.is_partial(n);
    return false;
  }
};

/// The order of a tile's steps in the blocks of queries [begin, end) that see it: head by head of the group, or where tiles wait for one
/// another block by block. They stay as far apart as they begin then, while a tile that sees fewer queries would catch up in each head.
///
/// A place is one number where others would take two: the block of queries times the heads that are taken a block, plus which of them it is.
/// begin and end are times these heads, too: scaled().
template <class Instance>
struct BwdSm90Order {
  static constexpr LastQueriesFirst kLastFirst = Instance::kConfig.last_queries_first();
  static constexpr bool kHeadByHead = kLastFirst == LastQueriesFirst::kNever;
  const BackwardArgs& b;

  /// Whether blocks of queries go from the last to the first.
  __device__ __forceinline__ bool last_first() const {
    return kLastFirst == LastQueriesFirst::kAlways ||
           (kLastFirst == LastQueriesFirst::kInTurns && b.last_queries_first);
  }
  struct Place {
    int at;     ///< the block and the head
    int round;  ///< how often all blocks were passed: the head, where one is taken a block
  };
  __device__ __forceinline__ int scaled(int block) const {
    return kHeadByHead ? block : block * b.heads_a_block.value;
  }
  /// The block of queries of a place.
  __device__ __forceinline__ int block(Place place) const {
    return kHeadByHead ? place.at
                       : static_cast<int>(b.heads_a_block.quotient(static_cast<uint32_t>(place.at)));
  }
  /// Its head, counted from the first of the group on.
  __device__ __forceinline__ int head(Place place) const {
    return kHeadByHead ? place.round : place.round + b.heads_a_block.remainder(place.at);
  }
  __device__ __forceinline__ Place first(int begin, int end, int round = 0) const {
    return {last_first() ? end - 1 : begin, round};
  }
  __device__ __forceinline__ Place behind(const BwdSm90Walk& walk, Place place, int begin, int end) const {
    place.at = next(walk, place, begin, end);
    const bool none = place.at == (last_first() ? begin - 1 : end);
    return none ? first(begin, end, place.round + 1) : place;
  }

 private:
  __device__ __forceinline__ int next(const BwdSm90Walk& walk, Place place, int begin, int end) const {
    if constexpr (Expression::kHasSees) {
      const int n = block(place), within = place.at - scaled(n), heads = scaled(1);
      if (last_first())
        return within > 0 ? place.at - 1 : scaled(walk.before(n, block({begin, 0}))) + heads - 1;
      return within + 1 < heads ? place.at + 1 : scaled(walk.behind(n, block({end, 0})));
    }
    return last_first() ? place.at - 1 : place.at + 1;
  }
};

/// The steps of a tile in their order.
template <class Instance>
struct BwdSm90Steps {
  using Order = BwdSm90Order<Instance>;
  const Order order;
  const BwdSm90Walk walk;
  int left;        ///< -1: there is no tile any more
  int begin, end;  ///< of blocks of queries, scaled
  typename Order::Place at;

  __device__ __forceinline__ BwdSm90Steps(const BackwardArgs& b, const BwdSm90Work& work)
      : order{b},
        walk(BwdSm90Walk::of(b, work)),
        left(work[BwdSm90Work::kSteps]),
        begin(order.scaled(work[BwdSm90Work::kMBegin])),
        end(order.scaled(work[BwdSm90Work::kMEnd])),
        at(order.first(begin, end)) {}
  __device__ __forceinline__ int n() const { return order.block(at); }
  /// The query head of the sequence.
  __device__ __forceinline__ int head_of_sequence(const BwdSm90Work& work) const {
    return work[BwdSm90Work::kHeadKv] * order.b.p.group + order.head(at);
  }
  /// The same, counted over all sequences.
  __device__ __forceinline__ int head(const BwdSm90Work& work) const {
    return first_head(work) + order.head(at);
  }
  /// The first of the group's.
  __device__ __forceinline__ int first_head(const BwdSm90Work& work) const {
    return work[BwdSm90Work::kBatch] * order.b.p.heads_q + work[BwdSm90Work::kHeadKv] * order.b.p.group;
  }
  __device__ __forceinline__ void next() {
    --left;
    at = order.behind(walk, at, begin, end);
  }
  /// The same, for those that have no registers for `begin` and `end`.
  __device__ __forceinline__ void next(const BwdSm90Work& work) {
    --left;
    at = order.behind(walk, at, order.scaled(work[BwdSm90Work::kMBegin]),
                      order.scaled(work[BwdSm90Work::kMEnd]));
  }
};

/// Named barriers; barrier 0 is __syncthreads().
enum BwdSm90Barrier : int {
  kOwnKeys = 1,      ///< + consumer: its rows of K are finite
  kDqStaged = 6,     ///< + consumer: its dQ is staged
  kFactorTaken = 8,  ///< the factor of dS has been read, by the consumer that puts dS in its place
  kOddRows = 9,      ///< + consumer: rows that take no part are zeros as far as it clears them
};
inline constexpr int kBothConsumers = 256, kConsumerAndWriter = 128 + 32;

/// CTAs of a launch: at most as many as the GPU holds at a time.
template <class Grid>
constexpr Grid bwd_sm90_grid(const BackwardArgs& args) {
  if (args.cluster > 0) {
    const int64_t heads = int64_t{args.p.heads_kv} * args.p.batch, clusters = args.slots / args.cluster;
    return {(heads < clusters ? heads : clusters) * args.cluster};
  }
  const int64_t tiles = int64_t{args.key_blocks} * args.p.heads_kv * args.p.batch;
  return {tiles < args.slots ? tiles : args.slots};
}

/// Where things lie in shared memory: addresses in the shared window. Barriers: see bwd_sm90.cuh.
template <class Instance>
struct BwdSm90Memory {
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kQStages = kConfig.q_stages, kDoStages = kConfig.do_stages,
                       kKStages = kConfig.k_stages;
  static constexpr int kBuffers = kConfig.kBuffers;
  uint32_t base;

  __device__ __forceinline__ uint32_t k(int s) const { return base + s * kConfig.k_bytes(); }
  __device__ __forceinline__ uint32_t v() const { return base + kConfig.v_at(); }
  __device__ __forceinline__ uint32_t q(int s) const { return base + kConfig.q_at() + s * kConfig.q_bytes(); }
  __device__ __forceinline__ uint32_t d_o(int s) const {
    return base + kConfig.do_at() + s * kConfig.do_bytes();
  }
  /// dS as (queries, 64 keys): a strip, of 64 of the keys, or of a part.
  __device__ __forceinline__ uint32_t ds(int buffer, int strip) const {
    return base + kConfig.ds_at() + buffer * kConfig.ds_bytes() +
           strip * kConfig.tile_m * kConfig.kDsRowBytes;
  }
  /// The slice of dQ of a consumer in float32, in the order of dq_sum; a quarter a warp.
  __device__ __forceinline__ uint32_t dq(int consumer) const {
    return base + kConfig.dq_at() + consumer * kConfig.slice_bytes();
  }
  /// The way of dQ of a step (BwdSm90Route).
  __device__ __forceinline__ uint32_t route(uint32_t step) const {
    return base + kConfig.routes_at() + step % kConfig.kRoutes * kConfig.kRouteBytes;
  }
  __device__ __forceinline__ uint32_t lse(int s) const {
    return base + kConfig.statistics_at() + s * kConfig.statistics_bytes();
  }
  __device__ __forceinline__ uint32_t delta(int s) const { return lse(kQStages + s); }

  __device__ __forceinline__ uint32_t full_v() const { return barrier(0); }
  __device__ __forceinline__ uint32_t empty_v() const { return barrier(1); }
  __device__ __forceinline__ uint32_t full_k(int s) const { return barrier(2 + s); }
  __device__ __forceinline__ uint32_t empty_k(int s) const { return full_k(kKStages + s); }
  __device__ __forceinline__ uint32_t full_ds(int buffer) const { return full_k(2 * kKStages + buffer); }
  __device__ __forceinline__ uint32_t empty_ds(int buffer) const { return full_ds(kBuffers + buffer); }
  __device__ __forceinline__ uint32_t full_factor(int buffer) const { return full_ds(2 * kBuffers + buffer); }
  __device__ __forceinline__ uint32_t full_work(uint32_t tile) const {
    return full_ds(3 * kBuffers + static_cast<int>(tile & 1));
  }
  __device__ __forceinline__ uint32_t empty_work(uint32_t tile) const { return full_work(tile) + 16; }
  __device__ __forceinline__ uint32_t full_q(int s) const { return full_ds(3 * kBuffers + 4 + s); }
  __device__ __forceinline__ uint32_t empty_q(int s) const { return full_q(kQStages + s); }
  __device__ __forceinline__ uint32_t full_do(int s) const { return full_q(2 * kQStages + s); }
  __device__ __forceinline__ uint32_t empty_do(int s) const { return full_do(kDoStages + s); }
  __device__ __forceinline__ uint32_t empty_dq(int consumer) const {
    return full_do(2 * kDoStages + consumer);
  }
  __device__ __forceinline__ uint32_t turn(int buffer) const { return empty_dq(kConfig.kConsumers + buffer); }
  __device__ __forceinline__ uint32_t added(int buffer) const { return turn(kBuffers + buffer); }
  __device__ __forceinline__ uint32_t passed_on(int buffer) const { return turn(2 * kBuffers + buffer); }
  __device__ __forceinline__ uint32_t full_inbox(int slice) const { return turn(3 * kBuffers + slice); }
  __device__ __forceinline__ uint32_t empty_inbox(int slot) const {
    return full_inbox(kConfig.inboxes() + slot);
  }
  /// Where a warp of its own plans.
  __device__ __forceinline__ uint32_t loaded() const { return turn(3 * kBuffers); }
  /// Of the CTA above, or below.
  __device__ __forceinline__ uint32_t room(bool above, int slice) const {
    return full_inbox((above ? 2 : 1) * kConfig.kConsumers + slice);
  }

  /// What the warps of this CTA are told of tile number `tile`; overwritten two tiles later.
  __device__ __forceinline__ BwdSm90Work work(uint32_t tile) const {
    return {base + kConfig.work_at() + (tile & 1) * kConfig.kWorkBytes};
  }

  /// One thread; the others see them behind a barrier of the CTA. `in_turn`: dQ is added in a fixed order. `adds_dbias`: the
  /// writers read dS, too.
  __device__ __forceinline__ void init_barriers(bool in_turn, bool adds_dbias) const {
    // Threads of both consumers; and those that read V: of both, or of one warpgroup. Those that write dS, and those that
    // compute dQ, likewise, or where dS is in parts of its consumer. K has 256 readers: both consumers, or the first and the
    // warpgroup of dQ.
    constexpr int kConsumers = 128 * kConfig.kConsumers, kOwners = 128 * kConfig.key_groups();
    ptx::mbarrier_init(full_v(), 1);
    ptx::mbarrier_init(empty_v(), kOwners);
    for (int s = 0; s < kKStages; ++s) {
      ptx::mbarrier_init(full_k(s), 1);
      ptx::mbarrier_init(empty_k(s), 256);
    }
    for (int buffer = 0; buffer < kBuffers; ++buffer) {
      ptx::mbarrier_init(full_ds(buffer), 128 * kConfig.ds_groups());
      ptx::mbarrier_init(empty_ds(buffer), 128 * kConfig.ds_groups() + (adds_dbias ? kConfig.kConsumers : 0));
      ptx::mbarrier_init(full_factor(buffer), 128);
      ptx::mbarrier_init(turn(buffer), 1);
      ptx::mbarrier_init(added(buffer), 128);
      ptx::mbarrier_init(passed_on(buffer), 1);
    }
    for (uint32_t tile = 0; tile < 2; ++tile) {
      ptx::mbarrier_init(full_work(tile), 1);
      // Consumers, two loaders, and others that add dQ: a warpgroup and whoever looks after its turns, or two warps.
      constexpr int kWriters = kConfig.holds_dq() ? 64 : 0;
      ptx::mbarrier_init(empty_work(tile),
                         kConsumers + 2 + (kConfig.one_gradient ? 128 + (in_turn ? 2 : 0) : kWriters));
    }
    for (int s = 0; s < kQStages; ++s) {
      ptx::mbarrier_init(full_q(s), 1);
      ptx::mbarrier_init(empty_q(s), kConsumers);
    }
    for (int s = 0; s < kDoStages; ++s) {
      ptx::mbarrier_init(full_do(s), 1);
      ptx::mbarrier_init(empty_do(s), kConsumers);
    }
    for (int w = 0; w < kConfig.kConsumers; ++w) ptx::mbarrier_init(empty_dq(w), 1);
    for (int i = 0; i < (kConfig.chain ? 3 * kConfig.kConsumers : 0); ++i)
      ptx::mbarrier_init(full_inbox(i), 1);
    for (int slot = 0; slot < kConfig.inboxes(); ++slot) {
      ptx::mbarrier_init(full_inbox(slot), 1);
      ptx::mbarrier_init(empty_inbox(slot), 128);
    }
    if constexpr (kConfig.plans_apart()) ptx::mbarrier_init(loaded(), 1);
    ptx::mbarrier_init_fence();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kConfig.barriers_at() + 8 * i; }
};

/// The blocks of queries that see any key of the block from `first_key` on, which may not exist.
template <class Instance>
__device__ __forceinline__ tile::KvBlocks bwd_sm90_queries_of(const tile::AttentionParams& p,
                                                              const tile::SequenceSpan& span, int first_key,
                                                              int reach) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  if (first_key < 0 || first_key >= span.used_k) return {};
  const int end = min(first_key + kConfig.tile_n(), span.used_k);
  tile::KvBlocks blocks = tile::q_blocks(p, span, first_key, end, kConfig.tile_m);
  if (blocks.begin >= blocks.end) return {};
  if constexpr (kConfig.alibi)
    blocks = tile::queries_in_reach(blocks, span, first_key, end, reach, kConfig.tile_m);
  return blocks;
}

/// The fixed order in which key blocks add to a tile of dQ, so that the sums have the same bits each time: that of the tiles, so whom a
/// CTA waits for has begun before it. Or with `first_alone` the first of them, which stores, and then the others in any order:
/// the flag is 1 when it has.
struct BwdSm90Turn {
  int* flag;   ///< the number of the block that has added last, plus 1
  int number;  ///< of this tile's block
  int before;  ///< what the flag is when the turn has come
  bool waits;  ///< whether a block adds before, which has not been seen to
  bool first;  ///< whether none does: what is there before is not to be added to

  /// Of block n of a head, counted over all sequences; `part` of its sums has an order of its own. Null flag: no order.
  template <class Instance>
  __device__ __forceinline__ static BwdSm90Turn of(const BackwardArgs& b, const BwdSm90Work& work, int head,
                                                   int n, int part) {
    if (b.dq_semaphore == nullptr) return {nullptr, 0, 0, false, false};
    const BwdSm90Turn turn = in_order<Instance>(b, work, head, n, part);
    return b.first_alone ? BwdSm90Turn{turn.flag, 0, 1, !turn.first, turn.first} : turn;
  }
  /// The same where there is an order.
  template <class Instance>
  __device__ __forceinline__ static BwdSm90Turn in_order(const BackwardArgs& b, const BwdSm90Work& work,
                                                         int head, int n, int part) {
    constexpr BwdSm90Config kConfig = Instance::kConfig;
    constexpr int kTileN = kConfig.tile_n();
    int* const flag = b.dq_semaphore + b.semaphore_at(0, head, n * kConfig.tile_m, 0) + part;
    const int number = work[BwdSm90Work::kFirstKey] / kTileN;
    const bool known = n >= work[BwdSm90Work::kBeforeBegin] && n < work[BwdSm90Work::kBeforeEnd];
    if (!BwdSm90Order<Instance>{b}.last_first()) return {flag, number, number + 2, known, !known};
    const tile::KeyRounds rounds{b.key_rounds};
    if (known) return {flag, number, number - rounds.rounds + 1, true, false};
    // It is the first of its round at these queries.
    const tile::SequenceSpan span = work.span();
    const int reach = work[BwdSm90Work::kReach], row = n * kConfig.tile_m,
              end = min(row + kConfig.tile_m, span.used_q);
    tile::KvBlocks keys = tile::kv_blocks(b.p, span, row, end, kTileN);
    if constexpr (kConfig.alibi) keys = tile::keys_in_reach(keys, span, row, end, reach, kTileN);
    const int before = rounds.before(number, n, keys.end - 1, [&](int block) {
      return bwd_sm90_queries_of<Instance>(b.p, span, block * kTileN, reach);
    });
    return {flag, number, before + 1, before >= 0, before < 0};
  }
  /// The same, of the half of the block that a consumer adds, where the last keys add first.
  __device__ __forceinline__ BwdSm90Turn of_half(int consumer) const {
    const int half = 2 * number + consumer;
    return {flag, half, half + 2, waits || consumer == 0, false};
  }
  /// Whether there is an order, for a branch round acquire() and release(): predicated instead, the fences of a release
  /// take a tenth of the time at D = 256 though no thread executes them.
  __device__ __forceinline__ static bool wanted(const BackwardArgs& b) { return b.dq_semaphore != nullptr; }
  /// Whether others wait for this block.
  __device__ __forceinline__ bool is_awaited(const BackwardArgs& b) const { return first || !b.first_alone; }
  /// By one thread, before it adds.
  __device__ __forceinline__ void acquire() const {
    if (waits) ptx::wait_for(flag, before);
  }
  /// By one thread, behind its additions.
  __device__ __forceinline__ void release() const { ptx::st_release(flag, number + 1); }
  /// The same, and looks whether the turn of what comes next has come: `seen`, read by look() before these additions arrived. One fence
  /// orders the flag behind the additions, and what follows behind `seen`.
  __device__ __forceinline__ void release(BwdSm90Turn& next, int seen) const {
    ptx::fence_acq_rel();
    ptx::st_relaxed(flag, number + 1);
    next.waits = next.waits && seen != next.before;
  }
  __device__ __forceinline__ int look() const { return waits ? ptx::ld_relaxed(flag) : 0; }
};

/// What the warpgroups that issue products have in common.
template <class Instance>
struct BwdSm90Warpgroup {
  const TmaBackwardArgs& args;
  const BwdSm90Memory<Instance>& memory;
  int base16;  ///< where shared memory starts, in units of 16 bytes; uniform

  static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::thread_index() % 32); }
  static __device__ __forceinline__ int warp() { return static_cast<int>(ptx::thread_index() / 32 % 4); }
  /// A shuffle from lane 0 marks a value warp-uniform: loops bounded by it keep their counters, and descriptors made of
  /// these, in uniform registers.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

  /// `first` is as if shared memory began at 0.
  __device__ __forceinline__ uint64_t descriptor(const tile::WgmmaDescriptor& first, int offset) const {
    return first.encode_from(base16 + offset / 16);
  }
  /// Every lane arrives for itself, so that what it has read or written comes before what the waiter does.
  __device__ __forceinline__ static void release(uint32_t barrier) { ptx::mbarrier_arrive(barrier); }
};

}  // namespace fovea::cuda
