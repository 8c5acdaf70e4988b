// Elements of a tensor with one for each pair (Expression::kReadsPairs), on their way through shared memory: copied a block
// ahead, and read in the order in which a warp holds scores.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/mma_tile.cuh"

namespace fovea::cuda {

/// Eight elements of 16 bits, of which the first `count` exist, and zeros behind them.
__device__ __forceinline__ uint4 read_eight(const unsigned short* from, int count) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) words[i / 2] |= static_cast<uint32_t>(__ldg(from + i)) << (16 * (i % 2));
  return {words[0], words[1], words[2], words[3]};
}

/// A warp copies the elements of queries first_query + [0, kQueries) and keys first_key + [0, 8 kChunks): chunk c of row r to
/// shared address at(r, c). Those that do not exist become 0. The caller commits.
template <int kQueries, int kChunks, class At>
__device__ __forceinline__ void copy_pair_elements(const Expression::Head& head,
                                                   const tile::SequenceSpan& span, int first_query,
                                                   int first_key, int lane, At&& at) {
  static_assert(32 % kChunks == 0 && kQueries % (32 / kChunks) == 0, "a lane has one chunk of its rows");
  constexpr int kRowsAtOnce = 32 / kChunks;
  const int row = lane / kChunks, chunk = lane % kChunks, key = first_key + 8 * chunk;
  const int count = max(0, min(span.used_k - key, 8)), rows = span.used_q - first_query;
  const Expression::Query query(head, query_in_use(span, first_query + row));
  const int64_t step = Expression::pair_row_step(head) * kRowsAtOnce;
  const Expression::PairElement* from = Expression::pair_row(head, query) + key;
  const bool aligned = ((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(2 * step)) & 15) == 0;
  if (__all_sync(~0u, aligned)) {
#pragma unroll
    for (int i = 0; i < kQueries / kRowsAtOnce; ++i) {
      const int r = row + i * kRowsAtOnce;
      ptx::cp_async_16_part(at(r, chunk), from + i * step, r < rows ? 2 * count : 0);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kQueries / kRowsAtOnce; ++i) {
      const int r = row + i * kRowsAtOnce;
      const auto* elements = reinterpret_cast<const unsigned short*>(from + i * step);
      ptx::st_shared_16(at(r, chunk), read_eight(elements, r < rows ? count : 0));
    }
  }
}

/// visit(i, element) for each element of a lane of 16 queries and 16 kSteps keys, i as in the sums of wgmma. address(step): of the row
/// that the lane reads for ldmatrix, of 16 keys.
template <int kSteps, class Address, class Visit>
__device__ __forceinline__ void for_each_pair_element(Address&& address, Visit&& visit) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t elements[4];
    ptx::ldmatrix_x4(elements, address(step));
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = unpack<Expression::PairElement>(elements[x]);
      visit(8 * step + 2 * x, pair.x);
      visit(8 * step + 2 * x + 1, pair.y);
    }
  }
}

}  // namespace fovea::cuda
