// The C++ face of problems over several ranks: pieces, threads as ranks, plans, errors.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "fovea/distributed.hpp"

namespace {

constexpr int64_t kRows = 37, kHeads = 4, kHeadsKv = 2, kSize = 8;
constexpr int64_t kRowQ = kHeads * kSize, kRowK = kHeadsKv * kSize;

std::vector<float> wave(int64_t count, float step) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
  return x;
}

/// The rows of one axis that a rank holds, in its order.
std::vector<int64_t> rows_of(const std::vector<fovea::Piece>& pieces, int rank) {
  std::vector<int64_t> rows;
  for (const fovea::Piece& piece : pieces) {
    for (int64_t row = piece.begin; piece.rank == rank && row < piece.end; ++row) rows.push_back(row);
  }
  return rows;
}

/// Rows of a tensor (1, rows, heads, size), and of its part.
struct Whole {
  std::vector<float> data;
  int64_t row_size;

  std::vector<float> part(const std::vector<int64_t>& rows) const {
    std::vector<float> part;
    for (const int64_t row : rows)
      part.insert(part.end(), data.begin() + row * row_size, data.begin() + (row + 1) * row_size);
    return part;
  }
  void put(const std::vector<int64_t>& rows, const std::vector<float>& part) {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(part.begin() + static_cast<int64_t>(i) * row_size, row_size,
                  data.begin() + rows[i] * row_size);
    }
  }
};

struct Case {
  Whole q{wave(kRows * kRowQ, 0.3f), kRowQ}, k{wave(kRows * kRowK, 0.7f), kRowK};
  Whole v{wave(kRows * kRowK, 1.1f), kRowK}, d_o{wave(kRows * kRowQ, 0.9f), kRowQ};
  Whole o{std::vector<float>(q.data.size()), kRowQ}, dq = o;
  Whole dk{std::vector<float>(k.data.size()), kRowK}, dv = dk;
  std::vector<float> lse = std::vector<float>(kHeads * kRows);

  static std::array<int64_t, 4> shape(int64_t rows, bool keys) {
    return {1, rows, keys ? kHeadsKv : kHeads, kSize};
  }

  /// Both passes on this thread.
  void attend_alone() {
    const auto sq = shape(kRows, false), sk = shape(kRows, true);
    fovea::Problem p{.q = {q.data.data(), sq},
                     .k = {k.data.data(), sk},
                     .v = {v.data.data(), sk},
                     .o = {o.data.data(), sq},
                     .lse = {lse.data(), {1, kHeads, kRows}},
                     .causal = true};
    fovea::attend(p);
    p.d_o = {d_o.data.data(), sq};
    p.dq = {dq.data.data(), sq};
    p.dk = {dk.data.data(), sk};
    p.dv = {dv.data.data(), sk};
    fovea::attend_backward(p);
  }

  /// The part of one rank.
  void attend_on(const fovea::Transport& transport, const std::vector<fovea::Piece>& pieces) {
    const std::vector<int64_t> rows = rows_of(pieces, transport.rank());
    const auto count = static_cast<int64_t>(rows.size());
    const auto sq = shape(count, false), sk = shape(count, true);
    std::vector<float> own_q = q.part(rows), own_k = k.part(rows), own_v = v.part(rows);
    std::vector<float> own_d_o = d_o.part(rows), own_o(own_q.size()), own_dq(own_q.size());
    std::vector<float> own_dk(own_k.size()), own_dv(own_k.size()),
        own_lse(static_cast<size_t>(kHeads * count));
    fovea::DistributedProblem problem{.local = {.q = {own_q.data(), sq},
                                                .k = {own_k.data(), sk},
                                                .v = {own_v.data(), sk},
                                                .o = {own_o.data(), sq},
                                                .lse = {own_lse.data(), {1, kHeads, count}},
                                                .causal = true},
                                      .queries = pieces};
    const fovea::DistributedOptions options{.attention = {.num_threads = 1}};
    fovea::Buffers buffers{
        .q = own_q.data(), .k = own_k.data(), .v = own_v.data(), .o = own_o.data(), .lse = own_lse.data()};
    const auto run = [&] {
      const fovea::DistributedPlan plan(transport, problem, options);
      fovea::Workspace workspace(plan.workspace_size(), plan.device());
      plan.run(buffers, workspace);
      EXPECT_TRUE(plan.reason().starts_with("chosen: ")) << plan.reason();
    };
    run();
    problem.local.pass = fovea::Pass::backward;
    problem.local.d_o = {own_d_o.data(), sq};
    problem.local.dq = {own_dq.data(), sq};
    problem.local.dk = {own_dk.data(), sk};
    problem.local.dv = {own_dv.data(), sk};
    buffers.d_o = own_d_o.data();
    buffers.dq = own_dq.data();
    buffers.dk = own_dk.data();
    buffers.dv = own_dv.data();
    run();
    o.put(rows, own_o);
    dq.put(rows, own_dq);
    dk.put(rows, own_dk);
    dv.put(rows, own_dv);
  }
};

void expect_near(const Whole& got, const Whole& wanted, const char* name) {
  for (size_t i = 0; i < wanted.data.size(); ++i)
    ASSERT_NEAR(got.data[i], wanted.data[i], 1e-5) << name << '[' << i << ']';
}

TEST(DistributedCppFace, ContiguousPiecesDifferByARow) {
  const auto pieces = fovea::contiguous_pieces(11, 4);
  ASSERT_EQ(pieces.size(), 4u);
  const std::array<int64_t, 5> ends = {0, 3, 6, 9, 11};
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(pieces[r].rank, static_cast<int32_t>(r));
    EXPECT_EQ(pieces[r].begin, ends[r]);
    EXPECT_EQ(pieces[r].end, ends[r + 1]);
  }
  EXPECT_EQ(fovea::rows_of_rank(fovea::contiguous_pieces(2, 3), 2), 0);
}

TEST(DistributedCppFace, ZigzagPiecesBalanceCausalMasks) {
  constexpr int kRanks = 4;
  const auto pieces = fovea::zigzag_pieces(8 * 16, kRanks);
  ASSERT_EQ(pieces.size(), 8u);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(pieces[static_cast<size_t>(rank)].rank, rank);
    EXPECT_EQ(pieces[static_cast<size_t>(2 * kRanks - 1 - rank)].rank, rank);
    int64_t pairs = 0;
    for (const int64_t row : rows_of(pieces, rank)) pairs += row + 1;
    EXPECT_EQ(pairs, 128 * 129 / 2 / kRanks) << "rank " << rank;
  }
  for (const int64_t rows : {0, 1, 5, 7}) {
    int64_t sum = 0;
    for (int rank = 0; rank < kRanks; ++rank)
      sum += fovea::rows_of_rank(fovea::zigzag_pieces(rows, kRanks), rank);
    EXPECT_EQ(sum, rows);
  }
}

TEST(DistributedCppFace, PiecesOfNoAxisAreRefused) {
  EXPECT_THROW(fovea::contiguous_pieces(-1, 2), fovea::Error);
  EXPECT_THROW(fovea::zigzag_pieces(4, 0), fovea::Error);
}

TEST(DistributedCppFace, RanksComputeWhatOneDoes) {
  Case alone;
  alone.attend_alone();
  for (const auto& pieces : {fovea::zigzag_pieces(kRows, 3), fovea::contiguous_pieces(kRows, 3)}) {
    Case together;
    const fovea::ThreadRanks ranks(3, {.deadline_ms = 20'000, .delay_us = 50, .seed = 1, .peer_copies = 1});
    EXPECT_EQ(ranks.size(), 3);
    ranks.run([&](const fovea::Transport& transport) { together.attend_on(transport, pieces); });
    expect_near(together.o, alone.o, "o");
    expect_near(together.dq, alone.dq, "dq");
    expect_near(together.dk, alone.dk, "dk");
    expect_near(together.dv, alone.dv, "dv");
  }
}

TEST(DistributedCppFace, PlanSaysWhatItSends) {
  const fovea::ThreadRanks ranks(2);
  std::array<fovea::Sent, 2> planned;
  ranks.run([&](const fovea::Transport& transport) {
    const auto shape = Case::shape(4, false);
    std::vector<float> q = wave(4 * kRowQ, 0.3f), o(q.size());
    const fovea::Tensor input(q.data(), shape);
    const fovea::DistributedPlan plan(transport,
                                      {.local = {.q = input, .k = input, .v = input, .o = {o.data(), shape}},
                                       .queries = fovea::contiguous_pieces(8, 2)},
                                      {.heads_ranks = 1, .stages = 1});
    fovea::Workspace workspace(plan.workspace_size(), plan.device());
    plan.run({.q = q.data(), .k = q.data(), .v = q.data(), .o = o.data()}, workspace);
    planned[static_cast<size_t>(transport.rank())] = plan.sends();
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_GT(planned[static_cast<size_t>(rank)].messages, 0);
    // Making the plan takes one message more.
    EXPECT_EQ(ranks.sent(rank).messages, planned[static_cast<size_t>(rank)].messages + 1);
    EXPECT_GT(ranks.sent(rank).bytes, planned[static_cast<size_t>(rank)].bytes);
  }
}

TEST(DistributedCppFace, PackedSequences) {
  const std::vector<float> data = wave(12 * kRowQ, 0.3f);
  Whole alone{std::vector<float>(data.size()), kRowQ}, together = alone;
  const std::vector<int32_t> starts = {0, 5, 5, 12};
  const auto whole_shape = {int64_t{12}, kHeads, kSize};
  const fovea::Tensor whole(data.data(), whole_shape);
  fovea::attend(whole, whole, whole, {alone.data.data(), whole_shape},
                {.cu_seqlens_q = {starts.data(), {4}}, .cu_seqlens_k = {starts.data(), {4}}, .causal = true});
  const auto pieces = fovea::contiguous_pieces(12, 2);
  const fovea::ThreadRanks ranks(2);
  ranks.run([&](const fovea::Transport& transport) {
    const std::vector<int64_t> rows = rows_of(pieces, transport.rank());
    const std::vector<float> own = Whole{data, kRowQ}.part(rows);
    std::vector<float> o(own.size());
    const auto shape = {static_cast<int64_t>(rows.size()), kHeads, kSize};
    const fovea::Tensor input(own.data(), shape);
    const fovea::DistributedPlan plan(
        transport, {.local = {.q = input, .k = input, .v = input, .o = {o.data(), shape}, .causal = true},
                    .queries = pieces,
                    .cu_seqlens_q = starts});
    fovea::Workspace workspace(plan.workspace_size(), plan.device());
    plan.run({.q = own.data(), .k = own.data(), .v = own.data(), .o = o.data()}, workspace);
    together.put(rows, o);
  });
  expect_near(together, alone, "o");
}

/// Terms by positions of the whole: whole tensors, and the gradient of one, on every rank.
struct TermsCase {
  static constexpr int64_t kDistances = 9;
  std::vector<float> data = wave(kRows * kRowQ, 0.3f), table = wave(kHeads * kDistances, 0.8f),
                     slopes = wave(kHeads, 0.5f), lse = std::vector<float>(kHeads * kRows);
  std::vector<float> o = std::vector<float>(data.size()), dq = o, dk = o, dv = o;
  std::vector<float> d_table = std::vector<float>(table.size());

  /// Both passes of some rows: plan_and_run(problem, buffers).
  template <class PlanAndRun>
  void attend(int64_t rows, PlanAndRun&& plan_and_run) {
    const auto shape = Case::shape(rows, false);
    fovea::Problem p{.q = {data.data(), shape},
                     .k = {data.data(), shape},
                     .v = {data.data(), shape},
                     .o = {o.data(), shape},
                     .lse = {lse.data(), {1, kHeads, rows}},
                     .alibi = {slopes.data(), {kHeads}},
                     .score = "s + table[h, clamp(k - q, -4, 4) + 4]",
                     .sees = "k <= q + 2",
                     .named = {{"table", {table.data(), {kHeads, kDistances}}, {}}}};
    plan_and_run(p, fovea::buffers_of(p));
    p.pass = fovea::Pass::backward;
    p.d_o = {data.data(), shape};
    p.dq = {dq.data(), shape};
    p.dk = {dk.data(), shape};
    p.dv = {dv.data(), shape};
    p.named[0].gradient = {d_table.data(), {kHeads, kDistances}};
    plan_and_run(p, fovea::buffers_of(p));
  }
};

TEST(DistributedCppFace, TermsCountPositionsOfTheWhole) {
  TermsCase alone;
  alone.attend(kRows, [](const fovea::Problem& p, const fovea::Buffers& buffers) {
    const fovea::Plan plan(p);
    fovea::Workspace workspace(plan.workspace_size(), plan.device());
    plan.run(buffers, workspace);
  });
  constexpr int kRanks = 3;
  for (const int heads_ranks : {1, kRanks}) {
    const auto pieces = fovea::zigzag_pieces(kRows, kRanks);
    std::array<TermsCase, kRanks> parts;
    fovea::ThreadRanks(kRanks).run([&](const fovea::Transport& transport) {
      const auto rows = rows_of(pieces, transport.rank());
      TermsCase& part = parts[static_cast<size_t>(transport.rank())];
      part.data = Whole{part.data, kRowQ}.part(rows);
      part.attend(
          static_cast<int64_t>(rows.size()), [&](const fovea::Problem& p, const fovea::Buffers& buffers) {
            const fovea::DistributedPlan plan(transport, {.local = p, .queries = pieces},
                                              {.heads_ranks = heads_ranks});
            fovea::Workspace workspace(plan.workspace_size(), plan.device());
            plan.run(buffers, workspace);
            EXPECT_NE(plan.reason().find("terms of the whole problem: alibi float32 (4); score s + table["),
                      std::string_view::npos)
                << plan.reason();
          });
    });
    Whole o{alone.o, kRowQ}, dk{alone.dk, kRowQ};
    for (int rank = 0; rank < kRanks; ++rank) {
      const TermsCase& part = parts[static_cast<size_t>(rank)];
      o.put(rows_of(pieces, rank), part.o);
      dk.put(rows_of(pieces, rank), part.dk);
      EXPECT_EQ(part.d_table, parts[0].d_table) << "rank " << rank;
    }
    expect_near(o, {alone.o, kRowQ}, "o");
    expect_near(dk, {alone.dk, kRowQ}, "dk");
    expect_near({parts[0].d_table, 1}, {alone.d_table, 1}, "gradient of table");
  }
}

TEST(DistributedCppFace, MessagesOfAProgramsOwn) {
  const fovea::ThreadRanks ranks(3);
  std::array<int, 3> got{};
  ranks.run([&](const fovea::Transport& transport) {
    int own = transport.rank() + 10;
    const int next = (transport.rank() + 1) % 3, before = (transport.rank() + 2) % 3;
    const std::array sends = {fovea_message{next, &own, sizeof own}};
    const std::array receives = {
        fovea_message{before, &got[static_cast<size_t>(transport.rank())], sizeof own}};
    transport.exchange(sends, receives);
  });
  EXPECT_EQ(got, (std::array{12, 10, 11}));
}

TEST(DistributedCppFace, RankThatThrowsStopsTheOthers) {
  const fovea::ThreadRanks ranks(3, {.deadline_ms = 20'000});
  std::atomic<int> stopped = 0;
  const auto work = [&](const fovea::Transport& transport) {
    if (transport.rank() == 1) throw std::runtime_error("out of ideas");
    int own = 0, got = 0;
    const std::array sends = {fovea_message{1, &own, sizeof own}};
    const std::array receives = {fovea_message{1, &got, sizeof got}};
    try {
      transport.exchange(sends, receives);
    } catch (const fovea::Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1: out of ideas"), std::string::npos) << error.what();
      ++stopped;
      throw;
    }
  };
  try {
    ranks.run(work);
    ADD_FAILURE() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "out of ideas");
  }
  EXPECT_EQ(stopped, 2);
}

TEST(DistributedCppFace, MethodsOnPaperNeedNoRanks) {
  const fovea::Tensor rows =
      fovea::Tensor(static_cast<fovea::bf16*>(nullptr), {1, 8192, 16, 128}).on(fovea::cuda(0));
  fovea::DistributedProblem problem;
  problem.local.q = problem.local.k = problem.local.v = problem.local.o = rows;
  problem.queries = fovea::contiguous_pieces(8 * 8192, 8);
  fovea::DistributedOptions options;
  options.ranks_per_host = 4;
  const std::string text = fovea::distributed_on_paper(8, problem, options);
  EXPECT_NE(text.find("all-to-all over heads: "), std::string::npos) << text;
  EXPECT_NE(text.find("in groups of 4, "), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10) << text;
  options.stages = 1;
  options.heads_ranks = 2;
  const std::string one = fovea::distributed_on_paper(8, problem, options);
  EXPECT_EQ(std::count(one.begin(), one.end(), '\n'), 1) << one;
  EXPECT_NE(one.find("simulated"), std::string::npos) << one;
  for (const int ranks : {0, 3}) EXPECT_THROW(fovea::distributed_on_paper(ranks, problem), fovea::Error);
}

TEST(DistributedCppFace, WrongArguments) {
  EXPECT_THROW(fovea::ThreadRanks(0), fovea::Error);
  EXPECT_THROW(fovea::ThreadRanks(2, {.devices = {fovea::cpu()}}), fovea::Error);
  const fovea::ThreadRanks ranks(1);
  EXPECT_THROW(ranks.transport(1), fovea::Error);
  const float* nothing = nullptr;
  const auto shape = {int64_t{4}, kHeads, kSize};
  const fovea::Tensor input(nothing, shape), output(static_cast<float*>(nullptr), shape);
  fovea::DistributedProblem problem{.local = {.q = input, .k = input, .v = input, .o = output},
                                    .queries = fovea::contiguous_pieces(4, 1),
                                    .cu_seqlens_q = {0, 4},
                                    .cu_seqlens_k = {0, 2, 4}};
  try {
    const fovea::DistributedPlan plan(ranks.transport(0), problem);
    ADD_FAILURE() << "no exception";
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.argument(), "cu_seqlens_k");
  }
  problem.cu_seqlens_k.clear();
  problem.local.o = input;
  try {
    const fovea::DistributedPlan plan(ranks.transport(0), problem);
    ADD_FAILURE() << "no exception";
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.argument(), "o");
  }
}

}  // namespace
