// Configuration of fwd_sm90, its shared memory and barriers, the work tile of a consumer, and the grid.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/fwd_stream_k.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/kernels/transposed_values.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/warp/expression.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/stream_k.hpp"
#include "tile/tile_scheduler.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

struct FwdSm90Config {
  int head_dim, head_dim_v;  ///< padded to multiples of 16
  int tile_n;                ///< a multiple of 16: a step of P V
  int consumers;             ///< warpgroups of 64 rows
  int stages;                ///< of K, and of V
  /// The same where the score reads a tensor of pairs: two blocks of it lie beside them. 0: it is read where it lies.
  int stages_beside_pairs = 0;
  bool intra_warpgroup_overlap = false;  ///< the overlapped schedule, else the queued one
  /// The row sum by the tensor cores, from columns of ones beside V. It is the sum of the rounded weights: right
  /// for O, but up to 1e-3 off for lse. Worth 3 % of d64 at 512 to 4,096 tokens (docs/kernels/fwd_sm90.md, Tiles).
  bool row_sum_in_mma = false;
  bool ping_pong = false;  ///< products of one consumer at a time; overlapped: queued one after the other
  /// Q as operand A from registers: a quarter less of shared memory's bandwidth at d128, where blocks of 128
  /// keys read it often. It takes head_dim / 4 registers.
  bool q_in_registers = false;
  bool softcap = false;
  bool alibi = false;
  bool dropout = false;
  bool expression = false;  ///< compiled for warp/expression.cuh
  /// Waits for keys that arrive (ArrivingKeysView), which costs 1 % of the cycles, at 512 keys 4 %.
  bool arriving = false;
  /// The consumers have the same 64 rows, each every other block of keys, and add up what they have at the end of the tile
  /// (fwd_sm90_shared_rows.cuh): a tile takes half as long where there are too few for all SMs.
  bool shared_rows = false;
  int ctas_per_sm =
      1;  ///< of short tiles several: what one waits for, its loads and its end, stands beside the others' products
  bool stream_k = false;  ///< tiles of few queries, cut into equal shares of all keys (fwd_stream_k.cuh)
  bool bf16x3 = false;    ///< float32: operands as bf16x3, each product a sum of six (part_pair)
  /// Operands of float8_e4m3fn. Products want V's keys side by side: transpose_values.cuh writes it so beforehand.
  bool e4m3 = false;

  static constexpr int kRows = 64;       ///< of a consumer: the m of wgmma
  static constexpr int kRowBytes = 128;  ///< of a strip
  static constexpr int kMostShared = 227 * 1024;
  static constexpr bool multiplies_qv = false;

  /// Whether the consumers may share rows: two, and nothing beside the plain problem.
  constexpr bool can_share_rows() const {
    return consumers == 2 && stages % 2 == 0 &&
           !(row_sum_in_mma || ping_pong || softcap || alibi || dropout) &&
           !(expression || arriving || stream_k || bf16x3 || e4m3);
  }
  constexpr int parts() const { return bf16x3 ? kBf16x3Parts : 1; }    ///< of an operand
  constexpr int element_bytes() const { return e4m3 ? 1 : 2; }         ///< of a part
  constexpr int strip() const { return kRowBytes / element_bytes(); }  ///< its columns

  /// Whether a warp loads K and V, whose lanes look up pages; else one thread, without pages. With dropout the warp costs registers
  /// that consumers lack.
  constexpr bool pages() const { return !bf16x3 && !dropout; }
  /// Threads that plan tiles; the fourth warp of the producers loads K and V.
  constexpr int planners() const { return row_groups() < 3 ? row_groups() : 3; }

  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int tile_m() const { return kRows * row_groups(); }
  /// What the pieces shared with fwd_sm90_wide ask for: groups of 64 rows with a Q of their own, the columns of O that
  /// an epilogue writes, and the threads that read the index of the next tile.
  constexpr int row_groups() const { return shared_rows ? 1 : consumers; }
  constexpr int columns_o() const { return shared_rows ? head_dim_v / consumers : head_dim_v; }
  constexpr int next_readers() const { return planners(); }
  static constexpr int cluster = 1;
  /// Registers of a thread: what the launch gives to all, in multiples of 8, less what the producers can do
  /// with. Three consumers need 160, and float32's boxes of Q are three times as many.
  constexpr int producer_registers() const {
    if (stream_k) return 152;  // they merge, too
    if (consumers >= 3) return 32;
    return (consumers == 2 && !bf16x3) || ctas_per_sm > 1 ? 40 : 56;
  }
  constexpr int consumer_registers() const {
    const int each = 65536 / ctas_per_sm / threads() / 8 * 8;
    const int all = (each < 256 ? each : 248) * (consumers + 1);
    const int rest = (all - producer_registers()) / consumers / 8 * 8;
    return rest < 240 ? rest : 240;
  }

  constexpr int strips(int columns) const { return (columns + strip() - 1) / strip(); }
  constexpr int q_bytes() const { return parts() * strips(head_dim) * kRows * kRowBytes; }
  constexpr int k_bytes() const { return parts() * strips(head_dim) * tile_n * kRowBytes; }
  constexpr int v_bytes() const {
    return e4m3 ? head_dim_v * tile_n : parts() * strips(head_dim_v) * tile_n * kRowBytes;
  }
  /// One more strip of V, of ones.
  constexpr int ones_bytes() const { return row_sum_in_mma ? tile_n * kRowBytes : 0; }
  constexpr int v_stage_bytes() const { return v_bytes() + ones_bytes(); }
  /// Of the kernel as it is compiled.
  constexpr bool stages_pairs() const { return Expression::kReadsPairs && stages_beside_pairs > 0; }
  constexpr int k_at() const { return row_groups() * q_bytes(); }
  constexpr int ring() const { return stages_pairs() ? stages_beside_pairs : stages; }
  /// Rings that the stages are dealt to, block by block. With shared_rows one for each consumer: a stage that changed its reader could be taken
  /// for full by a consumer that has not seen the other's use of it.
  constexpr int rings() const { return shared_rows ? consumers : 1; }
  constexpr int stages_of_ring() const { return ring() / rings(); }
  constexpr int v_at() const { return k_at() + ring() * k_bytes(); }
  constexpr int barriers_at() const { return v_at() + ring() * v_stage_bytes(); }
  constexpr int barriers() const { return 2 * consumers + 4 * ring() + 4 + (stream_k ? 2 : 0); }
  constexpr int work_tiles_at() const { return barriers_at() + (barriers() * 8 + 15) / 16 * 16; }
  /// Whether planners look at a tile before its Q has a place: where an expression says what it sees, which takes time.
  constexpr bool plans_ahead() const { return expression; }
  /// Whether blocks of keys that an expression hides are passed over.
  constexpr bool seen_blocks() const { return expression; }
  /// Whether the loader may ask for the first loads before a plan (ForwardArgs::loads_first).
  constexpr bool loads_first() const { return !(e4m3 || expression || arriving || stream_k); }
  /// Of a consumer: the one that it ends, the next, whose Q has a place, and with plans_ahead() the one behind that.
  constexpr int work_tiles() const { return plans_ahead() ? 4 : 2; }
  constexpr int next_at() const { return work_tiles_at() + work_tiles() * consumers * work_tile_bytes(); }
  constexpr int units_at() const { return next_at() + 16; }
  constexpr int units_bytes() const { return stream_k ? (kStreamSequences + 4) * 4 + kShareBytes : 0; }
  /// Two blocks of elements for each warp's 16 rows; 16 bytes more a row, so that eight rows begin in different banks.
  constexpr int pairs_at() const { return units_at() + units_bytes(); }
  constexpr int pair_row_bytes() const { return tile_n * 2 + 16; }
  constexpr int pair_block_bytes() const { return 16 * pair_row_bytes(); }
  constexpr int all_pairs_bytes() const { return 4 * consumers * 2 * pair_block_bytes(); }
  /// What stands at the end: sums of O of operands of 8 bits, what consumers with shared_rows leave for each other, or with ALiBi the
  /// columns' numbers (AlibiColumns).
  constexpr int sums_at() const { return (pairs_at() + 15) / 16 * 16; }
  constexpr int columns_at() const { return (pairs_at() + 255) / 256 * 256; }  ///< an atom of 32-byte rows
  constexpr int columns_bytes() const { return alibi ? tile_n * 32 : 0; }
  /// With shared_rows: of a consumer, of each thread half of its sums of O, maxima and sums of its rows.
  constexpr int shared_rows_bytes() const { return shared_rows ? 128 * (columns_o() / 2 + 4) * 4 : 0; }
  /// Of operands of 8 bits: the registers of acc_o, in float32.
  constexpr int sums_bytes() const { return e4m3 ? kRows * head_dim_v * 4 : 0; }  ///< of a consumer
  /// Enough for both ways to compile it: the library's table does not know the expression.
  constexpr int shared_bytes() const {
    if (e4m3) return sums_at() + consumers * sums_bytes();
    if (shared_rows) return sums_at() + consumers * shared_rows_bytes();
    if (alibi) return columns_at() + columns_bytes();
    const auto up_to_pairs = [&](int in_ring) {
      return pairs_at() + (in_ring - ring()) * (k_bytes() + v_stage_bytes() + 4 * 8);
    };
    const int beside_pairs =
        stages_beside_pairs > 0 ? up_to_pairs(stages_beside_pairs) + all_pairs_bytes() : 0;
    return beside_pairs > up_to_pairs(stages) ? beside_pairs : up_to_pairs(stages);
  }
  constexpr int work_tile_bytes() const { return expression ? 112 : 96; }  ///< of FwdSm90WorkTile
  static constexpr int kShareBytes = 48;                                   ///< of StreamShare
  static_assert(sizeof(StreamShare) <= kShareBytes);
};

/// 32 blocks of keys, those from 32 `at` on, as bits (tile/seen_blocks.hpp).
struct SeenWords {
  int at = 0;
  uint32_t any = 0;   ///< that are loaded: those that any of a tile's consumers sees
  uint32_t some = 0;  ///< in which some of this consumer's pairs are not seen
};
/// What an expression leaves of a consumer's tile.
struct SeenTile {
  SeenWords words;    ///< around the consumer's last block
  int before, after;  ///< blocks that are loaded before its last one, and after its first, for others
};
/// In its place in kernels without one.
struct WholeTile {
  WholeTile() = default;
  __device__ __forceinline__ WholeTile(const SeenTile&) {}
  __device__ __forceinline__ operator SeenTile() const { return {}; }
};

/// What a consumer does with a tile: its 64 rows, and blocks of keys. The planner writes it before it signals
/// full_q. Rows up to end_row exist; those from used_q on get zeros.
struct alignas(16) FwdSm90WorkTile : FwdWorkTile {
  tile::KvBlocks blocks;     ///< that its rows see
  int load_begin, load_end;  ///< blocks that the producer loads: those of all consumers
  int last;                  ///< 1: the consumer has no further tile
  std::conditional_t<Expression::kHasSees, SeenTile, WholeTile> seen;
};

/// CTAs of a launch: at most as many as the GPU holds at a time, in whole clusters.
template <class Grid, class Config>
constexpr Grid fwd_sm90_grid(const ForwardArgs& args, const Config& config) {
  if (args.part_rows > 0) return {args.num_splits};
  const tile::QueryTiles tiles = query_tiles(args, config.tile_m());
  if (args.one_tile_each)
    return {int64_t{tiles.grid.blocks} * config.cluster, tiles.grid.heads, tiles.grid.batch};
  const int64_t slots = args.slots > 0 ? args.slots : 1;
  return {(tiles.count() < slots ? tiles.count() : slots) * config.cluster};
}

/// Where things lie in shared memory: addresses in the shared window. Barriers: see fwd_sm90.cuh.
template <class Instance>
struct FwdSm90Memory {
  static constexpr FwdSm90Config kConfig = Instance::kConfig;
  uint32_t base;
  unsigned char* bytes;

  __device__ __forceinline__ uint32_t q(int w) const { return base + w * kConfig.q_bytes(); }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + kConfig.k_at() + stage * kConfig.k_bytes();
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + kConfig.v_at() + stage * kConfig.v_stage_bytes();
  }

  /// Operands of products, of the first consumer or stage, as if shared memory began at 0.
  static constexpr tile::WgmmaDescriptor first_q() { return tile::wgmma_k_major(0, tile::SwizzleMode::k128); }
  static constexpr tile::WgmmaDescriptor first_k() {
    return tile::wgmma_k_major(kConfig.k_at(), tile::SwizzleMode::k128);
  }
  static constexpr tile::WgmmaDescriptor first_v() {
    if (kConfig.e4m3) return transposed_values_operand(kConfig.v_at(), kConfig.head_dim_v);
    return tile::wgmma_mn_major(kConfig.v_at(), tile::SwizzleMode::k128, kConfig.tile_n);
  }

  /// Block `parity` of the elements of a tensor of pairs of warp `warp` of consumer w.
  __device__ __forceinline__ uint32_t pairs(int w, int warp, int parity) const {
    return base + kConfig.pairs_at() + ((4 * w + warp) * 2 + parity) * kConfig.pair_block_bytes();
  }

  /// With shared_rows: four floats that consumer w leaves for the same thread of the other.
  __device__ __forceinline__ uint32_t left_for_other(int w, int thread, int four) const {
    return base + kConfig.sums_at() + w * kConfig.shared_rows_bytes() + (four * 128 + thread) * 16;
  }

  /// Four sums of a thread of consumer w.
  __device__ __forceinline__ uint32_t sums(int w, int thread, int four) const {
    return base + kConfig.sums_at() + w * kConfig.sums_bytes() + (four * 128 + thread) * 16;
  }

  __device__ __forceinline__ uint32_t full_q(int w) const { return barrier(w); }
  __device__ __forceinline__ uint32_t empty_q(int w) const { return barrier(kConfig.consumers + w); }
  __device__ __forceinline__ uint32_t full_k(int s) const { return barrier(2 * kConfig.consumers + s); }
  __device__ __forceinline__ uint32_t full_v(int s) const { return full_k(s) + 8 * kConfig.ring(); }
  __device__ __forceinline__ uint32_t empty_k(int s) const { return full_k(s) + 16 * kConfig.ring(); }
  __device__ __forceinline__ uint32_t empty_v(int s) const { return full_k(s) + 24 * kConfig.ring(); }

  __device__ __forceinline__ uint32_t full_next(uint32_t turn) const {
    return barrier(2 * kConfig.consumers + 4 * kConfig.ring() + turn % 2);
  }
  __device__ __forceinline__ uint32_t empty_next(uint32_t turn) const { return full_next(turn) + 16; }
  /// Stream-K: the part of the share's first tile (even), or of its last, is written.
  __device__ __forceinline__ uint32_t part_written(int part) const {
    return full_next(0) + 32 + 8 * (part & 1);
  }
  __device__ __forceinline__ void wait_for_part(int part) const { ptx::mbarrier_wait(part_written(part), 0); }
  /// The index of the tile after the one of this turn.
  __device__ __forceinline__ uint32_t next(uint32_t turn) const {
    return base + kConfig.next_at() + turn % 2 * 4;
  }

  /// Stream-K: units before each sequence, and of all; whether all parts of a tile are there.
  __device__ __forceinline__ int* units() const { return reinterpret_cast<int*>(bytes + kConfig.units_at()); }
  __device__ __forceinline__ int* all_parts() const { return units() + kStreamSequences + 1; }
  __device__ __forceinline__ StreamShare* share() const {
    return reinterpret_cast<StreamShare*>(units() + kStreamSequences + 4);
  }

  /// By one thread; the others see the barriers after a __syncthreads().
  __device__ __forceinline__ void init_barriers() const {
    for (int w = 0; w < kConfig.row_groups(); ++w) {
      ptx::mbarrier_init(full_q(w), 1);
      ptx::mbarrier_init(empty_q(w), 4 * kConfig.consumers / kConfig.row_groups());
    }
    for (int s = 0; s < kConfig.ring(); ++s) {
      ptx::mbarrier_init(full_k(s), 1);
      ptx::mbarrier_init(full_v(s), 1);
      ptx::mbarrier_init(empty_k(s), 4 * kConfig.consumers / kConfig.rings());
      ptx::mbarrier_init(empty_v(s), 4 * kConfig.consumers / kConfig.rings());
    }
    for (int part = 0; kConfig.stream_k && part < 2; ++part) ptx::mbarrier_init(part_written(part), 4);
    for (uint32_t turn = 0; turn < 2; ++turn) {
      ptx::mbarrier_init(full_next(turn), 1);
      ptx::mbarrier_init(empty_next(turn), kConfig.next_readers());
    }
    ptx::mbarrier_init_fence();
  }

  /// Writes the strips of ones behind V, by all threads; wgmma sees them after a __syncthreads().
  __device__ __forceinline__ void fill_ones(int thread, uint32_t pair) const {
    for (int s = 0; s < kConfig.ring(); ++s) {
      for (int i = thread; i < kConfig.ones_bytes() / 4; i += kConfig.threads())
        ptx::st_shared_4(v(s) + kConfig.v_bytes() + 4 * i, pair);
    }
    ptx::async_proxy_fence();
  }

  /// Tile number `tile` of consumer w, which the planner overwrites work_tiles() tiles later.
  __device__ __forceinline__ FwdSm90WorkTile* work_tile(int w, uint32_t tile) const {
    return reinterpret_cast<FwdSm90WorkTile*>(bytes + kConfig.work_tiles_at()) + kConfig.work_tiles() * w +
           tile % kConfig.work_tiles();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kConfig.barriers_at() + 8 * i; }
};

/// The place of a producer or a consumer in a ring of stages of K and V.
template <int kStages>
struct StageRing {
  int first = 0;  ///< stage of the ring
  int stage = first;
  uint32_t phase = 0;  ///< parity of the use of the stage

  __device__ __forceinline__ int before() const { return (stage == first ? first + kStages : stage) - 1; }
  __device__ __forceinline__ void advance() {
    if (++stage == first + kStages) {
      stage = first;
      phase ^= 1;
    }
  }
};

/// Of two rings the one whose turn it is stands first.
template <int kStages>
__device__ __forceinline__ void exchange(StageRing<kStages>& a, StageRing<kStages>& b) {
  const StageRing<kStages> before = a;
  a = b;
  b = before;
}

/// The blocks of keys that an expression lets the consumers of a tile see, or all: of the tile whose first row is `row`. `head` is
/// that of the queries: heads are not packed where there is an expression.
template <int kConsumers>
struct TileBlocks {
  const uint32_t *any = nullptr, *some = nullptr;  ///< of the first consumer's rows
  int consumers = 0, words = 0;                    ///< that have rows; words of each

  __device__ __forceinline__ TileBlocks(const ForwardArgs& f, int batch, int head, int row) {
    if constexpr (Expression::kHasSees) {
      // Of rows behind the longest sequence, which see nothing, the last words that there are.
      const int first = min(row / tile::kSeenQueries, f.seen.tiles - 1);
      const tile::SeenBlocks blocks = f.seen.at(batch, head, first);
      any = blocks.any;
      some = blocks.some;
      consumers = min(kConsumers, f.seen.tiles - first);
      words = f.seen.words();
    }
  }

  /// Blocks from 32 `at` on that any consumer sees.
  __device__ __forceinline__ uint32_t loaded(int at) const {
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) bits |= any[min(w, consumers - 1) * words + at];
    return bits;
  }
  /// What consumer w knows of them.
  __device__ __forceinline__ SeenWords words_of(int w, int at) const {
    return {at, loaded(at), some[min(w, consumers - 1) * words + at]};
  }
  /// What consumer w has of the loaded ones of blocks [begin, end): its own are [own_begin, own_end).
  __device__ __forceinline__ SeenTile tile_of(int w, int begin, int end, int& own_begin, int& own_end) const {
    const tile::OwnBlocks own = tile::own_blocks(
        begin, end, [&](int at) { return loaded(at); },
        [&](int at) { return w < consumers ? any[w * words + at] : 0; });
    own_begin = own.begin;
    own_end = own.end;
    return {words_of(w, max(own.end - 1, 0) / 32), own.before, own.after};
  }
  /// The last one before n that any consumer sees; begin - 1 where there is none.
  __device__ __forceinline__ int before(int n, int begin) const {
    if constexpr (!Expression::kHasSees) return n - 1;
    return tile::block_before(n, begin, [&](int at) { return loaded(at); });
  }
};

}  // namespace fovea::cuda
