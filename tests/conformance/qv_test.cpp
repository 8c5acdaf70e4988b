// Queries that meet the values (qv): the products of a score are those with k and those with v.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec queries_of_values(int64_t seqlen_q, int64_t seqlen_k, int64_t group = 2) {
  ProblemSpec s;
  s.qv = true;
  s.batch = 2;
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = 32;
  s.head_dim_v = 48;
  return s;
}

/// Latent attention over its latents: 64 elements that are rotated, 512 that are not, one key head.
ProblemSpec latent(int64_t heads, int64_t seqlen_q, int64_t seqlen_k) {
  ProblemSpec s = queries_of_values(seqlen_q, seqlen_k);
  s.heads_kv = 1;
  s.heads_q = heads;
  s.head_dim = 64;
  s.head_dim_v = 512;
  return s;
}

TEST(QueriesOfValues, OfEveryHeadSize) {
  constexpr std::array<std::array<int64_t, 2>, 9> kSizes = {
      {{1, 1}, {1, 64}, {64, 1}, {17, 33}, {40, 64}, {64, 256}, {96, 96}, {128, 128}, {576, 512}}};
  for (const auto& [size, size_v] : kSizes) {
    for (const int64_t queries : {1, 3, 60}) {
      ProblemSpec s = queries_of_values(queries, 140);
      s.head_dim = size;
      s.head_dim_v = size_v;
      s.causal = queries > 1;
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOfValues, OfEveryGroup) {
  for (const int64_t group : {1, 4, 8, 9, 16, 17, 60}) {
    for (const int64_t queries : {1, 2}) {
      ProblemSpec s = queries_of_values(queries, 300, group);
      s.used_k = {300, 130};
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOfValues, OfLatentAttention) {
  for (const int64_t heads : {16, 128}) {
    for (const int64_t queries : {1, 4}) {
      ProblemSpec s = latent(heads, queries, 200);
      s.type = Type::kBF16;
      s.causal = true;
      s.used_k = {200, 77};
      expect_conformance(s);
    }
  }
  ProblemSpec s = latent(16, 70, 90);
  s.batch = 1;
  s.causal = true;
  expect_conformance_of_all_types(s);
}

TEST(QueriesOfValues, OfLatentAttentionInPages) {
  for (const int64_t heads : {16, 128}) {
    for (const int64_t page : {1, 7, 64}) {
      ProblemSpec s = latent(heads, 1, 196 / page * page);
      s.type = heads == 16 ? Type::kBF16 : Type::kF16;
      s.page_size = page;
      s.caches = 2 * (196 / page) + 3;
      s.used_k = {static_cast<int32_t>(s.seqlen_k), static_cast<int32_t>(s.seqlen_k / 3)};
      expect_conformance(s);
      s.leftpad_k = {0, static_cast<int32_t>(s.seqlen_k / 5)};
      s.e4m3_keys = true;
      expect_conformance(s);
    }
  }
}

TEST(QueriesOfValues, LongEnoughForSplits) {
  for (const int64_t queries : {1, 9}) {
    ProblemSpec s = queries_of_values(queries, 4200, 4);
    s.type = Type::kBF16;
    s.used_k = {4200, 77};
    s.causal = true;
    expect_conformance(s, many_threads());
  }
}

TEST(QueriesOfValues, InChosenSequences) {
  for (const int64_t queries : {1, 20}) {
    ProblemSpec s = queries_of_values(queries, 130);
    s.cache_batch = {2, 0};
    s.caches = 3;
    s.leftpad_k = {5, 0};
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOfValues, Packed) {
  ProblemSpec s = queries_of_values(50, 130);
  s.lengths_q = {50, 0, 1};
  s.lengths_k = {130, 7, 0};
  s.spare_rows = 2;
  expect_conformance_of_all_types(s);
  s.lengths_k.clear();
  s.used_k = {130, 0, 44};
  expect_conformance_of_all_types(s);
}

TEST(QueriesOfValues, BehindRowsThatAreAppended) {
  for (const int64_t page : {0, 16}) {
    for (const bool rotates : {false, true}) {
      ProblemSpec s = queries_of_values(3, 160);
      s.used_k = {40, 9};
      s.lengths_new = {3, 3};
      s.page_size = page;
      if (page > 0) s.caches = 2 * 160 / page + 1;
      s.rotary = rotates ? 32 : 0;
      s.causal = true;
      expect_conformance_of_all_types(s);
      s.e4m3_keys = true;
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOfValues, WithFactorsOfEveryShape) {
  for (const int broadcast : {-1, 0, 1, 2, 3}) {
    for (const int64_t queries : {1, 30}) {
      ProblemSpec s = queries_of_values(queries, 90);
      s.e4m3_keys = true;
      s.descale_broadcast = broadcast;
      s.layout = broadcast == 0 ? Layout::kPadded : Layout::kHeadsFirst;
      expect_conformance_of_all_types(s);
      s.softcap = 3;
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOfValues, UnderEveryTerm) {
  for (const bool e4m3 : {false, true}) {
    ProblemSpec s = queries_of_values(20, 150);
    s.e4m3_keys = e4m3;
    s.bias = s.mask = s.block_mask = s.alibi = s.sink = true;
    s.block_q = 8;
    s.block_k = 32;
    s.softcap = 5;
    s.dropout = 0.3;
    s.layout = Layout::kPadded;
    expect_conformance_of_all_types(s);
    s.scale = -0.2;
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOfValues, UnderWindows) {
  for (const int64_t queries : {1, 60}) {
    ProblemSpec s = queries_of_values(queries, 300, 4);
    s.window_left = 40;
    s.window_right = 3;
    s.sink = true;
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOfValues, UnderDropout) {
  ProblemSpec s = queries_of_values(40, 130);
  s.dropout = 0.4;
  s.rng_state = true;
  expect_conformance_of_all_types(s);
}

TEST(QueriesOfValues, UnderListsAndExpressions) {
  for (const bool e4m3 : {false, true}) {
    for (const int64_t group : {1, 3, 20}) {
      ProblemSpec s = queries_of_values(6, 96, group);
      s.e4m3_keys = e4m3;
      s.list_size = 40;
      expect_conformance_of_all_types(s);
      s.list_size = -1;
      s.sees = &known_masks().front();
      s.score = &known_scores().front();
      expect_conformance_of_all_types(s);
      s.seqlen_q = 1;
      expect_conformance_of_all_types(s);
    }
  }
}

/// NaN and infinity in v reach the scores of the rows that see them, and no others.
TEST(QueriesOfValues, ThatAreNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t queries : {1, 40}) {
    ProblemSpec s = queries_of_values(queries, 200, 4);
    s.causal = true;
    s.used_k = {200, 120};
    expect_conformance_of_all_types(s, {}, [&](OwnedProblem& x) {
      x[Role::kV].set({0, 190, 1, 5}, nan);
      x[Role::kV].set({1, 150, 0, 5}, nan);
      x[Role::kQV].set({1, 0, 2, 7}, nan);
    });
  }
}

/// The oracle itself: as rows [q | qv] against rows [k | v].
TEST(QueriesOfValues, AreAPartOfLongerQueries) {
  ProblemSpec s = queries_of_values(7, 60);
  s.type = Type::kF64;
  s.sink = s.alibi = true;
  s.causal = true;
  OwnedProblem x(s);
  ProblemSpec joined_spec = s;
  joined_spec.qv = false;
  joined_spec.head_dim = s.head_dim + s.head_dim_v;
  OwnedProblem joined(joined_spec);
  for (const Role role : {Role::kV, Role::kSink, Role::kAlibi}) joined[role].assign(x[role].values());
  const auto join = [&](Role role, Role behind) {
    const Sizes& shape = joined[role].shape();
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t r = 0; r < shape[1]; ++r)
        for (int64_t h = 0; h < shape[2]; ++h)
          for (int64_t c = 0; c < shape[3]; ++c)
            joined[role].set({b, r, h, c}, c < s.head_dim ? x[role].get({b, r, h, c})
                                                          : x[behind].get({b, r, h, c - s.head_dim}));
  };
  join(Role::kQ, Role::kQV);
  join(Role::kK, Role::kV);
  for (OwnedProblem* problem : {&x, &joined}) {
    const auto description = problem->description(FOVEA_FORWARD);
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = kOracle;
    ASSERT_EQ(fovea_attend(&description->problem, &options, 0, 0), FOVEA_OK) << fovea_last_error();
  }
  for (const Role role : {Role::kO, Role::kLse}) {
    const std::vector<double> got = x[role].values(), expected = joined[role].values();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], role == Role::kO ? 1e-12 : 1e-6);
  }
}

}  // namespace
}  // namespace fovea::conformance
