// Expressions of scores and masks (docs/expressions.md) by C++ operators. Part of fovea.hpp.
//
//   const auto slope = fovea::named("slope", slopes, {heads});
//   fovea::attend(q, k, v, o, {.score = fovea::score([&](auto p) { return p.s - slope(p.h) * abs(p.q - p.k); })});
//
// A function is called once, with symbols; each operator writes its text, and the library reads the whole. `p` has s, b, h, hk, q,
// k, nq and nk. A function of five parameters gets (s, b, h, q, k), one of four, for `sees`, (b, h, q, k).
//
// Types are those of the language: an int operand, a float, a bool. What C++ knows of them is checked when it compiles, the
// rest by the library.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>

#include "fovea/fovea.hpp"

namespace fovea {
inline namespace v0 {
namespace symbols {

/// `number`: an int or a float, as the element type of a tensor will tell.
enum class Kind { real, integer, boolean, number };

constexpr bool is_number(Kind kind) {
  return kind != Kind::boolean;
}
constexpr bool may_be_integer(Kind kind) {
  return kind == Kind::integer || kind == Kind::number;
}
/// The kind of what two numbers make.
constexpr Kind common(Kind a, Kind b) {
  if (a == Kind::real || b == Kind::real) return Kind::real;
  return a == Kind::integer && b == Kind::integer ? Kind::integer : Kind::number;
}

/// How tight operators bind, as in C.
inline constexpr int kOr = 1, kAnd = 2, kEquality = 3, kRelation = 4, kSum = 5, kProduct = 6, kPrefix = 7,
                     kPrimary = 8;

/// A part of an expression: its text, and the tensors that it reads.
template <Kind kKind>
class Symbol {
 public:
  Symbol(std::string text, int precedence, std::vector<NamedTensor> named = {})
      : text_(std::move(text)), precedence_(precedence), named_(std::move(named)) {}

  const std::string& text() const { return text_; }
  const std::vector<NamedTensor>& named() const { return named_; }
  /// The text, in parentheses where an operator binds tighter.
  std::string inside(int precedence) const { return precedence_ < precedence ? "(" + text_ + ")" : text_; }
  /// An expression has no value while it is made: use &&, || and where.
  explicit operator bool() const = delete;

 private:
  std::string text_;
  int precedence_;
  std::vector<NamedTensor> named_;
};

// ---- numbers ----

inline Symbol<Kind::boolean> symbol_of(bool value) {
  return {value ? "true" : "false", kPrimary};
}
template <std::integral T>
requires(!std::is_same_v<T, bool>) Symbol<Kind::integer> symbol_of(T value) {
  const auto wide = static_cast<int64_t>(value);
  if (wide == INT64_MIN) return {"-9223372036854775807 - 1", kSum};
  return {std::to_string(wide), wide < 0 ? kPrefix : kPrimary};
}
/// The shortest digits that read back as the same number, with a point or an exponent.
template <std::floating_point T>
Symbol<Kind::real> symbol_of(T given) {
  const auto value = static_cast<double>(given);
  if (std::isnan(value)) return {"0.0 / 0.0", kProduct};
  if (std::isinf(value)) return {value < 0 ? "-1.0 / 0.0" : "1.0 / 0.0", kProduct};
  std::array<char, 40> digits;
  std::string text(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return {text, std::signbit(value) ? kPrefix : kPrimary};
}
template <Kind kKind>
const Symbol<kKind>& symbol_of(const Symbol<kKind>& symbol) {
  return symbol;
}

template <class T>
struct KindOf;
template <Kind kKind>
struct KindOf<Symbol<kKind>> : std::integral_constant<Kind, kKind> {};
template <class T>
inline constexpr bool is_symbol = false;
template <Kind kKind>
inline constexpr bool is_symbol<Symbol<kKind>> = true;

/// A symbol, or a number or bool of C++.
template <class T>
concept Operand = is_symbol<std::remove_cvref_t<T>> || std::is_arithmetic_v<std::remove_cvref_t<T>>;
template <class T>
inline constexpr Kind kind_of =
    KindOf<std::remove_cvref_t<decltype(symbol_of(std::declval<const T&>()))>>::value;
/// Operands of an operator: one of them at least is a symbol.
template <class... T>
concept Operands = (Operand<T> && ...) && (is_symbol<std::remove_cvref_t<T>> || ...);

// ---- making text ----

inline void join(std::vector<NamedTensor>& all, const std::vector<NamedTensor>& more) {
  for (const NamedTensor& tensor : more) {
    bool known = false;
    for (const NamedTensor& other : all) known = known || other.name == tensor.name;
    if (!known) all.push_back(tensor);
  }
}

template <Kind kResult, class A, class B>
Symbol<kResult> infix(const A& a, const char* op, const B& b, int precedence) {
  const auto& left = symbol_of(a);
  const auto& right = symbol_of(b);
  std::vector<NamedTensor> named = left.named();
  join(named, right.named());
  return {left.inside(precedence) + " " + op + " " + right.inside(precedence + 1), precedence,
          std::move(named)};
}

template <Kind kResult, class A>
Symbol<kResult> prefix(const char* op, const A& a) {
  return {op + a.inside(kPrefix), kPrefix, a.named()};
}

/// name(a, b, ...), or name[a, b, ...] with the brackets of an index.
template <Kind kResult, class... A>
Symbol<kResult> call(const std::string& name, std::vector<NamedTensor> named, const char* brackets,
                     const A&... a) {
  std::string text = name + brackets[0];
  const auto add = [&](const auto& argument) {
    if (text.size() > name.size() + 1) text += ", ";
    text += argument.text();
    join(named, argument.named());
  };
  (add(symbol_of(a)), ...);
  return {text + brackets[1], kPrimary, std::move(named)};
}

// ---- operators ----

#define FOVEA_ARITHMETIC(op, precedence)                                                 \
  template <class A, class B>                                                            \
  requires Operands<A, B>                                                                \
  auto operator op(const A& a, const B& b) {                                             \
    static_assert(is_number(kind_of<A>) && is_number(kind_of<B>), #op " takes numbers"); \
    return infix<common(kind_of<A>, kind_of<B>)>(a, #op, b, precedence);                 \
  }
FOVEA_ARITHMETIC(+, kSum)
FOVEA_ARITHMETIC(-, kSum)
FOVEA_ARITHMETIC(*, kProduct)
FOVEA_ARITHMETIC(/, kProduct)
#undef FOVEA_ARITHMETIC

/// Of ints; the sign is that of b.
template <class A, class B>
requires Operands<A, B>
auto operator%(const A& a, const B& b) {
  static_assert(may_be_integer(kind_of<A>) && may_be_integer(kind_of<B>), "% takes ints");
  return infix<Kind::integer>(a, "%", b, kProduct);
}

#define FOVEA_COMPARISON(op, precedence)                                                    \
  template <class A, class B>                                                               \
  requires Operands<A, B> Symbol<Kind::boolean>                                             \
  operator op(const A& a, const B& b) {                                                     \
    static_assert(is_number(kind_of<A>) && is_number(kind_of<B>), #op " compares numbers"); \
    return infix<Kind::boolean>(a, #op, b, precedence);                                     \
  }
FOVEA_COMPARISON(==, kEquality)
FOVEA_COMPARISON(!=, kEquality)
FOVEA_COMPARISON(<, kRelation)
FOVEA_COMPARISON(<=, kRelation)
FOVEA_COMPARISON(>, kRelation)
FOVEA_COMPARISON(>=, kRelation)
#undef FOVEA_COMPARISON

#define FOVEA_LOGIC(op, precedence)                                                                         \
  template <class A, class B>                                                                               \
  requires Operands<A, B> Symbol<Kind::boolean>                                                             \
  operator op(const A& a, const B& b) {                                                                     \
    static_assert(kind_of<A> == Kind::boolean && kind_of<B> == Kind::boolean, #op " takes bools; compare"); \
    return infix<Kind::boolean>(a, #op, b, precedence);                                                     \
  }
FOVEA_LOGIC(&&, kAnd)
FOVEA_LOGIC(||, kOr)
#undef FOVEA_LOGIC

template <Kind kKind>
Symbol<kKind> operator-(const Symbol<kKind>& a) {
  static_assert(is_number(kKind), "- takes a number");
  return prefix<kKind>("-", a);
}
template <Kind kKind>
Symbol<Kind::boolean> operator!(const Symbol<kKind>& a) {
  static_assert(kKind == Kind::boolean, "! takes a bool; compare");
  return prefix<Kind::boolean>("!", a);
}

// ---- functions, found by their arguments ----

#define FOVEA_FLOAT_FUNCTION(name)                            \
  template <Kind kKind>                                       \
  Symbol<Kind::real> name(const Symbol<kKind>& x) {           \
    static_assert(is_number(kKind), #name " takes a number"); \
    return call<Kind::real>(#name, {}, "()", x);              \
  }
FOVEA_FLOAT_FUNCTION(exp)
FOVEA_FLOAT_FUNCTION(log)
FOVEA_FLOAT_FUNCTION(tanh)
FOVEA_FLOAT_FUNCTION(sqrt)
FOVEA_FLOAT_FUNCTION(floor)
#undef FOVEA_FLOAT_FUNCTION

/// float(x): an int as a float.
template <Kind kKind>
Symbol<Kind::real> to_float(const Symbol<kKind>& x) {
  static_assert(is_number(kKind), "to_float takes a number");
  return call<Kind::real>("float", {}, "()", x);
}
template <Kind kKind>
Symbol<kKind> abs(const Symbol<kKind>& x) {
  static_assert(is_number(kKind), "abs takes a number");
  return call<kKind>("abs", {}, "()", x);
}
template <class A, class B>
requires Operands<A, B>
auto min(const A& a, const B& b) {
  static_assert(is_number(kind_of<A>) && is_number(kind_of<B>), "min takes numbers");
  return call<common(kind_of<A>, kind_of<B>)>("min", {}, "()", a, b);
}
template <class A, class B>
requires Operands<A, B>
auto max(const A& a, const B& b) {
  static_assert(is_number(kind_of<A>) && is_number(kind_of<B>), "max takes numbers");
  return call<common(kind_of<A>, kind_of<B>)>("max", {}, "()", a, b);
}
template <class X, class Low, class High>
requires Operands<X, Low, High>
auto clamp(const X& x, const Low& low, const High& high) {
  static_assert(is_number(kind_of<X>) && is_number(kind_of<Low>) && is_number(kind_of<High>),
                "clamp takes numbers");
  return call<common(kind_of<X>, common(kind_of<Low>, kind_of<High>))>("clamp", {}, "()", x, low, high);
}
/// x where the condition is true, else y.
template <class X, class Y>
requires(Operand<X>&& Operand<Y>) auto where(const Symbol<Kind::boolean>& condition, const X& x, const Y& y) {
  static_assert(is_number(kind_of<X>) == is_number(kind_of<Y>), "where takes two numbers or two bools");
  constexpr Kind kResult = is_number(kind_of<X>) ? common(kind_of<X>, kind_of<Y>) : Kind::boolean;
  return call<kResult>("where", {}, "()", condition, x, y);
}

// ---- names ----

/// What every expression knows of a pair of a query and a key.
struct Pair {
  Symbol<Kind::real> s{"s", kPrimary};  ///< the scaled score; not in `sees`
  Symbol<Kind::integer> b{"b", kPrimary}, h{"h", kPrimary}, hk{"hk", kPrimary}, q{"q", kPrimary},
      k{"k", kPrimary}, nq{"nq", kPrimary}, nk{"nk", kPrimary};
};

/// A tensor with a name: name(i, j) is an element.
template <Kind kKind>
class Named {
 public:
  Named(std::string name, Tensor tensor, Tensor gradient)
      : tensor_{std::move(name), std::move(tensor), std::move(gradient)} {}

  template <class... Index>
  requires(Operand<Index>&&...) Symbol<kKind>
  operator()(const Index&... index) const {
    static_assert((may_be_integer(kind_of<Index>) && ...), "an index is an int");
    if constexpr (sizeof...(Index) == 0) {
      return {tensor_.name, kPrimary, {tensor_}};  // of a tensor without dimensions
    } else {
      return call<kKind>(tensor_.name, {tensor_}, "[]", index...);
    }
  }
  template <Operand Index>
  Symbol<kKind> operator[](const Index& index) const {
    return (*this)(index);
  }

 private:
  NamedTensor tensor_;
};

template <class T>
inline constexpr Kind kind_of_elements = std::is_integral_v<T> ? Kind::integer : Kind::real;

/// The expression that a function of symbols returns.
template <class Function>
auto traced(const Function& function) {
  const Pair p;
  if constexpr (std::is_invocable_v<const Function&, const Pair&>) {
    return function(p);
  } else if constexpr (std::is_invocable_v<const Function&, decltype(p.s), decltype(p.b), decltype(p.h),
                                           decltype(p.q), decltype(p.k)>) {
    return function(p.s, p.b, p.h, p.q, p.k);
  } else {
    static_assert(
        std::is_invocable_v<const Function&, decltype(p.b), decltype(p.h), decltype(p.q), decltype(p.k)>,
        "the function takes a pair, (s, b, h, q, k), or for sees (b, h, q, k)");
    return function(p.b, p.h, p.q, p.k);
  }
}

}  // namespace symbols

/// A tensor for expressions. `gradient`: where the backward writes its gradient, float32 of the same shape.
inline symbols::Named<symbols::Kind::number> named(std::string name, const Tensor& tensor,
                                                   const Tensor& gradient = {}) {
  return {std::move(name), tensor, gradient};
}
/// The same from a pointer, so that C++ knows whether elements are ints.
template <class T>
auto named(std::string name, T* data, std::initializer_list<int64_t> shape, const Tensor& gradient = {}) {
  constexpr symbols::Kind kKind = symbols::kind_of_elements<std::remove_cv_t<T>>;
  return symbols::Named<kKind>(std::move(name), Tensor(data, shape), gradient);
}

/// The text and the tensors of a score, from a function that is called once with symbols.
template <class Function>
Expression score(const Function& function) {
  const auto result = symbols::traced(function);
  const auto& whole = symbols::symbol_of(result);
  static_assert(symbols::is_number(symbols::kind_of<decltype(result)>), "a score is a number; use where");
  return {whole.text(), whole.named()};
}
/// The same of which keys a query sees.
template <class Function>
Expression sees(const Function& function) {
  const auto result = symbols::traced(function);
  const auto& whole = symbols::symbol_of(result);
  static_assert(symbols::kind_of<decltype(result)> == symbols::Kind::boolean, "sees is a bool; compare");
  return {whole.text(), whole.named()};
}

}  // namespace v0
}  // namespace fovea
