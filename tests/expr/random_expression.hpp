// Random expressions, and tensors to read, for the tests of src/expr.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "expr/evaluate.hpp"
#include "expr/graph.hpp"
#include "expr/parse.hpp"

namespace fovea::expr {

/// The tensors that every test may read, and their extents.
inline const std::vector<TensorDeclaration> kTensors = {{"slope", DType::kF32, 1},
                                                        {"bias", DType::kBF16, 4},
                                                        {"doc", DType::kI32, 2},
                                                        {"flag", DType::kU8, 1},
                                                        {"gain", DType::kF16, 0}};
inline const std::vector<std::vector<int64_t>> kExtents = {{2}, {2, 2, 16, 16}, {2, 16}, {16}, {}};

/// Values that depend on the index alone; some floats are NaN, infinite or -0.0 when `special`.
class MadeUpTensors : public TensorReader {
 public:
  explicit MadeUpTensors(bool special = false) : special_(special) {}

  std::optional<double> read(size_t tensor, std::span<const int64_t> index) const override {
    uint64_t place = tensor;
    for (size_t i = 0; i < index.size(); ++i) {
      if (index[i] < 0 || index[i] >= kExtents[tensor][i]) return std::nullopt;
      place = place * 31 + static_cast<uint64_t>(index[i]) + 1;
    }
    if (kTensors[tensor].name == "doc") return static_cast<double>(index[1] / 5);
    const uint64_t mixed = (place * 0x9e3779b97f4a7c15u) >> 40;
    if (kTensors[tensor].name == "flag") return static_cast<double>(mixed % 2);
    if (special_ && mixed % 8 == 0) return std::array{std::nan(""), HUGE_VAL, -HUGE_VAL, -0.0}[mixed / 8 % 4];
    return static_cast<double>(mixed % 64) / 32 - 1;
  }

 private:
  bool special_;
};

/// Texts of random trees of a type, with all operations of the language. `smooth` floats have no
/// steps, whose differences are no derivatives, and no ints so large that differences cancel.
class RandomText {
 public:
  RandomText(uint64_t seed, Use use, bool smooth = false) : random_(seed), use_(use), smooth_(smooth) {}

  std::string of(Type type, int depth) {
    if (type == Type::kBool) return boolean(depth);
    return type == Type::kInt ? integer(depth) : number(depth);
  }
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }

 private:
  template <size_t n>
  std::string one_of(const std::array<std::string_view, n>& choices) {
    return std::string(choices[static_cast<size_t>(below(static_cast<int>(n)))]);
  }
  /// "(a op b)": the parser drops parentheses, the printer adds those that are needed.
  std::string infix(const std::string& a, std::string_view op, const std::string& b) {
    return std::string("(").append(a).append(" ").append(op).append(" ").append(b).append(")");
  }

  std::string boolean(int depth) {
    static constexpr std::array<std::string_view, 6> kComparisons = {"<", "<=", ">", ">=", "==", "!="};
    const Type type = !smooth_ && below(3) == 0 ? Type::kFloat : Type::kInt;
    if (depth == 0) return below(8) == 0 ? "true" : "flag[k] != 0";
    switch (below(7)) {
      case 0:
        return infix(boolean(depth - 1), "&&", boolean(depth - 1));
      case 1:
        return infix(boolean(depth - 1), "||", boolean(depth - 1));
      case 2:
        return "!" + infix(boolean(depth - 1), "&&", boolean(depth - 1));
      default:
        return infix(of(type, depth - 1), one_of(kComparisons), of(type, depth - 1));
    }
  }

  std::string integer(int depth) {
    if (depth == 0) {
      static constexpr std::array<std::string_view, 14> kLeaves = {
          "q", "k", "q", "k", "nq", "nk", "b", "h", "hk", "doc[b, q]", "doc[b, k]", "0", "1", "2147483647"};
      const std::string leaf = below(4) == 0 ? std::to_string(below(20)) : one_of(kLeaves);
      return smooth_ && leaf == "2147483647" ? "3" : leaf;
    }
    static constexpr std::array<std::string_view, 5> kInfix = {"+", "-", "*", "/", "%"};
    switch (below(9)) {
      case 0:
        return "-" + integer(depth - 1);
      case 1:
        return "abs(" + integer(depth - 1) + ")";
      case 2:
        return "min(" + integer(depth - 1) + ", " + integer(depth - 1) + ")";
      case 3:
        return "clamp(" + integer(depth - 1) + ", -3, " + integer(depth - 1) + ")";
      case 4:
        return "where(" + boolean(depth - 1) + ", " + integer(depth - 1) + ", " + integer(depth - 1) + ")";
      default:
        return infix(integer(depth - 1), one_of(kInfix), integer(depth - 1));
    }
  }

  std::string number(int depth) {
    if (depth == 0) {
      static constexpr std::array<std::string_view, 8> kLeaves = {
          "slope[h]", "gain", "bias[b, h, q, k]", "0.5", "1.0", "3.0", "0.0", "1e-3"};
      return use_ == Use::kScore && below(2) == 0 ? "s" : one_of(kLeaves);
    }
    static constexpr std::array<std::string_view, 4> kInfix = {"+", "-", "*", "/"};
    static constexpr std::array<std::string_view, 5> kSmooth = {"abs", "exp", "log", "tanh", "sqrt"};
    static constexpr std::array<std::string_view, 6> kFunctions = {"abs",  "exp",  "log",
                                                                   "tanh", "sqrt", "floor"};
    const std::string a = below(5) == 0 ? "float(" + integer(depth - 1) + ")" : number(depth - 1);
    const std::string b = below(5) == 0 ? integer(0) : number(depth - 1);
    switch (below(9)) {
      case 0:
        return "-" + a;
      case 1:
        return (smooth_ ? one_of(kSmooth) : one_of(kFunctions)) + "(" + b + ")";
      case 2:
        return "max(" + a + ", " + b + ")";
      case 3:
        return "clamp(" + a + ", -1, " + b + ")";
      case 4:
        return "where(" + boolean(depth - 1) + ", " + a + ", " + b + ")";
      default:
        return infix(a, one_of(kInfix), b);
    }
  }

  std::mt19937_64 random_;
  Use use_;
  bool smooth_;
};

/// The expression of a text that has no error.
inline Expression parsed(std::string_view text, Use use, bool simplify = true) {
  auto result = parse(text, use, kTensors, {simplify});
  if (const auto* error = std::get_if<ParseError>(&result)) throw std::runtime_error(error->text());
  return std::get<Expression>(std::move(result));
}

}  // namespace fovea::expr
