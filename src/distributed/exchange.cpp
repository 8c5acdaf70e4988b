// The definitions of exchange.hpp.
#include "distributed/exchange.hpp"

#include <map>
#include <utility>

#include "core/arriving_keys.hpp"

namespace fovea::distributed {
namespace {

/// Whether elements are put to their place as they are.
bool only_copied(const Move& how) {
  return !how.add && how.from.code == how.to.code && how.from.bits == how.to.bits;
}

/// Visits the boxes of a flow that go from a rank to another, in an order that both know: visit(run, heads).
template <class Visit>
void for_each_box(const Flow& flow, int from, int to, Visit&& visit) {
  const Side &source = flow.from[static_cast<size_t>(from)], &target = flow.to[static_cast<size_t>(to)];
  const Range heads = source.heads & target.heads;
  if (heads.empty()) return;
  for (const Run& run : runs_between(source.rows, target.rows)) visit(run, heads);
}

/// Moves of one kind each, in the order in which they first come up.
void add_box(std::vector<PlannedMove>& moves, const Move& how, int from, const PlannedBox& box) {
  const int source = how.add ? from : -1;
  const auto same = [](const fovea_dtype& a, const fovea_dtype& b) {
    return a.code == b.code && a.bits == b.bits;
  };
  for (PlannedMove& move : moves) {
    if (move.source == source && same(move.how.from, how.from) && same(move.how.to, how.to) &&
        move.how.add == how.add) {
      move.boxes.push_back(box);
      return;
    }
  }
  moves.push_back({how, source, {box}});
}

/// What one rank has of a run of rows that travels.
struct Part {
  const Flow* flow;
  View view;  ///< in this rank's tensor
  int64_t rows, heads;

  int64_t box_bytes() const { return flow->elements * bytes_of(flow->type); }
  int64_t bytes() const { return flow->batch * rows * heads * box_bytes(); }
  /// Whether the rows lie side by side, as in a message.
  bool lies_compact() const {
    const int64_t row = heads * box_bytes();
    return (heads == 1 || view.stride_head == box_bytes()) && (rows == 1 || view.stride_row == row) &&
           (flow->batch == 1 || view.stride_batch == rows * row);
  }
};

/// The messages between this rank and one other, one way: from `next` on in the workspace what does not travel from, or to, its place.
class Leg {
 public:
  Leg(int peer, int64_t next) : peer_(peer), next_(next) {}

  /// A message of its own. `direct`: nothing else is done with the elements than to copy them.
  void add_own(const Part& part, bool direct, std::vector<Exchange::Message>& messages) {
    if (direct && part.lies_compact()) {
      messages.push_back({peer_, part.view, part.bytes()});
    } else {
      const int64_t begin = next_;
      boxes_.push_back({part, place(part)});
      messages.push_back({peer_, {-1, begin, 0, 0, 0}, part.bytes()});
      next_ = aligned(next_);
    }
  }
  void add_shared(const Part& part) {
    if (shared_ < 0) shared_ = next_;
    boxes_.push_back({part, place(part)});
  }
  /// Ends the shared message, and says where the workspace goes on.
  int64_t close(std::vector<Exchange::Message>& messages) {
    if (shared_ >= 0 && next_ > shared_) messages.push_back({peer_, {-1, shared_, 0, 0, 0}, next_ - shared_});
    return aligned(next_);
  }
  /// The parts that are packed or unpacked, each with its box in a message.
  const std::vector<std::pair<Part, View>>& boxes() const { return boxes_; }

 private:
  View place(const Part& part) {
    const int64_t box = part.box_bytes();
    const View view{-1, next_, part.rows * part.heads * box, part.heads * box, box};
    constexpr int64_t kVector = 16;  // what a copy moves at once
    next_ += (part.bytes() + kVector - 1) / kVector * kVector;
    return view;
  }

  int peer_;
  int64_t next_, shared_ = -1;
  std::vector<std::pair<Part, View>> boxes_;
};

PlannedBox box_of(const Part& part, const View& from, const View& to) {
  return {from, to, part.flow->batch, part.rows, part.heads, part.flow->elements};
}

View local(const View& view, const Side& side, int64_t row, const Range& heads) {
  return view.at(row, heads.begin - side.heads.begin);
}

/// Fills a leg with the parts of every flow, messages of their own first: part_of(flow, run, heads) is what this rank has of one,
/// direct(flow) whether this rank only copies what travels.
template <class PartOf, class Direct>
void fill_leg(Leg& leg, const std::vector<Flow>& flows, int from, int to, const Packing& packing,
              std::vector<Exchange::Message>& messages, PartOf&& part_of, Direct&& direct) {
  for (const bool own : {true, false}) {
    for (const Flow& flow : flows) {
      for_each_box(flow, from, to, [&](const Run& run, const Range& heads) {
        const Part part = part_of(flow, run, heads);
        if ((part.bytes() >= packing.least_own) != own) return;
        if (own) {
          leg.add_own(part, !packing.all && direct(flow), messages);
        } else {
          leg.add_shared(part);
        }
      });
    }
  }
}

/// What a rank sends to another, from `first` on in the workspace; returns where that goes on.
int64_t add_sends(Exchange& made, int rank, int to, const std::vector<Flow>& flows, int64_t first,
                  const Packing& packing) {
  Leg leg(to, first);
  const auto part_of = [&](const Flow& flow, const Run& run, const Range& heads) {
    return Part{&flow, local(flow.mine_from, flow.from[static_cast<size_t>(rank)], run.from, heads), run.rows,
                heads.size()};
  };
  fill_leg(leg, flows, rank, to, packing, made.sends, part_of, [](const Flow&) { return true; });
  for (const auto& [part, place] : leg.boxes())
    add_box(made.pack, {part.flow->type, part.flow->type, false}, rank, box_of(part, part.view, place));
  return leg.close(made.sends);
}

int64_t add_receives(Exchange& made, int rank, int from, const std::vector<Flow>& flows, int64_t first,
                     const Packing& packing) {
  Leg leg(from, first);
  const auto part_of = [&](const Flow& flow, const Run& run, const Range& heads) {
    return Part{&flow, local(flow.mine_to, flow.to[static_cast<size_t>(rank)], run.to, heads), run.rows,
                heads.size()};
  };
  const auto direct = [](const Flow& flow) { return only_copied(flow.arrival); };
  fill_leg(leg, flows, from, rank, packing, made.receives, part_of, direct);
  for (const auto& [part, place] : leg.boxes())
    add_box(made.unpack, part.flow->arrival, from, box_of(part, place, part.view));
  return leg.close(made.receives);
}

/// Rows that stay, and change tensors.
void add_own_rows(Exchange& made, int rank, const std::vector<Flow>& flows) {
  const auto own = static_cast<size_t>(rank);
  for (const Flow& flow : flows) {
    for_each_box(flow, rank, rank, [&](const Run& run, const Range& heads) {
      const Part part{&flow, local(flow.mine_from, flow.from[own], run.from, heads), run.rows, heads.size()};
      add_box(made.unpack, flow.arrival, rank,
              box_of(part, part.view, local(flow.mine_to, flow.to[own], run.to, heads)));
    });
  }
}

/// What lands on `rank` in its order: visit(sender, number of the flow, run, heads, bytes behind the first that land).
template <class Visit>
int64_t for_each_landing(int rank, const std::vector<Flow>& flows, bool alone, Visit&& visit) {
  const auto ranks = flows.empty() ? 0 : static_cast<int>(flows.front().from.size());
  int64_t next = 0;
  for (int step = 1; step < ranks; ++step) {
    const int from = (rank + ranks - step) % ranks;
    for (size_t f = 0; f < flows.size(); ++f) {
      const Flow& flow = flows[f];
      if (way_of(flow, alone) != Way::kLand) continue;
      for_each_box(flow, from, rank, [&](const Run& run, const Range& heads) {
        visit(from, f, run, heads, next);
        next = aligned(next + flow.batch * run.rows * heads.size() * flow.elements * bytes_of(flow.type));
      });
    }
  }
  return next;
}

/// A rank's step by copies in the making.
class ByCopies {
 public:
  ByCopies(int rank, const std::vector<FlowsOfRank>& of_rank, bool alone) : rank_(rank), of_rank_(of_rank) {
    made_.alone = alone;
  }

  Exchange made() {
    const auto ranks = static_cast<int>(of_rank_.size());
    keep_own();
    for (int step = 1; step < ranks; ++step) {
      // All copy to or from the rank behind them, then the one behind that: no rank is everyone's first.
      const int peer = (rank_ + step) % ranks;
      const bool leaves = plan_copies(peer, true), arrives = plan_copies(peer, false);
      if (leaves || arrives) made_.copied_by.push_back(peer);
      put_to_landing(peer);
    }
    land();
    return std::move(made_);
  }

 private:
  const std::vector<Flow>& flows(int rank) const { return *of_rank_[static_cast<size_t>(rank)].flows; }
  View source(int rank, size_t f, const Run& run, const Range& heads) const {
    const Flow& flow = flows(rank)[f];
    return local(flow.mine_from, flow.from[static_cast<size_t>(rank)], run.from, heads);
  }
  View target(int rank, size_t f, const Run& run, const Range& heads) const {
    const Flow& flow = flows(rank)[f];
    return local(flow.mine_to, flow.to[static_cast<size_t>(rank)], run.to, heads);
  }
  /// Where the rows of a box lie side by side.
  static View compact(const Flow& flow, int64_t offset, const Run& run, const Range& heads) {
    const int64_t box = flow.elements * bytes_of(flow.type);
    return {-1, offset, run.rows * heads.size() * box, heads.size() * box, box};
  }
  static PlannedBox box_between(const Flow& flow, const View& from, const View& to, const Run& run,
                                const Range& heads) {
    return {from, to, flow.batch, run.rows, heads.size(), flow.elements};
  }

  /// Rows that stay, and change tensors.
  void keep_own() {
    for (size_t f = 0; f < flows(rank_).size(); ++f) {
      const Flow& flow = flows(rank_)[f];
      for_each_box(flow, rank_, rank_, [&](const Run& run, const Range& heads) {
        const PlannedBox box =
            box_between(flow, source(rank_, f, run, heads), target(rank_, f, run, heads), run, heads);
        if (only_copied(flow.arrival)) {
          made_.copies.push_back({rank_, true, box, flow.type});
        } else {
          add_box(made_.unpack, flow.arrival, rank_, box);
        }
      });
    }
  }
  /// What travels to a peer, or from it. Returns whether the peer copies some of it.
  bool plan_copies(int peer, bool leaves) {
    const int from = leaves ? rank_ : peer, to = leaves ? peer : rank_;
    bool is_copied_by_peer = false;
    for (size_t f = 0; f < flows(rank_).size(); ++f) {
      const Flow& flow = flows(rank_)[f];
      const Way way = way_of(flow, made_.alone);
      const bool own = leaves == (way != Way::kGet);  // puts are their sender's, gets their receiver's
      for_each_box(flow, from, to, [&](const Run& run, const Range& heads) {
        const int64_t bytes = flow.batch * run.rows * heads.size() * flow.elements * bytes_of(flow.type);
        if (bytes == 0) return;
        (leaves ? made_.sends : made_.receives).push_back({peer, {}, bytes});
        is_copied_by_peer = is_copied_by_peer || !own;
        if (own && way != Way::kLand)
          made_.copies.push_back(
              {peer, leaves,
               box_between(flow, source(from, f, run, heads), target(to, f, run, heads), run, heads),
               flow.type, f});
      });
    }
    return is_copied_by_peer;
  }
  void put_to_landing(int peer) {
    for_each_landing(
        peer, flows(peer), made_.alone,
        [&](int from, size_t f, const Run& run, const Range& heads, int64_t at) {
          const Flow& flow = flows(rank_)[f];
          if (from != rank_ || run.rows * flow.batch * flow.elements == 0) return;
          const View to = compact(flow, of_rank_[static_cast<size_t>(peer)].landing + at, run, heads);
          made_.copies.push_back(
              {peer, true, box_between(flow, source(rank_, f, run, heads), to, run, heads), flow.type});
        });
  }
  /// What has landed here goes to its place.
  void land() {
    const int64_t first = of_rank_[static_cast<size_t>(rank_)].landing;
    made_.bytes = for_each_landing(rank_, flows(rank_), made_.alone,
                                   [&](int from, size_t f, const Run& run, const Range& heads, int64_t at) {
                                     const Flow& flow = flows(rank_)[f];
                                     add_box(made_.unpack, flow.arrival, from,
                                             box_between(flow, compact(flow, first + at, run, heads),
                                                         target(rank_, f, run, heads), run, heads));
                                   });
  }

  int rank_;
  const std::vector<FlowsOfRank>& of_rank_;
  Exchange made_;
};

}  // namespace

int64_t Exchange::bytes_sent() const {
  int64_t sum = 0;
  for (const Message& message : sends) sum += message.bytes;
  return sum;
}

void Exchange::move_own_rows(int rank, std::vector<PlannedMove>& moves) {
  for (const PeerCopy& copy : copies) {
    if (copy.peer == rank) add_box(moves, {copy.type, copy.type, false}, rank, copy.box);
  }
  std::erase_if(copies, [&](const PeerCopy& copy) { return copy.peer == rank; });
}

void Exchange::copy_in_parts(int heads_parts) {
  std::vector<PeerCopy> ordered;
  const auto rows_of = [&](size_t flow) {
    int64_t rows = 0;
    for (const PeerCopy& copy : copies) rows += copy.flow == flow ? copy.box.rows : 0;
    return rows;
  };
  const int key_parts = copies.empty() ? 1 : arriving_key_parts(rows_of(copies[0].flow));
  for (int part = 0; part < heads_parts; ++part) {
    for (int key_part = key_parts - 1; key_part >= 0; --key_part) {
      std::map<size_t, int64_t> next;  // row of each flow
      for (const PeerCopy& copy : copies) {
        const int64_t half = rows_of(copy.flow) / key_parts, first = next[copy.flow];
        const Range rows =
            Range{first, first + copy.box.rows} & Range{key_part * half, (key_part + 1) * half};
        next[copy.flow] += copy.box.rows;
        if (rows.empty()) continue;
        PlannedBox& box = ordered.emplace_back(copy).box;
        box.heads /= heads_parts;
        box.from = box.from.at(rows.begin - first, part * box.heads);
        box.to = box.to.at(rows.begin - first, part * box.heads);
        box.rows = rows.size();
      }
      if (!ordered.empty()) ordered.back().ends_part = part * key_parts + key_part;
    }
  }
  copies = std::move(ordered);
}

Way way_of(const Flow& flow, bool alone) {
  if (!only_copied(flow.arrival)) return Way::kLand;
  if (flow.mine_to.place < 0) return Way::kPut;
  return flow.mine_from.place < 0 && !alone ? Way::kGet : Way::kLand;
}

int64_t landing_bytes(int rank, const std::vector<Flow>& flows, bool alone) {
  return for_each_landing(rank, flows, alone, [](int, size_t, const Run&, const Range&, int64_t) {});
}

Exchange exchange_by_copies(int rank, const std::vector<FlowsOfRank>& of_rank, bool alone) {
  return ByCopies(rank, of_rank, alone).made();
}

Exchange exchange_of(int rank, const std::vector<Flow>& flows, int64_t first, const Packing& packing) {
  Exchange made;
  int64_t next = first;
  const auto ranks = flows.empty() ? 0 : static_cast<int>(flows.front().from.size());
  for (int step = 0; step < ranks; ++step) {
    // All send to the rank behind them, then to the one behind that: no rank is everyone's first.
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    if (to == rank) {
      add_own_rows(made, rank, flows);
      continue;
    }
    next = add_sends(made, rank, to, flows, next, packing);
    next = add_receives(made, rank, from, flows, next, packing);
  }
  made.bytes = next - first;
  return made;
}

}  // namespace fovea::distributed
