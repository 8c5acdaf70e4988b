// Compares the oracle with answers computed by hand.
#include "cpu/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "float64_problem.hpp"
#include "tile/philox.hpp"

namespace fovea::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// One head of size 1 whose scores are the keys (q = scale = 1) and whose output is the weights: v is the identity.
Float64Problem weights_problem(int64_t seqlen_q, const std::vector<double>& scores) {
  const auto keys = static_cast<int64_t>(scores.size());
  Float64Problem x(1, seqlen_q, keys, 1, 1, 1, keys);
  x.problem.scale = 1;
  std::fill(x[Role::kQ].begin(), x[Role::kQ].end(), 1.0);
  x[Role::kK] = scores;
  for (size_t j = 0; j < scores.size(); ++j) {
    for (size_t c = 0; c < scores.size(); ++c) x[Role::kV][j * scores.size() + c] = j == c ? 1.0 : 0.0;
  }
  return x;
}

void expect_output(Float64Problem& x, const std::vector<double>& o, const std::vector<double>& lse) {
  ASSERT_EQ(x[Role::kO].size(), o.size());
  for (size_t c = 0; c < o.size(); ++c) EXPECT_NEAR(x[Role::kO][c], o[c], 1e-15) << "o[" << c << "]";
  ASSERT_EQ(x[Role::kLse].size(), lse.size());
  for (size_t c = 0; c < lse.size(); ++c) {
    if (std::isinf(lse[c])) {
      EXPECT_EQ(x[Role::kLse][c], lse[c]) << "lse[" << c << "]";
    } else {
      EXPECT_NEAR(x[Role::kLse][c], lse[c], 1e-14) << "lse[" << c << "]";
    }
  }
}

const double kLog2 = std::log(2.0), kLog3 = std::log(3.0);

TEST(Reference, SoftmaxOfThree) {
  Float64Problem x = weights_problem(1, {0, kLog2, kLog3});
  x.run(Pass::kForward);
  expect_output(x, {1.0 / 6, 2.0 / 6, 3.0 / 6}, {std::log(6.0)});
}

TEST(Reference, ScaleMultipliesTheScores) {
  Float64Problem x = weights_problem(1, {0, kLog2});
  x.problem.scale = -2;
  x.run(Pass::kForward);
  expect_output(x, {0.8, 0.2}, {std::log(1.25)});
}

TEST(Reference, QueriesOfValuesAddTheirProductsWithV) {
  Float64Problem x = weights_problem(1, {0, 0, kLog3 / 2});
  x.problem.scale = 2;
  x.add(Role::kQV, {1, 1, 1, 3}) = {0, kLog2 / 2, 0};  // v is the identity
  x.run(Pass::kForward);
  expect_output(x, {1.0 / 6, 2.0 / 6, 3.0 / 6}, {std::log(6.0)});
}

TEST(Reference, CausalIsAlignedBottomRight) {
  Float64Problem more_keys = weights_problem(2, {0, 0, 0});
  more_keys.problem.causal = true;
  more_keys.problem.window_right = 0;
  more_keys.run(Pass::kForward);
  expect_output(more_keys, {0.5, 0.5, 0, 1.0 / 3, 1.0 / 3, 1.0 / 3}, {kLog2, kLog3});

  Float64Problem more_queries = weights_problem(3, {0, 0});
  more_queries.problem.causal = true;
  more_queries.problem.window_right = 0;
  more_queries.run(Pass::kForward);
  expect_output(more_queries, {0, 0, 1, 0, 0.5, 0.5}, {-kInfinity, 0, kLog2});
}

TEST(Reference, WindowKeepsTheDiagonal) {
  Float64Problem x = weights_problem(3, {0, 0, 0});
  x.problem.window_left = 1;
  x.problem.window_right = 0;
  x.run(Pass::kForward);
  expect_output(x, {1, 0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5}, {0, kLog2, kLog2});
}

TEST(Reference, SoftcapThenAlibiThenBias) {
  Float64Problem x = weights_problem(1, {0.3, -0.2});
  x.problem.softcap = 0.5;
  x.add(Role::kAlibi, {1, 1}) = {0.25};
  x.add(Role::kBias, {1, 1, 1, 2}) = {0.1, 0.7};
  x.run(Pass::kForward);
  const double first = std::exp(0.5 * std::tanh(0.6) - 0.25 + 0.1);  // one position left of the diagonal
  const double second = std::exp(0.5 * std::tanh(-0.4) + 0.7);
  expect_output(x, {first / (first + second), second / (first + second)}, {std::log(first + second)});
}

TEST(Reference, AlibiIsSymmetricAroundTheDiagonal) {
  Float64Problem x = weights_problem(3, {0, 0, 0});
  x.add(Role::kAlibi, {1, 1}) = {kLog2};
  x.run(Pass::kForward);
  expect_output(x, {4.0 / 7, 2.0 / 7, 1.0 / 7, 0.25, 0.5, 0.25, 1.0 / 7, 2.0 / 7, 4.0 / 7},
                {std::log(1.75), kLog2, std::log(1.75)});
}

TEST(Reference, SinkTakesWeightAndEntersLse) {
  Float64Problem x = weights_problem(1, {0, kLog2});
  x.add(Role::kSink, {1}) = {kLog3};
  x.run(Pass::kForward);
  expect_output(x, {1.0 / 6, 2.0 / 6}, {std::log(6.0)});
}

TEST(Reference, SinkAloneIsTheLse) {
  Float64Problem x = weights_problem(1, {0, kLog2});
  x.add(Role::kSink, {1}) = {1.25};
  x.add_mask(Role::kMask, {1, 1, 1, 1}, 0.0);
  x.run(Pass::kForward);
  expect_output(x, {0, 0}, {1.25});
}

TEST(Reference, ListsNameTheKeys) {
  Float64Problem x = weights_problem(3, {0, kLog2, kLog3});
  x.add_lists({1, 1, 3, 2}, {2, 0, -1, 1, -1, -1});
  x.run(Pass::kForward);
  expect_output(x, {0.25, 0, 0.75, 0, 1, 0, 0, 0, 0}, {std::log(4.0), kLog2, -kInfinity});
}

TEST(Reference, AnEntryThatStandsTwiceHasTwiceTheWeight) {
  Float64Problem x = weights_problem(1, {0, kLog2});
  x.add_lists({1, 1, 1, 4}, {0, 1, 0, -1});
  x.run(Pass::kForward);
  expect_output(x, {0.5, 0.5}, {std::log(4.0)});
}

TEST(Reference, MasksLeaveEntriesOut) {
  Float64Problem x = weights_problem(3, {0, 0, 0});
  x.problem.causal = true;
  x.problem.window_right = 0;
  x.add_lists({1, 1, 3, 3}, {2, 1, 0, 2, 1, 0, 2, 1, 0});
  x.add_mask(Role::kMask, {1, 1, 1, 3}, 1.0) = {1, 0, 1};
  x.run(Pass::kForward);
  expect_output(x, {1, 0, 0, 1, 0, 0, 0.5, 0, 0.5}, {0, 0, kLog2});
}

TEST(Reference, ScoresOfListsUseThePositions) {
  Float64Problem x = weights_problem(1, {0, 0, 0});
  x.add(Role::kAlibi, {1, 1}) = {kLog2};
  x.add_lists({1, 1, 1, 2}, {0, 2});
  x.run(Pass::kForward);
  expect_output(x, {0.2, 0, 0.8}, {std::log(1.25)});
}

TEST(Reference, MaskAndBlockMask) {
  Float64Problem masked = weights_problem(1, {0, 0, 0, 0});
  masked.add_mask(Role::kMask, {1, 1, 1, 4}, 1.0) = {1, 0, 1, 0};
  masked.run(Pass::kForward);
  expect_output(masked, {0.5, 0, 0.5, 0}, {kLog2});

  Float64Problem blocks = weights_problem(1, {0, 0, 0});
  blocks.problem.block_q = 4;
  blocks.problem.block_k = 2;
  blocks.add_mask(Role::kBlockMask, {1, 1, 1, 2}, 1.0) = {1, 0};
  blocks.run(Pass::kForward);
  expect_output(blocks, {0.5, 0.5, 0}, {kLog2});
}

TEST(Reference, SeqUsedMovesTheDiagonalAndEmptiesTheRest) {
  Float64Problem x = weights_problem(2, {0, 0, 0});
  x.problem.causal = true;
  x.problem.window_right = 0;
  x.add_integers(Role::kSeqUsedQ, {1});
  x.add_integers(Role::kSeqUsedK, {2});
  x[Role::kK][2] = kNan;
  x[Role::kV][8] = kNan;
  x[Role::kQ][1] = kNan;
  x.run(Pass::kForward);
  expect_output(x, {0.5, 0.5, 0, 0, 0, 0}, {kLog2, -kInfinity});
}

TEST(Reference, PackedSequencesDoNotSeeEachOther) {
  Float64Problem x(1, 1, 1, 1, 1, 1, 1);
  x.problem.scale = 1;
  x.pack({1, 0, 2}, {2, 1, 1}, 1);
  x[Role::kQ] = {0, 0, 0, kNan};
  x[Role::kV] = {1, 3, 10, 20, kNan};
  x.run(Pass::kForward);
  expect_output(x, {2, 20, 20, 0}, {kLog2, 0, 0, -kInfinity});
}

/// Key j of sequence 0 is row 1 + j of its pages 2, 0; the third entry is none.
TEST(Reference, PagesSayWhereKeysLie) {
  Float64Problem x(3, 1, 2, 1, 1, 1, 1);  // three pages of two rows
  x.problem.batch = 1;
  x.problem.caches = 3;
  x.problem.cache_rows = 2;
  x.problem.seqlen_k = 6;
  x.add(Role::kQ, {1, 1, 1, 1}) = {1};
  x.add(Role::kO, {1, 1, 1, 1});
  x.add(Role::kLse, {1, 1, 1});
  x[Role::kK] = {kLog2, kNan, kNan, kNan, kNan, 0};
  x[Role::kV] = {8, kNan, kNan, kNan, kNan, 2};
  x.problem.scale = 1;
  x.add_integers(Role::kPageTable, {2, 0, -1});
  x.add_integers(Role::kSeqUsedK, {3});
  x.add_integers(Role::kLeftPadK, {1});
  x.run(Pass::kForward);
  expect_output(x, {6}, {kLog3});
}

TEST(Reference, SequencesReadTheCachesThatTheyChoose) {
  Float64Problem x(2, 1, 2, 1, 1, 1, 1);
  std::fill(x[Role::kQ].begin(), x[Role::kQ].end(), 0.0);
  x[Role::kV] = {1, 3, 10, 30};
  x.problem.caches = 2;
  x.add_integers(Role::kCacheBatch, {1, 1});
  x.add_integers(Role::kSeqUsedK, {2, 1});
  x.run(Pass::kForward);
  expect_output(x, {20, 10}, {kLog2, 0});
}

/// Causal counts from the first key that exists.
TEST(Reference, PaddingMovesTheKeys) {
  Float64Problem x = weights_problem(2, {0, 0, 0});
  x.problem.causal = true;
  x.problem.window_right = 0;
  x.add_integers(Role::kLeftPadK, {1});
  x[Role::kK][0] = kNan;
  x[Role::kV][0] = kNan;
  x.run(Pass::kForward);
  expect_output(x, {0, 1, 0, 0, 0.5, 0.5}, {0, kLog2});
}

TEST(Reference, GroupsOfQueryHeadsShareAKeyHead) {
  Float64Problem x(1, 1, 1, 4, 2, 1, 1);
  x[Role::kV] = {5, 7};
  x.run(Pass::kForward);
  EXPECT_EQ(x[Role::kO], (std::vector<double>{5, 5, 7, 7}));
}

TEST(Reference, DropoutFollowsPhiloxAndLeavesLse) {
  constexpr int64_t kKeys = 40;
  Float64Problem x = weights_problem(2, std::vector<double>(kKeys, 0.0));
  x.problem.dropout = 0.5;
  x.run(Pass::kForward);
  const tile::Dropout dropout(0.5, x.seed, x.offset);
  int64_t kept = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    for (uint32_t j = 0; j < kKeys; ++j) {
      kept += dropout.keep(0, i, j) ? 1 : 0;
      EXPECT_DOUBLE_EQ(x[Role::kO][i * kKeys + j],
                       dropout.keep(0, i, j) ? 2.0 / static_cast<double>(kKeys) : 0.0);
    }
  }
  EXPECT_GT(kept, kKeys / 2);
  EXPECT_LT(kept, 3 * kKeys / 2);
  EXPECT_DOUBLE_EQ(x[Role::kLse][0], std::log(40.0));
}

TEST(Reference, HiddenKeysDoNotChangeARow) {
  Float64Problem x = weights_problem(2, {0, kNan, 0});
  for (size_t c = 0; c < 3; ++c) x[Role::kV][3 + c] = kInfinity;
  x.add_mask(Role::kMask, {1, 1, 2, 3}, 1.0) = {1, 0, 1, 1, 1, 1};
  x.run(Pass::kForward);
  EXPECT_EQ(x[Role::kO][0], 0.5);
  EXPECT_EQ(x[Role::kO][1], 0.0);
  EXPECT_EQ(x[Role::kO][2], 0.5);
  EXPECT_EQ(x[Role::kLse][0], kLog2);
  for (size_t c = 0; c < 3; ++c) EXPECT_TRUE(std::isnan(x[Role::kO][3 + c]));
  EXPECT_TRUE(std::isnan(x[Role::kLse][1]));
}

TEST(Reference, AScoreOfMinusInfinityIsAMask) {
  Float64Problem x = weights_problem(2, {0, 0});
  x.add(Role::kBias, {1, 1, 2, 2}) = {-kInfinity, 0, -kInfinity, -kInfinity};
  x[Role::kV] = {kNan, kNan, 0, 1};
  x.run(Pass::kForward);
  expect_output(x, {0, 1, 0, 0}, {0, -kInfinity});
}

TEST(Reference, LargeScoresDoNotOverflow) {
  Float64Problem x = weights_problem(1, {10000, 10000 - kLog2, -10000});
  x.run(Pass::kForward);
  EXPECT_NEAR(x[Role::kO][0], 2.0 / 3, 1e-12);
  EXPECT_NEAR(x[Role::kO][1], 1.0 / 3, 1e-12);
  EXPECT_EQ(x[Role::kO][2], 0.0);
  EXPECT_NEAR(x[Role::kLse][0], 10000 + std::log(1.5), 1e-11);
}

/// Rows and keys that take no part get zero gradients, whatever their memory holds.
TEST(Reference, RowsAndKeysThatTakeNoPartGetZeroGradients) {
  Float64Problem x(1, 3, 4, 2, 1, 2, 2);
  x.add_integers(Role::kSeqUsedQ, {2});
  x.add_integers(Role::kSeqUsedK, {3});
  for (size_t c = 8; c < 12; ++c) x[Role::kQ][c] = x[Role::kDO][c] = kNan;
  for (size_t c = 6; c < 8; ++c) x[Role::kK][c] = x[Role::kV][c] = kNan;
  x.run(Pass::kBackward);
  for (size_t c = 0; c < 12; ++c) EXPECT_EQ(x[Role::kDQ][c] == 0, c >= 8) << c;
  for (size_t c = 0; c < 8; ++c) {
    EXPECT_EQ(x[Role::kDK][c] == 0, c >= 6) << c;
    EXPECT_EQ(x[Role::kDV][c] == 0, c >= 6) << c;
  }
}

TEST(Reference, RngStateIsWrittenByTheForwardAndReadByTheBackward) {
  Float64Problem x(1, 4, 16, 1, 1, 2, 2);
  x.problem.dropout = 0.5;
  x.run(Pass::kBackward);
  const std::vector<double> expected = x[Role::kDV];

  AttentionProblem& p = x.problem;
  TensorDesc& t = p.tensors[index_of(Role::kRngState)];
  t.present = true;
  t.dtype = DType::kI64;
  t.ndim = 1;
  t.shape[0] = 2;
  t.stride[0] = 1;
  std::vector<int64_t> state = {-1, -1};
  Buffers buffers;
  for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kO, Role::kLse, Role::kDO, Role::kDLse,
                          Role::kDQ, Role::kDK, Role::kDV}) {
    buffers.data[index_of(role)] = x[role].data();
  }
  buffers.data[index_of(Role::kRngState)] = state.data();
  buffers.seed = x.seed;
  buffers.offset = x.offset;
  p.pass = Pass::kForward;
  cpu::run_reference(p, buffers);
  EXPECT_EQ(state, (std::vector<int64_t>{static_cast<int64_t>(x.seed), static_cast<int64_t>(x.offset)}));

  buffers.seed = buffers.offset = 999;  // ignored: the backward reads rng_state
  p.pass = Pass::kBackward;
  cpu::run_reference(p, buffers);
  EXPECT_EQ(x[Role::kDV], expected);
}

TEST(Reference, RoundsEveryOutputTypeOnce) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Float64Problem x = weights_problem(1, {0, kLog2, kLog3});
    x.problem.tensors[index_of(Role::kO)].dtype = dtype;
    x.run(Pass::kForward);
    const void* memory = x[Role::kO].data();
    for (size_t j = 0; j < 3; ++j) {
      const double exact = static_cast<double>(j + 1) / 6;
      if (dtype == DType::kF32) {
        EXPECT_EQ(static_cast<const float*>(memory)[j], static_cast<float>(exact));
      } else if (dtype == DType::kF16) {
        EXPECT_EQ(static_cast<const F16*>(memory)[j].bits, from_double<F16>(exact).bits);
      } else {
        EXPECT_EQ(static_cast<const Bf16*>(memory)[j].bits, from_double<Bf16>(exact).bits);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::testing
