// Configuration of bwd_sm90_wide, its shared memory and barriers, what its warps are told of their tile, and the grid.
#pragma once

#include <cstdint>

#include "cuda/kernels/tma_args.hpp"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The gradient that a launch computes.
enum class BwdSm90WideMode { kDk, kDv, kDq };

struct BwdSm90WideConfig {
  using Mode = BwdSm90WideMode;
  Mode mode;
  int head_dim, head_dim_v;  ///< padded to multiples of 64
  int streamed;              ///< rows of a streamed tile: the n of the scores' products
  int z_pieces, w_pieces;    ///< of the rings: a tile at least
  /// Strips of X and of Y, the last ones, that the consumer that multiplies them keeps in registers, 16 a strip.
  int kept_strips = 0;
  bool expression = false;  ///< compiled for warp/expression.cuh, which is asked of every pair
  bool dropout = false;

  static constexpr int kCluster =
      2;  ///< CTAs that share what is streamed: each loads every second strip for both
  static constexpr int kConsumers = 2, kRows = 64;    ///< warpgroups that share the sums of kRows rows
  static constexpr int kStrip = 64, kRowBytes = 128;  ///< columns of a strip, and their bytes
  static constexpr int kPieceStrips = 2;              ///< what one barrier of a ring stands for
  static constexpr int kResidentStripBytes = kRows * kRowBytes;
  static constexpr int kMostShared = 227 * 1024;
  static constexpr int threads() { return 128 * (kConsumers + 1); }
  /// 168 registers a thread at the launch: 240 for a consumer leave 24.
  static constexpr int producer_registers() { return 24; }
  static constexpr int consumer_registers() { return 240; }

  constexpr bool queries_stay() const { return mode == Mode::kDq; }
  /// Whether dP is computed: dV needs P alone.
  constexpr bool has_dp() const { return mode != Mode::kDv; }
  /// Whether dS is the gradient of a bias, too, where the launch says so.
  constexpr bool adds_dbias() const { return expression && mode == Mode::kDq; }
  constexpr int tile_m() const { return queries_stay() ? kRows : streamed; }
  constexpr int tile_n() const { return queries_stay() ? streamed : kRows; }

  constexpr int strips_x() const { return head_dim / kStrip; }    ///< of X and Z
  constexpr int strips_y() const { return head_dim_v / kStrip; }  ///< of Y and W
  static constexpr int pieces(int strips) { return (strips + kPieceStrips - 1) / kPieceStrips; }
  static constexpr int strips_of(int strips, int piece) {
    const int left = strips - piece * kPieceStrips;
    return left < kPieceStrips ? left : kPieceStrips;
  }
  /// Of the sums, which have the columns of Z, or of W in dV: the first consumer has more where they are odd.
  constexpr int strips_sum() const { return has_dp() ? strips_x() : strips_y(); }
  constexpr int first_strip(int consumer) const { return consumer == 0 ? 0 : (strips_sum() + 1) / 2; }
  constexpr int last_strip(int consumer) const {
    return consumer == 0 ? (strips_sum() + 1) / 2 : strips_sum();
  }

  constexpr int strip_bytes() const { return streamed * kRowBytes; }
  constexpr int piece_bytes() const { return kPieceStrips * strip_bytes(); }
  static constexpr int kWeightBytes = kRows * kRowBytes;  ///< of P and dS, up to 64 columns
  /// Stages of lse and delta: a stage is overwritten once a later tile's piece is read (a ring has two tiles at most).
  static constexpr int kStages = 4;
  constexpr int statistics_bytes() const { return queries_stay() ? 0 : streamed * 4; }

  /// Of X or Y: those in shared memory.
  constexpr int shared_strips(int strips) const { return strips - kept_strips; }
  constexpr int y_at() const { return shared_strips(strips_x()) * kResidentStripBytes; }
  constexpr int z_at() const {
    return y_at() + (has_dp() ? shared_strips(strips_y()) * kResidentStripBytes : 0);
  }
  constexpr int w_at() const { return z_at() + z_pieces * piece_bytes(); }
  constexpr int weights_at() const { return w_at() + w_pieces * piece_bytes(); }
  constexpr int statistics_at() const { return weights_at() + kWeightBytes; }
  constexpr int work_at() const {
    return statistics_at() + (has_dp() ? 3 : 2) * kStages * statistics_bytes();
  }
  static constexpr int kWorkBytes = 64;
  constexpr int barriers_at() const { return work_at() + kWorkBytes; }
  constexpr int barriers() const { return 5 + 2 * (z_pieces + w_pieces); }
  constexpr int shared_bytes() const { return barriers_at() + barriers() * 8; }
};

/// What the warps are told of their tile: 64 rows of X for each CTA of the cluster, against the blocks of Z that any of them
/// meets, for each head of Z in turn.
struct BwdSm90WideWork {
  int row_x, row_z;           ///< first rows of the sequence (0 unless packed)
  int used_q, used_k;         ///< its rows that take part
  int length_x;               ///< rows of X that the tensors hold for it
  int batch, head_x, head_z;  ///< head_z: the first
  int first;                  ///< row of X of the cluster
  int begin, end;             ///< blocks of Z
  int full_begin, full_end;   ///< those that need no mask
  int heads_z;

  __device__ __forceinline__ tile::SequenceSpan span() const {
    tile::SequenceSpan span;
    span.used_q = used_q, span.used_k = used_k;
    return span;
  }
};

/// Clusters that share the rows of one head.
template <BwdSm90WideConfig C>
constexpr int bwd_sm90_wide_tiles(const tile::AttentionParams& p) {
  constexpr int kRows = C.kRows * C.kCluster;
  const int rows = C.queries_stay() ? p.seqlen_q : p.seqlen_k;
  return rows > kRows ? tile::ceil_div(rows, kRows) : 1;
}
template <class Grid, BwdSm90WideConfig C>
constexpr Grid bwd_sm90_wide_grid(const BackwardArgs& args) {
  const int64_t heads = C.queries_stay() ? args.p.heads_q : args.p.heads_kv;
  return {bwd_sm90_wide_tiles<C>(args.p) * heads * args.p.batch * C.kCluster};
}

/// The tile of this cluster: head by head, the tiles of most work first.
template <BwdSm90WideConfig C>
__device__ __forceinline__ BwdSm90WideWork bwd_sm90_wide_work(const BackwardArgs& b) {
  constexpr int kRows = C.kRows * C.kCluster;
  const tile::AttentionParams& p = b.p;
  const int tiles = bwd_sm90_wide_tiles<C>(p), heads = C.queries_stay() ? p.heads_q : p.heads_kv;
  const int index = static_cast<int>(blockIdx.x) / C.kCluster, place = index % tiles;
  // The last queries see most keys of a causal mask, and the first keys are seen by most queries.
  const int tile = C.queries_stay() && p.window_right >= 0 ? tiles - 1 - place : place;
  BwdSm90WideWork work;
  work.batch = index / tiles / heads;
  work.head_x = index / tiles % heads;
  work.head_z = C.queries_stay() ? work.head_x / p.group : work.head_x * p.group;
  work.heads_z = C.queries_stay() ? 1 : p.group;
  work.first = tile * kRows;
  const tile::SequenceSpan span = tile::sequence_span(p, work.batch);
  work.row_x = static_cast<int>(C.queries_stay() ? span.row_q : span.row_k);
  work.row_z = static_cast<int>(C.queries_stay() ? span.row_k : span.row_q);
  work.used_q = span.used_q, work.used_k = span.used_k;
  work.length_x = C.queries_stay() ? span.length_q : span.length_k;
  tile::KvBlocks blocks;
  if constexpr (C.queries_stay()) {
    blocks = tile::kv_blocks(p, span, work.first, min(work.first + kRows, span.used_q), C.streamed);
  } else {
    blocks = tile::q_blocks(p, span, work.first, min(work.first + kRows, span.used_k), C.streamed);
  }
  if (blocks.empty()) blocks = {};
  work.begin = blocks.begin, work.end = blocks.end;
  work.full_begin = blocks.full_begin, work.full_end = blocks.full_end;
  return work;
}

/// Where the pieces of a tile lie in a ring of kSlots, and the phase of their barriers; uniform.
template <int kPieces, int kSlots>
struct BwdSm90WideRing {
  static_assert(kSlots >= kPieces && kSlots <= 2 * kPieces);
  int first = 0;       ///< slot of the tile's first piece
  uint32_t phase = 0;  ///< and its phase

  __device__ __forceinline__ bool wraps(int piece) const { return first + piece >= kSlots; }
  __device__ __forceinline__ int slot(int piece) const { return first + piece - (wraps(piece) ? kSlots : 0); }
  __device__ __forceinline__ uint32_t phase_of(int piece) const { return phase ^ (wraps(piece) ? 1u : 0u); }
  __device__ __forceinline__ void next() {
    if constexpr (kSlots == kPieces) {
      phase ^= 1;
    } else {
      first += kPieces;
      if (first >= kSlots) first -= kSlots, phase ^= 1;
    }
  }
};

/// Where things lie in shared memory: addresses in the shared window. Barriers: see bwd_sm90_wide.cuh.
template <class Instance>
struct BwdSm90WideMemory {
  static constexpr BwdSm90WideConfig kConfig = Instance::kConfig;
  static constexpr int kPiecesZ = kConfig.pieces(kConfig.strips_x()),
                       kPiecesW = kConfig.pieces(kConfig.strips_y());
  using RingZ = BwdSm90WideRing<kPiecesZ, kConfig.z_pieces>;
  using RingW = BwdSm90WideRing<kPiecesW, kConfig.w_pieces>;
  uint32_t base;

  __device__ __forceinline__ uint32_t x(int strip) const {
    return base + strip * kConfig.kResidentStripBytes;
  }
  __device__ __forceinline__ uint32_t y(int strip) const { return x(strip) + kConfig.y_at(); }
  __device__ __forceinline__ uint32_t z(int slot) const {
    return base + kConfig.z_at() + slot * kConfig.piece_bytes();
  }
  __device__ __forceinline__ uint32_t w(int slot) const {
    return base + kConfig.w_at() + slot * kConfig.piece_bytes();
  }
  /// P, then dS: rows of X, columns of Z.
  __device__ __forceinline__ uint32_t weights() const { return base + kConfig.weights_at(); }
  /// lse of tile number t as it comes with Z; the same with W, and delta.
  __device__ __forceinline__ uint32_t lse_z(uint32_t t) const { return statistics(0, t); }
  __device__ __forceinline__ uint32_t lse_w(uint32_t t) const { return statistics(1, t); }
  __device__ __forceinline__ uint32_t delta(uint32_t t) const { return statistics(2, t); }
  __device__ __forceinline__ BwdSm90WideWork& work() const {
    static_assert(sizeof(BwdSm90WideWork) <= kConfig.kWorkBytes);
    return *reinterpret_cast<BwdSm90WideWork*>(ptx::shared_pointer(base + kConfig.work_at()));
  }

  __device__ __forceinline__ uint32_t full_x() const { return barrier(0); }
  __device__ __forceinline__ uint32_t full_y() const { return barrier(1); }
  __device__ __forceinline__ uint32_t full_p() const { return barrier(2); }
  __device__ __forceinline__ uint32_t full_weights() const { return barrier(3); }
  __device__ __forceinline__ uint32_t empty_weights() const { return barrier(4); }
  __device__ __forceinline__ uint32_t full_z(int slot) const { return barrier(5 + slot); }
  __device__ __forceinline__ uint32_t empty_z(int slot) const { return full_z(kConfig.z_pieces + slot); }
  __device__ __forceinline__ uint32_t full_w(int slot) const { return full_z(2 * kConfig.z_pieces + slot); }
  __device__ __forceinline__ uint32_t empty_w(int slot) const { return full_w(kConfig.w_pieces + slot); }

  /// By one thread; the others see the barriers after a barrier of the cluster.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4, kOne = kWarps * kConfig.kCluster, kBoth = kConfig.kConsumers * kOne;
    ptx::mbarrier_init(full_x(), 1);
    ptx::mbarrier_init(full_y(), 1);
    ptx::mbarrier_init(full_p(), kWarps);
    ptx::mbarrier_init(full_weights(), kWarps);
    ptx::mbarrier_init(empty_weights(), kConfig.kConsumers * kWarps);
    for (int slot = 0; slot < kConfig.z_pieces; ++slot) {
      ptx::mbarrier_init(full_z(slot), 1);
      ptx::mbarrier_init(empty_z(slot), kConfig.has_dp() ? kBoth : kOne);
    }
    for (int slot = 0; slot < kConfig.w_pieces; ++slot) {
      ptx::mbarrier_init(full_w(slot), 1);
      ptx::mbarrier_init(empty_w(slot), kConfig.has_dp() ? kOne : kBoth);
    }
    ptx::mbarrier_init_fence();
  }

 private:
  __device__ __forceinline__ uint32_t statistics(int which, uint32_t t) const {
    return base + kConfig.statistics_at() +
           (which * kConfig.kStages + static_cast<int>(t % kConfig.kStages)) * kConfig.statistics_bytes();
  }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kConfig.barriers_at() + 8 * i; }
};

}  // namespace fovea::cuda
