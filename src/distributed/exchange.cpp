// The definitions of exchange.hpp.
#include "distributed/exchange.hpp"

namespace fovea::distributed {
namespace {

int64_t bytes_of(const fovea_dtype& type) {
  return type.bits / 8;
}

/// Boxes that lie behind each other in a message.
class Message {
 public:
  explicit Message(int64_t first) : first_(first), next_(first) {}

  /// Room for a box, compact.
  View place(int64_t batch, int64_t rows, int64_t heads, int64_t bytes) {
    View view{-1, next_, rows * heads * bytes, heads * bytes, bytes};
    next_ += batch * view.stride_batch;
    constexpr int64_t kVector = 16;  // what a copy moves at once
    next_ = (next_ + kVector - 1) / kVector * kVector;
    return view;
  }
  int64_t bytes() const { return next_ - first_; }
  int64_t end() const { return next_; }

 private:
  int64_t first_, next_;
};

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

}  // namespace

int64_t Exchange::bytes_sent() const {
  int64_t sum = 0;
  for (const Message& message : sends) sum += message.bytes;
  return sum;
}

Exchange exchange_of(int rank, const std::vector<Flow>& flows, int64_t first) {
  Exchange made;
  int64_t next = first;
  const auto ranks = flows.empty() ? 0 : static_cast<int>(flows.front().from.size());
  const auto local = [](const View& view, const Side& side, int64_t row, const Range& heads) {
    return view.at(row, heads.begin - side.heads.begin);
  };
  for (int step = 0; step < ranks; ++step) {
    // All send to the rank behind them, then to the one behind that: no rank is everyone's first.
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    Message out(next);
    for (const Flow& flow : flows) {
      const Side &mine = flow.from[static_cast<size_t>(rank)], &there = flow.to[static_cast<size_t>(to)];
      for_each_box(flow, rank, to, [&](const Run& run, const Range& heads) {
        PlannedBox box{local(flow.mine_from, mine, run.from, heads),
                       {},
                       flow.batch,
                       run.rows,
                       heads.size(),
                       flow.elements};
        if (to == rank) {
          box.to = local(flow.mine_to, there, run.to, heads);
          add_box(made.unpack, flow.arrival, rank, box);
        } else {
          box.to = out.place(flow.batch, run.rows, heads.size(), flow.elements * bytes_of(flow.type));
          add_box(made.pack, {flow.type, flow.type, false}, rank, box);
        }
      });
    }
    if (out.bytes() > 0) made.sends.push_back({to, next, out.bytes()});
    next = aligned(out.end());
    if (from == rank) continue;
    Message in(next);
    for (const Flow& flow : flows) {
      const Side& here = flow.to[static_cast<size_t>(rank)];
      for_each_box(flow, from, rank, [&](const Run& run, const Range& heads) {
        PlannedBox box{in.place(flow.batch, run.rows, heads.size(), flow.elements * bytes_of(flow.type)),
                       local(flow.mine_to, here, run.to, heads),
                       flow.batch,
                       run.rows,
                       heads.size(),
                       flow.elements};
        add_box(made.unpack, flow.arrival, from, box);
      });
    }
    if (in.bytes() > 0) made.receives.push_back({from, next, in.bytes()});
    next = aligned(in.end());
  }
  made.bytes = next - first;
  return made;
}

}  // namespace fovea::distributed
