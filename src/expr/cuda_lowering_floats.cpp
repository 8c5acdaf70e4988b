// Ints that end as floats: distances, mostly. Float32 has every int up to 2^24, and the device converts ints at a
// quarter of the rate at which it adds floats.
#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "expr/cuda_lowering.hpp"

namespace fovea::expr {
namespace {

bool is_exact(const IntRange& range) {
  return range.lowest >= -kExactInFloat32 && range.highest <= kExactInFloat32;
}

/// Never NaN, and never -0.0: nothing here negates.
Range as_number(const IntRange& range) {
  return Range::of_float(static_cast<double>(range.lowest), static_cast<double>(range.highest), false);
}

}  // namespace

StepId CudaLowering::to_float(NodeId id) {
  if (sums_[id].terms.empty()) return steps_.number(static_cast<double>(sums_[id].constant));
  const StepId exact = ints_.place(sums_[id]) == Place::kPair ? exact_float(id) : kNoStep;
  return exact != kNoStep ? exact : ints_.apply(Op::kToFloat, {step(id)});
}

/// Rounding keeps signs and order, so that abs, min and max of what is rounded are the rounded ones, even where no float
/// is exact.
StepId CudaLowering::exact_float(NodeId id) {
  const Sum& sum = sums_[id];
  const Node& node = graph_[id];
  const bool atom = sum.constant == 0 && sum.terms.size() == 1 && sum.terms.begin()->second == 1;
  if (!atom) return exact_sum(sum);
  switch (node.op) {
    case Op::kAbs:  // of the smallest int is that int
      return steps_[step(node.operand[0])].range.integer.lowest == std::numeric_limits<int64_t>::min()
                 ? kNoStep
                 : exact_call(node);
    case Op::kMin:
    case Op::kMax:
    case Op::kClamp:
      return exact_call(node);
    default:
      return kNoStep;
  }
}

/// The part of head and query less that of the key, and then the terms of the pair.
StepId CudaLowering::exact_sum(const Sum& sum) {
  int64_t magnitude = 0;
  for (const auto& [term, factor] : sum.terms) {
    const auto of = ints_.range({{{term, factor}}, 0});
    if (!of || !is_exact(*of) || !is_exact({factor, factor})) return kNoStep;
    magnitude += std::max(-of->lowest, of->highest);
  }
  if (magnitude > kExactInFloat32 || !is_exact({sum.constant, sum.constant}) ||
      magnitude + std::abs(sum.constant) > kExactInFloat32)
    return kNoStep;

  const SumParts parts = ints_.parts(sum);
  StepId result = biased_difference(parts);
  std::vector<std::pair<StepId, double>> terms;
  const auto add_part = [&](const Sum& part) {
    if (part.terms.empty() || result != kNoStep) return;
    const bool negative = IntSteps::is_negative(part);
    const StepId whole = ints_.total(negative ? IntSteps::scaled(part, -1) : part);
    terms.emplace_back(ints_.apply(Op::kToFloat, {whole}), negative ? -1.0 : 1.0);
  };
  add_part(parts.base);
  add_part(parts.key);
  for (const auto& [term, factor] : parts.pair.terms) {
    const auto origin = origins_.find(term);
    StepId exact = origin == origins_.end() ? kNoStep : exact_float(origin->second);
    if (exact == kNoStep) exact = ints_.apply(Op::kToFloat, {term});
    terms.emplace_back(exact, static_cast<double>(factor));
  }
  if (parts.pair.constant != 0)
    terms.emplace_back(steps_.number(static_cast<double>(parts.pair.constant)), 1.0);
  return exact_total(result, std::move(terms));
}

/// Where the key is subtracted from head and query, or these from it, both may be off by the same amount, and an int
/// that is added to the bits of 2^23 + 2^22 is added to that number: no conversion at all.
StepId CudaLowering::biased_difference(const SumParts& parts) {
  constexpr int64_t kMost = (int64_t{1} << 22) - 1;
  const bool negative = IntSteps::is_negative(parts.base);
  if (parts.base.terms.empty() || parts.key.terms.empty() || negative == IntSteps::is_negative(parts.key))
    return kNoStep;
  const auto biased = [&](const Sum& part, bool negated) {
    const StepId whole = ints_.total(negated ? IntSteps::scaled(part, -1) : part);
    const IntRange range = steps_[whole].range.integer;
    if (range.lowest < -kMost || range.highest > kMost) return kNoStep;
    return steps_.add(Kind::kFloat, "__int_as_float(%0 + 0x4b400000)", {whole},
                      as_number({0, kExactInFloat32}));
  };
  const StepId base = biased(parts.base, negative), key = biased(parts.key, !negative);
  if (base == kNoStep || key == kNoStep) return kNoStep;
  return steps_.add(Kind::kFloat, "%0 - %1", {negative ? key : base, negative ? base : key},
                    as_number({-kExactInFloat32, kExactInFloat32}));
}

/// What is added stands before what is subtracted.
StepId CudaLowering::exact_total(StepId result, std::vector<std::pair<StepId, double>> terms) {
  std::stable_partition(terms.begin(), terms.end(), [](const auto& term) { return term.second > 0; });
  const Range bound = as_number({-kExactInFloat32, kExactInFloat32});
  for (const auto& [term, factor] : terms) {
    const double times = std::abs(factor);
    const StepId x =
        times == 1.0 ? term : steps_.add(Kind::kFloat, "%0 * %1", {term, steps_.number(times)}, bound);
    if (result == kNoStep && factor > 0) {
      result = x;
    } else {
      if (result == kNoStep) result = steps_.number(0.0);
      result = steps_.add(Kind::kFloat, factor > 0 ? "%0 + %1" : "%0 - %1", {result, x}, bound);
    }
  }
  return result;
}

StepId CudaLowering::exact_call(const Node& node) {
  std::vector<StepId> x;
  for (const NodeId operand : node.operands()) x.push_back(to_float(operand));
  const auto call = [&](Op op, const std::vector<StepId>& operands) {
    std::vector<Range> ranges;
    for (const StepId id : operands) ranges.push_back(steps_[id].range);
    const Range range = apply(op, Type::kFloat, ranges);
    const char* text = op == Op::kAbs ? "fabsf($0)" : op == Op::kMin ? "fminf($0, $1)" : "fmaxf($0, $1)";
    return steps_.add(Kind::kFloat, text, operands, range);
  };
  if (node.op == Op::kClamp) return call(Op::kMin, {call(Op::kMax, {x[0], x[1]}), x[2]});
  return call(node.op, x);
}

}  // namespace fovea::expr
