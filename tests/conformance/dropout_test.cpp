// Which weights dropout keeps: with V the identity the output shows them, and they are compared with the stream.
#include <gtest/gtest.h>

#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

TEST(Dropout, KeepsWhatTheStreamSays) {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.seqlen_q = 50;
  spec.seqlen_k = spec.head_dim_v = 130;
  spec.dropout = 0.375;
  spec.logit = 0.1;
  spec.rng_state = true;
  for (const uint64_t offset : {uint64_t{0}, uint64_t{5}, uint64_t{0xfedcba9876543210}}) {
    spec.offset = offset;
    spec.heads_kv =
        offset == 5 ? 4 : 2;  // the rows of a tile: neighbours of one head, or those of two heads in turn
    spec.seed = 0x0123456789abcdef ^ offset << 1;
    OwnedProblem x(spec);
    for (int64_t b = 0; b < spec.batch; ++b) {
      for (int64_t head = 0; head < spec.heads_kv; ++head) {
        for (int64_t j = 0; j < spec.seqlen_k; ++j) {
          for (int64_t c = 0; c < spec.seqlen_k; ++c) x[Role::kV].set({b, j, head, c}, j == c ? 1 : 0);
        }
      }
    }
    for (const std::string& backend : backends_under_test()) {
      const RunResult result = run_pass(x, FOVEA_FORWARD, {backend});
      if (result.unsupported) continue;
      ASSERT_EQ(result.failure, "") << backend;
      const std::vector<double> o = x[Role::kO].values();
      size_t place = 0;
      for (int64_t b = 0; b < spec.batch; ++b) {
        for (int64_t i = 0; i < spec.seqlen_q; ++i) {
          for (int64_t head = 0; head < spec.heads_q; ++head) {
            for (int64_t j = 0; j < spec.seqlen_k; ++j, ++place) {
              const bool keeps =
                  dropout_keeps(spec.dropout, spec.seed, spec.offset, b * spec.heads_q + head, i, j);
              ASSERT_EQ(o[place] != 0, keeps)
                  << backend << " b" << b << " h" << head << " i" << i << " j" << j;
            }
          }
        }
      }
    }
  }
}

/// rng_state is written even without dropout, and the backward takes seed and offset from it alone.
TEST(Dropout, RngState) {
  ProblemSpec spec;
  spec.seqlen_q = 20;
  spec.seqlen_k = 30;
  spec.rng_state = true;
  spec.seed = ~uint64_t{0} - 5;
  spec.offset = uint64_t{1} << 63;
  expect_conformance_of_all_types(spec);
  spec.dropout = 0.5;
  expect_conformance_of_all_types(spec, many_threads());
}

TEST(Dropout, AlmostEverything) {
  ProblemSpec spec;
  spec.seqlen_q = 20;
  spec.seqlen_k = 70;
  spec.dropout = 0.99;
  expect_conformance_of_all_types(spec);
}

/// Where a weight outgrows those of the blocks before by more than float32 holds, and is dropped: lse has it all the same.
TEST(Dropout, OfWeightsThatOutgrowAllOthers) {
  for (const int64_t head_dim : {64, 128, 256}) {
    ProblemSpec spec;
    spec.heads_q = spec.heads_kv = 2;
    spec.seqlen_q = spec.seqlen_k = 300;
    spec.head_dim = spec.head_dim_v = head_dim;
    spec.window_right = 0;
    spec.keys = Keys::kOneLarge;
    spec.logit = 20;
    spec.dropout = 0.5;
    expect_conformance_of_all_types(spec);
  }
}

}  // namespace
}  // namespace fovea::conformance
