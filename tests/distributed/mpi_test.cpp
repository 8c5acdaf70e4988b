// Ranks that are processes, as many as mpirun starts: problems against the oracle, and what goes wrong on one of them. All processes
// run the same tests; the first compares.
#define OMPI_SKIP_MPICXX 1
#include <gtest/gtest.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "distributed/local_ranks.hpp"
#include "distributed/random_problems.hpp"
#include "fovea/mpi.hpp"
#include "verify/check.hpp"

namespace fovea::distributed_tests {
namespace {

using namespace verify;

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// All processes begin and end together, so a fault in one test does not reach into the next.
class Mpi : public testing::Test {
 protected:
  void SetUp() override { MPI_Barrier(MPI_COMM_WORLD); }
  void TearDown() override { MPI_Barrier(MPI_COMM_WORLD); }
};

/// The tensors of all processes added up, which makes parts one whole.
void add_up(const OwnedProblem& problem, const std::vector<Role>& outputs) {
  for (const Role role : outputs) {
    if (problem[role].type() == Type::kI64) {  // no doubles
      MPI_Allreduce(MPI_IN_PLACE, problem[role].data(), static_cast<int>(problem[role].count()), MPI_INT64_T,
                    MPI_SUM, MPI_COMM_WORLD);
      continue;
    }
    std::vector<double> values = problem[role].values();
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD);
    problem[role].assign(values);
  }
}

/// Whether all processes say so.
bool on_all(bool given) {
  int all = given ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all != 0;
}

bool is_right(const ProblemSpec& spec, const Division& division, bool backward,
              const fovea_transport& transport) {
  OwnedProblem problem(spec);
  CheckOptions options;
  options.backward = backward;
  Checker checker(problem, options);
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
    if (pass == FOVEA_BACKWARD && !backward) break;
    LocalRanks ranks(problem, division);
    std::string failure = ranks.run_one(pass, transport);
    add_up(problem, ranks.outputs(pass));
    if (failure.empty() && transport.rank == 0) failure = checker.check_outputs(pass);
    EXPECT_EQ(failure, "") << (pass == FOVEA_FORWARD ? "forward " : "backward ") << describe(spec) << '\n'
                           << ranks.reason();
    if (!on_all(failure.empty())) return false;
  }
  return true;
}

TEST_F(Mpi, RandomProblems) {
  const MpiRank own;
  const Transport transport = own.transport();
  for (uint64_t index = 0; index < 16; ++index) {
    Random random(2026 * 1'000'003 + index);
    const bool same_axis = random.chance(0.6);
    const ProblemSpec spec = random_spec(random, same_axis);
    Division division = random_division(random, spec, same_axis, transport.size());
    division.delay_us = 0;
    const bool backward = index % 4 != 3;
    if (!backward) {
      division.queries_everywhere = true;
      division.queries.clear();
      division.heads_ranks = division.stages = 0;
    }
    ASSERT_TRUE(is_right(spec, division, backward, *transport.c_transport())) << "problem " << index;
  }
}

/// A communicator of the program's own, whose ranks are in another order than the processes.
TEST_F(Mpi, CommunicatorOfTheProgram) {
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank(), &reversed);
  {
    const MpiRank rank(&reversed);
    const Transport transport = rank.transport();
    EXPECT_EQ(transport.rank(), world_size() - 1 - world_rank());
    EXPECT_EQ(transport.size(), world_size());
    int own = transport.rank(), got = -1;
    const std::array sends = {fovea_message{(transport.rank() + 1) % transport.size(), &own, sizeof own}};
    const int before = (transport.rank() + transport.size() - 1) % transport.size();
    const std::array receives = {fovea_message{before, &got, sizeof got}};
    transport.exchange(sends, receives);
    EXPECT_EQ(got, before);
  }
  MPI_Comm_free(&reversed);
}

/// Rank 1 opens no transport, and the others give up.
TEST_F(Mpi, RankThatDoesNotOpen) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  fovea_transport transport{};
  if (world_rank() != 1) {
    EXPECT_EQ(fovea_mpi_transport_open(&own, 200, &transport), FOVEA_INTERNAL);
    EXPECT_NE(
        std::string(fovea_mpi_last_error()).find("not all of its ranks opened a transport within 200 ms"),
        std::string::npos)
        << fovea_mpi_last_error();
    EXPECT_EQ(transport.context, nullptr);
  }
}

/// Messages of sizes around those where MPI changes its way, several steps open at a time.
TEST_F(Mpi, MessagesOfManySizes) {
  const MpiRank rank;
  const Transport transport = rank.transport();
  const fovea_transport& t = *transport.c_transport();
  const int next = (t.rank + 1) % t.size, before = (t.rank + t.size - 1) % t.size;
  const std::vector<size_t> sizes = {0, 1, 4'000, 4'097, 70'000, 3'000'000};
  std::vector<std::vector<unsigned char>> sent, got;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sent.emplace_back(sizes[i], static_cast<unsigned char>(16 * i + static_cast<size_t>(t.rank)));
    got.emplace_back(sizes[i]);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const fovea_message send{next, sent[i].data(), sizes[i]}, receive{before, got[i].data(), sizes[i]};
    ASSERT_EQ(t.start(t.context, &send, 1, &receive, 1, nullptr), FOVEA_OK) << t.error(t.context);
    if (i % 3 != 2) continue;
    for (int open = 0; open < 3; ++open)
      ASSERT_EQ(t.finish(t.context, nullptr), FOVEA_OK) << t.error(t.context);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::vector<unsigned char> wanted(sizes[i],
                                            static_cast<unsigned char>(16 * i + static_cast<size_t>(before)));
    EXPECT_EQ(got[i], wanted) << sizes[i] << " bytes";
  }
}

/// What a step with every other rank says; "" for none.
std::string exchange_with_all(const Transport& transport, size_t bytes_sent, size_t bytes_received) {
  std::vector<char> out(bytes_sent), in(bytes_received * static_cast<size_t>(transport.size()));
  std::vector<fovea_message> sends, receives;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    sends.push_back({peer, out.data(), bytes_sent});
    receives.push_back({peer, in.data() + static_cast<size_t>(peer) * bytes_received, bytes_received});
  }
  try {
    transport.exchange(sends, receives);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void expect_in(const std::string& error, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(error.find(part), std::string::npos)
        << "rank " << world_rank() << ": " << error << "\nlacks " << part;
}

TEST_F(Mpi, RankThatStopsTellsTheOthers) {
  const MpiRank rank;
  const Transport transport = rank.transport();
  const auto start = std::chrono::steady_clock::now();
  if (transport.rank() == 1) {
    transport.stop("rank 1: out of ideas");
    expect_in(exchange_with_all(transport, 8, 8), {"rank 1: out of ideas"});
  } else {
    expect_in(exchange_with_all(transport, 8, 8), {"rank 1: out of ideas"});
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

/// An exception that leaves a rank's work between steps, while the others wait for its next.
TEST_F(Mpi, RankThatThrowsTellsTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  std::string error;
  try {
    const MpiRank rank;
    EXPECT_EQ(exchange_with_all(rank.transport(), 8, 8), "");
    MPI_Barrier(MPI_COMM_WORLD);  // all have ended the step
    if (world_rank() == 1) throw std::runtime_error("out of memory");
    error = exchange_with_all(rank.transport(), 8, 8);
  } catch (const std::runtime_error& thrown) {
    error = thrown.what();
  }
  expect_in(error, {world_rank() == 1 ? "out of memory" : "rank 1: ended by an exception"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

/// A stop may come from a thread of its own, whatever MPI allows.
TEST_F(Mpi, StopFromAnotherThread) {
  const MpiRank rank;
  const Transport transport = rank.transport();
  if (transport.rank() == 1) std::thread([&] { transport.stop("rank 1: a watchman stops"); }).join();
  expect_in(exchange_with_all(transport, 8, 8), {"rank 1: a watchman stops"});
}

/// Rank 0 waits for rank 1, and takes nothing of the others meanwhile: all name rank 1.
TEST_F(Mpi, RankThatIsSilentIsNamedByAll) {
  const MpiRank rank(nullptr, 1000);
  const Transport transport = rank.transport();
  std::vector<char> memory(3'000'000);
  const fovea_message to_first{0, memory.data(), memory.size()}, from_second{1, memory.data(), 8};
  std::string error = "rank 1 sent nothing to rank 0";
  try {
    if (transport.rank() == 0) transport.exchange({}, {&from_second, 1});
    if (transport.rank() > 1) transport.exchange({&to_first, 1}, {});
  } catch (const Error& late) {
    error = late.what();
    transport.stop("rank " + std::to_string(transport.rank()) + ": " + error);
  }
  expect_in(error, {"rank 1 sent nothing to rank 0"});
  MPI_Barrier(MPI_COMM_WORLD);
  if (transport.rank() == 1) expect_in(exchange_with_all(transport, 8, 8), {"rank 1 sent nothing to rank 0"});
}

TEST_F(Mpi, RankThatIsLate) {
  const MpiRank rank(nullptr, 1000);
  const Transport transport = rank.transport();
  std::string error;
  if (transport.rank() != 1) {
    error = exchange_with_all(transport, 8, 8);
    transport.stop("rank " + std::to_string(transport.rank()) + ": " + error);
    expect_in(error, {"within 1000 ms"});
  }
  MPI_Barrier(MPI_COMM_WORLD);  // rank 1 is late until all others gave up
  if (transport.rank() == 1) {
    // What they sent before may still arrive, once.
    error = exchange_with_all(transport, 8, 8);
    if (error.empty()) error = exchange_with_all(transport, 8, 8);
  }
  expect_in(error, {"rank 1 sent nothing to rank"});
}

TEST_F(Mpi, MessageOfAnotherSize) {
  const MpiRank rank(nullptr, 5'000);
  const Transport transport = rank.transport();
  const std::string error = exchange_with_all(transport, 32, transport.rank() == 1 ? 16 : 32);
  if (transport.rank() == 1) {
    expect_in(error, {"sent 32 bytes to rank 1, which expected 16"});
    transport.stop("rank 1: " + error);
  }
}

/// A whole plan, where one rank passes something that it cannot do.
TEST_F(Mpi, RankThatCannotPlanTellsTheOthers) {
  const MpiRank rank(nullptr, 20'000);
  const Transport transport = rank.transport();
  std::vector<float> q(4 * 2 * 8, 0.5f), o(q.size());
  const auto shape = {int64_t{1}, int64_t{4}, int64_t{2}, int64_t{8}};
  const Tensor input(q.data(), shape);
  try {
    const DistributedPlan plan(
        transport, {.local = {.q = input,
                              .k = input,
                              .v = input,
                              .o = {o.data(), shape},
                              .dropout = transport.rank() == 1 ? 1.0 : 0.0},
                    .queries = contiguous_pieces(int64_t{4} * transport.size(), transport.size())});
    ADD_FAILURE() << "no exception";
  } catch (const Error& error) {
    expect_in(error.what(), {"dropout"});
    if (transport.rank() != 1) expect_in(error.what(), {"rank 1 could not plan"});
  }
}

TEST_F(Mpi, WrongArguments) {
  fovea_transport transport{};
  EXPECT_EQ(fovea_mpi_transport_open(nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_mpi_transport_open(nullptr, -1, &transport), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_mpi_last_error(), {"deadline_ms: got -1"});
  const MPI_Comm none = MPI_COMM_NULL;
  EXPECT_EQ(fovea_mpi_transport_open(&none, 0, &transport), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_mpi_last_error(), {"communicator: got MPI_COMM_NULL"});
  fovea_mpi_transport_close(&transport);
  fovea_mpi_transport_close(nullptr);
  const MpiRank rank;
  const Transport own = rank.transport();
  int value = 0;
  const std::array sends = {fovea_message{own.size(), &value, sizeof value}};
  EXPECT_THROW(own.exchange(sends, {}), Error);
}

}  // namespace
}  // namespace fovea::distributed_tests

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
