// Values: large logits, ties, infinities, and NaN in keys that some rows do not see.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

ProblemSpec base() {
  ProblemSpec spec;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = 60;
  spec.seqlen_k = 75;
  spec.head_dim = spec.head_dim_v = 32;
  return spec;
}

TEST(Values, LargeLogits) {
  ProblemSpec spec = base();
  for (const Keys keys : {Keys::kNormal, Keys::kTies, Keys::kGrowing, Keys::kOneLarge}) {
    spec.keys = keys;
    spec.logit = 3000;
    spec.scale = 0;
    expect_conformance_of_all_types(spec);
    spec.scale = -700;
    expect_conformance_of_all_types(spec);
  }
}

/// Scores that grow by 87 to 89 from one block to another: what takes such weights down to the new maximum is smaller than float32 is for
/// instructions that flush to zero, or the sum of weights is infinite.
TEST(Values, ScoresThatGrowByAllOfFloat32) {
  for (const int64_t size : {64, 96, 128, 192, 256}) {
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{141, 294}, {300, 600}}) {
      for (uint64_t seed = 0; seed < 4; ++seed) {
        ProblemSpec spec;
        spec.data_seed = 7 * seed + 1;
        spec.heads_q = spec.heads_kv = 4;
        spec.seqlen_q = queries;
        spec.seqlen_k = keys;
        spec.head_dim = spec.head_dim_v = size;
        spec.causal = seed % 2 == 0;
        spec.logit = 40;
        spec.type = seed < 2 ? Type::kBF16 : Type::kF16;
        expect_conformance(spec, forward_only());
      }
    }
  }
}

TEST(Values, LargeLogitsAreReached) {
  ProblemSpec spec = base();
  spec.logit = 3000;
  const OwnedProblem problem(spec);
  double largest_logit = 0;
  for (int64_t i = 0; i < spec.seqlen_q; ++i) {
    for (int64_t j = 0; j < spec.seqlen_k; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < spec.head_dim; ++c) {
        dot += problem[Role::kQ].get({0, i, 0, c}) * problem[Role::kK].get({0, j, 0, c});
      }
      largest_logit = std::max(largest_logit, std::abs(dot * spec.resolved_scale()));
    }
  }
  EXPECT_GT(largest_logit, 1e4);
}

TEST(Values, EqualKeys) {
  ProblemSpec spec = base();
  spec.keys = Keys::kTies;
  expect_conformance_of_all_types(spec);
  spec.seqlen_k = 500;
  expect_conformance_of_all_types(spec);
}

TEST(Values, EachKeyOutgrowsAllBefore) {
  ProblemSpec spec = base();
  spec.keys = Keys::kGrowing;
  spec.seqlen_k = 300;
  for (const double logit : {30.0, 1000.0}) {
    spec.logit = logit;
    expect_conformance_of_all_types(spec);
  }
}

TEST(Values, QueriesOfZero) {
  expect_conformance_of_all_types(base(), {}, [](OwnedProblem& x) {
    x[Role::kQ].assign(std::vector<double>(static_cast<size_t>(x[Role::kQ].count()), 0.0));
  });
}

TEST(Values, SmallestNumbers) {
  ProblemSpec spec = base();
  spec.magnitude = 1e-6;
  expect_conformance_of_all_types(spec);
}

TEST(Values, BiasOfMinusInfinity) {
  ProblemSpec spec = base();
  spec.bias = spec.dbias = true;
  for (const BiasValues values : {BiasValues::kSomeMinusInfinity, BiasValues::kRowsMinusInfinity}) {
    spec.bias_values = values;
    spec.sink = spec.dsink = false;
    expect_conformance_of_all_types(spec);
    spec.sink = spec.dsink = true;
    expect_conformance_of_all_types(spec);
  }
}

TEST(Values, BiasOfPlusInfinityMakesTheRowNan) {
  ProblemSpec spec = base();
  spec.bias = true;
  expect_conformance_of_all_types(spec, forward_only(), [](OwnedProblem& x) {
    x[Role::kBias].set({0, 0, 7, 11}, kInfinity);
    x[Role::kBias].set({0, 1, 59, 74}, kInfinity);
  });
}

TEST(Values, SinkThatOutweighsAllOrNothing) {
  ProblemSpec spec = base();
  spec.sink = spec.dsink = spec.dlse = true;
  for (const double sink : {60.0, -60.0, 5000.0, -5000.0, -kInfinity}) {
    expect_conformance_of_all_types(spec, {}, [&](OwnedProblem& x) { x[Role::kSink].set({0}, sink); });
  }
}

/// Fills the row of one key in K or V (all heads) with `value`.
Tweak spoil(Role role, std::vector<int64_t> keys, double value) {
  return [=](OwnedProblem& x) {
    OwnedTensor& t = x[role];
    for (const int64_t j : keys) {
      for (int64_t head = 0; head < x.spec.heads_kv; ++head) {
        for (int64_t c = 0; c < t.shape()[3]; ++c) t.set({0, j, head, c}, value);
      }
    }
  };
}

struct Hidden {
  const char* name;
  void (*hide)(ProblemSpec&);
  std::vector<int64_t> keys;  ///< seen by some rows only, or by none
};
void PrintTo(const Hidden& hidden, std::ostream* out) {
  *out << hidden.name;
}

/// Ways in which some rows do not see a key.
std::vector<Hidden> ways_to_hide() {
  return {
      {"causal",
       [](ProblemSpec& s) {
         s.causal = true;
         s.seqlen_q = s.seqlen_k;
       },
       {74, 50}},
      {"lists",
       [](ProblemSpec& s) {
         s.list_size = 30;
         s.list_density = 0.9;
       },
       {0, 33}},
      {"window",
       [](ProblemSpec& s) {
         s.window_left = 10;
         s.window_right = 5;
       },
       {0, 33}},
      {"mask", [](ProblemSpec& s) { s.mask = true; }, {20}},
      {"mask_of_keys",
       [](ProblemSpec& s) {
         s.mask = true;
         s.mask_broadcast = 0b0111;
         s.mask_density = 0.5;
       },
       {1, 2, 3, 4, 5, 6, 7, 8}},
      {"block_mask",
       [](ProblemSpec& s) {
         s.block_mask = true;
         s.block_q = 16;
         s.block_k = 16;
         s.block_mask_density = 0.5;
       },
       {17}},
      {"dropped_after_mask",
       [](ProblemSpec& s) {
         s.mask = true;
         s.dropout = 0.5;
       },
       {40}},
  };
}

class HiddenKeys : public testing::TestWithParam<Hidden> {};

TEST_P(HiddenKeys, NanInKStaysAway) {
  ProblemSpec spec = base();
  GetParam().hide(spec);
  expect_conformance_of_all_types(spec, {}, spoil(Role::kK, GetParam().keys, kNan));
}
TEST_P(HiddenKeys, InfinityInKStaysAway) {
  ProblemSpec spec = base();
  GetParam().hide(spec);
  expect_conformance_of_all_types(spec, forward_only(), spoil(Role::kK, GetParam().keys, kInfinity));
}
TEST_P(HiddenKeys, NanInVStaysAway) {
  ProblemSpec spec = base();
  GetParam().hide(spec);
  expect_conformance_of_all_types(spec, {}, spoil(Role::kV, GetParam().keys, kNan));
}
TEST_P(HiddenKeys, InfinityInVStaysAway) {
  ProblemSpec spec = base();
  spec.logit = 0.3;  // no weight rounds to 0 in any type: 0 times infinity is NaN
  GetParam().hide(spec);
  expect_conformance_of_all_types(spec, forward_only(), spoil(Role::kV, GetParam().keys, kInfinity));
}
/// All keys are hidden from some rows: rows that see only NaN are NaN, rows that see nothing are 0.
TEST_P(HiddenKeys, AllOfThemNan) {
  ProblemSpec spec = base();
  GetParam().hide(spec);
  std::vector<int64_t> all;
  for (int64_t j = 0; j < spec.seqlen_k; ++j) all.push_back(j);
  expect_conformance_of_all_types(spec, {}, spoil(Role::kK, all, kNan));
  expect_conformance_of_all_types(spec, {}, spoil(Role::kV, all, kNan));
}
/// When no row sees the keys, no output may change.
TEST_P(HiddenKeys, DecodeStep) {
  ProblemSpec spec = base();
  GetParam().hide(spec);
  spec.seqlen_q = 1;
  spec.heads_q = 8;
  expect_conformance_of_all_types(spec, {}, spoil(Role::kK, GetParam().keys, kNan));
  expect_conformance_of_all_types(spec, {}, spoil(Role::kV, GetParam().keys, kNan));
}
INSTANTIATE_TEST_SUITE_P(By, HiddenKeys, testing::ValuesIn(ways_to_hide()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(Values, NanInTheVOfDroppedKeys) {
  ProblemSpec spec = base();
  spec.dropout = 0.5;
  spec.seed = 77;
  expect_conformance_of_all_types(spec, {}, spoil(Role::kV, {30}, kNan));
}

TEST(Values, NanInTheVOfKeysWithABiasOfMinusInfinity) {
  ProblemSpec spec = base();
  spec.bias = true;
  spec.bias_values = BiasValues::kSomeMinusInfinity;
  expect_conformance_of_all_types(spec, {}, spoil(Role::kV, {30}, kNan));
}

TEST(Values, InfinitiesOfBothSignsInV) {
  ProblemSpec spec = base();
  spec.logit = 0.3;
  spec.causal = true;
  expect_conformance_of_all_types(spec, forward_only(), [](OwnedProblem& x) {
    x[Role::kV].set({0, 20, 0, 3}, kInfinity);
    x[Role::kV].set({0, 50, 0, 3}, -kInfinity);
    x[Role::kV].set({0, 40, 1, 31}, -kInfinity);
  });
}

/// Where two warpgroups share rows, each has half of the columns of v.
TEST(Values, NanInVOfWideHeads) {
  for (const auto& [head_dim, odd_column] : {std::pair<int64_t, int64_t>{320, 3}, {512, 400}}) {
    ProblemSpec spec = base();
    spec.head_dim = spec.head_dim_v = head_dim;
    spec.causal = true;
    expect_conformance_of_all_types(spec, forward_only(), [&, column = odd_column](OwnedProblem& x) {
      x[Role::kV].set({0, 50, 0, column}, kNan);
    });
  }
}

/// Where each gradient has a kernel of its own, each multiplies other rows by weights of 0.
TEST(Values, NotFiniteInWideHeads) {
  for (const int64_t head_dim : {304, 512, 576}) {
    ProblemSpec spec = base();
    spec.head_dim = head_dim;
    spec.head_dim_v = std::min<int64_t>(head_dim, 512);
    spec.causal = true;
    spec.window_left = 30;
    for (const Role role : {Role::kK, Role::kV}) {
      expect_conformance_of_all_types(spec, {}, spoil(role, {0, 33, 50}, kNan));
    }
    expect_conformance_of_all_types(spec, forward_only(), spoil(Role::kK, {33}, kInfinity));
    expect_conformance_of_all_types(spec, {}, [](OwnedProblem& x) { x[Role::kQ].set({0, 13, 1, 5}, kNan); });
  }
}

TEST(Values, NanInOneQuery) {
  ProblemSpec spec = base();
  spec.causal = true;
  expect_conformance_of_all_types(spec, {}, [](OwnedProblem& x) { x[Role::kQ].set({0, 13, 1, 5}, kNan); });
}

}  // namespace
}  // namespace fovea::conformance
