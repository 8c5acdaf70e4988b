// The clock that is only thought: programs made by hand, whose times are known, and bounds of real ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "distributed/choose.hpp"
#include "distributed/program.hpp"
#include "distributed/simulate.hpp"
#include "fovea/distributed.hpp"

namespace fovea::distributed {
namespace {

/// One unit a second of everything, and nothing for the start of anything.
Machine unit_machine(bool overlaps) {
  return {.flops = 1, .link = 1, .host_link = 0.5, .memory = 1, .overlaps = overlaps, .ranks_per_host = 2};
}

Exchange messages(std::vector<Exchange::Message> sends, std::vector<Exchange::Message> receives) {
  Exchange made;
  made.sends = std::move(sends);
  made.receives = std::move(receives);
  return made;
}

Attend computing(double seconds) {
  Attend step;
  step.flops = seconds;
  return step;
}

/// Rank 0 sends 10 bytes to rank 1, and both compute for 4 seconds meanwhile; then rank 1 computes with what arrived, for 1.
std::vector<Program> one_message(int other = 1) {
  std::vector<Program> programs(static_cast<size_t>(other) + 1);
  programs.front().exchanges = {messages({{other, {}, 10}}, {})};
  programs.front().steps = {Start{0}, computing(4), Finish{0}};
  programs.back().exchanges = {messages({}, {{0, {}, 10}})};
  programs.back().steps = {Start{0}, computing(4), Finish{0}, computing(1)};
  return programs;
}

TEST(Simulation, MessagesTravelBesideComputing) {
  EXPECT_DOUBLE_EQ(simulate(one_message(), unit_machine(true)), 11);
}

TEST(Simulation, OtherHostsAreFurtherAway) {
  EXPECT_DOUBLE_EQ(simulate(one_message(2), unit_machine(true)), 21) << "10 bytes at half a byte a second";
}

TEST(Simulation, ARankReceivesOneMessageAtATime) {
  std::vector<Program> programs(3);
  for (int sender = 0; sender < 2; ++sender) {
    programs[static_cast<size_t>(sender)].exchanges = {messages({{2, {}, 5}}, {})};
    programs[static_cast<size_t>(sender)].steps = {Start{0}, Finish{0}};
  }
  programs[2].exchanges = {messages({}, {{1, {}, 5}, {0, {}, 5}})};
  programs[2].steps = {Start{0}, Finish{0}};
  Machine machine = unit_machine(true);
  machine.ranks_per_host = 0;
  EXPECT_DOUBLE_EQ(simulate(programs, machine), 10);
}

TEST(Simulation, ALaneThatIsOneComputesAndPacksInTurn) {
  PlannedMove move{{{FOVEA_CODE_FLOAT, 32, 1}, {FOVEA_CODE_FLOAT, 32, 1}, false}, -1, {{{}, {}, 1, 1, 1, 1}}};
  std::vector<Program> programs = one_message();
  programs.back().exchanges[0].unpack = {move};  // 8 bytes
  EXPECT_DOUBLE_EQ(simulate(programs, unit_machine(true)), 10 + 8 + 1);
  programs.back().steps = {Start{0}, Finish{0, false}, computing(4)};
  EXPECT_DOUBLE_EQ(simulate(programs, unit_machine(true)), 10 + 8) << "beside each other";
  EXPECT_DOUBLE_EQ(simulate(programs, unit_machine(false)), 10 + 8 + 4);
}

TEST(Simulation, AMessageThatNobodySendsIsAnError) {
  std::vector<Program> programs = one_message();
  programs.front().steps = {computing(1)};
  EXPECT_THROW(simulate(programs, unit_machine(true)), std::logic_error);
}

/// A causal problem of `rows` rows on `ranks` ranks of GPUs, of which none is here.
LocalProblem local_problem(int64_t rows, int ranks, fovea_pass pass, std::vector<fovea_piece>& pieces,
                           const std::vector<int32_t>& starts = {}) {
  pieces.clear();
  for (int i = 0; i < 2 * ranks; ++i)
    pieces.push_back(
        {i < ranks ? i : 2 * ranks - 1 - i, rows * i / (2 * ranks), rows * (i + 1) / (2 * ranks)});
  const int64_t own = 2 * (rows / (2 * ranks));
  const auto tensor = [&](std::vector<int64_t> shape, fovea_dtype type = dtype_of<bf16>()) {
    return Tensor(nullptr, type, shape).on(cuda(0));
  };
  Problem p;
  p.pass = pass == FOVEA_FORWARD ? Pass::forward : Pass::backward;
  p.causal = true;
  const bool packed = !starts.empty();
  p.q = p.k = p.v = p.o = packed ? tensor({own, 16, 128}) : tensor({1, own, 16, 128});
  p.lse = packed ? tensor({16, own}, dtype_of<float>()) : tensor({1, 16, own}, dtype_of<float>());
  if (pass == FOVEA_BACKWARD) p.d_o = p.dq = p.dk = p.dv = p.q;
  const fovea::detail::CProblem c(p);
  fovea_distributed_problem whole{};
  whole.struct_size = sizeof whole;
  whole.local = c.get();
  whole.queries = pieces.data();
  whole.num_queries = static_cast<int64_t>(pieces.size());
  if (packed) {
    whole.cu_seqlens_q = whole.cu_seqlens_k = starts.data();
    whole.num_sequences = static_cast<int64_t>(starts.size()) - 1;
  }
  return read_local_problem(whole, 0, ranks, {FOVEA_CUDA, 0});
}

TEST(Simulation, LiesBetweenComputingAndOneAfterTheOther) {
  std::vector<fovea_piece> pieces;
  for (const int ranks : {1, 2, 4, 8}) {
    for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
      const LocalProblem problem = local_problem(32768, ranks, pass, pieces);
      for (const Estimate& e : weigh_on_paper(problem, {})) {
        const std::string line = describe(e, problem.shape);
        EXPECT_GE(e.simulated, e.computing) << line;
        EXPECT_LE(e.simulated, 1.6 * e.seconds) << line;
        EXPECT_NE(line.find("simulated"), std::string::npos);
      }
    }
  }
}

/// By copies: what the caller's stream did before a run is waited for first, and at its end nothing is copied from the caller's tensors.
TEST(Program, CopiesLieBetweenBeginAndEndOfTheCallersStream) {
  std::vector<fovea_piece> pieces;
  ProgramOptions sizes;
  sizes.only_sizes = true;
  for (const int ranks : {2, 4}) {
    LocalProblem problem = local_problem(4096, ranks, FOVEA_FORWARD, pieces);
    problem.by_copies = true;
    for (const Method method : {Method{ranks, 1}, {ranks, 4}, {1, 1}, {1, 2}, {1, ranks}, {ranks / 2, 2}}) {
      const Program program = make_program(problem, Schedule(problem.shape, method), 0, sizes);
      const auto is_start = [](const Step& step) { return std::holds_alternative<Start>(step); };
      const auto first = std::find_if(program.steps.begin(), program.steps.end(), is_start);
      ASSERT_NE(first, program.steps.end());
      EXPECT_TRUE(std::get<Start>(*first).waits) << method.heads_ranks << " " << method.stages;
      // Who gives its result back knows that it is there once all ranks have what they need of it.
      const auto* order = std::get_if<Order>(&program.steps.back());
      const bool ends = order != nullptr && order->sooner == Lane::kLink && order->later == Lane::kCompute;
      EXPECT_TRUE(ends || std::holds_alternative<Finish>(program.steps.back()));
    }
  }
}

/// The call of a program that has the keys of both ranks, and how many calls and merges there are.
struct CallsOfRank {
  const Attend* waits = nullptr;
  int calls = 0, merges = 0;
};
CallsOfRank calls_of(const Program& program) {
  CallsOfRank found;
  for (const Step& step : program.steps) {
    found.merges += std::holds_alternative<Merge>(step) ? 1 : 0;
    const auto* attend = std::get_if<Attend>(&step);
    if (attend == nullptr) continue;
    ++found.calls;
    if (attend->arriving) found.waits = attend;
  }
  return found;
}

/// Early and late rows of two ranks that copy: the rank with the first ones has a call more, of these.
TEST(Program, KeysArriveInCallsOfTwoRanks) {
  std::vector<fovea_piece> pieces;
  ProgramOptions sizes;
  sizes.only_sizes = true;
  LocalProblem problem = local_problem(4096, 2, FOVEA_FORWARD, pieces);
  problem.by_copies = true;
  for (int rank = 0; rank < 2; ++rank) {
    const Program program = make_program(problem, Schedule(problem.shape, {1, 2}), rank, sizes);
    const CallsOfRank found = calls_of(program);
    ASSERT_NE(found.waits, nullptr);
    EXPECT_EQ(found.calls, rank == 0 ? 2 : 1);
    EXPECT_EQ(found.merges, 0);
    EXPECT_EQ(found.waits->operands[kO].view.place, kO) << "the result, not a part";
    const Arriving& arriving = *found.waits->arriving;
    EXPECT_EQ(arriving.peer, 1 - rank);
    EXPECT_EQ(arriving.exchange, 0u);
    EXPECT_EQ(arriving.k.view.place, -1) << "where copies land";
    // Own rows are copied where an address of the caller's is odd.
    ASSERT_TRUE(arriving.over_copies);
    EXPECT_EQ(arriving.copies.size(), 3u);
    for (const Place place : {kQ, kK, kV}) EXPECT_EQ(arriving.over_copies->operands[place].view.place, -1);
    // The peer hears of each half of the keys of each half of the heads, the last keys first.
    std::vector<int> parts;
    for (const PeerCopy& copy : program.exchanges[0].copies) {
      if (copy.ends_part >= 0) parts.push_back(copy.ends_part);
    }
    EXPECT_EQ(parts, (std::vector<int>{1, 0, 3, 2}));
    EXPECT_EQ(arriving.first_part, parts[0]);
  }
  const auto waits = [&](const LocalProblem& other, Method method) {
    return calls_of(make_program(other, Schedule(other.shape, method), 0, sizes)).waits != nullptr;
  };
  EXPECT_FALSE(waits(problem, {1, 1})) << "all keys are gathered first";
  LocalProblem messages = problem, capped = problem;
  messages.by_copies = false;
  capped.softcap = 30;
  EXPECT_FALSE(waits(messages, {1, 2}));
  EXPECT_FALSE(waits(capped, {1, 2}));
}

TEST(Simulation, PackedSequencesThatNoCutDividesCostTheirComputingAlone) {
  std::vector<fovea_piece> pieces;
  std::vector<int32_t> starts = {0};
  while (starts.back() < 32768) starts.push_back(starts.back() + 2048);
  const LocalProblem apart = local_problem(32768, 4, FOVEA_FORWARD, pieces, starts);
  std::vector<fovea_piece> others;
  const LocalProblem whole = local_problem(32768, 4, FOVEA_FORWARD, others);
  for (const Estimate& e : weigh_on_paper(apart, {})) {
    const std::string line = describe(e, apart.shape);
    if (e.method.heads_ranks > 1) continue;
    EXPECT_EQ(e.messages, 0) << line;
    EXPECT_EQ(e.moving, 0) << line;
    EXPECT_EQ(e.bytes, 0) << line;
    // Keys that are gathered are copied even where they are this rank's: zigzag pieces do not lie side by side.
    if (e.method.stages > 1) {
      EXPECT_LE(e.simulated, 1.1 * e.seconds) << line;
    }
  }
  EXPECT_LT(weigh_on_paper(apart, {}).front().expected(), weigh_on_paper(whole, {}).front().expected() / 5);
}

TEST(Simulation, FasterLinksAreNeverSlower) {
  std::vector<fovea_piece> pieces;
  const LocalProblem problem = local_problem(16384, 4, FOVEA_FORWARD, pieces);
  fovea_distributed_options slow{}, fast{};
  slow.struct_size = fast.struct_size = sizeof slow;
  slow.link_bytes_per_second = 50e9;
  fast.link_bytes_per_second = 400e9;
  double slowest = 0, fastest = 0;
  for (const Estimate& e : weigh_on_paper(problem, slow)) slowest = std::max(slowest, e.simulated);
  for (const Estimate& e : weigh_on_paper(problem, fast)) fastest = std::max(fastest, e.simulated);
  EXPECT_LT(fastest, slowest);
}

}  // namespace
}  // namespace fovea::distributed
