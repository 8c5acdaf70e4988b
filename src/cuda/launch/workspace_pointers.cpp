// A run's pointers into the workspace, from the offsets that schedule.cpp has given its parts.
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {

void SeenBlocksParts::point_into(char* workspace, tile::SeenBlocksView& view) const {
  if (blocks >= 0) view.data = reinterpret_cast<uint32_t*>(workspace + blocks);
  if (pairs >= 0) view.pairs = reinterpret_cast<uint32_t*>(workspace + pairs);
}

void ForwardLayout::point_into(char* workspace, ForwardArgs& a) const {
  if (part_o >= 0) a.part_o = reinterpret_cast<float*>(workspace + part_o);
  if (part_flags >= 0) a.part_flags = reinterpret_cast<uint64_t*>(workspace + part_flags);
  if (part_lse >= 0) a.part_lse = reinterpret_cast<float*>(workspace + part_lse);
  if (bf16x3.q >= 0) a.bf16x3_q = workspace + bf16x3.q;
  if (bf16x3.k >= 0) a.bf16x3_k = workspace + bf16x3.k;
  if (bf16x3.v >= 0) a.bf16x3_v = workspace + bf16x3.v;
  if (transposed_v >= 0) a.transposed_v.data = workspace + transposed_v;
  if (tile_counter >= 0) a.tile_counter = reinterpret_cast<int*>(workspace + tile_counter);
  seen.point_into(workspace, a.seen);
  if (alibi_norms >= 0) a.alibi_norms.data = reinterpret_cast<uint32_t*>(workspace + alibi_norms);
}

void BackwardLayout::point_into(char* workspace, BackwardArgs& a) const {
  a.lse_log2 = reinterpret_cast<float*>(workspace + lse_log2);
  a.delta = reinterpret_cast<float*>(workspace + delta);
  a.dq_sum = reinterpret_cast<float*>(workspace + dq_sum);
  if (dq_semaphore >= 0) a.dq_semaphore = reinterpret_cast<int*>(workspace + dq_semaphore);
  if (tile_counter >= 0) a.tile_counter = reinterpret_cast<int*>(workspace + tile_counter);
  if (key_sums >= 0) a.key_sums = reinterpret_cast<float*>(workspace + key_sums);
  if (list_counts >= 0) {
    a.inverse.end = reinterpret_cast<unsigned long long*>(workspace + list_counts);
    a.inverse.counts = reinterpret_cast<int32_t*>(workspace + list_counts) + ListInverse::kWordsOfEnd;
    a.inverse.starts = reinterpret_cast<int64_t*>(workspace + list_starts);
    a.inverse.queries = reinterpret_cast<int32_t*>(workspace + list_queries);
  }
  seen.point_into(workspace, a.seen);
  if (alibi_norms >= 0) a.alibi_norms.data = reinterpret_cast<uint32_t*>(workspace + alibi_norms);
  if (bf16x3_do < 0) return;
  a.bf16x3_q = workspace + bf16x3.q;
  a.bf16x3_k = workspace + bf16x3.k;
  a.bf16x3_v = workspace + bf16x3.v;
  a.bf16x3_do = workspace + bf16x3_do;
  a.not_finite = reinterpret_cast<int*>(workspace + not_finite);
}

}  // namespace fovea::cuda
