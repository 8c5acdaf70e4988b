// Scores that grow, fall and leap from key to key. They break a softmax whose maximum comes from earlier blocks, is
// raised too seldom, or belongs to the wrong rows.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec base(int64_t head_dim) {
  ProblemSpec spec;
  spec.seqlen_q = 70;
  spec.seqlen_k = 300;  // several blocks of any kernel
  spec.head_dim = spec.head_dim_v = head_dim;
  spec.scale = 1;
  return spec;
}

/// Makes the score of key j profile(j) plus a normal number: column 0 is 1 in each query and profile(j) in key
/// j.
Tweak scores_follow(const std::function<double(int64_t)>& profile) {
  return [profile](OwnedProblem& x) {
    for (int64_t i = 0; i < x.spec.seqlen_q; ++i) x[Role::kQ].set({0, i, 0, 0}, 1);
    for (int64_t j = 0; j < x.spec.seqlen_k; ++j) x[Role::kK].set({0, j, 0, 0}, profile(j));
  };
}

void expect_all_masks(int64_t head_dim, const Tweak& tweak) {
  ProblemSpec spec = base(head_dim);
  expect_conformance_of_all_types(spec, forward_only(), tweak);
  spec.causal = true;
  expect_conformance_of_all_types(spec, forward_only(), tweak);
  spec.causal = false;
  spec.window_left = 90;  // rows whose first blocks are masked
  spec.window_right = 20;
  expect_conformance_of_all_types(spec, forward_only(), tweak);
}

TEST(Maximum, RisesAndFalls) {
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    for (const double slope : {0.3, -0.3, 3.0}) {
      expect_all_masks(head_dim, scores_follow([=](int64_t j) { return slope * static_cast<double>(j); }));
    }
  }
}

TEST(Maximum, Sawtooth) {
  for (const int64_t period : {7, 130}) {
    expect_all_masks(64, scores_follow([=](int64_t j) { return 0.4 * static_cast<double>(j % period); }));
    expect_all_masks(128, scores_follow([=](int64_t j) { return -0.4 * static_cast<double>(j % period); }));
  }
}

/// Blocks that lie before all queries of a tile, behind all of them, and among them.
TEST(Maximum, SlopesOnBothSides) {
  for (const int64_t head_dim : {64, 128, 256}) {
    ProblemSpec spec = base(head_dim);
    spec.seqlen_q = 330;
    spec.seqlen_k = 500;
    spec.heads_q = spec.heads_kv = 2;
    spec.alibi = true;
    expect_conformance_of_all_types(spec, forward_only());
    spec.causal = true;
    expect_conformance_of_all_types(spec, forward_only());
  }
}

/// An infinite slope leaves NaN at distance 0 and minus infinity elsewhere; a negative one raises scores with the distance.
TEST(Maximum, SlopesThatAreInfiniteNegativeOrLarge) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double slope : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN(), -0.3, 1e4}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      ProblemSpec spec = base(head_dim);
      spec.seqlen_q = 330;  // some before all keys
      spec.heads_q = spec.heads_kv = 2;
      spec.alibi = true;
      expect_conformance_of_all_types(spec, forward_only(),
                                      [=](OwnedProblem& x) { x[Role::kAlibi].set({1}, slope); });
    }
  }
}

TEST(Maximum, OneKeyLeaps) {
  constexpr std::array<int64_t, 4> head_dims = {64, 128, 256, 512};
  // The first and last keys of blocks of 64, 80, 96, 112 and 128, and keys inside.
  for (const int64_t leaping : {0, 63, 80, 95, 127, 192, 240, 299}) {
    for (const double height : {10.0, 20.0, 60.0, 256.0, std::ldexp(1.0, 100)}) {
      const Tweak leap = scores_follow([=](int64_t j) { return j == leaping ? height : 0.0; });
      ProblemSpec spec = base(head_dims[static_cast<size_t>(leaping % 4)]);
      expect_conformance_of_all_types(spec, forward_only(), leap);
      spec.causal = true;
      expect_conformance_of_all_types(spec, forward_only(), leap);
    }
  }
}

TEST(Maximum, OneKeyIsInfiniteOrNan) {
  for (const int64_t odd : {0, 96, 240}) {
    for (const double value :
         {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
          std::numeric_limits<double>::quiet_NaN()}) {
      ProblemSpec spec = base(64);
      spec.causal = true;  // some rows do not see it
      expect_conformance_of_all_types(spec, forward_only(),
                                      scores_follow([=](int64_t j) { return j == odd ? value : 0.0; }));
    }
  }
}

TEST(Maximum, RowsWithoutKeysInTheirFirstBlocks) {
  // Row 0 sees keys 0 to block - 1, each further row one more: it has no maximum when its first block comes, and
  // nothing is masked in that block. Scores lie far below 0, so weights against any other maximum vanish.
  for (const int64_t block : {64, 80, 96, 112, 128}) {
    for (const int64_t head_dim : {64, 128, 192, 512}) {
      ProblemSpec spec = base(head_dim);
      spec.seqlen_k = spec.seqlen_q + block - 1;
      spec.causal = true;
      expect_conformance_of_all_types(spec, forward_only(), scores_follow([](int64_t) { return -300.0; }));
    }
  }
}

TEST(Maximum, EachRowLeapsElsewhere) {
  // Neighbouring rows share the lanes of a warp: one raises its maximum a lot, the other not at all.
  for (const int64_t head_dim : {64, 192, 256, 512}) {
    expect_conformance_of_all_types(base(head_dim), forward_only(), [](OwnedProblem& x) {
      for (int64_t i = 0; i < x.spec.seqlen_q; ++i)
        x[Role::kQ].set({0, i, 0, 0}, i % 3 == 0 ? 1 : (i % 3 == 1 ? -1 : 0));
      for (int64_t j = 0; j < x.spec.seqlen_k; ++j)
        x[Role::kK].set({0, j, 0, 0}, 0.5 * static_cast<double>(j % 97));
    });
  }
}

}  // namespace
}  // namespace fovea::conformance
