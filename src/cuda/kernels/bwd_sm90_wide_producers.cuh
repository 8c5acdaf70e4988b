// The producers of bwd_sm90_wide, a thread each: one loads X and streams Z, the other Y and W.
#pragma once

#include <type_traits>

#include "cuda/kernels/bwd_sm90_wide_config.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace fovea::cuda {

/// Loads X and Z (kZ), or Y and W.
template <class Instance, bool kZ>
struct BwdSm90WideLoader {
  using Memory = BwdSm90WideMemory<Instance>;
  static constexpr BwdSm90WideConfig kConfig = Instance::kConfig;
  static constexpr int kStrips = kZ ? kConfig.strips_x() : kConfig.strips_y(),
                       kPieces = kConfig.pieces(kStrips);
  static constexpr bool kLoadsDelta = !kZ && kConfig.has_dp();
  const TmaBackwardArgs& args;
  const Memory& memory;

  __device__ __forceinline__ const CUtensorMap& resident() const {
    return kConfig.queries_stay() ? (kZ ? args.q : args.d_o) : (kZ ? args.k : args.v);
  }
  __device__ __forceinline__ const CUtensorMap& streamed() const {
    return kConfig.queries_stay() ? (kZ ? args.k : args.v) : (kZ ? args.q : args.d_o);
  }

  __device__ __forceinline__ void run() const {
    const BwdSm90WideWork work = memory.work();
    if (work.begin >= work.end) return;
    ptx::tma_prefetch(streamed());
    const tile::AttentionParams& p = args.b.p;
    const int batch_x = p.cu_seqlens_q != nullptr ? 0 : work.batch;
    if (kZ || kConfig.has_dp()) load_resident(work, batch_x);
    typename std::conditional_t<kZ, typename Memory::RingZ, typename Memory::RingW> ring;
    uint32_t t = 0;
#pragma unroll 1
    for (int head = work.head_z; head < work.head_z + work.heads_z; ++head) {
#pragma unroll 1
      for (int n = work.begin; n < work.end; ++n, ++t, ring.next()) {
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece)
          load_piece(work, ring.slot(piece), ring.phase_of(piece), piece, head, n, batch_x, t);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_resident(const BwdSm90WideWork& work, int batch) const {
    const uint32_t full = kZ ? memory.full_x() : memory.full_y();
    constexpr int kShared = kConfig.shared_strips(kStrips);
    ptx::mbarrier_arrive_expect(full, kShared * kConfig.kResidentStripBytes);
    const int row = work.row_x + work.first + ptx::cta_rank() * kConfig.kRows;
#pragma unroll 1
    for (int s = 0; s < kShared; ++s)
      ptx::tma_load(kZ ? memory.x(s) : memory.y(s), resident(), full, s * kConfig.kStrip, row, work.head_x,
                    batch);
  }

  /// This CTA's strip of a piece for all of the cluster; lse and delta of the tile come with its first piece.
  __device__ __forceinline__ void load_piece(const BwdSm90WideWork& work, int slot, uint32_t phase, int piece,
                                             int head, int n, int batch, uint32_t t) const {
    const uint32_t full = kZ ? memory.full_z(slot) : memory.full_w(slot);
    const int strips = kConfig.strips_of(kStrips, piece);
    constexpr int kStatistics = (kLoadsDelta ? 2 : 1) * kConfig.statistics_bytes();
    ptx::mbarrier_wait(kZ ? memory.empty_z(slot) : memory.empty_w(slot), phase ^ 1);
    ptx::mbarrier_arrive_expect(full, strips * kConfig.strip_bytes() + (piece == 0 ? kStatistics : 0));
    for (int s = ptx::cta_rank(); s < strips; s += kConfig.kCluster)
      ptx::tma_load_multicast((kZ ? memory.z(slot) : memory.w(slot)) + s * kConfig.strip_bytes(), streamed(),
                              full, (piece * kConfig.kPieceStrips + s) * kConfig.kStrip,
                              work.row_z + n * kConfig.streamed, head, batch, (1u << kConfig.kCluster) - 1);
    if constexpr (!kConfig.queries_stay()) {
      if (piece != 0) return;
      const int64_t row =
          (int64_t{work.batch} * args.b.p.heads_q + head) * args.b.rows + n * kConfig.streamed;
      ptx::bulk_load(kZ ? memory.lse_z(t) : memory.lse_w(t), args.b.lse_log2 + row,
                     kConfig.statistics_bytes(), full);
      if constexpr (kLoadsDelta)
        ptx::bulk_load(memory.delta(t), args.b.delta + row, kConfig.statistics_bytes(), full);
    }
  }
};

}  // namespace fovea::cuda
