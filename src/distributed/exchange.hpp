// One step of messages: what each rank sends to each other for some tensors whose holders change.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/memory.hpp"
#include "distributed/rows.hpp"

namespace fovea::distributed {

constexpr int64_t bytes_of(const fovea_dtype& type) {
  return type.bits / 8;
}

/// A tensor of rows and heads in memory that is known when a run begins: of the caller's (its number), or of the workspace.
struct View {
  int place = -1;                                             ///< of the caller's tensors; -1: the workspace
  int64_t offset = 0;                                         ///< bytes
  int64_t stride_batch = 0, stride_row = 0, stride_head = 0;  ///< bytes

  View at(int64_t row, int64_t head) const {
    View view = *this;
    view.offset += row * stride_row + head * stride_head;
    return view;
  }
};

/// What a rank holds of a tensor before or after a step.
struct Side {
  Holding rows;
  Range heads;
};

/// A tensor whose holders change, as one rank sees it.
struct Flow {
  std::vector<Side> from, to;  ///< by rank
  View mine_from, mine_to;
  int64_t batch = 1;
  int64_t elements = 1;  ///< contiguous ones of a row and head
  fovea_dtype type{};    ///< of the elements that travel
  Move arrival;          ///< how they are put into mine_to
};

/// A Box whose memory is not known yet.
struct PlannedBox {
  View from, to;
  int64_t batch = 0, rows = 0, heads = 0, elements = 0;
};
struct PlannedMove {
  Move how;
  int source =
      -1;  ///< additions of different ranks may meet in a row, so each rank's are a move, in this order; -1: no matter
  std::vector<PlannedBox> boxes;
};

/// One rank's part of a step. Between two ranks each run of rows of at least Packing::least_own bytes is a message of its own, which goes
/// from and to where the rows lie wherever they lie side by side; smaller ones share a message.
struct Exchange {
  struct Message {
    int peer = 0;
    View view;  ///< where it begins: in the workspace, or in a tensor
    int64_t bytes = 0;
  };
  std::vector<Message> sends, receives;  ///< those between two ranks in the order that both know
  std::vector<PlannedMove> pack,
      unpack;         ///< into messages and out of them; what stays is moved by `unpack` as well
  int64_t bytes = 0;  ///< of the workspace, from its `first` on

  bool empty() const { return sends.empty() && receives.empty() && unpack.empty(); }
  int64_t bytes_sent() const;
};

/// Multiple to which parts of the workspace are rounded up.
inline constexpr int64_t kPartAlignment = 256;
constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

/// How rows become messages.
struct Packing {
  int64_t least_own = 0;  ///< bytes from which a run of rows is a message of its own
  bool all = false;       ///< rows that lie side by side are packed like others
};

/// The step of `rank` for all of `flows`. What is packed lies in the workspace from `first` on.
Exchange exchange_of(int rank, const std::vector<Flow>& flows, int64_t first, const Packing& packing);

}  // namespace fovea::distributed
