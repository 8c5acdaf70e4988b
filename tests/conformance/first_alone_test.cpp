// Backwards in which the first block of keys to add to dq stores its part and the others wait for it alone (bwd_sm90, `first_alone`):
// many tiles of keys, of sequences that are longer than those that are added up in order, packed, or with windows.
#include <gtest/gtest.h>

#include <cstdint>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec many_tiles(int64_t seqlen, int64_t head_dim, int64_t heads, int64_t heads_kv) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.batch = 2;
  s.heads_q = heads;
  s.heads_kv = heads_kv;
  s.seqlen_q = s.seqlen_k = seqlen;
  s.head_dim = s.head_dim_v = head_dim;
  s.aligned = true;
  return s;
}

/// So many tiles that a small device has six for each SM.
TEST(CudaFirstAloneOf, Windows) {
  ProblemSpec s = many_tiles(270, 96, 8, 8);
  s.window_left = 150;
  s.causal = true;
  expect_conformance(s);
}

TEST(CudaFirstAloneOf, WindowsThatLeaveRowsWithoutKeys) {
  ProblemSpec s = many_tiles(300, 128, 8, 8);
  s.seqlen_q = 420;
  s.window_left = 40;
  s.window_right = 10;
  expect_conformance(s);
}

/// Blocks of keys of one head run together, and begin at the same queries.
TEST(CudaFirstAloneOf, LongSequences) {
  for (const int64_t head_dim : {64, 128}) {
    ProblemSpec s = many_tiles(1000, head_dim, 6, 6);
    s.batch = 1;
    s.lengths_q = {300};
    s.lengths_k = {1000};
    expect_conformance(s);
  }
}

TEST(CudaFirstAloneOf, PackedSequences) {
  ProblemSpec s = many_tiles(390, 128, 8, 8);
  s.lengths_q = s.lengths_k = {390, 0, 129, 260};
  s.batch = 4;
  s.causal = true;
  expect_conformance(s);
}

TEST(CudaFirstAloneOf, GroupsOfHeadsWithUsedLengths) {
  ProblemSpec s = many_tiles(300, 128, 16, 8);
  s.used_q = {290, 170};
  s.used_k = {300, 40};
  s.causal = true;
  expect_conformance(s);
}

TEST(CudaFirstAloneOf, OddStrides) {
  ProblemSpec s = many_tiles(300, 104, 8, 8);
  s.window_left = 130;
  s.layout = Layout::kMixed;
  s.sink = s.dsink = s.dlse = true;
  expect_conformance(s);
}

/// Six tiles for each of 132 SMs.
TEST(CudaManyFirstAlone, OfManyHeads) {
  ProblemSpec s = many_tiles(260, 128, 22, 22);
  s.batch = 12;
  s.causal = true;
  s.window_left = 100;
  expect_conformance(s, many_threads());
}

TEST(CudaManyFirstAlone, OfGroupsWithUsedLengths) {
  ProblemSpec s = many_tiles(200, 128, 44, 22);
  s.batch = 18;
  s.used_k = {200, 1, 130, 64, 0, 199, 128, 129, 200, 127, 100, 150, 200, 180, 33, 65, 200, 191};
  s.causal = true;
  expect_conformance(s, many_threads());
}

TEST(CudaManyFirstAlone, OfPackedSequences) {
  ProblemSpec s = many_tiles(520, 64, 22, 22);
  s.lengths_q = s.lengths_k = {520, 300, 384, 0, 128, 512, 1, 400, 450, 512, 500, 490, 416};
  s.batch = static_cast<int64_t>(s.lengths_k.size());
  s.causal = true;
  expect_conformance(s, many_threads());
}

}  // namespace
}  // namespace fovea::conformance
