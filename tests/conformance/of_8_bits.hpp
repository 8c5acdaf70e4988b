// What e4m3_test.cpp and e4m3_queries_test.cpp ask of problems of 8 bits alike.
#pragma once

#include "conformance/expectations.hpp"

namespace fovea::conformance {

/// What has 8 bits: keys and values, or queries, too.
enum class Of8Bits : uint8_t { kKeys, kAll };

inline ProblemSpec of_8_bits(Of8Bits which, int64_t seqlen_q, int64_t seqlen_k, int64_t group = 2) {
  ProblemSpec s;
  s.e4m3_keys = true;
  s.e4m3_queries = which == Of8Bits::kAll;
  s.batch = 2;
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = 64;
  s.head_dim_v = 48;
  return s;
}

inline void expect_of_every_head_size(Of8Bits which) {
  for (const int64_t size : {1, 16, 40, 64, 96, 128, 192, 256, 576}) {
    ProblemSpec s = of_8_bits(which, 3, 150);
    s.head_dim = s.head_dim_v = size;
    expect_conformance_of_all_types(s);
    s.seqlen_q = 70;
    s.causal = true;
    expect_conformance_of_all_types(s);
  }
}

inline void expect_with_factors_of_every_shape(Of8Bits which) {
  for (const int broadcast : {-1, 0, 1, 2, 3}) {
    for (const int64_t queries : {1, 30}) {
      ProblemSpec s = of_8_bits(which, queries, 90);
      s.descale_broadcast = broadcast;
      s.layout = broadcast == 0 ? Layout::kPadded : Layout::kHeadsFirst;
      expect_conformance_of_all_types(s);
    }
  }
}

inline void expect_of_every_group(Of8Bits which) {
  for (const int64_t group : {1, 4, 8, 16, 33}) {
    ProblemSpec s = of_8_bits(which, 1, 700, group);
    s.head_dim = s.head_dim_v = 128;
    s.used_k = {700, 130};
    expect_conformance_of_all_types(s);
  }
}

inline void expect_long_enough_for_splits(Of8Bits which) {
  for (const int64_t queries : {1, 4}) {
    ProblemSpec s = of_8_bits(which, queries, 4200, 4);
    s.type = Type::kBF16;
    s.head_dim = s.head_dim_v = 128;
    s.used_k = {4200, 77};
    s.causal = true;
    expect_conformance(s, many_threads());
  }
}

/// More than kernels that decode take: several tiles of queries, and keys enough for parts.
inline void expect_of_many_queries(Of8Bits which) {
  for (const int64_t size : {64, 128, 256}) {
    ProblemSpec s = of_8_bits(which, 150, 700, 4);
    s.head_dim = s.head_dim_v = size;
    s.causal = true;
    expect_conformance_of_all_types(s);
    s.used_k = {700, 90};
    s.page_size = 20;
    s.caches = 80;
    s.window_left = 200;
    expect_conformance_of_all_types(s);
  }
}

inline void expect_in_pages(Of8Bits which) {
  for (const int64_t page : {1, 7, 16, 64, 256}) {
    for (const int64_t queries : {1, 5, 70}) {
      ProblemSpec s = of_8_bits(which, queries, 260 / page * page, 4);
      s.page_size = page;
      s.caches = 2 * (260 / page) + 3;
      s.used_k = {static_cast<int32_t>(s.seqlen_k), static_cast<int32_t>(s.seqlen_k / 3)};
      s.leftpad_k = {0, static_cast<int32_t>(s.seqlen_k / 5)};
      expect_conformance_of_all_types(s);
    }
  }
}

inline void expect_packed(Of8Bits which) {
  ProblemSpec s = of_8_bits(which, 50, 130);
  s.lengths_q = {50, 0, 1};
  s.lengths_k = {130, 7, 0};
  s.spare_rows = 2;
  expect_conformance_of_all_types(s);
  s.lengths_k.clear();
  s.used_k = {130, 0, 44};
  expect_conformance_of_all_types(s);
}

inline void expect_under_every_term(Of8Bits which) {
  ProblemSpec s = of_8_bits(which, 20, 150);
  s.bias = s.mask = s.block_mask = s.alibi = s.sink = true;
  s.block_q = 8;
  s.block_k = 32;
  s.softcap = 5;
  s.dropout = 0.3;
  s.layout = Layout::kPadded;
  for (const bool bias_is_f32 : {false, true}) {
    s.bias_is_f32 = bias_is_f32;
    expect_conformance_of_all_types(s);
  }
}

inline void expect_under_windows(Of8Bits which) {
  for (const int64_t queries : {1, 60}) {
    ProblemSpec s = of_8_bits(which, queries, 300, 4);
    s.window_left = 40;
    s.window_right = 3;
    s.sink = true;
    expect_conformance_of_all_types(s);
  }
}

inline void expect_under_lists_and_expressions(Of8Bits which) {
  for (const int64_t queries : {1, 6}) {
    ProblemSpec s = of_8_bits(which, queries, 96);
    s.list_size = 40;
    expect_conformance(s);
    s.list_size = -1;
    s.sees = &known_masks().front();
    s.score = &known_scores().front();
    expect_conformance(s);
  }
}

inline void expect_beside_rows_that_are_appended(Of8Bits which) {
  for (const int64_t page : {0, 16}) {
    for (const bool rotates : {false, true}) {
      ProblemSpec s = of_8_bits(which, 3, 160);
      s.used_k = {40, 9};
      s.lengths_new = {3, 3};
      s.page_size = page;
      if (page > 0) s.caches = 2 * 160 / page + 1;
      s.rotary = rotates ? 32 : 0;
      s.angles_are_f32 = page > 0;
      expect_conformance_of_all_types(s);
    }
  }
}

}  // namespace fovea::conformance
