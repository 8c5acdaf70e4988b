// What a lane of a consumer of Hopper's forwards knows of its pairs: two of the 64 rows of queries against a block of keys, as wgmma
// lays out their scores.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/warp/any_query.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"

namespace fovea::cuda {

/// The expression's share of this lane's two rows.
struct LaneQueries {
  Expression::Head head;
  Expression::Query query[2];
};
/// Heads of a group are not packed into a tile that has an expression: its rows are of one head.
__device__ __forceinline__ LaneQueries lane_queries(const ForwardArgs& f, const FwdWorkTile& work) {
  const Expression::Head head = expression_head(f.p, work.span, work.batch, work.head);
  const int row = work.first_row + 16 * warp_index() + lane_index() / 4;
  return {head,
          {Expression::Query(head, query_in_use(work.span, row)),
           Expression::Query(head, query_in_use(work.span, row + 8))}};
}

/// The key of score i of the lane, and of i + 2, in the block that begins with key `first_key`. Keys behind the last one get that, so
/// that every tensor has their elements: the window takes them out.
__device__ __forceinline__ Expression::Key lane_key(const FwdWorkTile& work, const Expression::Head& head,
                                                    int first_key, int i) {
  const int k = first_key + 2 * (lane_index() % 4) + i / 4 * 8 + i % 2;
  return Expression::Key(head, Expression::kReadsByKey ? max(min(k, work.span.used_k - 1), 0) : k);
}

/// From Q K^T to what the expression makes of it.
template <int kRegs>
__device__ __forceinline__ void apply_expression(float (&acc_s)[kRegs], const ForwardArgs& f,
                                                 const FwdWorkTile& work, const LaneQueries& queries,
                                                 int first_key) {
  const float scale = f.p.scale;
#pragma unroll
  for (int i = 0; i < kRegs; i += (i % 2 == 0 ? 1 : 3)) {
    const Expression::Key key = lane_key(work, queries.head, first_key, i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& s = acc_s[i + 2 * half];
      s = Expression::score(queries.head, queries.query[half], key, s * scale);
    }
  }
}

/// Which weights of a block dropout keeps, kAtOnce cells at once.
template <int kAtOnce, int kSteps>
__device__ __forceinline__ void find_kept_weights(KeptWeights<kSteps>& kept, const tile::Dropout& dropout,
                                                  const ForwardArgs& f, const FwdWorkTile& work,
                                                  int first_key) {
  const uint32_t head = tile::dropout_head(f.p, work.batch, work.head);
  const int first_query = work.first_row + 16 * warp_index();
  kept.template of_queries<kAtOnce>(dropout, head, lane_index(), [&](int step) {
    return FirstPair{first_query, first_key + 16 * step};
  });
}

}  // namespace fovea::cuda
