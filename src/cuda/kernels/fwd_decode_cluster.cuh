// fwd_decode where no tile is cut by shares of all keys: the CTAs of a cluster have equal shares of the keys of a tile, and merge over
// distributed shared memory, in one launch and without anything in global memory. A cluster may be a CTA, and may have several tiles.
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
//          Where the GPU alone knows lengths, a sequence's says how many CTAs of a cluster share the keys of a tile; the others have tiles of
//          other heads, or end at once (ForwardArgs::sharing).
// Shared   as fwd_decode, and an inbox of tile_m rows of O, each with its state.
// Barriers
//   cluster     every CTA has begun and its mbarrier is initialised: others may write to its inbox
//   0           the length that a tensor has is in shared memory (ReadsEarly)
//   inbox_full  the rows of all CTAs are in the inbox
//   0, 1        as in fwd_decode; 1 also says whether the tile is to be done again
#pragma once

#include "cuda/kernels/fwd_decode.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace fovea::cuda {

/// log2 of the CTAs that share `keys` keys of a tile where a sequence's length says so: as many as find an SM each if all tiles have as
/// many, and more for a long one, which would be waited for.
constexpr int log2_of_sharing(const ForwardArgs& f, int keys) {
  constexpr int kFewestKeys = 32;  // of a CTA: fewer take no less time
  const int64_t tiles = int64_t{f.p.batch} * (f.pack_group ? f.p.heads_kv : f.p.heads_q),
                elements = int64_t{keys} * (f.p.head_dim + f.p.head_dim_v);
  int log2 = 0;
  while (log2 < f.sharing.log2_most &&
         (tiles << (log2 + 1) <= f.slots ? keys >> (log2 + 1) >= kFewestKeys
                                         : elements >> log2 > int64_t{1} << f.sharing.log2_elements))
    ++log2;
  return log2;
}

/// A cluster for each tile and split: CTAs, heads (key heads where packed), sequences. Where heads share clusters: CTAs, sequences, and as many
/// clusters as the heads of the longest sequence take that there may be; those behind the last head end at once, and begin last.
template <class Grid>
constexpr Grid fwd_decode_cluster_grid(const ForwardArgs& args) {
  const int64_t heads = args.pack_group ? args.p.heads_kv : args.p.heads_q, ctas = args.cluster_ctas;
  if (args.sharing.heads)
    return {ctas, args.p.batch, ((heads << log2_of_sharing(args, args.p.seqlen_k)) + ctas - 1) / ctas};
  return {ctas * args.num_splits, heads, args.p.batch};
}

/// A CTA's share of a tile or of its split, and of its rows.
struct ClusterShare {
  int log2_ctas;    ///< of the CTAs that share keys: those of the cluster, or fewer
  bool takes_part;  ///< whether there is a tile for the CTA
  FwdWorkTile work;
  tile::KvBlocks all, own;  ///< pieces of keys: of the tile or its split, of the CTA

  static __device__ __forceinline__ int batch(const ForwardArgs& f) {
    return static_cast<int>(f.sharing.heads ? blockIdx.y : blockIdx.z);
  }
  __device__ __forceinline__ ClusterShare(const ForwardArgs& f, int piece)
      : ClusterShare(f, piece, tile::cached_span(f.p, batch(f))) {}
  __device__ __forceinline__ ClusterShare(const ForwardArgs& f, int piece, const tile::SequenceSpan& span) {
    const int log2_cluster = __ffs(f.cluster_ctas) - 1;
    const int batch = ClusterShare::batch(f), split = static_cast<int>(blockIdx.x) >> log2_cluster;
    work = {span, batch, static_cast<int>(blockIdx.y), split, 0, span.used_q * packed_heads(f)};
    all = tile::split_blocks(key_blocks_of_rows(f, span, 0, work.end_row, piece), split, f.num_splits);
    const int count = all.count();
    log2_ctas = log2_cluster;
    takes_part = true;
    // Out of line: code that runs once is fetched line by line, and a single sequence waits for it.
    if (f.sharing.by_length) [[unlikely]] {
      log2_ctas = log2_of_sharing(f, count * piece);
      const int tile_of_cluster = place(f) >> log2_ctas;
      takes_part = tile_of_cluster == 0;
      if (f.sharing.heads) {
        work.head = (static_cast<int>(blockIdx.z) << (log2_cluster - log2_ctas)) + tile_of_cluster;
        takes_part = work.head < (f.pack_group ? f.p.heads_kv : f.p.heads_q);
      }
    }
    own = tile::units_of(all, count * rank() >> log2_ctas, count * (rank() + 1) >> log2_ctas);
  }
  __device__ __forceinline__ int ctas() const { return 1 << log2_ctas; }
  /// Of those that share the keys. Clusters begin at multiples of their size.
  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (ctas() - 1); }
  /// In the cluster.
  __device__ __forceinline__ static int place(const ForwardArgs& f) {
    return static_cast<int>(blockIdx.x) & (f.cluster_ctas - 1);
  }
  /// The CTA that merges a row, of those that share the keys, and its place in the cluster. Its inbox has the rows of one after the other, of
  /// all CTAs each.
  __device__ __forceinline__ int owner(int row) const { return row & (ctas() - 1); }
  __device__ __forceinline__ int place_of_owner(const ForwardArgs& f, int row) const {
    return place(f) - rank() + owner(row);
  }
  __device__ __forceinline__ int first_slot(int row) const { return row - owner(row); }
  __device__ __forceinline__ int owned_rows() const {
    return (work.end_row - rank() + ctas() - 1) >> log2_ctas;
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
    const int to = share.place_of_owner(own.f, row), slot = share.first_slot(row) + share.rank();
    const uint32_t full = ptx::address_in_cta(memory.inbox_full(), to),
                   o = ptx::address_in_cta(memory.inbox_o(slot), to);
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
      ptx::st_async_8(ptx::address_in_cta(memory.inbox_state(slot), to),
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
  for (int row = share.rank() + own.warp * share.ctas(); row < share.work.end_row;
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
    for (int h = share.rank(); h < packed_heads(args); h += share.ctas())
      clear_unused<T>(args.p, share.work.span, share.work.batch, share.work.head * packed_heads(args) + h, 0,
                      1);
  if (share.ctas() == 1 || share.rank() >= share.work.end_row) return;
  if (thread == 0)
    ptx::mbarrier_arrive_expect(memory.inbox_full(),
                                share.owned_rows() * share.ctas() * Instance::kConfig.inbox_row_bytes());
  ptx::mbarrier_wait(memory.inbox_full(), 0);
  write_owned_rows(own, share);
}

/// Shares are found while launches before still run. They may be writing the length of a sequence, which is read all the same: looked up behind
/// them, it takes half a microsecond that nothing hides. First copies begin by what stood there, inside of the tensors whatever it is; beside
/// them it is read again, and a CTA for which it has changed begins again at the end of its tile.
struct ReadsEarly {
  static constexpr bool kReadsEarly = true;
  const ForwardArgs& f;
  bool may_change;    ///< the length that the share is made of
  bool first = true;  ///< time: the cluster is still to be waited for

  __device__ __forceinline__ explicit ReadsEarly(const ForwardArgs& args)
      : f(args), may_change(args.p.seqused_k != nullptr) {}
  /// Where a sequence lies, by what stands there now: all threads of the CTA call it, and one reads, as others may read other things.
  template <class Instance>
  __device__ __forceinline__ tile::SequenceSpan span(const FwdDecodeMemory<Instance>& memory) {
    const tile::AttentionParams& p = f.p;
    const bool by_length_alone = p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr &&
                                 p.seqused_q == nullptr && p.leftpad_k == nullptr &&
                                 p.cache_batch == nullptr && (p.page_table.data == nullptr || p.caches > 0);
    // A CTA that has no part by its length ends at once, and leaves its place to others.
    if (!by_length_alone || f.sharing.by_length) {
      before_copies();
      may_change = false;
      return tile::cached_span(p, ClusterShare::batch(f));
    }
    tile::SequenceSpan span = tile::whole_span(p);
    if (p.seqused_k != nullptr) {
      if (threadIdx.x == 0)
        ptx::st_shared_4(memory.length(), static_cast<uint32_t>(p.seqused_k[ClusterShare::batch(f)]));
      __syncthreads();  // the length is there
      span.used_k = clamped(of_lane_0(static_cast<int>(ptx::ld_shared_4(memory.length()))));
    }
    return span;
  }
  /// What is the same for all lanes the compiler knows to be so of what comes from one of them: else loops lose their uniform registers.
  static __device__ __forceinline__ int of_lane_0(int x) { return __shfl_sync(0xffffffffu, x, 0); }
  __device__ __forceinline__ int clamped(int length) const { return min(max(length, 0), f.p.seqlen_k); }

  __device__ __forceinline__ void before_copies() const {
    ptx::wait_for_launches_before();  // what they have written may be read
    ptx::let_next_launch_begin();     // it waits, and has its CTAs where those of this one end
  }
  __device__ __forceinline__ bool has_other_length(const FwdWorkTile& work) const {
    return may_change && clamped(f.p.seqused_k[work.batch]) != work.span.used_k;
  }
  __device__ __forceinline__ void before_keys() const {
    if (first) ptx::cluster_wait();
  }
};

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
  ReadsEarly beside(args);
  ClusterShare share(args, Warp::kWarpKeys, beside.span(memory));
  Warp own(args, memory, warp, lane);
  while (true) {  // once, or twice if the length has changed
    if (thread == 0) ptx::st_shared_4(memory.sharing(), static_cast<uint32_t>(share.log2_ctas));
    if (share.takes_part && ReadsEarly::of_lane_0(own.sum_up(share.work, share.own, beside))) break;
    beside.before_copies();
    if (!share.takes_part && !beside.may_change) return;
    beside.first = !share.takes_part;
    beside.may_change = false;
    share = ClusterShare(args, Warp::kWarpKeys);
  }
  share.log2_ctas = static_cast<int>(ptx::ld_shared_4(memory.sharing()));  // registers are few
  share.work = *memory.work_tile(warp);
  merge_in_cluster<T>(args, own.results(), share, thread);
}

}  // namespace fovea::cuda
