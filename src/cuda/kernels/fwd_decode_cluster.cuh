// fwd_decode where few tiles leave most of a GPU idle: the CTAs of a cluster have equal shares of the keys of a tile, and merge over
// distributed shared memory, in one launch and without anything in global memory.
//
//   CTA 0  keys [0, n)    rows of O, merged over its warps  -->  row r goes to the inbox of CTA r mod CTAs,
//   CTA 1  keys [n, 2n)   rows of O, merged over its warps  -->  which merges and writes it
//   ...
//
// What limits it is latency: a step that nothing hides costs a thousand clocks, of 8,000. So nobody divides, the cluster meets while
// keys are on their way, and rows travel by st.async, which the receiver's mbarrier counts: no fence is waited for. And it begins while the
// launch before it ends (begins_early).
//
// Grid     (CTAs of a cluster * splits, heads or key heads, sequences); the launch says how many CTAs: 1, 2, 4, 8 or 16
//          (ForwardArgs::cluster_ctas). Splits are clusters that have parts of the keys, which fwd_combine merges.
//          Where the GPU alone knows lengths, clusters are there for many tiles, too, and for few have CTAs for a long sequence: those that a
//          shorter one has no keys for end at once.
// Shared   as fwd_decode, and an inbox of tile_m rows of O, each with its state.
// Barriers
//   cluster     every CTA has begun and its mbarrier is initialised: others may write to its inbox
//   inbox_full  the rows of all CTAs are in the inbox
//   0, 1        as in fwd_decode
#pragma once

#include "cuda/kernels/fwd_decode.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace fovea::cuda {

/// A cluster for each tile and split: CTAs, heads (key heads where packed), sequences.
template <class Grid>
constexpr Grid fwd_decode_cluster_grid(const ForwardArgs& args) {
  return {int64_t{args.cluster_ctas} * args.num_splits, args.pack_group ? args.p.heads_kv : args.p.heads_q,
          args.p.batch};
}

/// log2 of the CTAs, of 2^`most` in a cluster, that share `keys` keys where the GPU alone knows how long sequences are: as many as find an SM each
/// if all tiles have as many, and more for a long one, which would be waited for.
__device__ __forceinline__ int log2_of_sharing(const ForwardArgs& f, int most, int keys) {
  constexpr int kFewestKeys = 32;  // of a CTA: fewer take no less time
  constexpr int kMostLog2 = 20;    // elements of a CTA: 4,096 keys of two times 128 columns
  const int64_t tiles = int64_t{gridDim.y} * gridDim.z;
  const int64_t elements = int64_t{keys} * (f.p.head_dim + f.p.head_dim_v);
  int log2 = 0;
#pragma unroll 1
  while (log2 < most && (tiles << (log2 + 1) <= f.slots ? keys >> (log2 + 1) >= kFewestKeys
                                                        : elements >> log2 > int64_t{1} << kMostLog2))
    ++log2;
  return log2;
}

/// A CTA's share of a tile or of its split, and of its rows.
struct ClusterShare {
  int rank, log2_ctas;  ///< of the CTAs that share keys: those of the cluster, or fewer
  FwdWorkTile work;
  tile::KvBlocks all, own;  ///< pieces of keys: of the cluster, of the CTA

  __device__ __forceinline__ ClusterShare(const ForwardArgs& f, int piece) {
    log2_ctas = __ffs(f.cluster_ctas) - 1;
    const int split = static_cast<int>(blockIdx.x) >> log2_ctas;
    rank = static_cast<int>(blockIdx.x) - (split << log2_ctas);
    const int batch = static_cast<int>(blockIdx.z);
    const tile::SequenceSpan span = tile::cached_span(f.p, batch);
    work = {span, batch, static_cast<int>(blockIdx.y), split, 0, span.used_q * packed_heads(f)};
    all = tile::split_blocks(key_blocks_of_rows(f, span, 0, work.end_row, piece), split, f.num_splits);
    const int count = all.count();
    // Out of line: code that runs once is fetched line by line, and a single sequence waits for it.
    if (log2_ctas > 1 && f.p.batch > 1 && !tile::lengths_are_known(f.p)) [[unlikely]]
      log2_ctas = log2_of_sharing(f, log2_ctas, count * piece);
    if (!takes_part()) return;
    own = tile::units_of(all, count * rank >> log2_ctas, count * (rank + 1) >> log2_ctas);
  }
  __device__ __forceinline__ int ctas() const { return 1 << log2_ctas; }
  __device__ __forceinline__ bool takes_part() const { return rank < ctas(); }
  /// The CTA that merges a row. Its inbox has the rows of one after the other, of all CTAs each.
  __device__ __forceinline__ int owner(int row) const { return row & (ctas() - 1); }
  __device__ __forceinline__ int first_slot(int row) const { return row - owner(row); }
  __device__ __forceinline__ int owned_rows() const {
    return (work.end_row - rank + ctas() - 1) >> log2_ctas;
  }
};

/// Sends the rows of this CTA to those that merge them.
template <class Instance>
__device__ __forceinline__ void send_rows(const FwdDecodeResults<Instance>& own, const ClusterShare& share) {
  using Results = FwdDecodeResults<Instance>;
  const auto& memory = own.memory;
#pragma unroll 1
  for (int row = own.warp; row < share.work.end_row; row += Results::kWarps) {
    const typename Results::MergedRow merged = own.merge_results(row);
    const int owner = share.owner(row), slot = share.first_slot(row) + share.rank;
    const uint32_t full = ptx::address_in_cta(memory.inbox_full(), owner),
                   o = ptx::address_in_cta(memory.inbox_o(slot), owner);
#pragma unroll
    for (int i = 0; i < Results::MergedRow::kVectors; ++i) {
      const int column = Results::MergedRow::column(i, own.lane);
      const float* const x = merged.o[i];
      if (column < Results::kConfig.head_dim_v)
        ptx::st_async_16(
            o + column * 4,
            uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])},
            full);
    }
    if (own.lane == 0)
      ptx::st_async_8(ptx::address_in_cta(memory.inbox_state(slot), owner),
                      uint2{__float_as_uint(merged.base), __float_as_uint(merged.sum)}, full);
  }
}

/// Merges the rows of which this CTA is the owner, and writes them.
template <class Instance>
__device__ __forceinline__ void write_owned_rows(const FwdDecodeResults<Instance>& own,
                                                 const ClusterShare& share) {
  using Results = FwdDecodeResults<Instance>;
  constexpr int kColumns = Results::kConfig.head_dim_v;
  const auto& memory = own.memory;
#pragma unroll 1
  for (int row = share.rank + own.warp * share.ctas(); row < share.work.end_row;
       row += Results::kWarps * share.ctas()) {
    const int slot = share.first_slot(row);
    const auto merged = own.template merge<kMostDecodeCtas>(
        memory.inbox_states() + slot, 1, memory.inbox() + slot * kColumns, kColumns, share.ctas());
    own.write_row(*memory.work_tile(own.warp), share.all, row, merged);
  }
}

/// The end of a tile, behind the results of all of the CTA: those of all CTAs are merged and written.
template <class T, class Instance>
__device__ __forceinline__ void merge_in_cluster(const ForwardArgs& args,
                                                 const FwdDecodeResults<Instance>& own,
                                                 const ClusterShare& share, int thread) {
  const auto& memory = own.memory;
  if (share.ctas() == 1) {  // the rows of its warps are all
    own.write_rows(share.all, share.work.end_row);
  } else {
    send_rows(own, share);
  }
  if (own.warp == 0 && args.num_splits == 1 && share.work.span.length_q != share.work.span.used_q)
    for (int h = share.rank; h < packed_heads(args); h += share.ctas())
      clear_unused<T>(args.p, share.work.span, share.work.batch, share.work.head * packed_heads(args) + h, 0,
                      1);
  if (share.ctas() == 1 || share.rank >= share.work.end_row) return;
  if (thread == 0)
    ptx::mbarrier_arrive_expect(memory.inbox_full(),
                                share.owned_rows() * share.ctas() * Instance::kConfig.inbox_row_bytes());
  ptx::mbarrier_wait(memory.inbox_full(), 0);
  write_owned_rows(own, share);
}

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.ctas_per_sm)
    fwd_decode_cluster(const __grid_constant__ ForwardArgs args) {
  using T = typename Instance::Element;
  using Warp = FwdDecodeWarp<Instance>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const FwdDecodeMemory<Instance> memory{base, ptx::shared_pointer(base)};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  if (thread == 0) {
    ptx::mbarrier_init(memory.inbox_full(), 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_arrive();  // waited for below: the barrier is initialised, and this CTA has begun
  const bool lengths_are_known = tile::lengths_are_known(args.p);
  if (!lengths_are_known) ptx::wait_for_launches_before();  // lengths may be read
  ClusterShare share(args, Warp::kWarpKeys);
  if (lengths_are_known) ptx::wait_for_launches_before();  // what they have written may be read
  ptx::let_next_launch_begin();  // it waits, and has its CTAs where those of this one end
  if (!share.takes_part()) return;
  if (thread == 0) ptx::st_shared_4(memory.sharing(), static_cast<uint32_t>(share.log2_ctas));
  Warp own(args, memory, warp, lane);
  own.sum_up(share.work, share.own, [] { ptx::cluster_wait(); });
  share.log2_ctas = static_cast<int>(ptx::ld_shared_4(memory.sharing()));  // registers are few
  merge_in_cluster<T>(args, own.results(), share, thread);
}

}  // namespace fovea::cuda
