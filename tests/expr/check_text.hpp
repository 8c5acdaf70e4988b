// What holds for every text, whatever is in it. The fuzz target and the test of random texts share it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "expr/blocks.hpp"
#include "expr/differentiate.hpp"
#include "expr/evaluate.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {

inline bool same_value(const Value& a, const Value& b) {
  if (a.valid != b.valid) return false;
  if (!a.valid || (std::isnan(a.number) && std::isnan(b.number))) return true;
  return a.integer == b.integer && a.number == b.number && std::signbit(a.number) == std::signbit(b.number);
}

/// Reads what was printed again. A text that is too long or too deep for the parser says nothing.
inline bool reads_as(const std::string& printed, const Expression& tree, bool simplify) {
  if (printed.size() > kMaxTextLength) return true;
  const auto again = parse(printed, tree.use, kTensors, {simplify});
  if (const auto* error = std::get_if<ParseError>(&again)) {
    return error->message.find("levels of parentheses") != std::string::npos ||
           error->message.find("operations, expected") != std::string::npos;
  }
  return std::get<Expression>(again) == tree;
}

/// The promise that a text breaks, or nullptr. `parses` says whether it is an expression.
inline const char* broken_promise(std::string_view text, Use use, bool& parses) {
  const auto plain = parse(text, use, kTensors, {false}), simple = parse(text, use, kTensors);
  parses = std::holds_alternative<Expression>(simple);
  if (parses != std::holds_alternative<Expression>(plain)) {
    // Folding may keep a long text below the limit of operations.
    return parses ? nullptr : "simplification makes an error";
  }
  if (const auto* error = std::get_if<ParseError>(&simple)) {
    if (error->position > text.size() || error->message.empty())
      return "an error has a position and a message";
    return nullptr;
  }
  const Expression &a = std::get<Expression>(plain), &b = std::get<Expression>(simple);
  if (!reads_as(print(a), a, false) || !reads_as(print(b), b, true)) return "a printed tree is read again";

  static const MadeUpTensors tensors(true);
  Evaluator of_a(a, &tensors), of_b(b, &tensors);
  BlockAnalysis analysis(b);
  for (int64_t i = 0; i < 4; ++i) {
    const Block block{i * 3, i * 3 + 2, 5 - i, 7 - i, i % 2, 0, 0, 16, 12};
    const Seen seen = use == Use::kSees ? analysis.seen(block) : Seen::kSome;
    for (int64_t j = 0; j < 4; ++j) {
      const Pair pair{
          static_cast<double>(j) - 1.5, block.b, 0, 0, block.q0 + j / 2, block.k0 + j % 2, 16, 12};
      if (!same_value(of_a.value(pair), of_b.value(pair))) return "simplification keeps values";
      if (seen != Seen::kSome && of_b.sees(pair) != (seen == Seen::kAll)) return "blocks are never wrong";
    }
  }
  if (use == Use::kScore) {
    ScoreDerivative d = differentiate_by_s(b);
    d.score.root = d.by_s;
    const Expression derivative = compact(d.score);
    if (!reads_as(print(derivative), derivative, true)) return "a printed derivative is read again";
  }
  return nullptr;
}

}  // namespace fovea::expr
