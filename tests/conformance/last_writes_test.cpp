// Backwards that add to dq in a fixed order always, in which the last block of keys writes it (bwd_sm90, last_writes) or the first stores
// (first_stores, head size 256): causal, above head size 128 without a mask, too, of up to 1,024 keys. With `deterministic`, which each
// check asks for as well, those kernels take problems of a few heads, too.
#include <gtest/gtest.h>

#include <cstdint>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr int64_t kKeysOfTile = 128;

ProblemSpec short_causal(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.heads_q = s.heads_kv = 2;
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
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    if (head_dim == 128 && blocks < 5) continue;  // a chain's
    for (const int64_t more : {-kKeysOfTile + 1, int64_t{-1}, int64_t{0}}) {
      const int64_t keys = blocks * kKeysOfTile + more;
      expect_conformance(short_causal(keys, keys, head_dim), many_threads());
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Blocks, CudaLastWrites, testing::Range(int64_t{3}, int64_t{9}));

/// So many heads that nobody has to ask for a fixed order.
TEST(CudaManyLastWrites, OfManyHeads) {
  ProblemSpec s = short_causal(260, 260, 64);
  s.batch = 12;
  s.heads_q = s.heads_kv = 22;  // 792 tiles of keys, six for each of 132 SMs
  expect_conformance(s);
  for (const bool causal : {false, true}) {
    s = short_causal(150, 150, 192);
    s.batch = 12;
    s.heads_q = s.heads_kv = 22;
    s.causal = causal;
    expect_conformance(s);
  }
}

/// The first blocks of queries see several blocks of keys, and some blocks of keys are the last at many.
TEST(CudaLastWritesOf, WithFewerQueriesThanKeys) {
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    for (const int64_t queries : {1, 300}) {
      ProblemSpec s = short_causal(queries, 540, head_dim);
      expect_conformance(s);
      s.causal = false;
      s.window_right = 150;  // beyond the diagonal
      expect_conformance(s);
    }
  }
}

/// Rows without keys are zeros, whichever kernel does it.
TEST(CudaLastWritesOf, WithMoreQueriesThanKeys) {
  expect_conformance(short_causal(350, 300, 64));
  expect_conformance(short_causal(600, 550, 128));
  expect_conformance(short_causal(350, 300, 192));
  expect_conformance(short_causal(350, 300, 256));
}

/// All queries see all keys: the first keys are the last to add at every block of queries.
TEST(CudaLastWritesOf, WithoutAMask) {
  for (const int64_t head_dim : {192, 256}) {
    for (const int64_t keys : {64, 65, 300}) {
      ProblemSpec s = short_causal(200, keys, head_dim);
      s.causal = false;
      expect_conformance(s);
    }
  }
}

TEST(CudaLastWritesOf, OfGroupsOfHeads) {
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    ProblemSpec s = short_causal(200, 530, head_dim);
    s.heads_q = 4;
    s.heads_kv = head_dim == 64 ? 2 : 1;
    expect_conformance(s);
  }
}

TEST(CudaLastWritesOf, OfPaddedHeadsAndOddStrides) {
  ProblemSpec s = short_causal(300, 340, 40);
  s.head_dim_v = 56;
  s.layout = Layout::kMixed;
  expect_conformance(s);
  s.head_dim = s.head_dim_v = 104;
  s.seqlen_k = 520;
  expect_conformance(s);
  s.head_dim = s.head_dim_v = 168;
  expect_conformance(s);
  s.head_dim = s.head_dim_v = 200;
  expect_conformance(s);
  s.aligned = false;
  expect_conformance(s);
}

/// Sinks and dlse, and the same bits each time.
TEST(CudaLastWritesOf, WithAllThatTheyKnow) {
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    const int64_t keys = head_dim == 128 ? 530 : 270;
    ProblemSpec s = short_causal(keys, keys, head_dim);
    s.sink = s.dsink = s.dlse = true;
    expect_conformance(s);
    expect_same_bits_each_time(s);
    s.type = Type::kF16;
    expect_conformance(s);
  }
}

}  // namespace
}  // namespace fovea::conformance
