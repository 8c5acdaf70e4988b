// Before bwd_list_keys: lists of queries for the keys, from the lists of keys of the queries. A counting sort, whose order
// within a key is that of the queries, whatever the order of threads.
//
//   list_zeros     zeros in `counts` and `end`
//   list_counts    counts[chunk][key]: entries of the chunk's queries that name the key
//   list_offsets   counts[chunk][key]: those of the chunks before; starts[key]: where the key's queries begin
//   list_inverse   queries[starts[key] + ...]: one for each entry, chunk by chunk, query by query
//
// A warp has a chunk of neighbouring queries of a key head of a sequence and goes through their lists one after the other, so
// that no other warp touches its row of `counts`. Entries of one query that name the same key are the same in any order.
// Where in `queries` the segment of a key lies depends on the order of CTAs, and nothing else does.
//
// Left out are entries that causal, window and seqused_k leave out for all queries of the list, and those that no sequence
// has: their queries have an lse of NaN.
//
// Grid     list_chunks_ctas(args), list_offsets_ctas(args).
// Block    kListInverseThreads threads. No shared memory.
#pragma once

#include <cstdint>

#include "cuda/kernels/simt_lists.cuh"

namespace fovea::cuda {

inline constexpr int kListInverseThreads = 128;
inline constexpr int kListInverseWarps = kListInverseThreads / 32;

constexpr int64_t list_chunks_ctas(const BackwardArgs& args) {
  const int64_t warps = int64_t{args.inverse.chunks} * args.inverse.heads * args.p.batch;
  return (warps + kListInverseWarps - 1) / kListInverseWarps;
}
constexpr int64_t list_offsets_ctas(const BackwardArgs& args) {
  return (args.inverse.keys + kListInverseThreads - 1) / kListInverseThreads;
}

/// The queries of a warp, and their lists.
struct ListChunk {
  /// Entries of a lane in flight: atomic operations on the L2 cache take as long as reads of it.
  static constexpr int kAtOnce = 4;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  const ListInverse& inverse;
  int chunk, head, batch;

  __device__ __forceinline__ explicit ListChunk(const BackwardArgs& a) : args(a), p(a.p), inverse(a.inverse) {
    int64_t warp = int64_t{blockIdx.x} * kListInverseWarps + threadIdx.x / 32;
    chunk = static_cast<int>(warp % inverse.chunks);
    warp /= inverse.chunks;
    head = static_cast<int>(warp % inverse.heads);
    batch = static_cast<int>(warp / inverse.heads);
  }

  /// visit(query, keys) of each query in its turn: keys[kAtOnce], rows of `starts`, -1 where there is none.
  template <class Visit>
  __device__ __forceinline__ void for_each_entry(const Visit& visit) const {
    if (batch >= p.batch) return;
    const tile::SequenceSpan span = tile::sequence_span(p, batch);
    const bool shared = queries_share_list(p);
    const int lists = shared ? min(span.used_q, 1) : span.used_q;
    const int each = (lists + inverse.chunks - 1) / inverse.chunks;
    const int64_t row = inverse.row(args.key_rows_before(span, batch), head);
#pragma unroll 1
    for (int i = chunk * each; i < min((chunk + 1) * each, lists); ++i) {
      const int begin = tile::keys_of(p, span, i).begin,
                end = tile::keys_of(p, span, shared ? span.used_q - 1 : i).end;
      const int32_t* list = p.keys.data + p.keys.offset(batch, head, span.row_q + i);
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) % 32; n < p.list_size; n += 32 * kAtOnce) {
        int64_t keys[kAtOnce];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int entry = n + 32 * u < p.list_size ? __ldg(list + n + 32 * u) : kNoKey;
          keys[u] = entry >= begin && entry < end ? row + int64_t{entry} * inverse.heads : -1;
        }
        visit(i, keys);
      }
      __syncwarp();  // entries of the next query come behind those of this one
    }
  }
  __device__ __forceinline__ int32_t* count_of(int64_t key) const {
    return inverse.counts + chunk * inverse.keys + key;
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_counts(const __grid_constant__ BackwardArgs args) {
  const ListChunk chunk(args);
  chunk.for_each_entry([&](int, const int64_t(&keys)[ListChunk::kAtOnce]) {
#pragma unroll
    for (const int64_t key : keys)
      if (key >= 0) atomicAdd(chunk.count_of(key), 1);
  });
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_offsets(const __grid_constant__ BackwardArgs args) {
  const ListInverse& inverse = args.inverse;
  const int64_t key = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool exists = key < inverse.keys;
  int count = 0;
#pragma unroll 8
  for (int chunk = 0; chunk < (exists ? inverse.chunks : 0); ++chunk) {
    int32_t& place = inverse.counts[chunk * inverse.keys + key];
    const int of_chunk = place;
    place = count;
    count += of_chunk;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned long long behind =
      static_cast<unsigned long long>(count);  // this key and those of the lanes before
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long before = __shfl_sync(~0u, behind, max(lane - step, 0));
    if (lane >= step) behind += before;
  }
  unsigned long long first = 0;
  if (lane == 31) first = atomicAdd(inverse.end, behind);
  first = __shfl_sync(~0u, first, 31);
  if (exists) inverse.starts[key] = static_cast<int64_t>(first + behind) - count;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_inverse(const __grid_constant__ BackwardArgs args) {
  const ListChunk chunk(args);
  const ListInverse& inverse = args.inverse;
  chunk.for_each_entry([&](int query, const int64_t(&keys)[ListChunk::kAtOnce]) {
    int64_t places[ListChunk::kAtOnce];
#pragma unroll
    for (int u = 0; u < ListChunk::kAtOnce; ++u)
      if (keys[u] >= 0) places[u] = inverse.starts[keys[u]] + atomicAdd(chunk.count_of(keys[u]), 1);
#pragma unroll
    for (int u = 0; u < ListChunk::kAtOnce; ++u)
      if (keys[u] >= 0) inverse.queries[places[u]] = query;
  });
}

}  // namespace fovea::cuda
