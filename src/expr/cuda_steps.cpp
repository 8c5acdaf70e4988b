// Steps of an expression: how literals and operands are written, and which steps are one and the same.
#include "expr/cuda_steps.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

namespace fovea::expr {
namespace {

std::string_view type_of(Kind kind) {
  switch (kind) {
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kLong:
      return "long long";
    default:
      return "float";
  }
}

/// The shortest digits that give the same float32.
std::string literal(double value) {
  const auto x = static_cast<float>(value);
  if (std::isinf(x)) return x > 0 ? "__int_as_float(0x7f800000)" : "-__int_as_float(0x7f800000)";
  std::array<char, 40> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text + "f";
}

std::string literal(int64_t value) {
  if (value == std::numeric_limits<int64_t>::min()) return "(-9223372036854775807ll - 1)";
  if (value == std::numeric_limits<int32_t>::min()) return "(-2147483647 - 1)";
  return std::to_string(value) + (fits_int({value, value}) ? "" : "ll");
}

Range range_of(Op op, std::initializer_list<Range> operands) {
  Range range = apply(op, Type::kInt, {operands.begin(), operands.size()});
  return range;
}

}  // namespace

StepId Steps::add(Step step) {
  for (const StepId operand : step.operands) step.place = step.place | steps_[operand].place;
  const auto [place, is_new] =
      places_.try_emplace({step.text, step.type, step.operands}, static_cast<StepId>(steps_.size()));
  if (is_new) steps_.push_back(std::move(step));
  return place->second;
}

StepId Steps::add(Kind kind, std::string text, std::vector<StepId> operands, const Range& range,
                  Place place) {
  if (kind == Kind::kBool && !operands.empty() && range.may_be_true() != range.may_be_false())
    return boolean(range.may_be_true());
  const bool is_int = kind == Kind::kInt || kind == Kind::kLong;
  if (is_int && !operands.empty() && range.integer.lowest == range.integer.highest)
    return integer(range.integer.lowest);
  Step step{std::move(text), std::string(type_of(kind)), kind, std::move(operands), place, range, false};
  size_t variables = 0;
  for (const StepId operand : step.operands) variables += !steps_[operand].constant();
  const bool converts =
      step.text.starts_with("static_cast<float>") || step.text.starts_with("static_cast<int>");
  const bool calls = step.text.find('(') != std::string::npos && !step.text.starts_with("static_cast");
  const bool divides = step.text.find(" / ") != std::string::npos;
  step.cheap = variables == 1 && !converts && !calls && !divides && step.text.find('@') == std::string::npos;
  return add(std::move(step));
}

StepId Steps::pointer(std::string type, std::string text, std::vector<StepId> operands, Place place) {
  return add(Step{std::move(text), std::move(type), Kind::kPointer, std::move(operands), place, {}, false});
}

StepId Steps::boolean(bool value) {
  return add(Kind::kBool, value ? "true" : "false", {}, Range::of_bool(!value, value));
}

StepId Steps::integer(int64_t value) {
  const Range range = Range::of_int(value, value);
  return add(kind_of(range.integer), literal(value), {}, range);
}

StepId Steps::number(double value) {
  const Range exact = Range::of_float(value, value, false);
  return add(Kind::kFloat, literal(value), {}, apply(Op::kFloat, Type::kFloat, {&exact, 1}));
}

bool Steps::is(StepId id, bool value) const {
  return steps_[id].constant() && steps_[id].text == (value ? "true" : "false");
}

StepId Steps::both(StepId a, StepId b) {
  if (is(a, true) || a == b || is(b, false)) return b;
  if (is(b, true) || is(a, false)) return a;
  return add(Kind::kBool, "%0 && %1", {a, b}, range_of(Op::kAnd, {steps_[a].range, steps_[b].range}));
}

StepId Steps::either(StepId a, StepId b) {
  if (is(a, false) || a == b || is(b, true)) return b;
  if (is(b, false) || is(a, true)) return a;
  return add(Kind::kBool, "%0 || %1", {a, b}, range_of(Op::kOr, {steps_[a].range, steps_[b].range}));
}

StepId Steps::opposite(StepId a) {
  if (is(a, true) || is(a, false)) return boolean(is(a, false));
  return add(Kind::kBool, "!%0", {a}, range_of(Op::kNot, {steps_[a].range}));
}

StepId Steps::choice(StepId condition, StepId a, StepId b) {
  if (is(condition, true) || a == b) return a;
  if (is(condition, false)) return b;
  if (is(a, true)) return either(condition, b);
  if (is(b, false)) return both(condition, a);
  if (is(b, true)) return either(opposite(condition), a);
  if (is(a, false)) return both(opposite(condition), b);
  const Step &x = steps_[a], &y = steps_[b];
  const Kind kind = x.kind == Kind::kLong ? Kind::kLong : y.kind;
  return add(kind, "%0 ? %1 : %2", {condition, a, b},
             range_of(Op::kWhere, {steps_[condition].range, x.range, y.range}));
}

}  // namespace fovea::expr
