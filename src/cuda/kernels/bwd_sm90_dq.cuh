// dQ = dS K of a step of bwd_sm90, in slices of 64 queries x slice_columns(), and its way to dq_sum. Where consumers have the
// registers each computes one slice; else a warpgroup of its own computes them all, one after the other.
#pragma once

#include <cstdint>

#include "cuda/kernels/bwd_sm90_chain.cuh"
#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/store.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"
#include "tile/wgmma_strips.hpp"

namespace fovea::cuda {

template <class Instance>
struct BwdSm90Dq : BwdSm90Warpgroup<Instance> {
  using T = typename Instance::Element;
  using Base = BwdSm90Warpgroup<Instance>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::uniform, Base::warp;
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n(), kD = kConfig.head_dim,
                       kSlice = kConfig.kSlice;
  static constexpr int kSlicesAcross = kConfig.slices_across(),
                       kColumns = kConfig.slice_columns();  ///< of a slice
  using Strips = tile::WgmmaStrips<kConfig.k_strip>;        ///< of K
  using DsStrips = tile::WgmmaStrips<64>;                   ///< of dS, whose columns are keys
  using Slice = float[kColumns / 2];                        ///< (64 queries, kColumns)
  /// Bytes: of a fragment, of 16 rows of dq_sum, of a warp's part of a slice.
  static constexpr int kFragment = 512, kRow16 = kD / 8 * kFragment, kPart = kConfig.slice_bytes() / 4;

  /// acc = (64 queries of dS) (the slice's columns of K, which lies at k_at), over all keys of the tile.
  __device__ __forceinline__ void issue(Slice& acc, int buffer, int k_at, int slice) const {
    issue_columns<kColumns>(acc, buffer, k_at, slice / kSlicesAcross * kSlice,
                            slice % kSlicesAcross * kColumns);
  }
  /// acc = (64 queries of dS, from `row` on) (kWidth columns of K, from `column` on), over all keys of the tile. A descriptor may
  /// begin 64 bytes inside a strip.
  template <int kWidth>
  __device__ __forceinline__ void issue_columns(float (&acc)[kWidth / 2], int buffer, int k_at, int row,
                                                int column) const {
    const uint64_t a = descriptor(tile::wgmma_k_major(0, DsStrips::kSwizzle),
                                  kConfig.ds_at() + buffer * kConfig.ds_bytes() + row * kConfig.kDsRowBytes);
    const uint64_t b =
        descriptor(tile::wgmma_mn_major(0, Strips::kSwizzle, kN), k_at + Strips::column_at(column, kN));
    using Product = ptx::Wgmma<kWidth>;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      const uint64_t a_step = a + tile::wgmma_start_step(DsStrips::column_at(16 * i, kM));
      const uint64_t b_step = b + tile::wgmma_start_step(i * 16 * Strips::kRowBytes);
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kMN>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }

  /// Stages this warp's 16 queries of a slice at `to`, a slice's room, as bwd_postprocess reads them: fragments of 16
  /// queries x 8 columns, 16 bytes a lane.
  __device__ __forceinline__ static void stage(const Slice& acc, uint32_t to) {
    const uint32_t at = to + warp() * kPart + lane() * 16;
#pragma unroll
    for (int t = 0; t < kColumns / 8; ++t)
      ptx::st_shared_16(at + t * kFragment,
                        uint4{__float_as_uint(acc[4 * t]), __float_as_uint(acc[4 * t + 1]),
                              __float_as_uint(acc[4 * t + 2]), __float_as_uint(acc[4 * t + 3])});
  }
  /// Rows of dq, which are complete, times the scale. `kVectors`: in 16 bits and in vectors of 16 bytes alone, which takes fewer registers.
  template <bool kVectors>
  __device__ __forceinline__ void write(const Slice& acc, const BwdSm90Route& route, int slice) const {
    const int row = slice / kSlicesAcross * kSlice + warp() * 16 + lane() / 4,
              column = slice % kSlicesAcross * kColumns;
    const bool aligned = (args.b.p.aligned16 & tile::kAlignedDQ) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int exist = row + 8 * half < route.rows ? args.b.p.head_dim - column : 0;
      const int64_t at = (row + 8 * half) * args.b.p.dq.row + column;
      if constexpr (kVectors) {
        store_row_vectors<kColumns>(reinterpret_cast<T*>(route.dq) + at, exist, acc, half, args.b.p.scale,
                                    lane());
      } else {
        store_gradient_row<kColumns, T>(route.dq, at, args.b.p.dq_is_f32, aligned, exist, acc, half,
                                        args.b.p.scale, lane());
      }
    }
  }

  // --- by the last block to add ---

  /// Adds a consumer's slice to the sums of the blocks before, which the writer has brought, and writes it as dq.
  __device__ __forceinline__ void deliver(Slice& acc, int slice) const {
    const uint32_t at = memory.route(slice);
    const auto flags = static_cast<uint32_t>(uniform(static_cast<int>(BwdSm90Route::flags_at(at))));
    if (flags & BwdSm90Route::kReceives) add_inbox(acc, memory.dq(slice) + warp() * kPart + lane() * 16);
    write<true>(acc, BwdSm90Route::read(at), slice);
  }

  // --- along a chain ---

  /// Adds what later keys have sent of step number `count` to a slice, and sends it on, or writes dq. The messenger tells the
  /// other CTAs.
  __device__ __forceinline__ void pass(Slice& acc, uint32_t count, int slice) const {
    const uint32_t at = memory.route(count);
    const auto flags = static_cast<uint32_t>(uniform(static_cast<int>(BwdSm90Route::flags_at(at))));
    const uint32_t inbox = memory.dq(slice) + warp() * kPart + lane() * 16;
    if (flags & BwdSm90Route::kReceives) {
      ptx::mbarrier_wait_cluster(memory.full_inbox(slice), (flags & BwdSm90Route::kInboxPhase) != 0);
      add_inbox(acc, inbox);
    }
    __syncwarp();  // lanes leave the wait one by one: the compiler takes the warp for whole again
    if (flags & BwdSm90Route::kSends) {
      const bool up = (flags & BwdSm90Route::kUp) != 0;
      ptx::mbarrier_wait(memory.room(up, slice), (flags & BwdSm90Route::kRoomPhase) != 0);
      send(acc, ptx::address_in_cta(inbox, ptx::cta_rank() + (up ? 1 : -1)));
    } else {
      write<false>(acc, BwdSm90Route::read(at), slice);
    }
    ptx::mbarrier_wait(memory.empty_dq(slice),
                       (count & 1) ^ 1);  // the messenger is done with the step before
    ptx::barrier_arrive(kDqStaged + slice, kConsumerAndWriter);
  }
  __device__ __forceinline__ static void add_inbox(Slice& acc, uint32_t from) {
#pragma unroll
    for (int t = 0; t < kColumns / 8; ++t) {
      const uint4 x = ptx::ld_shared_16(from + t * kFragment);
      acc[4 * t] += __uint_as_float(x.x), acc[4 * t + 1] += __uint_as_float(x.y);
      acc[4 * t + 2] += __uint_as_float(x.z), acc[4 * t + 3] += __uint_as_float(x.w);
    }
  }
  __device__ __forceinline__ static void send(const Slice& acc, uint32_t to) {
#pragma unroll
    for (int t = 0; t < kColumns / 8; ++t)
      ptx::st_cluster_16(to + t * kFragment,
                         uint4{__float_as_uint(acc[4 * t]), __float_as_uint(acc[4 * t + 1]),
                               __float_as_uint(acc[4 * t + 2]), __float_as_uint(acc[4 * t + 3])});
  }
  // --- to dq_sum ---

  /// Where the sums of dQ of block n of a head are, which is counted over all sequences.
  __device__ __forceinline__ static float* sums_of(const BackwardArgs& b, int head, int n) {
    return b.dq_sum + (int64_t{head} * b.rows + n * kM) * kD;
  }
  /// Adds a warp's 16 queries of columns from `column` on, straight from registers, to `sums`, those of the block; or stores them there.
  template <bool kStores = false, int kRegisters>
  __device__ __forceinline__ static void add_registers(const float (&acc)[kRegisters], float* sums,
                                                       int column) {
    float* const to = sums + warp() * (kRow16 / 4) + column / 8 * (kFragment / 4) + lane() * 4;
#pragma unroll
    for (int t = 0; t < kRegisters; t += 4) {
      float* const fragment = to + t * (kFragment / 16);
      if constexpr (kStores) {
        ptx::store_v4(fragment, acc[t], acc[t + 1], acc[t + 2], acc[t + 3]);
      } else {
        ptx::red_add_v4(fragment, acc[t], acc[t + 1], acc[t + 2], acc[t + 3]);
      }
    }
  }
  /// Adds what a warp has staged of a slice at `from` to `sums`, those of the step, or stores it there: contiguous, one bulk reduction or
  /// copy, of the columns that exist.
  __device__ __forceinline__ static void add(uint32_t from, float* sums, int slice, int of_warp,
                                             bool stores) {
    float* const to = sums + sums_at(slice, of_warp);
    const uint32_t at = from + of_warp * kPart, bytes = bytes_of(slice);
    if (stores) {
      ptx::bulk_store_f32(to, at, bytes);
    } else {
      ptx::bulk_add_f32(to, at, bytes);
    }
  }
  /// Brings the sums of a slice from there to `to`; `barrier` counts their bytes.
  __device__ __forceinline__ static void bring(uint32_t to, const float* sums, int slice, uint32_t barrier) {
    ptx::mbarrier_arrive_expect(barrier, 4 * bytes_of(slice));
#pragma unroll 1
    for (int of_warp = 0; of_warp < 4; ++of_warp)
      ptx::bulk_load(to + of_warp * kPart, sums + sums_at(slice, of_warp), bytes_of(slice), barrier);
  }
  /// Where in the sums of a block a warp's part of a slice is, and the bytes of it that exist.
  __device__ __forceinline__ static int sums_at(int slice, int of_warp) {
    const int row16 = slice / kSlicesAcross * (kSlice / 16) + of_warp;
    return (row16 * kRow16 + slice % kSlicesAcross * kPart) / 4;
  }
  __device__ __forceinline__ static uint32_t bytes_of(int slice) {
    return min(kPart, kRow16 - slice % kSlicesAcross * kPart);
  }

  /// What a step's part of dQ is to the sums of its queries, where the order is fixed.
  struct Role {
    bool first = false;  ///< nobody adds before
    bool last = false;   ///< nobody adds after, and dq is written
  };
  /// Adds the part of others in slot `use` of the inboxes.
  __device__ __forceinline__ void add_brought(Slice& acc, uint32_t use) const {
    const RingSlot<kConfig.inboxes()> slot(use);
    ptx::mbarrier_wait(memory.full_inbox(slot.index), slot.phase);
    add_inbox(acc, memory.dq(slot.index) + warp() * kPart + lane() * 16);
    release(memory.empty_inbox(slot.index));
  }
  /// A slice of a step leaves the registers, for `sums`, or for dq by the route of the buffer of dS. `brought`: slices of others so far.
  __device__ __forceinline__ void leave(Slice& acc, float* sums, int buffer, int slice, Role role,
                                        uint32_t& brought) const {
    if constexpr (kConfig.last_writes) {
      if (role.last) {
        if (!role.first) add_brought(acc, brought++);
        write<true>(acc, BwdSm90Route::read(memory.route(buffer)), slice);
        return;
      }
    }
    if constexpr (kConfig.fixed_order()) {
      if (role.first) {
        add_registers<true>(acc, sums, slice * kSlice);
        return;
      }
    }
    add_registers(acc, sums, slice * kSlice);
  }
  /// All slices of step number `count`, straight from registers: staged slices would wait for one another.
  __device__ __forceinline__ void step(uint32_t count, int k_at, float* sums, Role role,
                                       uint32_t& brought) const {
    const RingSlot<kConfig.kBuffers> ds(count);
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // dS, which the consumer has written, for the products
#pragma unroll 1               // one slice's descriptors in uniform registers at a time
    for (int slice = 0; slice < kConfig.slices(); ++slice) {
      Slice acc;
      ptx::wgmma_fence();
      issue(acc, ds.index, k_at, slice);
      if (slice == 0 && BwdSm90Turn::wanted(args.b))
        ptx::mbarrier_wait(memory.turn(ds.index), ds.phase);  // it is this block's turn to add
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(acc);
      if (slice + 1 == kConfig.slices()) release(memory.empty_ds(ds.index));
      leave(acc, sums, ds.index, slice, role, brought);
    }
    if (BwdSm90Turn::wanted(args.b)) release(memory.added(ds.index));
  }

  /// Of a tile's steps.
  struct Roles {
    int before_begin, before_end;  ///< blocks of queries at which another adds before it
    int after_begin;               ///< the first at which another adds after it
    __device__ __forceinline__ Role at(int n) const {
      return {kConfig.fixed_order() && (n < before_begin || n >= before_end), n < after_begin};
    }
  };
  __device__ __forceinline__ static Roles roles_of(const BwdSm90Work& work) {
    if constexpr (!kConfig.fixed_order()) return {};
    return {uniform(work[BwdSm90Work::kBeforeBegin]), uniform(work[BwdSm90Work::kBeforeEnd]),
            kConfig.last_writes ? uniform(work[BwdSm90Work::kAfterBegin]) : 0};
  }

  /// All tiles of this CTA, where dQ has a warpgroup of its own.
  __device__ __forceinline__ void run() const {
    ptx::wait_for_launches_before();  // sums are zeros, unless the first to add stores
    uint32_t count = 0, keys_read = 0, brought = 0;
    for (uint32_t tile = 0;; ++tile) {
      ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
      ptx::wgmma_fence();  // .aligned: the compiler takes the warp for whole again
      BwdSm90Steps<Instance> steps(args.b, memory.work(tile));
      steps.left = uniform(steps.left);
      if (steps.left < 0) break;
      const RingSlot<kConfig.k_stages> k(keys_read);
      const bool any = steps.left > 0;
      const int first_head = steps.first_head(memory.work(tile));
      const Roles roles = roles_of(memory.work(tile));
#pragma unroll 1
      for (; steps.left > 0; steps.next(), ++count)
        step(count, k.index * kConfig.k_bytes(),
             sums_of(args.b, first_head + steps.order.head(steps.at), steps.n()), roles.at(steps.n()),
             brought);
      if (any) release(memory.empty_k(k.index)), ++keys_read;
      release(memory.empty_work(tile));
    }
  }
};

}  // namespace fovea::cuda
