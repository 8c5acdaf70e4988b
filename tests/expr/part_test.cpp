// Expressions over a part of a problem say what those over the whole do.
#include "expr/part.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

PartNames moved(std::initializer_list<Variable> names) {
  PartNames part{{}, {}, "part"};
  for (const Variable name : names) part.is_moved[static_cast<size_t>(name)] = true;
  part.limits.fill(63);
  return part;
}
constexpr std::initializer_list<Variable> kPositions = {Variable::kQ, Variable::kK, Variable::kNq,
                                                        Variable::kNk};

std::vector<Dimensions> dimensions(const PairExpressions& all, const std::vector<int>& ones = {}) {
  std::vector<std::array<bool, kMaxRank>> is_one(kTensors.size());
  for (const int tensor : ones) is_one[static_cast<size_t>(tensor)].fill(true);
  return dimensions_of(all, is_one);
}

std::string text(std::string_view whole, Use use, const PartNames& part, const std::vector<int>& ones = {}) {
  PairExpressions all;
  (use == Use::kScore ? all.score : all.sees) = parsed(whole, use);
  const Expression& expression = use == Use::kScore ? *all.score : *all.sees;
  return print(in_part(expression, dimensions(all, ones), part));
}

TEST(Part, ByHand) {
  const auto score = [](std::string_view whole) { return text(whole, Use::kScore, moved(kPositions)); };
  EXPECT_EQ(score("s"), "s");
  EXPECT_EQ(score("s + bias[b, h, q, k]"), "s + bias[b, h, q, k]");
  EXPECT_EQ(score("s - slope[h] * abs(q + nk - nq - k)"),
            "s - slope[h] * abs(q + clamp(part[3], 0, 63) + clamp(part[6], 0, 63) - clamp(part[5], 0, 63) - "
            "(k + clamp(part[4], 0, 63)))");
  const auto sees = [](std::string_view whole, const PartNames& part, const std::vector<int>& ones = {}) {
    return text(whole, Use::kSees, part, ones);
  };
  EXPECT_EQ(sees("doc[b, q] == doc[b, k]", moved(kPositions)),
            "doc[b, q + clamp(part[3], 0, 63)] == doc[b, k + clamp(part[4], 0, 63)]");
  EXPECT_EQ(sees("doc[b, q] == doc[b, k]", moved({Variable::kB})), "doc[b, q] == doc[b, k]");
  EXPECT_EQ(sees("doc[0, q] == b", moved({Variable::kB})), "doc[0, q] == b + clamp(part[0], 0, 63)");
  constexpr int kDoc = 2;
  EXPECT_EQ(sees("doc[b, q] == doc[b, k + 1]", moved(kPositions), {kDoc}),
            "doc[b, 0] == doc[b, where(k + clamp(part[4], 0, 63) + 1 >= 0, 0, -1)]");
}

TEST(Part, NumbersAreDeclaredWhereTheyAreRead) {
  PairExpressions all;
  all.score = parsed("s * slope[h]", Use::kScore);
  const auto uses = dimensions(all);
  EXPECT_EQ(in_part(*all.score, uses, moved({Variable::kH})).tensors, kTensors);
  all.score = parsed("s * h", Use::kScore);
  const Expression part = in_part(*all.score, uses, moved({Variable::kH}));
  ASSERT_EQ(part.tensors.size(), kTensors.size() + 1);
  EXPECT_EQ(part.tensors.back(), (TensorDeclaration{"part", DType::kI32, 1}));
}

/// The tensors of a part: elements of the whole, moved where a name that counts alone indexes them.
class PartTensors : public TensorReader {
 public:
  PartTensors(const std::vector<Dimensions>& dimensions, const std::array<int64_t, kPartNumbers>& numbers)
      : dimensions_(dimensions), numbers_(numbers) {}

  std::optional<double> read(size_t tensor, std::span<const int64_t> index) const override {
    if (tensor == kTensors.size()) return static_cast<double>(numbers_[static_cast<size_t>(index[0])]);
    std::vector<int64_t> whole(index.begin(), index.end());
    for (size_t d = 0; d < whole.size(); ++d) {
      if (const auto name = dimensions_[tensor][d].name) whole[d] += numbers_[number_of(*name)];
    }
    return whole_.read(tensor, whole);
  }

 private:
  const std::vector<Dimensions>& dimensions_;
  const std::array<int64_t, kPartNumbers>& numbers_;
  MadeUpTensors whole_;
};

TEST(Part, RandomTreesHaveTheValuesOfTheWhole) {
  constexpr std::array<int64_t, kPartNumbers> kNumbers = {1, 1, 1, 5, 3, 16, 14};
  const PartNames names = moved(
      {Variable::kB, Variable::kH, Variable::kHk, Variable::kQ, Variable::kK, Variable::kNq, Variable::kNk});
  const MadeUpTensors whole_tensors;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Use use = seed % 2 ? Use::kSees : Use::kScore;
    RandomText random(seed, use);
    const std::string text = random.of(use == Use::kSees ? Type::kBool : Type::kFloat, 1 + random.below(4));
    PairExpressions all;
    Expression& whole = (use == Use::kSees ? all.sees : all.score).emplace(parsed(text, use));
    const auto uses = dimensions(all);
    const Expression part = in_part(whole, uses, names);
    const PartTensors part_tensors(uses, kNumbers);
    Evaluator of_whole(whole, &whole_tensors), of_part(part, &part_tensors);
    for (int64_t q = 0; q < 4; ++q) {
      for (int64_t k = 0; k < 4; ++k) {
        const Pair inside{0.5, 0, 0, 0, q, k, 4, 4};
        const Pair pair{0.5, 1, 1, 1, q + 5, k + 3, 16, 14};
        if (use == Use::kSees) {
          ASSERT_EQ(of_part.sees(inside), of_whole.sees(pair)) << text << '\n' << print(part);
          continue;
        }
        const double got = of_part.score(inside), expected = of_whole.score(pair);
        ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
            << got << ", not " << expected << '\n'
            << text << '\n'
            << print(part);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::expr
