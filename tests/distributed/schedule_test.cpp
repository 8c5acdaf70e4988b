// Cuts, calls and exchanges: each pair that a query sees is computed once, on one rank, and what is sent is what is expected.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "distributed/exchange.hpp"
#include "distributed/rectangles.hpp"
#include "distributed/schedule.hpp"
#include "verify/random.hpp"

namespace fovea::distributed {
namespace {

using verify::Random;

bool sees(const Sequence& s, const Window& window, int64_t query, int64_t key) {
  const int64_t diagonal = query - s.queries.begin + s.shift() + s.keys.begin;
  return (window.left < 0 || key >= diagonal - window.left) &&
         (window.right < 0 || key <= diagonal + window.right);
}

/// A cut of a sequence, pair by pair.
void expect_pairs(const Sequence& s, const Range& queries, const Range& keys, const Window& window,
                  int64_t multiple) {
  const auto made = cut(s, queries, keys, window, multiple);
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      bool in_cut = made && i >= made->queries.begin && i < made->queries.end && j >= made->keys.begin &&
                    j < made->keys.end;
      if (in_cut) in_cut = sees({made->queries, made->keys}, made->window, i, j);
      ASSERT_EQ(in_cut, sees(s, window, i, j)) << "pair " << i << "," << j;
    }
  }
  if (!made) return;
  if (window.left >= 0) {
    ASSERT_GE(made->window.left, 0);
  }
  if (window.right >= 0) {
    ASSERT_GE(made->window.right, 0);
  }
  ASSERT_EQ((made->queries.begin - s.queries.begin) % multiple, 0);
  ASSERT_EQ((made->keys.begin - s.keys.begin) % multiple, 0);
}

/// Every cut of a small sequence that begins at multiples.
void expect_cuts(const Sequence& s, const Window& window, int64_t multiple) {
  for (int64_t a = s.queries.begin; a < s.queries.end; a += multiple) {
    for (int64_t b = a + 1; b <= s.queries.end; ++b) {
      for (int64_t c = s.keys.begin; c < s.keys.end; c += multiple) {
        for (int64_t d = c + 1; d <= s.keys.end; ++d) {
          ASSERT_NO_FATAL_FAILURE(expect_pairs(s, {a, b}, {c, d}, window, multiple))
              << "queries " << a << ".." << b << " keys " << c << ".." << d << " multiple " << multiple;
        }
      }
    }
  }
}

TEST(Cut, HasThePairsThatAreSeen) {
  for (const int64_t sq : {1, 3, 4}) {
    for (const int64_t sk : {1, 2, 6}) {
      for (int64_t left = -1; left <= sk; ++left) {
        for (int64_t right = -1; right <= sq; ++right) {
          for (const int64_t multiple : {1, 2, 3}) {
            ASSERT_NO_FATAL_FAILURE(expect_cuts({{10, 10 + sq}, {20, 20 + sk}}, {left, right}, multiple))
                << "sq" << sq << " sk" << sk << " left" << left << " right" << right;
          }
        }
      }
    }
  }
}

Placement random_placement(Random& random, int64_t total, int ranks) {
  Placement placement{total, std::vector<Holding>(static_cast<size_t>(ranks))};
  std::vector<Range> pieces;
  for (int64_t at = 0; at < total;) {
    const int64_t end = std::min(total, at + random.between(1, std::max<int64_t>(1, total / ranks)));
    pieces.push_back({at, end});
    at = end;
  }
  std::vector<int64_t> next(static_cast<size_t>(ranks), 0);
  for (size_t i = pieces.size(); i-- > 0;) {
    const auto rank = static_cast<size_t>(random.between(0, ranks - 1));
    placement.of_rank[rank].push_back({pieces[i], next[rank]});
    next[rank] += pieces[i].size();
  }
  return placement;
}

Shape random_shape(Random& random) {
  Shape shape;
  shape.row_multiple = random.chance(0.5) ? 1 : random.between(2, 5);
  shape.joins = shape.row_multiple == 1;
  shape.ranks = static_cast<int>(random.between(1, 7));
  shape.heads_kv = random.between(1, 5);
  shape.heads_q = shape.heads_kv * random.between(1, 3);
  if (random.chance(0.6)) shape.window = {random.between(-1, 12), random.between(-1, 8)};
  if (random.chance(0.4)) shape.window = {-1, 0};
  int64_t queries = 0, keys = 0;
  for (int64_t n = random.between(1, 5); n > 0; --n) {
    const Sequence s{{queries, queries + random.between(0, 14)}, {keys, keys + random.between(0, 14)}};
    shape.sequences.push_back(s);
    queries = s.queries.end;
    keys = s.keys.end;
  }
  shape.queries = random_placement(random, queries, shape.ranks);
  shape.keys = random_placement(random, keys, shape.ranks);
  return shape;
}

Method random_method(Random& random, int ranks) {
  std::vector<int> divisors;
  for (int g = 1; g <= ranks; ++g) {
    if (ranks % g == 0) divisors.push_back(g);
  }
  const int g = divisors[static_cast<size_t>(random.between(0, static_cast<int64_t>(divisors.size()) - 1))];
  return {g, static_cast<int>(random.between(1, g == ranks ? 4 : ranks / g))};
}

/// The row of an axis that lies at a place of a holding.
int64_t row_at(const Holding& holding, int64_t at) {
  for (const Held& held : holding) {
    if (at >= held.at && at < held.at + held.rows.size()) return held.rows.begin + at - held.at;
  }
  ADD_FAILURE() << "nothing lies at " << at;
  return -1;
}

using Pairs = std::map<std::pair<int64_t, int64_t>, int>;  // query and key, how often

/// Counts the pairs of a call on the axes.
void count_pairs(const Call& call, const Holding& queries, const Holding& keys, Pairs& pairs) {
  std::vector<int32_t> starts_q = call.starts_q, starts_k = call.starts_k;
  if (starts_q.empty()) {
    starts_q = {0, static_cast<int32_t>(call.q_rows)};
    starts_k = {0, static_cast<int32_t>(call.k_rows)};
  }
  for (size_t n = 1; n < starts_q.size(); ++n) {
    const Sequence s{{starts_q[n - 1], starts_q[n]}, {starts_k[n - 1], starts_k[n]}};
    EXPECT_LE(s.queries.size(), call.longest_q);
    EXPECT_LE(s.keys.size(), call.longest_k);
    for (int64_t i = s.queries.begin; i < s.queries.end; ++i) {
      for (int64_t j = s.keys.begin; j < s.keys.end; ++j) {
        if (sees(s, call.window, i, j))
          ++pairs[{row_at(queries, call.q_at + i), row_at(keys, call.k_at + j)}];
      }
    }
  }
}

TEST(Schedule, ComputesEachPairOnce) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Random random(seed);
    const Shape shape = random_shape(random);
    const Schedule schedule(shape, random_method(random, shape.ranks));
    std::map<int64_t, Pairs> by_head;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      for (int stage = 0; stage < schedule.stages(); ++stage) {
        Pairs pairs;
        double counted = 0;
        for (const Call& call : schedule.calls(rank, stage)) {
          count_pairs(call, schedule.queries(rank), schedule.keys(rank, stage), pairs);
          counted += pairs_of(call);
        }
        double all = 0;
        for (const auto& [pair, times] : pairs) all += times;
        ASSERT_EQ(all, counted) << "seed " << seed;
        const Range heads = schedule.heads_q(rank, stage);
        for (int64_t head = heads.begin; head < heads.end; ++head) {
          for (const auto& [pair, times] : pairs) by_head[head][pair] += times;
        }
      }
    }
    for (int64_t head = 0; head < shape.heads_q; ++head) {
      size_t expected = 0;
      for (const Sequence& s : shape.sequences) {
        for (int64_t i = s.queries.begin; i < s.queries.end; ++i) {
          for (int64_t j = s.keys.begin; j < s.keys.end; ++j) {
            if (!sees(s, shape.window, i, j)) continue;
            ++expected;
            ASSERT_EQ((by_head[head][{i, j}]), 1)
                << "seed " << seed << " head " << head << " pair " << i << "," << j;
          }
        }
      }
      ASSERT_EQ(by_head[head].size(), expected) << "seed " << seed;
    }
  }
}

/// Rows of a call are neighbours in their sequence, begin at a multiple there, and its sequences follow each other: what terms of a part
/// stand on.
void expect_positions(const Shape& shape, const Call& call, const Holding& queries, const Holding& keys) {
  const auto expect_rows = [](const Holding& held, int64_t at, const Range& rows) {
    for (int64_t i = 0; i < rows.size(); ++i) ASSERT_EQ(row_at(held, at + i), rows.begin + i);
  };
  EXPECT_EQ(call.first_q % shape.row_multiple, 0);
  EXPECT_EQ(call.first_k % shape.row_multiple, 0);
  for (int64_t n = 0; n < call.sequences(); ++n) {
    const Sequence& s = shape.sequences[static_cast<size_t>(call.sequence + n)];
    Range q{s.queries.begin + call.first_q, s.queries.begin + call.first_q + call.q_rows};
    Range k{s.keys.begin + call.first_k, s.keys.begin + call.first_k + call.k_rows};
    int64_t q_at = call.q_at, k_at = call.k_at;
    if (call.starts_q.empty()) {
      EXPECT_EQ(call.whole_q, s.queries.size());
      EXPECT_EQ(call.whole_k, s.keys.size());
      EXPECT_EQ(call.is_cut(), !(q == s.queries && k == s.keys));
    } else {
      const auto i = static_cast<size_t>(n);
      EXPECT_FALSE(call.is_cut());
      EXPECT_EQ(call.starts_q[i + 1] - call.starts_q[i], s.queries.size());
      EXPECT_EQ(call.starts_k[i + 1] - call.starts_k[i], s.keys.size());
      q = s.queries;
      k = s.keys;
      q_at += call.starts_q[i];
      k_at += call.starts_k[i];
    }
    expect_rows(queries, q_at, q);
    expect_rows(keys, k_at, k);
  }
}

TEST(Schedule, CallsAreNeighbours) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Random random(seed);
    Shape shape = random_shape(random);
    shape.joins = false;
    const Schedule schedule(shape, random_method(random, shape.ranks));
    for (int rank = 0; rank < shape.ranks; ++rank) {
      for (int stage = 0; stage < schedule.stages(); ++stage) {
        for (const Call& call : schedule.calls(rank, stage))
          expect_positions(shape, call, schedule.queries(rank), schedule.keys(rank, stage));
      }
    }
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

/// Early and late rows together: what a rank has is one causal problem, and so is what each sees of the others' keys.
TEST(Schedule, EarlyAndLateRowsShareCalls) {
  Shape shape;
  shape.ranks = 2;
  shape.window = {-1, 0};
  shape.sequences = {{{0, 64}, {0, 64}}};
  shape.queries = {64, {{{{0, 16}, 0}, {{48, 64}, 16}}, {{{16, 32}, 0}, {{32, 48}, 16}}}};
  shape.keys = shape.queries;
  const Schedule schedule(shape, {1, 2});
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<Call> own = schedule.calls(rank, 0), others = schedule.calls(rank, 1);
    ASSERT_EQ(own.size(), 1U);
    EXPECT_EQ(own[0].q_rows, 32);
    EXPECT_EQ(own[0].k_rows, 32);
    EXPECT_EQ(own[0].window, (Window{-1, 0}));
    ASSERT_EQ(others.size(), 1U);
    EXPECT_EQ(others[0].q_rows, rank == 0 ? 16 : 32);
    EXPECT_EQ(others[0].k_rows, rank == 0 ? 32 : 16);
    EXPECT_EQ(pairs_of(others[0]), 512);
  }
  shape.joins = false;
  EXPECT_GT(Schedule(shape, {1, 2}).calls(0, 0).size(), 1U);
}

TEST(Schedule, BordersMoveToTheNearestMultiple) {
  const std::vector<Sequence> sequences = {{{0, 40}, {0, 0}}, {{40, 40}, {0, 0}}, {{40, 57}, {0, 0}}};
  const Placement placement{57, {{{{0, 7}, 0}, {{23, 49}, 7}}, {{{7, 23}, 0}}, {{{49, 57}, 0}}}};
  const Placement made = with_borders_at(placement, sequences, &Sequence::queries, 16);
  EXPECT_EQ(made.total, 57);
  // 7, 23 and 49 go to 0, 16 and 40 + 16.
  EXPECT_EQ(made.of_rank[0], (Holding{{{16, 56}, 0}}));
  EXPECT_EQ(made.of_rank[1], (Holding{{{0, 16}, 0}}));
  EXPECT_EQ(made.of_rank[2], (Holding{{{56, 57}, 0}}));
  EXPECT_EQ(with_borders_at(placement, sequences, &Sequence::queries, 1).of_rank, placement.of_rank);
  // Behind the last multiple of a sequence its end is next.
  const Placement end{30, {{{{0, 25}, 0}}, {{{25, 30}, 0}}}};
  EXPECT_EQ(with_borders_at(end, {{{0, 30}, {0, 0}}}, &Sequence::queries, 16).of_rank,
            (std::vector<Holding>{{{{0, 30}, 0}}, {}}));
}

/// Rows travel to where they are computed only where a border moves.
TEST(Schedule, AlignedRowsStayWhereTheyLie) {
  Shape shape;
  shape.ranks = 2;
  shape.row_multiple = 16;
  shape.sequences = {{{0, 100}, {0, 100}}};
  shape.queries = shape.keys = {100, {{{{0, 48}, 0}}, {{{48, 100}, 0}}}};
  EXPECT_FALSE(Schedule(shape, {1, 2}).queries_travel());
  EXPECT_TRUE(Schedule(shape, {1, 2}).in_place(0, 0));
  shape.queries = shape.keys = {100, {{{{0, 50}, 0}}, {{{50, 100}, 0}}}};
  const Schedule moved(shape, {1, 2});
  EXPECT_TRUE(moved.queries_travel());
  EXPECT_FALSE(moved.in_place(0, 0));
  EXPECT_EQ(moved.queries(0), (Holding{{{0, 48}, 0}}));
  EXPECT_EQ(moved.keys(1, 0), (Holding{{{48, 100}, 0}}));
}

TEST(Schedule, TakesEmptyRanksAndSequences) {
  Shape shape;
  shape.ranks = 3;
  shape.heads_q = shape.heads_kv = 2;
  shape.sequences = {{{0, 0}, {0, 0}}, {{0, 4}, {0, 4}}, {{4, 4}, {4, 4}}};
  shape.queries = shape.keys = {4, {{}, {{{0, 4}, 0}}, {}}};
  for (const Method method : {Method{1, 1}, {1, 3}, {3, 1}, {3, 2}}) {
    const Schedule schedule(shape, method);
    double pairs = 0;
    for (int rank = 0; rank < 3; ++rank) {
      for (int stage = 0; stage < schedule.stages(); ++stage)
        pairs += schedule.pairs(rank, stage) * static_cast<double>(schedule.heads_q(rank, stage).size());
    }
    EXPECT_EQ(pairs, 4 * 4 * 2);
  }
}

TEST(Schedule, CountsPairsOfEveryWindow) {
  for (int64_t queries = 0; queries < 7; ++queries) {
    for (int64_t keys = 0; keys < 7; ++keys) {
      for (int64_t left = -1; left < 9; ++left) {
        for (int64_t right = -1; right < 9; ++right) {
          const Sequence s{{0, queries}, {0, keys}};
          double expected = 0;
          for (int64_t i = 0; i < queries; ++i) {
            for (int64_t j = 0; j < keys; ++j) expected += sees(s, {left, right}, i, j);
          }
          Call call;
          call.q_rows = queries;
          call.k_rows = keys;
          call.window = {left, right};
          ASSERT_EQ(pairs_of(call), expected) << queries << ' ' << keys << ' ' << left << ' ' << right;
        }
      }
    }
  }
}

constexpr int64_t kElement = 2;

/// A tensor of one element a row and head, with one head more than there is: rows are compact where all heads are one.
Flow flow_of_keys(const Shape& shape, const Schedule& schedule, int stage, int64_t row_bytes) {
  const fovea_dtype type{FOVEA_CODE_FLOAT, 16, 1};
  Flow flow{{},
            {},
            {0, 0, 0, row_bytes, kElement},
            {1, 0, 0, row_bytes, kElement},
            1,
            1,
            type,
            {type, type, false}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    flow.from.push_back({shape.keys.of_rank[static_cast<size_t>(rank)], {0, shape.heads_kv}});
    flow.to.push_back({schedule.keys(rank, stage), schedule.heads_kv(rank, stage)});
  }
  return flow;
}

using Cell = std::pair<int64_t, int64_t>;  // a row and head of a target

/// Counts what is written: by boxes that are unpacked, and by messages that arrive where they belong.
void count_written(const Exchange& exchange, int64_t row_bytes, std::map<Cell, int>& written) {
  for (const PlannedMove& move : exchange.unpack) {
    for (const PlannedBox& box : move.boxes) {
      for (int64_t row = 0; row < box.rows; ++row) {
        for (int64_t head = 0; head < box.heads; ++head)
          ++written[{box.to.offset / row_bytes + row, box.to.offset % row_bytes / kElement + head}];
      }
    }
  }
  for (const Exchange::Message& message : exchange.receives) {
    if (message.view.place < 0) continue;
    for (int64_t at = message.view.offset; at < message.view.offset + message.bytes; at += kElement)
      ++written[{at / row_bytes, at % row_bytes / kElement}];
  }
}

/// The messages from one rank to another, in the order of a list.
std::vector<int64_t> sizes_between(const std::vector<Exchange::Message>& list, int peer) {
  std::vector<int64_t> sizes;
  for (const Exchange::Message& message : list) {
    if (message.peer == peer) sizes.push_back(message.bytes);
  }
  return sizes;
}

/// What one rank sends to another is what that one expects, and each row and head of a target is written once.
TEST(Exchange, BothSidesAgree) {
  int from_their_place = 0, to_their_place = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const Shape shape = random_shape(random);
    const Schedule schedule(shape, random_method(random, shape.ranks));
    const int64_t least_own = std::array{int64_t{1}, int64_t{20}, int64_t{1} << 40}[seed % 3];
    const int64_t row_bytes = (shape.heads_kv + static_cast<int64_t>(seed / 3 % 2)) * kElement;
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      std::vector<Exchange> of_rank;
      for (int rank = 0; rank < shape.ranks; ++rank) {
        const Exchange& made = of_rank.emplace_back(
            exchange_of(rank, {flow_of_keys(shape, schedule, stage, row_bytes)}, 0, {least_own}));
        std::map<Cell, int> written;
        count_written(made, row_bytes, written);
        for (const auto& [cell, times] : written)
          ASSERT_EQ(times, 1) << "seed " << seed << " row " << cell.first;
        const auto rows = static_cast<size_t>(count(schedule.keys(rank, stage)));
        ASSERT_EQ(written.size(), rows * static_cast<size_t>(schedule.heads_kv(rank, stage).size()))
            << "seed " << seed;
        for (const Exchange::Message& message : made.sends) from_their_place += message.view.place == 0;
        for (const Exchange::Message& message : made.receives) to_their_place += message.view.place == 1;
      }
      for (int from = 0; from < shape.ranks; ++from) {
        for (int to = 0; to < shape.ranks; ++to)
          ASSERT_EQ(sizes_between(of_rank[static_cast<size_t>(from)].sends, to),
                    sizes_between(of_rank[static_cast<size_t>(to)].receives, from))
              << "seed " << seed << " from " << from << " to " << to;
      }
    }
  }
  EXPECT_GT(from_their_place, 0);
  EXPECT_GT(to_their_place, 0);
}

/// Adds the cells of a target that a box of the tensor with this view writes.
void count_box(const PlannedBox& box, int64_t row_bytes, std::map<Cell, int>& written) {
  for (int64_t row = 0; row < box.rows; ++row) {
    for (int64_t head = 0; head < box.heads; ++head)
      ++written[{box.to.offset / row_bytes + row, box.to.offset % row_bytes / kElement + head}];
  }
}

/// Each row and head of a target is put there by its sender, got by its receiver, or lands and is moved, once.
TEST(ExchangeByCopies, WritesEachRowOnce) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const Shape shape = random_shape(random);
    const Schedule schedule(shape, random_method(random, shape.ranks));
    const int64_t row_bytes = (shape.heads_kv + 1) * kElement;
    std::vector<Flow> flows = {flow_of_keys(shape, schedule, 0, row_bytes)};
    const bool alone = seed % 2 == 0;
    const Way way = std::array{Way::kPut, Way::kGet, Way::kLand}[seed / 2 % 3];
    if (way == Way::kPut) flows[0].mine_to.place = -1;
    if (way == Way::kGet) flows[0].mine_from.place = -1;
    ASSERT_EQ(way_of(flows[0], alone), way == Way::kGet && alone ? Way::kLand : way);
    const std::vector<FlowsOfRank> of_rank(static_cast<size_t>(shape.ranks), {&flows, 1 << 20});
    std::vector<Exchange> made;
    std::vector<std::map<Cell, int>> written(static_cast<size_t>(shape.ranks));
    std::vector<int64_t> landed(static_cast<size_t>(shape.ranks));
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const Exchange& exchange = made.emplace_back(exchange_by_copies(rank, of_rank, alone));
      for (const PeerCopy& copy : exchange.copies) {
        const auto into = static_cast<size_t>(copy.puts ? copy.peer : rank);
        if (copy.puts && copy.peer != rank && copy.box.to.place < 0 &&
            way_of(flows[0], alone) == Way::kLand) {
          landed[into] += copy.bytes();
        } else {
          count_box(copy.box, row_bytes, written[into]);
        }
      }
      for (const PlannedMove& move : exchange.unpack) {
        for (const PlannedBox& box : move.boxes)
          count_box(box, row_bytes, written[static_cast<size_t>(rank)]);
      }
    }
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      for (const auto& [cell, times] : written[at])
        ASSERT_EQ(times, 1) << "seed " << seed << " row " << cell.first;
      ASSERT_EQ(written[at].size(), static_cast<size_t>(count(schedule.keys(rank, 0))) *
                                        static_cast<size_t>(schedule.heads_kv(rank, 0).size()))
          << "seed " << seed;
      ASSERT_LE(landed[at], landing_bytes(rank, flows, alone));
      // Who copies from or to another's memory is one of those whom that one waits for.
      for (int peer = 0; peer < shape.ranks; ++peer) {
        const auto& copies = made[static_cast<size_t>(peer)].copies;
        const auto& by = made[at].copied_by;
        const bool copied =
            peer != rank && std::any_of(copies.begin(), copies.end(),
                                        [&](const PeerCopy& copy) { return copy.peer == rank; });
        ASSERT_EQ(copied, std::find(by.begin(), by.end(), peer) != by.end()) << "seed " << seed;
        ASSERT_EQ(sizes_between(made[at].sends, peer),
                  sizes_between(made[static_cast<size_t>(peer)].receives, rank));
      }
    }
  }
}

/// Random boxes, some of whose axes lie side by side: rectangles have each run once, at its place.
TEST(Rectangles, CoverBoxes) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    std::array<char, 1> base{};
    Box box;
    box.from = box.to = base.data();
    box.elements = random.between(1, 3);
    const int64_t bytes = 2 * box.elements;
    std::array<size_t, 3> order = {0, 1, 2};
    std::swap(order[0], order[static_cast<size_t>(random.between(0, 2))]);
    int64_t from = bytes, to = bytes;
    for (const size_t axis : order) {
      box.size[axis] = random.between(1, 3);
      box.from_stride[axis] = from;
      box.to_stride[axis] = to;
      from = from * box.size[axis] + (random.chance(0.3) ? 2 : 0);
      to = to * box.size[axis] + (random.chance(0.3) ? 6 : 0);
    }
    std::map<int64_t, int64_t> expected, got;  // byte of the source: byte of the target
    for (int64_t b = 0; b < box.size[0]; ++b) {
      for (int64_t r = 0; r < box.size[1]; ++r) {
        for (int64_t h = 0; h < box.size[2]; ++h) {
          for (int64_t i = 0; i < bytes; ++i)
            expected[b * box.from_stride[0] + r * box.from_stride[1] + h * box.from_stride[2] + i] =
                b * box.to_stride[0] + r * box.to_stride[1] + h * box.to_stride[2] + i;
        }
      }
    }
    int64_t rectangles = 0, copied = 0;
    for_each_rectangle(box, 2, [&](const Rectangle& r) {
      ++rectangles;
      for (int64_t line = 0; line < r.lines; ++line) {
        for (int64_t i = 0; i < r.width; ++i, ++copied)
          got[r.from - base.data() + line * r.from_pitch + i] = r.to - base.data() + line * r.to_pitch + i;
      }
    });
    ASSERT_EQ(got, expected) << "seed " << seed;
    ASSERT_EQ(copied, static_cast<int64_t>(expected.size())) << "seed " << seed;
    const bool one = to == from && from == static_cast<int64_t>(expected.size());
    ASSERT_TRUE(!one || rectangles == 1) << "seed " << seed;
  }
}

}  // namespace
}  // namespace fovea::distributed
