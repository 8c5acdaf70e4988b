// Few query rows on CPUs: groups on both sides of where lanes and tiles take over from dot products, key heads that go through the keys together, and
// numbers that are no sums of parts.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// Rows of three key heads lie side by side, and there are items enough for the heads to go together.
ProblemSpec few_rows(int64_t seqlen_k, int64_t group) {
  ProblemSpec s;
  s.batch = 4;
  s.heads_kv = 3;
  s.heads_q = 3 * group;
  s.seqlen_q = 1;
  s.seqlen_k = seqlen_k;
  s.head_dim = s.head_dim_v = 64;
  return s;
}

/// Of 8 bits under every type, and of the type of the queries.
void expect_of_all_caches(ProblemSpec s, const CheckOptions& options = forward_only()) {
  expect_conformance_of_all_types(s, options);
  s.e4m3_keys = true;
  expect_conformance_of_all_types(s, options);
}

TEST(FewRows, OfEveryGroup) {
  for (int64_t group = 1; group <= 17; ++group) expect_of_all_caches(few_rows(150, group));
}

/// Beside 256 keys and more up to 48 rows are few, 16 at a time; the last key has no neighbour in a pair.
TEST(FewRows, OfLargeGroups) {
  for (const int64_t group : {18, 25, 32, 33, 41, 48, 49}) {
    ProblemSpec s = few_rows(259, group);
    s.batch = 1;
    expect_of_all_caches(s);
  }
}

/// Rows of a head that are pages apart, and such as begin between the words of a cache line.
TEST(FewRows, OfManyHeads) {
  for (const int64_t heads : {16, 31}) {
    ProblemSpec s = few_rows(70, 6);
    s.batch = 1;
    s.heads_kv = heads;
    s.heads_q = heads * 6;
    s.head_dim = heads == 16 ? 128 : 33;
    s.head_dim_v = heads == 16 ? 128 : 97;
    expect_of_all_caches(s);
  }
}

/// Steps are of 32 keys, tiles of 16.
TEST(FewRows, OverAnyNumberOfKeys) {
  for (const int64_t keys : {1, 15, 17, 31, 32, 33, 64, 127, 129, 260}) {
    for (const int64_t group : {4, 16}) expect_of_all_caches(few_rows(keys, group));
  }
}

/// Tiles take 32 elements at a time, or 64.
TEST(FewRows, OfEveryHeadSize) {
  constexpr std::array<std::array<int64_t, 2>, 7> kSizes = {
      {{1, 8}, {24, 40}, {63, 65}, {72, 136}, {128, 128}, {192, 80}, {256, 256}}};
  for (const auto& [size, size_v] : kSizes) {
    ProblemSpec s = few_rows(70, size % 16 == 0 ? 9 : 6);
    s.head_dim = size;
    s.head_dim_v = size_v;
    expect_of_all_caches(s);
  }
}

TEST(FewRows, InSplitsByAnyNumberOfThreads) {
  for (const int64_t group : {1, 8, 16}) {
    ProblemSpec s = few_rows(2300, group);
    s.batch = 2;
    s.used_k = {2300, 700};
    expect_of_all_caches(s, [] {
      CheckOptions options = many_threads();
      options.backward = false;
      return options;
    }());
  }
}

/// So many sequences that an item goes through its splits itself.
TEST(FewRows, InSplitsInTurn) {
  ProblemSpec s = few_rows(300, 8);
  s.batch = 22;
  CheckOptions options = many_threads();
  options.backward = false;
  options.num_splits = 2;
  expect_of_all_caches(s, options);
}

TEST(FewRows, ThatSeePartOfTheKeys) {
  for (const int64_t queries : {2, 5}) {
    ProblemSpec s = few_rows(200, 3);
    s.seqlen_q = queries;
    s.causal = true;
    s.sink = true;
    expect_of_all_caches(s);
    s.window_left = 40;
    s.used_k = {200, 0, 3, 77};
    expect_of_all_caches(s);
  }
}

TEST(FewRows, InPages) {
  for (const int64_t page : {1, 7, 16, 256}) {
    for (const int64_t group : {1, 4, 8, 16}) {
      ProblemSpec s = few_rows(page * (300 / page + 1), group);
      s.page_size = page;
      s.caches = 4 * (300 / page + 1) + 2;
      s.used_k = {static_cast<int32_t>(s.seqlen_k), 100, 1, 0};
      expect_of_all_caches(s);
    }
  }
}

TEST(FewRows, ThatMeetValues) {
  for (const int64_t group : {2, 7, 16}) {
    ProblemSpec s = few_rows(140, group);
    s.qv = true;
    s.head_dim_v = 136;
    expect_of_all_caches(s);
  }
}

/// Infinities of queries, keys and values, in what some rows see and others do not.
TEST(FewRows, OfNumbersThatAreNotFinite) {
  for (const Role role : {Role::kQ, Role::kK, Role::kV}) {
    for (const double number : {kUnbounded, -kUnbounded, kNotANumber}) {
      ProblemSpec s = few_rows(100, 4);
      s.seqlen_q = 3;
      s.causal = true;
      expect_conformance_of_all_types(s, forward_only(), [&](OwnedProblem& x) {
        std::vector<double> values = x[role].values();
        const int64_t size = role == Role::kV ? x.spec.head_dim_v : x.spec.head_dim;
        // The last key, which the last query alone sees, or that query.
        const int64_t row = role == Role::kQ ? 2 * x.spec.heads_q : x.key_row(0, 99);
        values[static_cast<size_t>(row * size + 5)] = number;
        x[role].assign(values);
      });
    }
  }
}

/// The same in a step of which every row sees all: its weights are made without scores row by row, which such numbers need.
TEST(FewRows, OfNumbersThatAreNotFiniteAndThatAllSee) {
  for (const Role role : {Role::kQ, Role::kK, Role::kV}) {
    for (const double number : {kUnbounded, kNotANumber}) {
      for (const int64_t group : {8, 16}) {
        expect_conformance_of_all_types(few_rows(160, group), forward_only(), [&](OwnedProblem& x) {
          std::vector<double> values = x[role].values();
          const int64_t size = role == Role::kV ? x.spec.head_dim_v : x.spec.head_dim;
          const int64_t row = role == Role::kQ ? 1 : x.key_row(0, 40);
          values[static_cast<size_t>(row * size + 5)] = number;
          x[role].assign(values);
        });
      }
    }
  }
}

/// The last of an odd number of keys: a product of pairs meets it beside nothing.
TEST(FewRows, OfALastValueThatIsNotFinite) {
  for (const int64_t group : {6, 16, 20}) {
    expect_conformance_of_all_types(few_rows(261, group), forward_only(), [&](OwnedProblem& x) {
      std::vector<double> values = x[Role::kV].values();
      values[static_cast<size_t>(x.key_row(0, 260) * x.spec.head_dim_v + 5)] = kUnbounded;
      x[Role::kV].assign(values);
    });
  }
}

/// In the second unit of columns of V, where the sums of the first are there already, and those of all lie as tiles have them; in the
/// second step of the keys, before others.
TEST(FewRows, OfValuesThatAreNotFiniteBehindOthers) {
  for (const bool seen_by_all : {false, true}) {
    for (const int64_t size_v : {72, 136, 192}) {
      ProblemSpec s = few_rows(300, 5);
      s.head_dim_v = size_v;
      s.seqlen_q = seen_by_all ? 1 : 3;
      s.causal = !seen_by_all;
      expect_conformance_of_all_types(s, forward_only(), [&](OwnedProblem& x) {
        std::vector<double> values = x[Role::kV].values();
        // A key of the second step, or the last but one, which the first query does not see.
        const int64_t row = x.key_row(0, seen_by_all ? 140 : 298);
        values[static_cast<size_t>(row * size_v + 70)] = kUnbounded;
        x[Role::kV].assign(values);
      });
    }
  }
}

/// Elements of 64 and more, a few among others: in float16 those are taken apart in another way.
TEST(FewRows, OfAFewLargeElements) {
  for (const int64_t group : {8, 16}) {
    expect_conformance_of_all_types(few_rows(160, group), forward_only(), [&](OwnedProblem& x) {
      for (const Role role : {Role::kK, Role::kV}) {
        std::vector<double> values = x[role].values();
        const int64_t size = role == Role::kV ? x.spec.head_dim_v : x.spec.head_dim;
        values[static_cast<size_t>(x.key_row(0, 7) * size + 3)] = 64;
        values[static_cast<size_t>(x.key_row(0, 90) * size + 40)] = -300;
        x[role].assign(values);
      }
    });
  }
}

/// Elements whose parts are of every size: the smallest float16 and the largest.
TEST(FewRows, OfSmallAndOfLargeElements) {
  for (const double factor : {0x1p-22, 0x1p-15, 0x1p6}) {
    ProblemSpec s = few_rows(100, 8);
    expect_conformance_of_all_types(s, forward_only(), [&](OwnedProblem& x) {
      for (const Role role : {Role::kK, Role::kV}) {
        std::vector<double> values = x[role].values();
        for (double& value : values) value *= factor;
        x[role].assign(values);
      }
    });
  }
}

}  // namespace
}  // namespace fovea::conformance
