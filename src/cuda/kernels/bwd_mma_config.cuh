// How bwd_mma divides its work: what a CTA knows of it, the configuration of a kernel with its shared memory and
// grid, and which part of each product a thread computes.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/opaque.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "tile/kv_range.hpp"
#include "tile/seen_blocks.hpp"

namespace fovea::cuda {

/// What a CTA knows of its work and needs now and then: in shared memory, as registers are what limits this
/// kernel.
struct BwdWork {
  tile::SequenceSpan span;
  tile::Dropout dropout;
  int batch, head_kv;
  int block, j0;                 ///< of keys, and its first
  int m_first, m_end;            ///< blocks of queries that see the key block
  int before_first, before_end;  ///< those that see the key block after it, which adds to dQ before it
  int* turn[2];                  ///< of the tile of dQ that this CTA adds to in a step of either parity
  bool not_finite[2];            ///< the step, of either parity, has rows that are not finite
  tile::SeenBlocks seen;         ///< blocks of queries that the expression lets see the keys
  int behind[2];                 ///< of these the one behind that of a step of either parity
};

struct BwdConfig {
  int head_dim, head_dim_v;  ///< padded: multiples of 32
  int tile_m, tile_n;
  int warps_q;     ///< slices of queries in S, of columns in dK and dV; slices of keys are tile_n / 32
  int chunk_m;     ///< queries whose S and dP a warp holds at a time
  int warps_dq_m;  ///< warps along the queries in dQ
  int stages_q, stages_do;  ///< of Q and dO
  int min_ctas = 1;         ///< CTAs an SM, for the register allocator
  bool general = false;     ///< every term of the score; else window, causal and lengths only
  /// 0, or wide heads: a CTA owns `head_dim` columns of dK and dQ and `head_dim_v` of dV (slice blockIdx.y),
  /// and computes S and dP from all columns of Q, K, dO, V, which pass through shared memory `stream` columns
  /// at a time.
  int stream = 0;
  MmaShape mma = MmaShape::kM16N8K16;
  // Kernels that know a term, and for the rest are no general ones.
  bool alibi = false, dropout = false;
  bool expression = false;  ///< compiled for the problem's expression

  constexpr int warps_n() const { return tile_n / 32; }
  constexpr int num_warps() const { return warps_n() * warps_q; }
  constexpr int threads() const { return 32 * num_warps(); }
  constexpr bool exchanges_p() const { return warps_q > 1; }  ///< P through shared memory, as operands

  // Offsets in shared memory.
  constexpr int offset_k() const { return 0; }
  constexpr int offset_v() const { return tile_n * head_dim * 2; }
  constexpr int stream_bytes() const { return (tile_n + tile_m) * stream * 2; }  ///< of one of two stages
  constexpr int offset_q() const {
    return offset_v() + (stream > 0 ? 2 * stream_bytes() : tile_n * head_dim_v * 2);
  }
  constexpr int offset_do() const { return offset_q() + stages_q * tile_m * head_dim * 2; }
  constexpr int offset_ds() const { return offset_do() + stages_do * tile_m * head_dim_v * 2; }
  constexpr int offset_p() const { return offset_ds() + tile_n * tile_m * 2; }
  constexpr int offset_stats() const { return offset_p() + (exchanges_p() ? tile_n * tile_m * 2 : 0); }
  constexpr int offset_kept() const { return offset_stats() + 2 * 2 * tile_m * 4; }
  /// Of a thread: a word for each of its chunks of a step.
  constexpr int kept_bytes() const { return dropout ? threads() * (tile_m / (warps_q * chunk_m)) * 4 : 0; }
  constexpr int offset_work() const { return offset_kept() + kept_bytes(); }
  constexpr int shared_bytes() const { return offset_work() + static_cast<int>(sizeof(BwdWork)); }

  constexpr bool valid() const {
    return head_dim % 32 == 0 && head_dim_v % 32 == 0 && tile_n % 32 == 0 && tile_m % 32 == 0 &&
           tile_m % (warps_q * chunk_m) == 0 && chunk_m % 16 == 0 && head_dim % (16 * warps_q) == 0 &&
           head_dim_v % (16 * warps_q) == 0 && num_warps() % warps_dq_m == 0 &&
           tile_m % (16 * warps_dq_m) == 0 && head_dim % (16 * (num_warps() / warps_dq_m)) == 0 &&
           BackwardArgs::kRowPadding % tile_m == 0 && 2 * tile_m <= threads() && stages_q <= 2 &&
           stages_do <= 2 && tile_m % BackwardArgs::kSemaphoreRows == 0 &&
           (stream == 0 || (stages_q == 1 && stages_do == 1 && exchanges_p() && tile_m == warps_q * chunk_m &&
                            2 * stream_bytes() >= tile_n * head_dim_v * 2 && stream % 32 == 0));
  }
};

/// Grid of a launch: x, y, z. `value_slice` of the kernel table is head_dim_v where heads are streamed, else
/// 0.
template <class Grid>
constexpr Grid bwd_mma_grid(const BackwardArgs& args, const BwdConfig& config) {
  const int64_t ctas = static_cast<int64_t>(args.key_blocks) * args.p.heads_kv * args.p.batch;
  if (config.stream == 0) return {ctas, 1, 1};
  const int slices = (args.p.head_dim + config.head_dim - 1) / config.head_dim;
  const int slices_v = (args.p.head_dim_v + config.head_dim_v - 1) / config.head_dim_v;
  return {ctas, slices > slices_v ? slices : slices_v, 1};
}

/// Offset of 16 rows x 8 columns in a head's sums of dq: they lie as an mma leaves them in its lanes, 16
/// bytes a lane, so that a warp adds 512 consecutive bytes.
__host__ __device__ constexpr int64_t dq_fragment(int row16, int column8, int columns) {
  return (static_cast<int64_t>(row16) * (columns / 8) + column8) * 128;
}

template <class Instance>
struct BwdMma {
  static constexpr BwdConfig kC = Instance::kConfig;
  static_assert(kC.valid());
  static constexpr int kD = kC.head_dim, kDv = kC.head_dim_v, kM = kC.tile_m, kN = kC.tile_n;
  static constexpr int kThreads = kC.threads();
  static constexpr int kChunkN8 = kC.chunk_m / 8;
  static constexpr int kSliceM = kM / kC.warps_q;
  static constexpr int kChunks = kSliceM / kC.chunk_m;
  static constexpr int kOwnD16 = kD / 16 / kC.warps_q, kOwnDv16 = kDv / 16 / kC.warps_q;
  static constexpr int kWarpsDqD = kC.num_warps() / kC.warps_dq_m;
  static constexpr int kDqM16 = kM / 16 / kC.warps_dq_m;
  static constexpr int kDqD16 = kD / 16 / kWarpsDqD;
  /// 16-column groups of dQ at a time: beside the accumulators of dK and dV there is room for 64 a lane, with
  /// 16 warps for 32.
  static constexpr int kDqRoom = kThreads * kC.min_ctas > 256 ? 4 : 8;
  static constexpr int kDqGroup = kDqD16 * kDqM16 <= kDqRoom                 ? kDqD16
                                  : kDqD16 % 4 == 0 && 4 * kDqM16 <= kDqRoom ? 4
                                  : kDqD16 % 2 == 0 && 2 * kDqM16 <= kDqRoom ? 2
                                                                             : 1;

  using TileK = SharedTile<kN, kD>;
  using TileV = SharedTile<kN, kDv>;
  using TileQ = SharedTile<kM, kD>;
  using TileDO = SharedTile<kM, kDv>;
  using TileP = SharedTile<kN, kM>;
  static constexpr int kStream = kC.stream > 0 ? kC.stream : 32;  // 32: unused
  using StreamN = SharedTile<kN, kStream>;
  using StreamM = SharedTile<kM, kStream>;

  /// Where a thread stands. Made anew in each phase: kept over a step, what is derived from it would cost 30
  /// registers.
  struct Place {
    int lane, g, t;            ///< g, t: row and pair of columns in a fragment
    int warp_n, warp_q;        ///< in S, dP, dV, dK
    int warp_dq_m, warp_dq_d;  ///< in dQ

    __device__ __forceinline__ explicit Place(int thread) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
      constexpr bool kAnew = true;
#else
      // Where P stays in registers there are few addresses: sm_90 has room to keep them (measured: 5 % at D =
      // 64).
      constexpr bool kAnew = kC.warps_q > 1;
#endif
      if constexpr (kAnew) ptx::make_opaque(thread);
      constexpr auto divide = [](int x, int y) {
        return static_cast<int>(static_cast<uint32_t>(x) / static_cast<uint32_t>(y));
      };
      const int warp = divide(thread, 32);
      lane = thread & 31;
      g = lane >> 2, t = lane & 3;
      warp_q = divide(warp, kC.warps_n()), warp_n = warp - warp_q * kC.warps_n();
      warp_dq_d = divide(warp, kC.warps_dq_m), warp_dq_m = warp - warp_dq_d * kC.warps_dq_m;
    }
    /// First query of a chunk, in the tile.
    __device__ __forceinline__ int column0(int chunk) const {
      return warp_q * kSliceM + chunk * kC.chunk_m;
    }
    /// Where this lane's words of a chunk lie in sP^T and sdS^T: fragment (m, n), row g or g + 8.
    __device__ __forceinline__ uint32_t words(int chunk) const {
      return TileP::offset(warp_n * 32 + g, column0(chunk) / 8) + static_cast<uint32_t>(t) * 4;
    }
    static __device__ __forceinline__ uint32_t word(uint32_t words, int m, int half, int n) {
      return TileP::moved(words, m * 16 + half * 8, n);
    }
  };

  /// Copies of the terms that every pair needs.
  struct Pairs {
    int shift, window_lo, window_hi;  ///< key j and query i see each other when lo <= j - i - shift <= hi
    int used_q, used_k;

    __device__ __forceinline__ Pairs(const tile::AttentionParams& p, const tile::SequenceSpan& span)
        : shift(span.used_k - span.used_q),
          window_lo(p.window_left < 0 ? -(1 << 30) : -p.window_left),
          window_hi(p.window_right < 0 ? 1 << 30 : p.window_right),
          used_q(span.used_q),
          used_k(span.used_k) {}
    __device__ __forceinline__ bool sees(int i, int j) const {
      const int distance = j - i - shift;
      return distance >= window_lo && distance <= window_hi && j < used_k;
    }
    /// Every query of a block sees every key of a block.
    __device__ __forceinline__ bool all_see(int i, int j) const {
      return j + kN - 1 - i - shift <= window_hi && j - (i + kM - 1) - shift >= window_lo && j + kN <= used_k;
    }
  };
};

}  // namespace fovea::cuda
