// The forward for few queries over keys and values of 8 bits on Hopper: decoding, on wgmma, which multiplies 8 bits as they are.
//
//   S^T = K Q^T        P = exp2(scale log2(e) S - m)        O^T = V^T P^T / l        lse = m + log l
//
// What limits it is the read of K and V, as long as nothing is done to each of their elements. So they stay of 8 bits, and it is Q and P, of
// which there is little, that become such: an element of 16 bits is cut into four of 8 (tile/byte_strips.hpp), each a column of the
// product. A tile of 4 rows has 16 columns then, fewer than the 64 rows that wgmma would take of Q. With 64 keys or 64 columns of V
// as its rows the product wastes nothing:
//
//   K      rows of 64 keys, from shared memory as they were copied
//   V^T    rows of 64 columns, from registers: ldmatrix gives a lane two columns of two keys, and a byte permutation one of four
//
// Beside more than 8 rows pieces would be too many columns: there K and V become float16 on their way to registers, and both are operand A.
//
// By pieces, a column's sums lose what is 2^-13 of its largest product, as the chip's accumulators do: scores are right to 2^-13 of their size (PTX
// has no more for 8 bits). Those of values start anew with each block, and are added up in float32.
//
// Files
//   fwd_decode_e4m3_config.cuh    configuration, shared memory
//   fwd_decode_e4m3_producer.cuh  the warp that copies K and V
//   fwd_decode_e4m3_consumer.cuh  a warpgroup that multiplies
//   fwd_decode_e4m3_shape.cuh     what of a block a thread has
//   fwd_decode_e4m3_pieces.cuh    products of up to 8 rows
//   fwd_decode_e4m3_widened.cuh   products of more rows
//   fwd_decode_results.cuh        the end of a tile
//   fwd_stream_k.cuh              shares of CTAs, and how their parts are merged
// Grid     as many CTAs as the GPU holds (ForwardArgs::num_splits); fwd_decode_e4m3_cluster: as fwd_decode_cluster.
// Warps    `warpgroups` consumers, which take blocks of keys in turn, and one warp that copies blocks, by TMA.
// Barriers
//   full[stage]      a block has been copied          32: the lanes that copy it, and its bytes
//   empty[stage]     and read                         4: a lane of each warp of the consumer
//   kConsumers       Q is there; nobody reads stages any more, where results lie over them; results are there; nobody reads them any more
//   kConsumer + g    of a consumer: its weights are there, its maxima, its sums
//
// NaN and Inf in V of keys that a row does not see: a row of O that is not finite is computed again (warp/exact_row.cuh).
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_decode_e4m3_consumer.cuh"
#include "cuda/kernels/fwd_decode_e4m3_producer.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace fovea::cuda {

/// Initialises the barriers of the ring: one thread.
template <class Instance>
__device__ __forceinline__ void init_ring(const FwdDecodeE4M3Memory<Instance>& memory) {
#pragma unroll 1
  for (int stage = 0; stage < Instance::kConfig.stages; ++stage) {
    ptx::mbarrier_init(memory.full(stage), 32);
    ptx::mbarrier_init(memory.empty(stage), 4);
  }
  ptx::mbarrier_init_fence();
}

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    fwd_decode_e4m3(const __grid_constant__ TmaDecodeArgs all) {
  const ForwardArgs& args = all.f;
  using T = typename Instance::Element;
  constexpr int kConsumerWarps = Instance::kConfig.warps;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdDecodeE4M3Memory<Instance> memory{{ptx::shared_address(shared), shared}};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  if (thread == 0) {
    prefetch_maps(all);
    init_ring<Instance>(memory);
  }
  ptx::wait_for_launches_before();  // what they have written may be read
  ptx::let_next_launch_begin();     // it waits, and has its CTAs where those of this one end
  count_units(args, memory);
  __syncthreads();  // the units are known, the barriers are initialised
  const auto for_each_tile = [&](const auto& visit) {
    for_each_tile_of_share(
        args, memory,
        [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks& blocks) {
          visit(FwdWorkTile{span, work.batch, work.head, work.split, 0, span.used_q * packed_heads(args)},
                blocks);
        });
  };
  if (warp >= kConsumerWarps) {
    FwdDecodeE4M3Producer<Instance> own(all, memory, lane);
    for_each_tile([&](const FwdWorkTile& work, const tile::KvBlocks& blocks) { own.copy(work, blocks); });
    clear_unused_of_share<T>(args.p);
    return;
  }
  FwdDecodeE4M3Consumer<Instance> own(args, memory, warp, lane);
  for_each_tile([&](const FwdWorkTile& work, const tile::KvBlocks& blocks) {
    own.sum_up(work, blocks, [] {});
    own.results().write_rows(blocks, work.end_row);
    own.wait_for_all();  // nobody reads results any more
  });
  if (warp < 4) merge_share<T>(args, memory, thread);
}

}  // namespace fovea::cuda
