// The problems of `fovea check`: those of the random stream as they are drawn, with chosen expressions, or with the user's own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/data/expressions.hpp"
#include "cli/options/cli11.hpp"
#include "verify/problem_spec.hpp"

namespace fovea::cli {

/// What the command line says of the problems' expressions.
struct CheckedExpressions {
  std::string which = "drawn";  ///< drawn, none, or the name of a known expression
  ExpressionOptions own;
  /// Of problems with expressions of the user's own, whose tensors have sizes.
  int64_t batch = 2, seqlen = 96, seqlen_k = 0, heads = 4, heads_kv = 0, head_dim = 64;

  void add_options(CLI::App& command);
  /// The options that repeat it, each after a blank.
  std::string text() const;
};

/// Problems by seed and index. Neither copied nor moved, as problems point into it.
class CheckProblems {
 public:
  /// Failures and the library's errors name what is wrong with the expressions.
  explicit CheckProblems(const CheckedExpressions& options);
  CheckProblems(const CheckProblems&) = delete;
  CheckProblems& operator=(const CheckProblems&) = delete;

  verify::ProblemSpec draw(uint64_t seed, uint64_t index) const;

 private:
  void refuse_wrong_expressions() const;

  const CheckedExpressions& options_;
  Expressions own_;
  std::vector<std::vector<double>> values_;
  verify::KnownExpression score_, sees_;
  const verify::KnownExpression *chosen_score_ = nullptr, *chosen_sees_ = nullptr;
};

}  // namespace fovea::cli
