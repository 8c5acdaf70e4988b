// Where a problem lies in a larger one, whose random stream of dropout it shares.
#pragma once

#include <cstdint>

namespace fovea {

struct DropoutPlace {
  /// Of queries and of keys: tile::Dropout decides cells of as many together, which no part divides.
  static constexpr int64_t kMultiple = 16;

  int64_t heads = 0;       ///< query heads of the larger problem; 0: the problem is no part of one
  int64_t first_head = 0;  ///< batch index * heads + query head
  int64_t first_query = 0, first_key = 0;  ///< multiples of kMultiple

  /// The number of a head in the stream; `heads_q`: those of the problem itself.
  constexpr int64_t head_number(int64_t heads_q, int64_t batch, int64_t head) const {
    return first_head + batch * (heads != 0 ? heads : heads_q) + head;
  }
};

}  // namespace fovea
