// Ints of an expression in CUDA: their types, and sums regrouped by what they depend on.
#include "expr/cuda_ints.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

namespace fovea::expr {
namespace {

constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();

int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t wrapping_multiply(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

/// Ranges give every int to what may wrap around.
bool may_wrap(const IntRange& range) {
  return range.lowest == kSmallest && range.highest == std::numeric_limits<int64_t>::max();
}

/// The operation in C, and the helper that wraps around.
struct Spelling {
  const char *plain, *wrapping;
};
Spelling spelling_of(Op op) {
  switch (op) {
    case Op::kNegate:
      return {"-%0", "wrapping_subtract(0, $0)"};
    case Op::kAdd:
      return {"%0 + %1", "wrapping_add($0, $1)"};
    case Op::kSubtract:
      return {"%0 - %1", "wrapping_subtract($0, $1)"};
    default:
      return {"%0 * %1", "wrapping_multiply($0, $1)"};
  }
}

Op mirrored(Op op) {
  switch (op) {
    case Op::kLess:
      return Op::kGreater;
    case Op::kLessEqual:
      return Op::kGreaterEqual;
    case Op::kGreater:
      return Op::kLess;
    case Op::kGreaterEqual:
      return Op::kLessEqual;
    default:
      return op;
  }
}

}  // namespace

StepId IntSteps::narrow(StepId wide) {
  const Range range = steps_[wide].range;
  return steps_[wide].kind == Kind::kLong && fits_int(range.integer)
             ? steps_.add(Kind::kInt, "static_cast<int>($0)", {wide}, range)
             : wide;
}

StepId IntSteps::call(const char* name, const std::vector<StepId>& operands, const Range& range, bool wide) {
  std::string text = std::string(name) + (wide ? "<long long>(" : "<int>(");
  for (size_t i = 0; i < operands.size(); ++i) text.append(i > 0 ? ", $" : "$").append(std::to_string(i));
  return narrow(steps_.add(wide ? Kind::kLong : Kind::kInt, text + ")", operands, range));
}

StepId IntSteps::quotient(Op op, StepId a, StepId b) {
  const IntRange by = steps_[b].range.integer;
  if (by.lowest <= 0 && by.highest >= 0) {  // pairs that divide by 0 are not valid; they divide by 1
    const Range others = Range::of_int(by.lowest == 0 ? 1 : by.lowest, std::max<int64_t>(by.highest, 1));
    b = call("non_zero", {b}, others, steps_[b].kind == Kind::kLong);
  }
  const std::array operands = {steps_[a].range, steps_[b].range};
  Range range = expr::apply(op, Type::kInt, operands);
  range.invalid = false;
  const IntRange x = operands[0].integer, y = operands[1].integer;
  const bool wide =
      steps_[a].kind == Kind::kLong || steps_[b].kind == Kind::kLong || !fits_int(range.integer);
  const Kind kind = wide ? Kind::kLong : Kind::kInt;
  const bool divides = op == Op::kDivide;
  if (y.lowest == y.highest && y.lowest > 0 && std::has_single_bit(static_cast<uint64_t>(y.lowest))) {
    // Shifts round down, and masks have the sign of the divisor.
    const int64_t operand = divides ? std::countr_zero(static_cast<uint64_t>(y.lowest)) : y.lowest - 1;
    return narrow(steps_.add(kind, divides ? "%0 >> %1" : "%0 & %1", {a, steps_.integer(operand)}, range));
  }
  if (x.lowest >= 0 && y.lowest > 0) {
    const std::string type = wide ? "unsigned long long" : "unsigned", cast = "static_cast<" + type + ">(";
    const std::string text = cast + "$0) " + (divides ? "/ " : "% ") + cast + "$1)";
    return narrow(steps_.add(kind, (wide ? "static_cast<long long>(" : "static_cast<int>(") + text + ")",
                             {a, b}, range));
  }
  return call(divides ? "floor_quotient" : "floor_remainder", {a, b}, range, wide);
}

StepId IntSteps::apply(Op op, const std::vector<StepId>& x) {
  if (op == Op::kDivide || op == Op::kRemainder) return quotient(op, x[0], x[1]);
  std::vector<Range> ranges;
  bool wide = false;
  for (const StepId id : x) {
    ranges.push_back(steps_[id].range);
    wide = wide || steps_[id].kind == Kind::kLong;
  }
  const Range range = expr::apply(op, Type::kInt, ranges);
  if (is_comparison(op))
    return steps_.add(Kind::kBool, "%0 " + std::string(info_of(op).text) + " %1", x, range);
  if (op == Op::kToFloat) return steps_.add(Kind::kFloat, "static_cast<float>($0)", x, range);
  const bool operands_wide = wide;
  wide = wide || !fits_int(range.integer);
  switch (op) {
    case Op::kAbs:
      return ranges[0].integer.lowest >= 0 ? x[0]
             : ranges[0].integer.lowest == kSmallest
                 ? steps_.add(Kind::kLong, "wrapping_absolute($0)", x, range)
                 : call("absolute", x, range, wide);
    case Op::kMin:
      return call("smaller", x, range, wide);
    case Op::kMax:
      return call("larger", x, range, wide);
    case Op::kClamp:
      return apply(Op::kMin, {apply(Op::kMax, {x[0], x[1]}), x[2]});
    default:
      break;
  }
  if (wide && may_wrap(range.integer)) return steps_.add(Kind::kLong, spelling_of(op).wrapping, x, range);
  std::string text = spelling_of(op).plain;
  // One long operand makes the operation long.
  if (wide && !operands_wide) text.replace(text.find("%0"), 2, "static_cast<long long>($0)");
  return narrow(steps_.add(wide ? Kind::kLong : Kind::kInt, text, x, range));
}

Sum IntSteps::of_term(StepId term) const {
  const Step& step = steps_[term];
  // Only literals are constant.
  if (step.constant() && step.range.integer.lowest == step.range.integer.highest)
    return {{}, step.range.integer.lowest};
  return {{{term, 1}}, 0};
}

Sum IntSteps::scaled(const Sum& a, int64_t factor) {
  Sum result{{}, wrapping_multiply(a.constant, factor)};
  for (const auto& [term, times] : a.terms) {
    const int64_t product = wrapping_multiply(times, factor);
    if (product != 0) result.terms[term] = product;
  }
  return result;
}

Sum IntSteps::combined(const Sum& a, const Sum& b) {
  Sum result = a;
  result.constant = wrapping_add(a.constant, b.constant);
  for (const auto& [term, times] : b.terms) {
    int64_t& factor = result.terms[term];
    factor = wrapping_add(factor, times);
    if (factor == 0) result.terms.erase(term);
  }
  return result;
}

bool IntSteps::is_negative(const Sum& sum) {
  return !sum.terms.empty() && std::all_of(sum.terms.begin(), sum.terms.end(), [](const auto& term) {
    return term.second < 0 && term.second != kSmallest;
  });
}

Place IntSteps::place(const Sum& sum) const {
  Place place = Place::kConstant;
  for (const auto& [term, factor] : sum.terms) place = place | steps_[term].place;
  return place;
}

std::optional<IntRange> IntSteps::range(const Sum& sum) const {
  __extension__ using Wide = __int128;
  // Of all partial sums: each has some of the terms.
  Wide lowest = std::min<int64_t>(sum.constant, 0), highest = std::max<int64_t>(sum.constant, 0);
  Wide low = sum.constant, high = sum.constant;
  for (const auto& [term, factor] : sum.terms) {
    const IntRange& of = steps_[term].range.integer;
    const Wide x = Wide{of.lowest} * factor, y = Wide{of.highest} * factor;
    low += std::min(x, y);
    high += std::max(x, y);
    lowest += std::min<Wide>(std::min(x, y), 0);
    highest += std::max<Wide>(std::max(x, y), 0);
  }
  if (lowest < kSmallest || highest > std::numeric_limits<int64_t>::max()) return std::nullopt;
  return IntRange{static_cast<int64_t>(low), static_cast<int64_t>(high)};
}

/// In the order of ids; terms that are subtracted stand behind those that are added, the constant last.
StepId IntSteps::flat(const Sum& sum) {
  StepId result = kNoStep;
  int64_t constant = sum.constant;
  const auto term = [&](StepId id, int64_t factor) {
    return factor == 1 ? id : apply(Op::kMultiply, {id, steps_.integer(factor)});
  };
  const auto subtracted = [](int64_t factor) { return factor < 0 && factor != kSmallest; };
  for (const auto& [id, factor] : sum.terms) {
    if (subtracted(factor)) continue;
    result = result == kNoStep ? term(id, factor) : apply(Op::kAdd, {result, term(id, factor)});
  }
  for (const auto& [id, factor] : sum.terms) {
    if (!subtracted(factor)) continue;
    const StepId x = term(id, -factor);
    if (result != kNoStep) {
      result = apply(Op::kSubtract, {result, x});
    } else if (constant != 0) {
      result = apply(Op::kSubtract, {steps_.integer(constant), x});
      constant = 0;
    } else {
      result = apply(Op::kNegate, {x});
    }
  }
  if (result == kNoStep || constant == 0) return result == kNoStep ? steps_.integer(constant) : result;
  return constant > 0 || constant == kSmallest ? apply(Op::kAdd, {result, steps_.integer(constant)})
                                               : apply(Op::kSubtract, {result, steps_.integer(-constant)});
}

SumParts IntSteps::parts(const Sum& sum) const {
  SumParts parts;
  for (const auto& [term, factor] : sum.terms) {
    const Place place = steps_[term].place;
    Sum& part = place == Place::kPair ? parts.pair : place == Place::kKey ? parts.key : parts.base;
    part.terms[term] = factor;
  }
  // With no query to add it to, what the head gives is the key's.
  if (place(parts.base) == Place::kHead && !parts.key.terms.empty()) parts.key.terms.merge(parts.base.terms);
  const bool alone = parts.base.terms.empty() && (!parts.key.terms.empty() || !parts.pair.terms.empty());
  (!alone ? parts.base : parts.key.terms.empty() ? parts.pair : parts.key).constant = sum.constant;
  return parts;
}

StepId IntSteps::total(const Sum& sum) {
  // What depends on the head alone comes first: the query adds to it.
  Sum head, rest{{}, sum.constant};
  for (const auto& [term, factor] : sum.terms)
    (steps_[term].place == Place::kHead ? head : rest).terms[term] = factor;
  if (rest.terms.empty()) return flat(sum);
  if (!head.terms.empty()) rest = combined(rest, of_term(flat(head)));
  if (place(rest) != Place::kPair) return flat(rest);
  const SumParts split = parts(rest);
  Sum last = split.pair;
  const auto join = [&](const Sum& part) {
    if (part.terms.empty()) return;
    const bool negative = is_negative(part);
    last = combined(last, scaled(of_term(flat(negative ? scaled(part, -1) : part)), negative ? -1 : 1));
  };
  join(split.base);
  join(split.key);
  return flat(last);
}

StepId IntSteps::compare(Op op, const Sum& a, const Sum& b) {
  const Sum difference = combined(a, scaled(b, -1));
  const bool across = place(a) == Place::kPair || place(b) == Place::kPair;
  if (across || difference.terms.empty()) {
    const SumParts split = parts(difference);
    Sum left = combined(split.key, split.pair), right = split.base;
    // The constant belongs to what is not the key's.
    right.constant = wrapping_add(right.constant, left.constant);
    left.constant = 0;
    const bool swapped = !left.terms.empty() && left.terms.begin()->second < 0;
    (swapped ? left : right) = scaled(swapped ? left : right, -1);
    if (range(a) && range(b) && range(difference) && range(left) && range(right))
      return apply(swapped ? mirrored(op) : op, {total(left), total(right)});
  }
  return apply(op, {total(a), total(b)});
}

}  // namespace fovea::expr
