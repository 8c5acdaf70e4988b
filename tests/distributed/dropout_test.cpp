// Dropout over ranks drops the weights that one device drops: the stream counts positions, heads and sequences of the whole problem,
// wherever its rows lie and whatever the method.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "distributed/local_ranks.hpp"
#include "fovea/distributed.hpp"
#include "tile/philox.hpp"

namespace fovea::distributed_tests {
namespace {

using namespace verify;

constexpr int64_t kHeads = 3, kSize = 128;

/// Queries of zeros weigh all keys alike, and row j of v is 1 in column j alone: o has the weights. Row i of d_o likewise: dv has them.
void show_weights(const OwnedProblem& problem) {
  const auto fill = [&](Role role, auto&& value) {
    std::vector<double> values(static_cast<size_t>(problem[role].count()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = value(static_cast<int64_t>(i));
    problem[role].assign(values);
  };
  const ProblemSpec& s = problem.spec;
  const auto is_position = [&](int64_t at, const std::vector<int32_t>& lengths, int64_t rows) {
    int64_t row = at / (kHeads * kSize);
    if (lengths.empty()) return row % rows == at % kSize;
    for (size_t b = 0; row >= lengths[b]; ++b) row -= lengths[b];
    return row == at % kSize;
  };
  fill(Role::kQ, [](int64_t) { return 0.0; });
  fill(Role::kV, [&](int64_t at) { return is_position(at, s.lengths_k, s.seqlen_k) ? 1.0 : 0.0; });
  if (problem.has(Role::kDO))
    fill(Role::kDO, [&](int64_t at) { return is_position(at, s.lengths_q, s.seqlen_q) ? 1.0 : 0.0; });
}

/// Whether o, and dv, are other than 0 where the stream keeps a weight that causal leaves.
void expect_kept(const OwnedProblem& problem, bool backward) {
  const ProblemSpec& s = problem.spec;
  const tile::Dropout dropout(s.dropout, s.seed, s.offset);
  const int64_t sequences = s.packed() ? static_cast<int64_t>(s.lengths_q.size()) : s.batch;
  int64_t first_q = 0, first_k = 0, dropped = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    const auto at = static_cast<size_t>(b);
    const int64_t sq = s.packed() ? s.lengths_q[at] : s.seqlen_q,
                  sk = s.packed() ? s.lengths_k[at] : s.seqlen_k;
    const auto value = [&](Role role, int64_t first, int64_t row, int64_t h, int64_t column) {
      return s.packed() ? problem[role].get({first + row, h, column})
                        : problem[role].get({b, row, h, column});
    };
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < sq; ++i) {
        for (int64_t j = 0; j < sk; ++j) {
          const bool kept = dropout.keep(static_cast<uint32_t>(b * kHeads + h), static_cast<uint32_t>(i),
                                         static_cast<uint32_t>(j)),
                     sees = !s.causal || j <= i + sk - sq;
          dropped += sees && !kept ? 1 : 0;
          ASSERT_EQ(value(Role::kO, first_q, i, h, j) != 0, kept && sees)
              << "o of sequence " << b << " head " << h << " query " << i << " key " << j;
          if (!backward) continue;
          ASSERT_EQ(value(Role::kDV, first_k, j, h, i) != 0, kept && sees)
              << "dv of sequence " << b << " head " << h << " query " << i << " key " << j;
        }
      }
    }
    first_q += sq;
    first_k += sk;
  }
  EXPECT_GT(dropped, 1000);
}

ProblemSpec spec_of(bool packed, bool causal, Type type) {
  ProblemSpec s;
  s.type = type;
  s.heads_q = s.heads_kv = kHeads;
  s.head_dim = 32;
  s.head_dim_v = kSize;
  s.batch = 2;
  s.seqlen_q = s.seqlen_k = 101;
  s.causal = causal;
  s.dropout = 0.4;
  s.seed = 0x0123456789abcdef;
  s.offset = 77;
  if (packed) {
    s.batch = 4;
    s.lengths_q = {37, 101, 0, 64};
    s.lengths_k = {37, 101, 0, 64};
  }
  return s;
}

/// Rows that lie by rank, by head and tail, and anyhow; with borders at multiples of 16 and elsewhere.
std::vector<std::vector<fovea_piece>> placements(int64_t rows, int ranks) {
  std::vector<fovea_piece> anyhow;
  for (int64_t at = 0, i = 0; at < rows; ++i) {
    const int64_t end = std::min(rows, at + std::array<int64_t, 4>{16, 9, 32, 1}[static_cast<size_t>(i % 4)]);
    anyhow.push_back({static_cast<int32_t>(i * 5 % ranks), at, end});
    at = end;
  }
  std::reverse(anyhow.begin(), anyhow.end());
  return {contiguous_pieces(rows, ranks), zigzag_pieces(rows, ranks), anyhow};
}

struct Case {
  ProblemSpec spec;
  Division division;
};

/// Every method with every placement.
std::vector<Case> cases(const std::vector<Type>& types) {
  struct Method {
    int ranks, heads_ranks, stages;
  };
  std::vector<Case> all;
  for (const Method m :
       {Method{1, 1, 1}, {2, 1, 1}, {2, 1, 2}, {3, 3, 1}, {4, 2, 2}, {7, 1, 7}, {7, 7, 1}, {5, 0, 0}}) {
    for (const bool packed : {false, true}) {
      for (const auto& pieces : placements(packed ? 202 : 101, m.ranks)) {
        for (const bool causal : {false, true}) {
          for (const Type type : types) {
            Division division;
            division.ranks = m.ranks;
            division.heads_ranks = m.heads_ranks;
            division.stages = m.stages;
            division.queries = division.keys = pieces;
            all.push_back({spec_of(packed, causal, type), division});
          }
        }
      }
    }
  }
  return all;
}

void expect_weights_of_one_device(const Case& c) {
  const OwnedProblem problem(c.spec);
  show_weights(problem);
  LocalRanks ranks(problem, c.division);
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD})
    ASSERT_EQ(ranks.run(pass), "") << describe(c.spec) << '\n' << ranks.reason();
  ASSERT_NO_FATAL_FAILURE(expect_kept(problem, true)) << describe(c.spec) << '\n' << ranks.reason();
}

TEST(DropoutOverRanks, KeepsTheWeightsOfOneDevice) {
  for (const Case& c : cases({Type::kF32, Type::kBF16})) {
    expect_weights_of_one_device(c);
    if (HasFatalFailure()) return;
  }
}

/// Keys stay where they lie, at multiples of 16, while queries move to those.
TEST(DropoutOverRanks, KeepsThemWhereQueriesAloneMove) {
  for (const int stages : {1, 2}) {
    for (const bool causal : {false, true}) {
      Case c{spec_of(false, causal, Type::kF32), {}};
      c.division.ranks = 2;
      c.division.heads_ranks = 1;
      c.division.stages = stages;
      c.division.queries = {{0, 100, 101}, {1, 0, 100}};
      c.division.keys = {{1, 0, 64}, {0, 64, 101}};
      expect_weights_of_one_device(c);
      if (HasFatalFailure()) return;
    }
  }
}

/// On the GPUs of this machine, several ranks on one. FOVEA_TEST_PROBLEMS says how many of the cases.
TEST(CudaDropoutOverRanks, KeepsTheWeightsOfOneDevice) {
  const int devices = fovea_cuda_device_count();
  if (devices == 0) GTEST_SKIP() << "no GPU here: " << fovea_cuda();
  const std::vector<Case> all = cases({Type::kF32, Type::kF16, Type::kBF16});
  const char* given = std::getenv("FOVEA_TEST_PROBLEMS");
  const size_t count =
      given && *given ? std::min<size_t>(all.size(), std::strtoull(given, nullptr, 10)) : all.size();
  for (size_t i = 0; i < count; ++i) {
    Case c = all[i * all.size() / count];
    for (int rank = 0; rank < c.division.ranks; ++rank)
      c.division.devices.push_back({FOVEA_CUDA, static_cast<int32_t>(rank % devices)});
    expect_weights_of_one_device(c);
    if (HasFatalFailure()) return;
  }
}

/// Keys on ranks whose borders divide what dropout decides together, and queries on all of them.
TEST(DropoutOverRanks, KeepsThemWhereQueriesAreEverywhere) {
  for (const auto& pieces : placements(101, 3)) {
    Division division;
    division.ranks = 3;
    division.queries_everywhere = true;
    division.keys = pieces;
    const OwnedProblem problem(spec_of(false, true, Type::kF32));
    show_weights(problem);
    LocalRanks ranks(problem, division);
    ASSERT_EQ(ranks.run(FOVEA_FORWARD), "");
    ASSERT_NO_FATAL_FAILURE(expect_kept(problem, false));
  }
}

}  // namespace
}  // namespace fovea::distributed_tests
