// Keys and values of 8 bits: every form that they come in, with factors and without.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "conformance/of_8_bits.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec keys_of_8_bits(int64_t seqlen_q, int64_t seqlen_k, int64_t group = 2) {
  return of_8_bits(Of8Bits::kKeys, seqlen_q, seqlen_k, group);
}

TEST(KeysOf8Bits, OfEveryHeadSize) {
  expect_of_every_head_size(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, WithFactorsOfEveryShape) {
  expect_with_factors_of_every_shape(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, OfEveryGroup) {
  expect_of_every_group(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, LongEnoughForSplits) {
  expect_long_enough_for_splits(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, OfManyQueries) {
  expect_of_many_queries(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, InPages) {
  expect_in_pages(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, Packed) {
  expect_packed(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, UnderEveryTerm) {
  expect_under_every_term(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, UnderWindows) {
  expect_under_windows(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, UnderListsAndExpressions) {
  expect_under_lists_and_expressions(Of8Bits::kKeys);
}

TEST(KeysOf8Bits, ThatAreAppended) {
  expect_beside_rows_that_are_appended(Of8Bits::kKeys);
}

/// NaN in a key that is seen reaches the rows that see it; in one that is not, none. There is no infinity.
TEST(KeysOf8Bits, ThatAreNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CheckOptions options;
  options.threads = {1, 4, 16};
  for (const int64_t queries : {1, 40, 90}) {
    ProblemSpec s = keys_of_8_bits(queries, 200, 4);
    s.causal = true;
    s.used_k = {200, 120};
    expect_conformance_of_all_types(s, options, [&](OwnedProblem& x) {
      x[Role::kV].set({0, 190, 1, 5}, nan);
      x[Role::kV].set({1, 119, 0, 7}, nan);
      x[Role::kK].set({0, 199, 0, 3}, nan);
    });
  }
}

/// The largest values, the smallest, and every other.
TEST(KeysOf8Bits, OfEveryValue) {
  ProblemSpec s = keys_of_8_bits(5, 256);
  s.heads_q = s.heads_kv = 1;
  s.batch = 1;
  s.logit = 0.01;
  expect_conformance_of_all_types(s, {}, [&](OwnedProblem& x) {
    for (int64_t j = 0; j < 256; ++j) {
      for (int64_t c = 0; c < 48; ++c) {
        const auto code = static_cast<uint8_t>((j + 5 * c) % 0x7f | (c % 2 != 0 ? 0x80 : 0));
        std::memcpy(x[Role::kV].address({0, j, 0, c}), &code, 1);
      }
    }
  });
}

/// The oracle itself: as keys and values of float64 that were multiplied before.
TEST(KeysOf8Bits, AreWhatTheirFactorsMakeOfThem) {
  ProblemSpec s = keys_of_8_bits(7, 60);
  s.type = Type::kF64;
  OwnedProblem x(s);
  ProblemSpec dense_spec = s;
  dense_spec.e4m3_keys = false;
  OwnedProblem dense(dense_spec);
  dense[Role::kQ].assign(x[Role::kQ].values());
  for (const auto& [role, factors] : {std::pair{Role::kK, Role::kKDescale}, {Role::kV, Role::kVDescale}}) {
    const int64_t size = role == Role::kK ? s.head_dim : s.head_dim_v;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t j = 0; j < s.seqlen_k; ++j)
        for (int64_t h = 0; h < s.heads_kv; ++h)
          for (int64_t c = 0; c < size; ++c)
            dense[role].set({b, j, h, c}, x[role].get({b, j, h, c}) * x.descale(factors, b, h));
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
