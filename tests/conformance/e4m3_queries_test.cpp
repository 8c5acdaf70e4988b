// Queries of 8 bits beside keys and values of 8 bits: every form that they come in, for every type of o.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "conformance/of_8_bits.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec queries_of_8_bits(int64_t seqlen_q, int64_t seqlen_k, int64_t group = 2) {
  return of_8_bits(Of8Bits::kAll, seqlen_q, seqlen_k, group);
}

TEST(QueriesOf8Bits, OfEveryHeadSize) {
  expect_of_every_head_size(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, WithFactorsOfEveryShape) {
  expect_with_factors_of_every_shape(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, OfEveryGroup) {
  expect_of_every_group(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, OfManyQueries) {
  expect_of_many_queries(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, LongEnoughForSplits) {
  expect_long_enough_for_splits(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, InPages) {
  expect_in_pages(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, Packed) {
  expect_packed(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, UnderEveryTerm) {
  expect_under_every_term(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, UnderWindows) {
  expect_under_windows(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, UnderListsAndExpressions) {
  expect_under_lists_and_expressions(Of8Bits::kAll);
}

TEST(QueriesOf8Bits, BesideRowsThatAreAppended) {
  expect_beside_rows_that_are_appended(Of8Bits::kAll);
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
