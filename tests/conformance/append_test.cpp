// Caches that grow: new rows of k and v, rotated or not, and the attention over all of them.
#include <gtest/gtest.h>

#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

/// Three sequences, each with room for `rows` more.
ProblemSpec growing(int64_t seqlen_q, int32_t rows, int64_t page_size) {
  ProblemSpec s;
  s.batch = 3;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = 160;
  s.page_size = page_size;
  if (page_size > 0) s.caches = 3 * (s.seqlen_k / page_size) + 2;
  s.heads_kv = 2;
  s.heads_q = 4;
  s.head_dim = 40;
  s.head_dim_v = 24;
  s.used_k = {160 - rows, 0, 77 - rows};
  s.lengths_new = {rows, rows, rows};
  return s;
}

TEST(Append, ToEveryCache) {
  for (const int64_t page : {0, 1, 16, 80}) {
    for (const int32_t rows : {1, 5, 70}) {
      ProblemSpec s = growing(rows, rows, page);
      s.causal = true;
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(Append, WithRotation) {
  for (const bool interleaved : {false, true}) {
    for (const int64_t rotary : {2, 16, 40}) {
      ProblemSpec s = growing(5, 5, rotary == 16 ? 16 : 0);
      s.rotary = rotary;
      s.rotary_interleaved = interleaved;
      s.causal = true;
      expect_conformance_of_all_types(s);
      s.angles_are_f32 = true;
      s.rotary_positions = {3, 0, 90};
      expect_conformance_of_all_types(s);
    }
  }
}

/// All queries of a sequence take one position where neither causal nor a window tells them apart.
TEST(Append, QueriesRotateByRowUnderAWindowOnly) {
  ProblemSpec s = growing(6, 3, 0);
  s.rotary = 32;
  expect_conformance(s);
  s.window_left = 30;
  expect_conformance(s);
  s.window_left = 160;  // as many keys as the cache has: no window
  expect_conformance(s);
  s.window_left = -1;
  s.window_right = 40;
  expect_conformance(s);
}

TEST(Append, OneRowForDecoding) {
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t page : {0, 16}) {
      ProblemSpec s = growing(1, 1, page);
      s.type = Type::kBF16;
      s.heads_q = 8;
      s.head_dim = s.head_dim_v = head_dim;
      s.rotary = 64;
      s.causal = true;
      expect_conformance(s);
    }
  }
}

TEST(Append, PackedRowsOfAnyLength) {
  ProblemSpec s = growing(9, 0, 16);
  s.packed_new = true;
  s.lengths_new = {0, 9, 30};
  s.rotary = 24;
  s.causal = true;
  expect_conformance_of_all_types(s);
  s.lengths_q = {9, 0, 4};
  s.spare_rows = 3;
  expect_conformance_of_all_types(s);
  s.lengths_new = {0, 0, 0};
  expect_conformance(s);
}

TEST(Append, ToChosenSequencesBehindPadding) {
  ProblemSpec s = growing(4, 4, 0);
  s.caches = 5;
  s.cache_batch = {4, 0, 2};
  s.leftpad_k = {11, 0, 50};
  s.rotary = 40;
  s.layout = Layout::kPadded;
  expect_conformance_of_all_types(s);
  s.leftpad_k = {156, 2, 75};  // reaches into the new rows
  expect_conformance(s);
}

TEST(Append, UnderTermsAndExpressions) {
  ProblemSpec s = growing(6, 6, 16);
  s.rotary = 20;
  s.bias = s.alibi = s.sink = true;
  s.softcap = 8;
  s.dropout = 0.2;
  expect_conformance_of_all_types(s);
  s = growing(6, 6, 16);
  s.sees = &known_masks().front();
  expect_conformance(s);
  s.sees = nullptr;
  s.list_size = 20;
  expect_conformance(s);
}

}  // namespace
}  // namespace fovea::conformance
