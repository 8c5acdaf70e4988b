// Key-value caches: keys in pages, in chosen sequences, behind rows that do not exist, and packed queries over them.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

/// Three sequences over pages, of which more exist than are read.
ProblemSpec paged(int64_t seqlen_q, int64_t page_size, int64_t columns, int64_t group = 2) {
  ProblemSpec s;
  s.batch = 3;
  s.seqlen_q = seqlen_q;
  s.page_size = page_size;
  s.seqlen_k = page_size * columns;
  s.caches = 2 * columns + 3;
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.head_dim = 40;
  s.head_dim_v = 24;
  const auto most = static_cast<int32_t>(s.seqlen_k);
  s.used_k = {most, most / 3, most - 1};
  return s;
}

TEST(Caches, PagesOfEverySize) {
  for (const int64_t page : {1, 2, 7, 16, 48, 64, 128, 200, 256}) {
    for (const int64_t queries : {1, 5, 70}) {
      ProblemSpec s = paged(queries, page, 260 / page + 1);
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(Caches, LongEnoughForSplits) {
  for (const int64_t page : {1, 16, 100}) {
    ProblemSpec s = paged(1, page, 4200 / page);
    s.type = Type::kBF16;
    expect_conformance(s, many_threads());
  }
}

/// More queries than a tile takes: chunked prefill.
TEST(Caches, OfManyQueries) {
  for (const int64_t page : {7, 64, 128}) {
    ProblemSpec s = paged(450, page, 520 / page);
    s.type = Type::kBF16;
    s.batch = 1;
    s.used_k = {static_cast<int32_t>(s.seqlen_k - 3)};
    s.causal = true;
    expect_conformance(s);
  }
}

TEST(Caches, WithoutAnyKey) {
  ProblemSpec s = paged(4, 16, 3);
  s.used_k = {0, 0, 0};
  expect_conformance(s);
  s.caches = 0;
  expect_conformance(s);
  s.seqlen_k = 0;
  expect_conformance(s);
}

TEST(Caches, OfChosenSequences) {
  for (const int64_t queries : {1, 60}) {
    ProblemSpec s = paged(queries, 0, 0);
    s.seqlen_k = 150;
    s.used_k = {150, 0, 33};
    s.caches = 4;
    s.cache_batch = {3, 0, 3};
    expect_conformance_of_all_types(s);
    s.used_k.clear();
    s.leftpad_k = {0, 150, 31};
    expect_conformance_of_all_types(s);
  }
}

TEST(Caches, BehindPadding) {
  for (const bool pages : {false, true}) {
    for (const int64_t queries : {1, 60}) {
      ProblemSpec s = paged(queries, 16, 10);
      if (!pages) s.page_size = s.caches = 0;
      s.leftpad_k = {0, 53, 130};
      s.causal = true;
      expect_conformance_of_all_types(s);
      s.window_left = 20;
      expect_conformance(s);
    }
  }
  ProblemSpec packed = paged(9, 0, 0);
  packed.lengths_q = {9, 0, 3};
  packed.lengths_k = {40, 70, 7};
  packed.seqlen_k = 70;
  packed.used_k = {30, 70, 7};
  packed.leftpad_k = {30, 12, 0};
  expect_conformance(packed);
}

TEST(Caches, OfPackedQueries) {
  for (const bool pages : {false, true}) {
    ProblemSpec s = paged(50, 7, 20);
    if (!pages) s.page_size = s.caches = 0;
    s.lengths_q = {50, 0, 1};
    s.spare_rows = 2;
    s.causal = true;
    expect_conformance_of_all_types(s);
    s.plan_knows_data = false;
    expect_conformance(s);
  }
}

TEST(Caches, UnderEveryTerm) {
  ProblemSpec s = paged(20, 16, 9);
  s.leftpad_k = {5, 0, 40};
  s.bias = s.mask = s.block_mask = s.alibi = s.sink = true;
  s.block_q = 8;
  s.block_k = 32;
  s.softcap = 5;
  s.dropout = 0.3;
  s.layout = Layout::kPadded;
  expect_conformance_of_all_types(s);
}

TEST(Caches, UnderListsAndExpressions) {
  for (const int64_t page : {1, 16}) {
    ProblemSpec s = paged(6, page, 96 / page);
    s.leftpad_k = {5, 0, 40};
    s.list_size = 40;
    expect_conformance(s);
    s.list_size = -1;
    s.sees = &known_masks().front();
    expect_conformance(s);
  }
}

TEST(Caches, OfNumbersThatAreNotFinite) {
  CheckOptions options;
  options.threads = {1, 4, 16};
  for (const int64_t queries : {1, 30, 120}) {
    ProblemSpec s = paged(queries, 16, 9);
    s.causal = true;
    s.window_left = 40;
    // NaN before the window and in pages that nobody reads.
    expect_conformance_of_all_types(s, options, [](OwnedProblem& x) {
      for (const int64_t key : {0, 1, 17, 60}) {
        const int64_t place = x.key_row(0, key) * x.spec.heads_kv * x.spec.head_dim_v;
        std::vector<double> values = x[Role::kV].values();
        values[static_cast<size_t>(place)] = std::numeric_limits<double>::quiet_NaN();
        x[Role::kV].assign(values);
      }
    });
  }
}

}  // namespace
}  // namespace fovea::conformance
