// Blocks that are skipped or need no mask, against every pair of them.
#include "expr/blocks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "expr/evaluate.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

/// Minimum and maximum of the elements of a box, by reading all of them.
class ScannedRanges : public TensorRanges {
 public:
  explicit ScannedRanges(const TensorReader& tensors) : tensors_(tensors) {}

  std::optional<Range> range(size_t tensor, std::span<const IntRange> index) const override {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    Range found{{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()},
                {kInfinity, -kInfinity, false},
                false};
    std::array<int64_t, kMaxRank> at{};
    scan(tensor, index, 0, at, found);
    return found;
  }

 private:
  void scan(size_t tensor, std::span<const IntRange> index, size_t d, std::array<int64_t, kMaxRank>& at,
            Range& found) const {
    if (d == index.size()) {
      const double value = tensors_.read(tensor, {at.data(), d}).value();
      if (std::isnan(value)) {
        found.number.nan = true;
        return;
      }
      found.number.lowest = std::min(found.number.lowest, value);
      found.number.highest = std::max(found.number.highest, value);
      if (std::isinf(value)) return;
      found.integer.lowest = std::min(found.integer.lowest, static_cast<int64_t>(value));
      found.integer.highest = std::max(found.integer.highest, static_cast<int64_t>(value));
      return;
    }
    const int64_t extent = kExtents[tensor][d];
    if (index[d].lowest < 0 || index[d].highest >= extent) found.invalid = true;
    const int64_t last = std::min(index[d].highest, extent - 1);
    for (at[d] = std::max<int64_t>(index[d].lowest, 0); at[d] <= last; ++at[d])
      scan(tensor, index, d + 1, at, found);
  }

  const TensorReader& tensors_;
};

/// What all pairs of a block say.
Seen counted(Evaluator& evaluator, const Block& block) {
  bool any = false, all = true;
  for (int64_t q = block.q0; q < block.q1; ++q) {
    for (int64_t k = block.k0; k < block.k1; ++k) {
      const bool sees = evaluator.sees({0, block.b, block.h, block.hk, q, k, block.nq, block.nk});
      any = any || sees;
      all = all && sees;
    }
  }
  return !any ? Seen::kNone : all ? Seen::kAll : Seen::kSome;
}

struct Documents : TensorReader, TensorRanges {
  std::vector<int64_t> rows;  ///< the document of each row
  std::optional<double> read(size_t, std::span<const int64_t> index) const override {
    const int64_t at = index.back();
    if (at < 0 || at >= static_cast<int64_t>(rows.size())) return std::nullopt;
    return static_cast<double>(rows[static_cast<size_t>(at)]);
  }
  std::optional<Range> range(size_t, std::span<const IntRange> index) const override {
    const auto [low, high] =
        std::minmax_element(rows.begin() + index.back().lowest, rows.begin() + index.back().highest + 1);
    return Range::of_int(*low, *high);
  }
};

TEST(Blocks, AreExactForTheUsualMasks) {
  const std::vector<TensorDeclaration> declared = {{"doc", DType::kI32, 2}, {"prefix", DType::kI32, 1}};
  Documents documents;
  for (int64_t i = 0; i < 96; ++i) documents.rows.push_back(i / 32);
  for (const std::string_view text :
       {"k <= q", "k <= q + nk - nq", "k <= q + nk - nq && q + nk - nq - k <= 23", "abs(q - k) < 16",
        "doc[b, q] == doc[b, k]", "k < prefix[b] || k <= q", "(q / 16 - k / 16) % 4 == 0", "q % 16 == 3",
        "k < nk - 5", "(q / 16 + k / 16) % 2 != 0", "true", "q / 16 == k / 16 || k < 4",
        "where(q < 16, k < 8, k % 16 < 32)", "float(q) - k >= -1.5"}) {
    const Expression sees = std::get<Expression>(parse(text, Use::kSees, declared));
    documents.rows[0] = text.find("prefix") == std::string_view::npos ? 0 : 20;
    Evaluator evaluator(sees, &documents);
    BlockAnalysis analysis(sees, &documents);
    for (int64_t q = 0; q < 96; q += 16) {
      for (int64_t k = 0; k < 96; k += 16) {
        const Block block{q, q + 16, k, k + 16, 0, 0, 0, 80, 96};
        ASSERT_EQ(analysis.seen(block), counted(evaluator, block)) << text << " at " << q << ", " << k;
      }
    }
  }
}

TEST(Blocks, ByHand) {
  const auto seen = [](std::string_view text, const Block& block) {
    const Expression sees = parsed(text, Use::kSees);
    return BlockAnalysis(sees).seen(block);
  };
  const Block block{16, 32, 0, 16, 0, 0, 0, 64, 64};
  EXPECT_EQ(seen("true", {4, 4, 0, 8}), Seen::kNone);    // no pairs
  EXPECT_EQ(seen("flag[k] != 0", block), Seen::kSome);   // nothing is known
  EXPECT_EQ(seen("flag[k] < 256", block), Seen::kSome);  // but perhaps not inside
  EXPECT_EQ(seen("flag[k] > 255", block), Seen::kNone);
  EXPECT_EQ(seen("gain < 1.0 || true", block), Seen::kSome);
  EXPECT_EQ(seen("k < q || gain < 1.0", block), Seen::kAll);  // never reads it
  EXPECT_EQ(seen("q / (k - 20) < 100", block), Seen::kAll);
  EXPECT_EQ(seen("q / (k - 15) < 100", block), Seen::kSome);          // 0 is among the divisors
  EXPECT_EQ(seen("q / (b - 0) < 100", block), Seen::kNone);           // 0 is the divisor
  EXPECT_EQ(seen("log(float(q) - 40) < 100.0", block), Seen::kNone);  // NaN
  EXPECT_EQ(seen("log(float(q) - 20) < 100.0", block), Seen::kSome);
  EXPECT_EQ(seen("sqrt(q) < 6.0 && exp(k) < 1e7", block), Seen::kAll);
  EXPECT_EQ(seen("exp(q * 10.0) < 1e38", block), Seen::kNone);
  EXPECT_EQ(seen("q * 9223372036854775807 > 0", block), Seen::kSome);  // wraps around
  EXPECT_EQ(seen("q * 0.1 < 3.1", block), Seen::kSome);                // float32 may round either way
}

void expect_never_wrong(const std::string& text, uint64_t seed, const TensorReader& tensors,
                        const TensorRanges* ranges, std::array<int, 3>& answers) {
  const Expression sees = parsed(text, Use::kSees, seed % 3 != 0);
  Evaluator evaluator(sees, &tensors);
  BlockAnalysis analysis(sees, ranges);
  RandomText random(seed, Use::kSees);
  for (int i = 0; i < 12; ++i) {
    const int64_t q = random.below(18), k = random.below(18);
    const Block block{
        q, q + 1 + random.below(5), k, k + 1 + random.below(5), random.below(2), random.below(2), 0, 16, 12};
    const Seen claimed = analysis.seen(block);
    ++answers[static_cast<size_t>(claimed)];
    if (claimed != Seen::kSome) {
      ASSERT_EQ(claimed, counted(evaluator, block))
          << text << "\nq " << block.q0 << " to " << block.q1 << ", k " << block.k0 << " to " << block.k1
          << ", b " << block.b << ", h " << block.h;
    }
  }
}

TEST(Blocks, AreNeverWrongForRandomTrees) {
  const MadeUpTensors tensors, special(true);
  const ScannedRanges ranges(tensors), special_ranges(special);
  std::array<int, 3> answers{};
  for (uint64_t seed = 0; seed < 12000; ++seed) {
    const std::string text = RandomText(seed, Use::kSees).of(Type::kBool, 1 + static_cast<int>(seed % 4));
    const bool hostile = seed % 2;
    const TensorRanges* const known = hostile ? &special_ranges : &ranges;
    expect_never_wrong(text, seed, hostile ? special : tensors, seed % 5 ? known : nullptr, answers);
    if (HasFatalFailure()) return;
  }
  // Not by saying nothing.
  for (const Seen seen : {Seen::kNone, Seen::kAll}) EXPECT_GT(answers[static_cast<size_t>(seen)], 10000);
}

/// Ints around the ends of 32 and 64 bits and around 0, and divisors of every sign.
TEST(Ranges, OfIntsAreNeverWrong) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
  const std::array<int64_t, 13> starts = {kMin, kMin + 1, -(int64_t{1} << 32), -17,     -4, -3, -1, 0, 1,
                                          2,    14,       int64_t{1} << 31,    kMax - 3};
  const auto check = [](Op op, int64_t a, int64_t a_size, int64_t b, int64_t b_size) {
    const std::array<Range, 2> operands = {Range::of_int(a, a + a_size), Range::of_int(b, b + b_size)};
    const Range range = apply(op, Type::kInt, operands);
    for (int64_t i = 0; i <= a_size; ++i) {
      for (int64_t j = 0; j <= b_size; ++j) {
        const std::array<Value, 2> values = {Value{a + i}, Value{b + j}};
        const Value value = apply(op, Type::kInt, values);
        ASSERT_TRUE(value.valid || range.invalid);
        if (!value.valid) continue;
        ASSERT_LE(range.integer.lowest, value.integer) << info_of(op).text << " " << a + i << " " << b + j;
        ASSERT_GE(range.integer.highest, value.integer) << info_of(op).text << " " << a + i << " " << b + j;
      }
    }
  };
  for (const Op op :
       {Op::kAdd, Op::kSubtract, Op::kMultiply, Op::kDivide, Op::kRemainder, Op::kMin, Op::kMax, Op::kLess,
        Op::kLessEqual, Op::kGreater, Op::kGreaterEqual, Op::kEqual, Op::kNotEqual}) {
    for (const int64_t a : starts) {
      for (const int64_t b : starts) {
        for (const int64_t size : {0, 1, 3}) check(op, a, size, b, 3 - size);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::expr
