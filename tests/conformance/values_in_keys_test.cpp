// Values that are the first columns of the keys, in the same memory: latent attention, absorbed.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

/// 512 columns that are keys and values, and 64 that are keys alone; one key head.
ProblemSpec latent_rows(int64_t heads, int64_t seqlen_q, int64_t seqlen_k) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.values_in_keys = true;
  s.batch = 2;
  s.heads_kv = 1;
  s.heads_q = heads;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = 576;
  s.head_dim_v = 512;
  return s;
}

TEST(ValuesInKeys, OfOneQuery) {
  for (const int64_t heads : {1, 16, 64, 65, 128}) {
    for (const int64_t keys : {1, 63, 64, 65, 128, 300}) {
      ProblemSpec s = latent_rows(heads, 1, keys);
      s.sink = heads == 16;
      expect_conformance(s, forward_only());
    }
  }
}

TEST(ValuesInKeys, OfEveryHeadSize) {
  constexpr std::array<std::array<int64_t, 2>, 7> kSizes = {
      {{512, 512}, {504, 448}, {328, 264}, {264, 200}, {320, 256}, {576, 500}, {64, 64}}};
  for (const auto& [size, size_v] : kSizes) {
    for (const int64_t heads : {16, 128}) {
      ProblemSpec s = latent_rows(heads, 1, 200);
      s.head_dim = size;
      s.head_dim_v = size_v;
      expect_conformance_of_all_types(s, forward_only());
    }
  }
}

TEST(ValuesInKeys, OfSeveralQueries) {
  for (const int64_t heads : {8, 128}) {
    for (const int64_t queries : {2, 5, 40}) {
      ProblemSpec s = latent_rows(heads, queries, 190);
      s.used_k = {190, 77};
      s.causal = true;
      expect_conformance(s, forward_only());
      s.causal = false;
      s.window_left = 70;
      s.window_right = 3;
      expect_conformance(s, forward_only());
    }
  }
}

TEST(ValuesInKeys, OfSeveralKeyHeads) {
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kSliced, Layout::kPadded}) {
    ProblemSpec s = latent_rows(6, 50, 150);
    s.heads_kv = 3;
    s.layout = layout;
    s.aligned = layout == Layout::kSliced;
    expect_conformance(s, forward_only());
  }
}

TEST(ValuesInKeys, InPages) {
  for (const int64_t heads : {16, 128}) {
    for (const int64_t page : {1, 8, 16, 48, 64, 256}) {
      ProblemSpec s = latent_rows(heads, 1, 512 / page * page);
      s.page_size = page;
      s.caches = 2 * (512 / page) + 3;
      s.used_k = {static_cast<int32_t>(s.seqlen_k), static_cast<int32_t>(s.seqlen_k / 3)};
      expect_conformance(s, forward_only());
    }
  }
}

TEST(ValuesInKeys, InChosenSequencesAndPacked) {
  ProblemSpec s = latent_rows(16, 3, 130);
  s.cache_batch = {2, 0};
  s.caches = 3;
  s.used_k = {130, 0};
  expect_conformance(s, forward_only());
  s.leftpad_k = {5, 0};
  expect_conformance(s, forward_only());
  s = latent_rows(16, 50, 130);
  s.lengths_q = {50, 0, 1};
  s.lengths_k = {130, 7, 0};
  s.spare_rows = 2;
  expect_conformance(s, forward_only());
}

TEST(ValuesInKeys, LongEnoughForSplits) {
  for (const int64_t heads : {16, 128}) {
    ProblemSpec s = latent_rows(heads, 1, 4200);
    s.used_k = {4200, 300};
    CheckOptions options = many_threads();
    options.backward = false;
    expect_conformance(s, options);
    options.num_splits = 5;
    expect_conformance(s, options);
    options.num_splits = 0;
    options.batch_invariant = true;
    expect_conformance(s, options);
  }
}

/// Logits that raise the maximum of most blocks.
TEST(ValuesInKeys, OfLargeLogits) {
  for (const int64_t heads : {16, 128}) {
    ProblemSpec s = latent_rows(heads, 1, 1000);
    s.logit = 20;
    expect_conformance(s, forward_only());
  }
}

}  // namespace
}  // namespace fovea::conformance
