// Backwards whose keys are few enough that a cluster of CTAs holds all of a head (bwd_sm90_chain.cuh): every number of blocks
// of keys, tails of both sides, more heads than clusters, masks and groups.
#include <gtest/gtest.h>

#include <cstdint>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr int64_t kKeysOfBlock = 128;  ///< of a block

ProblemSpec few_keys(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.heads_q = s.heads_kv = 5;  // more than clusters, as the emulated device holds them
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = s.head_dim_v = head_dim;
  s.aligned = true;
  return s;
}

class CudaChains : public testing::TestWithParam<int64_t> {};

TEST_P(CudaChains, OfAnyLength) {
  const int64_t blocks = GetParam();
  for (const int64_t head_dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      for (const int64_t more : {-kKeysOfBlock + 1, int64_t{0}}) {
        const int64_t keys = blocks * kKeysOfBlock + more;
        ProblemSpec s = few_keys(causal ? keys : 70, keys, head_dim);
        s.causal = causal;
        expect_conformance(s, many_threads());
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Blocks, CudaChains, testing::Range(int64_t{1}, int64_t{6}));

/// The last queries see blocks of keys that the first do not; some keys are seen by all.
TEST(CudaChainsOf, WithFewerQueriesThanKeys) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = few_keys(200, head_dim == 64 ? 250 : 500, head_dim);
    s.causal = true;
    expect_conformance(s, many_threads());
    s.seqlen_q = 1;
    expect_conformance(s, many_threads());
    s.window_right = 90;  // beyond the diagonal
    s.causal = false;
    s.seqlen_q = s.seqlen_k + 20;
    expect_conformance(s, many_threads());
  }
}

/// Rows without keys are zeros, whichever kernel does it.
TEST(CudaChainsOf, WithMoreQueriesThanKeys) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = few_keys(700, head_dim == 64 ? 200 : 300, head_dim);
    expect_conformance(s, many_threads());
    s.causal = true;
    expect_conformance(s, many_threads());
  }
}

TEST(CudaChainsOf, OfGroupsOfHeads) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = few_keys(150, head_dim == 64 ? 250 : 400, head_dim);
    s.heads_q = 10;
    expect_conformance(s, many_threads());
    s.causal = true;
    expect_conformance(s, many_threads());
  }
}

TEST(CudaChainsOf, OfPaddedHeadsAndOddStrides) {
  ProblemSpec s = few_keys(190, 240, 40);
  s.head_dim_v = 56;
  s.layout = Layout::kMixed;
  s.causal = true;
  expect_conformance(s, many_threads());
  s.head_dim = s.head_dim_v = 104;
  s.seqlen_k = 390;
  s.aligned = false;
  expect_conformance(s, many_threads());
}

/// Sinks and dlse. (That all bits are the same each time is looked at in every problem.)
TEST(CudaChainsOf, WithAllThatTheyKnow) {
  for (const Type type : {Type::kBF16, Type::kF16}) {
    for (const int64_t head_dim : {64, 128}) {
      ProblemSpec s = few_keys(260, head_dim == 64 ? 250 : 380, head_dim);
      s.type = type;
      s.seqlen_q = s.seqlen_k;
      s.causal = true;
      s.sink = s.dsink = s.dlse = true;
      expect_conformance(s, many_threads());
    }
  }
}

}  // namespace
}  // namespace fovea::conformance
