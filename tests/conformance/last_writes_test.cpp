// Backwards in which the last block of keys to add to dq writes it (bwd_sm90, last_writes): causal, of up to 1,024 keys. With
// `deterministic`, which each check asks for as well, those kernels take problems of a few heads, too.
#include <gtest/gtest.h>

#include <cstdint>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr int64_t kKeysOfTile = 128;

ProblemSpec short_causal(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.heads_q = s.heads_kv = 3;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = s.head_dim_v = head_dim;
  s.causal = true;
  s.aligned = true;
  return s;
}

class CudaLastWrites : public testing::TestWithParam<int64_t> {};

TEST_P(CudaLastWrites, OfAnyLength) {
  const int64_t blocks = GetParam();
  for (const int64_t head_dim : {64, 128}) {
    if (head_dim == 128 && blocks < 5) continue;  // a chain's
    for (const int64_t more : {-kKeysOfTile + 1, int64_t{-1}, int64_t{0}}) {
      const int64_t keys = blocks * kKeysOfTile + more;
      expect_conformance(short_causal(keys, keys, head_dim), many_threads());
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Blocks, CudaLastWrites, testing::Range(int64_t{3}, int64_t{9}));

/// The first blocks of queries see several blocks of keys, and some blocks of keys are the last at many.
TEST(CudaLastWritesOf, WithFewerQueriesThanKeys) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t queries : {1, 70, 130, 500}) {
      ProblemSpec s = short_causal(queries, 1000, head_dim);
      expect_conformance(s, many_threads());
      s.causal = false;
      s.window_right = 200;  // beyond the diagonal
      expect_conformance(s, many_threads());
    }
  }
}

/// Rows without keys are zeros, whichever kernel does it.
TEST(CudaLastWritesOf, WithMoreQueriesThanKeys) {
  for (const int64_t head_dim : {64, 128})
    expect_conformance(short_causal(1000, 700, head_dim), many_threads());
}

TEST(CudaLastWritesOf, OfGroupsOfHeads) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = short_causal(800, 900, head_dim);
    s.heads_q = 6;
    s.heads_kv = 2;
    expect_conformance(s, many_threads());
    s.heads_kv = 1;
    expect_conformance(s, many_threads());
  }
}

TEST(CudaLastWritesOf, OfPaddedHeadsAndOddStrides) {
  ProblemSpec s = short_causal(700, 740, 40);
  s.head_dim_v = 56;
  s.layout = Layout::kMixed;
  expect_conformance(s, many_threads());
  s.head_dim = s.head_dim_v = 104;
  expect_conformance(s, many_threads());
  s.aligned = false;
  expect_conformance(s, many_threads());
}

TEST(CudaLastWritesOf, WithAllThatTheyKnow) {
  for (const Type type : {Type::kBF16, Type::kF16}) {
    for (const int64_t head_dim : {64, 128}) {
      ProblemSpec s = short_causal(650, 650, head_dim);
      s.type = type;
      s.sink = s.dsink = s.dlse = true;
      expect_conformance(s, many_threads());
      expect_same_bits_each_time(s);
    }
  }
}

/// So many heads that nobody has to ask for a fixed order.
TEST(CudaLastWritesOf, OfManyHeads) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = short_causal(520, 520, head_dim);
    s.batch = 10;
    s.heads_q = s.heads_kv = 16;  // 800 tiles of keys, six for each of 132 SMs
    expect_conformance(s);
  }
}

}  // namespace
}  // namespace fovea::conformance
