// Ints in CUDA: their types, and sums regrouped by what they depend on.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "expr/cuda_steps.hpp"

namespace fovea::expr {

/// The sum of terms, each times its factor, and a constant, as ints that wrap around: any order of adding gives the same.
struct Sum {
  std::map<StepId, int64_t> terms;
  int64_t constant = 0;
};

/// The terms of a sum by their places. The base has those of head and query and, unless it would have nothing else, the
/// constant.
struct SumParts {
  Sum base, key, pair;
};

class IntSteps {
 public:
  explicit IntSteps(Steps& steps) : steps_(steps) {}

  /// Any operation over ints but comparisons that regroup. It has 32 bits where its operands and its result have.
  StepId apply(Op op, const std::vector<StepId>& operands);
  /// A comparison with what depends on the key on one side and the rest on the other, where nothing may wrap around.
  StepId compare(Op op, const Sum& a, const Sum& b);

  Sum of_term(StepId term) const;
  static Sum scaled(const Sum& a, int64_t factor);
  static Sum combined(const Sum& a, const Sum& b);
  /// The sum, from the narrowest place to the widest, so that as little as possible is left to the pair.
  StepId total(const Sum& sum);
  SumParts parts(const Sum& sum) const;
  /// Of the sum as an integer that never wraps around, in any order of adding; nothing when it may.
  std::optional<IntRange> range(const Sum& sum) const;
  /// Whether all terms are subtracted, so that the sum is better subtracted as a whole.
  static bool is_negative(const Sum& sum);
  Place place(const Sum& sum) const;

 private:
  StepId quotient(Op op, StepId a, StepId b);
  StepId call(const char* name, const std::vector<StepId>& operands, const Range& range, bool wide);
  StepId narrow(StepId wide);
  StepId flat(const Sum& sum);

  Steps& steps_;
};

}  // namespace fovea::expr
