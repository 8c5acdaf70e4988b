// Queries of 8 bits beside keys and values of 8 bits: every form that they come in, for every type of o.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec queries_of_8_bits(int64_t seqlen_q, int64_t seqlen_k, int64_t group = 2) {
  ProblemSpec s;
  s.e4m3_keys = s.e4m3_queries = true;
  s.batch = 2;
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.head_dim = 64;
  s.head_dim_v = 48;
  return s;
}

TEST(QueriesOf8Bits, OfEveryHeadSize) {
  for (const int64_t size : {1, 16, 40, 64, 96, 128, 192, 256, 576}) {
    ProblemSpec s = queries_of_8_bits(3, 150);
    s.head_dim = s.head_dim_v = size;
    expect_conformance_of_all_types(s);
    s.seqlen_q = 70;
    s.causal = true;
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOf8Bits, WithFactorsOfEveryShape) {
  for (const int broadcast : {-1, 0, 1, 2, 3}) {
    for (const int64_t queries : {1, 30}) {
      ProblemSpec s = queries_of_8_bits(queries, 90);
      s.descale_broadcast = broadcast;
      s.layout = broadcast == 0 ? Layout::kPadded : Layout::kHeadsFirst;
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOf8Bits, OfEveryGroup) {
  for (const int64_t group : {1, 4, 8, 16, 33}) {
    ProblemSpec s = queries_of_8_bits(1, 700, group);
    s.head_dim = s.head_dim_v = 128;
    s.used_k = {700, 130};
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOf8Bits, LongEnoughForSplits) {
  for (const int64_t queries : {1, 4}) {
    ProblemSpec s = queries_of_8_bits(queries, 4200, 4);
    s.type = Type::kBF16;
    s.head_dim = s.head_dim_v = 128;
    s.used_k = {4200, 77};
    s.causal = true;
    expect_conformance(s, many_threads());
  }
}

TEST(QueriesOf8Bits, InPages) {
  for (const int64_t page : {1, 7, 64}) {
    for (const int64_t queries : {1, 5, 70}) {
      ProblemSpec s = queries_of_8_bits(queries, 260 / page * page, 4);
      s.page_size = page;
      s.caches = 2 * (260 / page) + 3;
      s.used_k = {static_cast<int32_t>(s.seqlen_k), static_cast<int32_t>(s.seqlen_k / 3)};
      s.leftpad_k = {0, static_cast<int32_t>(s.seqlen_k / 5)};
      expect_conformance_of_all_types(s);
    }
  }
}

TEST(QueriesOf8Bits, Packed) {
  ProblemSpec s = queries_of_8_bits(50, 130);
  s.lengths_q = {50, 0, 1};
  s.lengths_k = {130, 7, 0};
  s.spare_rows = 2;
  expect_conformance_of_all_types(s);
  s.lengths_k.clear();
  s.used_k = {130, 0, 44};
  expect_conformance_of_all_types(s);
}

TEST(QueriesOf8Bits, UnderEveryTerm) {
  ProblemSpec s = queries_of_8_bits(20, 150);
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

TEST(QueriesOf8Bits, UnderWindows) {
  for (const int64_t queries : {1, 60}) {
    ProblemSpec s = queries_of_8_bits(queries, 300, 4);
    s.window_left = 40;
    s.window_right = 3;
    s.sink = true;
    expect_conformance_of_all_types(s);
  }
}

TEST(QueriesOf8Bits, UnderListsAndExpressions) {
  for (const int64_t queries : {1, 6}) {
    ProblemSpec s = queries_of_8_bits(queries, 96);
    s.list_size = 40;
    expect_conformance(s);
    s.list_size = -1;
    s.sees = &known_masks().front();
    s.score = &known_scores().front();
    expect_conformance(s);
  }
}

TEST(QueriesOf8Bits, BesideRowsThatAreAppended) {
  for (const int64_t page : {0, 16}) {
    for (const bool rotates : {false, true}) {
      ProblemSpec s = queries_of_8_bits(3, 160);
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

TEST(QueriesOf8Bits, BesideQueriesOfValues) {
  for (const int broadcast : {-1, 0}) {
    for (const int64_t queries : {1, 30}) {
      ProblemSpec s = queries_of_8_bits(queries, 150);
      s.qv = true;
      s.descale_broadcast = broadcast;
      expect_conformance_of_all_types(s);
    }
  }
}

/// Weights far below the largest, which tensor cores of 8 bits lose: in keys that grow, and beside one that is large.
TEST(QueriesOf8Bits, OfUnequalWeights) {
  for (const Keys keys : {Keys::kTies, Keys::kGrowing, Keys::kOneLarge}) {
    for (const double logit : {1.0, 20.0}) {
      ProblemSpec s = queries_of_8_bits(40, 200);
      s.keys = keys;
      s.logit = logit;
      expect_conformance_of_all_types(s);
    }
  }
}

/// So many keys that tensor cores put their sums away, twice; and that the maxima of rows grow between.
TEST(QueriesOf8Bits, OfManyKeys) {
  for (const Keys keys : {Keys::kNormal, Keys::kGrowing}) {
    for (const int64_t size : {64, 128}) {
      ProblemSpec s = queries_of_8_bits(66, 3300);
      s.type = Type::kBF16;
      s.keys = keys;
      s.batch = 1;
      s.heads_q = s.heads_kv = 1;
      s.head_dim = s.head_dim_v = size;
      expect_conformance(s, many_threads());
    }
  }
}

/// NaN in a query reaches its row alone, in a key the rows that see it.
TEST(QueriesOf8Bits, ThatAreNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t queries : {1, 40}) {
    ProblemSpec s = queries_of_8_bits(queries, 200, 4);
    s.causal = true;
    s.used_k = {200, 120};
    expect_conformance_of_all_types(s, {}, [&](OwnedProblem& x) {
      x[Role::kQ].set({0, queries / 2, 3, 9}, nan);
      x[Role::kV].set({0, 190, 1, 5}, nan);
      x[Role::kK].set({0, 199, 0, 3}, nan);
    });
  }
}

/// The largest values, the smallest, and every other.
TEST(QueriesOf8Bits, OfEveryValue) {
  ProblemSpec s = queries_of_8_bits(256, 30);
  s.heads_q = s.heads_kv = 1;
  s.batch = 1;
  s.scale = 0.001;
  expect_conformance_of_all_types(s, {}, [&](OwnedProblem& x) {
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      for (int64_t c = 0; c < s.head_dim; ++c) {
        const auto code = static_cast<uint8_t>((i + 5 * c) % 0x7f | (c % 2 != 0 ? 0x80 : 0));
        std::memcpy(x[Role::kQ].address({0, i, 0, c}), &code, 1);
      }
    }
  });
}

/// The oracle itself: as q, k and v of float64 that were multiplied before.
TEST(QueriesOf8Bits, AreWhatTheirFactorsMakeOfThem) {
  ProblemSpec s = queries_of_8_bits(7, 60);
  s.type = Type::kF64;
  OwnedProblem x(s);
  ProblemSpec dense_spec = s;
  dense_spec.e4m3_keys = dense_spec.e4m3_queries = false;
  OwnedProblem dense(dense_spec);
  const std::vector<std::tuple<Role, Role, int64_t>> all = {{Role::kQ, Role::kQDescale, s.heads_q},
                                                            {Role::kK, Role::kKDescale, s.heads_kv},
                                                            {Role::kV, Role::kVDescale, s.heads_kv}};
  for (const auto& [role, factors, heads] : all) {
    const Sizes& shape = x[role].shape();
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t row = 0; row < shape[1]; ++row)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t c = 0; c < shape[3]; ++c)
            dense[role].set({b, row, h, c},
                            x[role].get({b, row, h, c}) * x.descale(factors, b, h * s.heads_kv / heads));
  }
  for (OwnedProblem* problem : {&x, &dense}) {
    const auto description = problem->description(FOVEA_FORWARD);
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = kOracle;
    ASSERT_EQ(fovea_attend(&description->problem, &options, 0, 0), FOVEA_OK) << fovea_last_error();
  }
  const std::vector<double> o = x[Role::kO].values(), expected = dense[Role::kO].values();
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(o[i], expected[i], 1e-12);
}

}  // namespace
}  // namespace fovea::conformance
