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

/// What one rank copies, as the elements are, between its memory and that of a peer, or within its own where it is the peer itself.
/// Of the two views one is of the peer's workspace then.
struct PeerCopy {
  int peer = 0;
  bool puts = true;  ///< else it gets
  PlannedBox box;
  fovea_dtype type{};
  size_t flow = 0;     ///< number of the tensor's flow in its exchange
  int ends_part = -1;  ///< with it all of that part has been copied (Exchange::copy_in_parts)
  int64_t bytes() const { return box.batch * box.rows * box.heads * box.elements * type.bits / 8; }
};

/// Most parts in which keys and values of two ranks are copied (Exchange::copy_in_parts): halves of the heads, and of the keys of these. More
/// are smaller copies, between which a link is idle for 3 us: 33 MB take 100 us in two copies, and 134 in eight (two H200s).
inline constexpr int kMostHeadParts = 2, kMostCopyParts = 2 * kMostHeadParts;

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
  /// Of a step by copies, where messages only say what leaves and what comes: those of this rank, by peer, and the peers whose
  /// copies read or write its memory.
  std::vector<PeerCopy> copies;
  std::vector<int> copied_by;
  /// Of these peers it is known, since the last step of the run before, that they may copy, and be copied to: those whose copies meet
  /// this rank's memory, and those whose memory this rank's copies meet.
  std::vector<int> open_to, open_at;
  /// Nothing is computed meanwhile, so SMs copy, and move rows that stay, of this step and others.
  bool alone = false;
  std::vector<PlannedMove> kept;
  /// Takes the copies within this rank's memory out, as moves for the lane of links.
  void move_own_rows(int rank, std::vector<PlannedMove>& moves);

  /// Copies come in so many parts of the heads, each in arriving_key_parts, and the peer, of which there is one, hears of each. The number
  /// divides the heads.
  void copy_in_parts(int heads_parts);

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

/// How the rows of a flow travel where ranks reach each other's workspaces, but not the callers' tensors: their sender puts them to their
/// place, their receiver gets them from it, or their sender puts them to memory out of which the receiver moves them.
/// Puts are over sooner than gets, which wait until they may begin; so where nothing is computed meanwhile, rows that could be got land,
/// too.
enum class Way : uint8_t { kPut, kGet, kLand };
Way way_of(const Flow& flow, bool alone);

/// A step as one of the ranks sees it.
struct FlowsOfRank {
  const std::vector<Flow>* flows = nullptr;
  int64_t landing = 0;  ///< where in its workspace what comes to it lands
};
/// Bytes of the workspace of `rank` for what lands there.
int64_t landing_bytes(int rank, const std::vector<Flow>& flows, bool alone);
/// The step of `rank` by copies.
Exchange exchange_by_copies(int rank, const std::vector<FlowsOfRank>& of_rank, bool alone);

/// The step of `rank` for all of `flows`. What is packed lies in the workspace from `first` on.
Exchange exchange_of(int rank, const std::vector<Flow>& flows, int64_t first, const Packing& packing);

}  // namespace fovea::distributed
