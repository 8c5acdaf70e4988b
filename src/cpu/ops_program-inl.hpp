// Runs programs (program.hpp): one function for each operation and kind of elements, over a strip at a time.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_PROGRAM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_PROGRAM_INL_HPP
#undef FOVEA_CPU_OPS_PROGRAM_INL_HPP
#else
#define FOVEA_CPU_OPS_PROGRAM_INL_HPP
#endif

#include <array>

#include "cpu/ops_program_elements-inl.hpp"
#include "cpu/ops_program_functions-inl.hpp"
#include "cpu/ops_program_wide-inl.hpp"
#include "cpu/program.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

using Executor = void (*)(const Instruction&, const Strip&);
using Executors = std::array<std::array<Executor, kKindCount>, kCodeCount>;

constexpr Executors make_executors() {
  Executors table{};
  const auto set = [&](Code code, Executor of_float, Executor of_int, Executor of_wide, Executor of_mask) {
    table[static_cast<size_t>(code)] = {of_float, of_int, of_wide, of_mask};
  };
  set(Code::kConstant, constant<int32_t>, constant<int32_t>, constant<int64_t>, constant<int32_t>);
  set(Code::kVariable, nullptr, variable, nullptr, nullptr);
  set(Code::kLoad, load, load, nullptr, nullptr);
  set(Code::kSpread, spread<int32_t>, spread<int32_t>, spread<int64_t>, spread<int32_t>);
  set(Code::kMove, unary<float, Same>, nullptr, nullptr, nullptr);
  set(Code::kAdd, binary<float, Sum>, binary<int32_t, Sum>, wide_binary<WideSum>, nullptr);
  set(Code::kSubtract, binary<float, Difference>, binary<int32_t, Difference>, wide_binary<WideDifference>,
      nullptr);
  set(Code::kMultiply, binary<float, Product>, binary<int32_t, Product>, wide_binary<WideProduct>, nullptr);
  set(Code::kDivide, binary<float, Quotient>, int_binary<IntQuotient>, wide_binary<WideQuotient>, nullptr);
  set(Code::kRemainder, nullptr, int_binary<IntRemainder>, wide_binary<WideRemainder>, nullptr);
  set(Code::kMin, binary<float, Smaller>, binary<int32_t, Smaller>, wide_binary<WideSmaller>, nullptr);
  set(Code::kMax, binary<float, Larger>, binary<int32_t, Larger>, wide_binary<WideLarger>, nullptr);
  set(Code::kNegate, unary<float, Negated>, unary<int32_t, Negated>, wide_unary<WideNegated>, nullptr);
  set(Code::kAbs, unary<float, Absolute>, unary<int32_t, Absolute>, wide_unary<WideAbsolute>, nullptr);
  set(Code::kAbsDifference, binary<float, AbsDifference>, binary<int32_t, AbsDifference>, nullptr, nullptr);
  set(Code::kShiftRight, nullptr, shift_right, nullptr, nullptr);
  set(Code::kLowBits, nullptr, low_bits, nullptr, nullptr);
  set(Code::kMultiplyAdd, ternary<ProductPlus>, nullptr, nullptr, nullptr);
  set(Code::kNegatedMultiplyAdd, ternary<MinusProduct>, nullptr, nullptr, nullptr);
  set(Code::kMultiplySubtract, ternary<ProductMinus>, nullptr, nullptr, nullptr);
  set(Code::kExp, unary<float, Exponential>, nullptr, nullptr, nullptr);
  set(Code::kLog, unary<float, Logarithm>, nullptr, nullptr, nullptr);
  set(Code::kTanh, unary<float, Tangent>, nullptr, nullptr, nullptr);
  set(Code::kSqrt, unary<float, Root>, nullptr, nullptr, nullptr);
  set(Code::kFloor, unary<float, Floored>, nullptr, nullptr, nullptr);
  set(Code::kLess, binary<float, Less>, binary<int32_t, Less>, wide_compare<WideLess>, nullptr);
  set(Code::kLessEqual, binary<float, LessEqual>, binary<int32_t, LessEqual>, wide_compare<WideLessEqual>,
      nullptr);
  set(Code::kEqual, binary<float, Equal>, binary<int32_t, Equal>, wide_compare<WideEqual>, nullptr);
  set(Code::kNotEqual, binary<float, NotEqual>, binary<int32_t, NotEqual>, wide_compare<WideNotEqual>,
      nullptr);
  set(Code::kAnd, nullptr, nullptr, nullptr, binary<int32_t, Both>);
  set(Code::kOr, nullptr, nullptr, nullptr, binary<int32_t, Either>);
  set(Code::kNot, nullptr, nullptr, nullptr, unary<int32_t, Inverted>);
  set(Code::kSelect, select, select, wide_select, select);
  set(Code::kToFloat, nullptr, int_to_float, wide_to<float>, nullptr);
  set(Code::kToWide, nullptr, int_to_wide, nullptr, nullptr);
  set(Code::kToInt, nullptr, nullptr, wide_to<int32_t>, nullptr);
  set(Code::kAddTo, add_to, nullptr, nullptr, nullptr);
  return table;
}

void run_program(const Program& program, const ProgramInputs& in) {
  static constexpr Executors kExecutors = make_executors();
  Strip strip{&in,
              in.scratch,
              in.scratch + program.column_bytes,
              in.scratch + program.column_bytes + program.row_bytes,
              0,
              1,
              program.width};
  const auto run = [&](const std::vector<Instruction>& instructions) {
    for (const Instruction& i : instructions) {
      kExecutors[static_cast<size_t>(i.code)][static_cast<size_t>(i.kind)](i, strip);
    }
  };
  run(program.columns);
  run(program.rows);
  const int64_t rows = program.keys_on_columns ? in.lanes : in.keys;
  for (; strip.row < rows; strip.row += kStripRows) {
    strip.rows = std::min(kStripRows, rows - strip.row);
    run(program.pairs);
    if (in.maxima != nullptr) column_max(in.tiles[kScoreTile] + strip.row * kPanel, strip.rows, in.maxima);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_PROGRAM_INL_HPP
