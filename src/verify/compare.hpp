// The bound of a result. For every output, both for the largest error and for the Frobenius norm of the errors:
//
//   error  <=  2 * (error of the plain implementation)  +  floor
//
// where errors are distances from the float64 oracle. The floor allows for roundings that the plain implementation
// escapes by luck. It consists of these, with A = the plain implementation's magnitudes (plain.hpp):
//
//   u_out |X|                        the output itself is rounded
//   u_type A w(rows)                 one factor of each product is rounded to the type of the problem (float8_e4m3fn beside a q of
//                                    8 bits)
//   u_f32 A (2 + r (1 + S) w(rows))  sums, exponentials and scores in float32; S = the largest magnitude of a
//                                    score, because an absolute error of a score, or of lse, is a relative
//                                    error of weights; r = max(8, d / 16) for heads of d
//   2 A t                            rows that are rotated are rounded to the type once more, and a float32 result beside the
//                                    middle of two numbers goes either way: t = 4 u_type scale max |q| max |k| for one such
//                                    element of q and one of k in a score; with a softcap c on cuda_sm90, whose tanh has an
//                                    absolute error of 2^-21, t = c 2^-22
//   one smallest step of the output type
//
// w(n) = min(1, 4 / sqrt(n)): the largest of n independent errors is close to its worst case in the plain
// implementation too, so only few errors need the floor in full. The rows of queries are independent, not the
// elements: a mask or dropout may leave a row one weight, and all elements of the row share its rounding.
//
// A row with one dominating key has a weight of exactly 1 in the plain implementation, because that uses the row's
// own maximum. Against any other maximum (of an earlier block, of another split) the weight is rounded. So the
// share of weights that needed no rounding counts with w = 1, in rows of several keys.
//
// r: tensor cores add 16 products of a score at a time, and truncate: each time up to 2 u_f32 of a sum that grows to S, so d / 16 of
// S in all. 8 is that of d = 128. Where they multiply k of 8 bits by q of 8 bits, or by pieces of 8 bits of a q of 16 (cuda_sm90), they
// keep 13 bits below the largest of 32 products and the sum, so that 2^-13 of S is lost.
//
// lse has no factor that is rounded to the type, A = 1 and w = 1. NaN and infinities must be exactly where the
// oracle has them, and an output whose magnitude is 0 (an empty sum: a row without keys, a key that no query sees)
// must be exactly 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include "verify/owned_problem.hpp"
#include "verify/plain.hpp"

namespace fovea::verify {

/// The margin of an output: error / allowed, at most 1 when the output is right.
struct Margin {
  double largest = 0, frobenius = 0;
};

namespace detail {

/// Largest value and sum of squares of a series.
struct Extent {
  double largest = 0, squares = 0;
  void add(double value) {
    largest = std::max(largest, value);
    squares += value * value;
  }
  double frobenius() const { return std::sqrt(squares); }
};

/// What the finite elements of an output have in common.
struct Errors {
  Extent error, plain_error;      ///< distances from the oracle
  Extent size, magnitude, exact;  ///< |oracle|, A, and the part of A whose weights needed no rounding
  size_t worst = 0, count = 0;    ///< place of the largest error, number of finite elements
};

/// The comparison of one output with the oracle.
class Comparison {
 public:
  Comparison(Role role, Type problem_type, const OwnedTensor& got, const std::vector<double>& oracle,
             const Plain& implementation)
      : role_(role),
        problem_type_(problem_type),
        out_(got.type()),
        values_(got.values()),
        oracle_(oracle),
        implementation_(implementation),
        plain_(implementation.outputs.at(role)) {}

  std::string run(Margin* margin) {
    for (size_t place = 0; place < values_.size(); ++place) {
      if (const char* wrong = wrong_kind(place)) return fail(place, wrong);
      if (std::isfinite(oracle_[place]) && std::isfinite(values_[place])) add(place);
    }
    return errors_.count == 0 ? std::string() : judge(margin);
  }

 private:
  bool is_lse() const { return role_ == Role::kLse; }

  std::string fail(size_t place, const std::string& what) const {
    std::ostringstream message;
    message.precision(9);
    message << name_of(role_) << "[" << place << " of " << values_.size() << "] = " << values_[place]
            << ", oracle " << oracle_[place] << ", plain " << plain_.values[place] << ": " << what;
    return message.str();
  }

  /// Why an element is wrong whatever the bound (NaN, infinities, zeros of empty sums), or null.
  const char* wrong_kind(size_t place) const {
    const double expected = oracle_[place], value = values_[place];
    if (std::isnan(expected) || std::isnan(value)) {
      return std::isnan(expected) && std::isnan(value) ? nullptr : "NaN in one of them";
    }
    if (std::isinf(expected)) return value == expected ? nullptr : "the oracle is infinite";
    if (std::isinf(value)) {
      const bool overflows = std::abs(expected) >= largest(out_) * (1 - 4 * unit_roundoff(problem_type_));
      return overflows && std::signbit(value) == std::signbit(expected) ? nullptr : "infinite";
    }
    const bool empty_sum = !is_lse() && plain_.magnitudes[place] == 0;
    return empty_sum && value != 0 ? "nothing is summed here, so it must be 0" : nullptr;
  }

  /// Counts a finite element.
  void add(size_t place) {
    const double distance = std::abs(values_[place] - oracle_[place]);
    const double plain_distance = std::abs(plain_.values[place] - oracle_[place]);
    if (distance > errors_.error.largest) errors_.worst = place;
    errors_.error.add(distance);
    errors_.plain_error.add(std::isfinite(plain_distance) ? plain_distance : 0);
    errors_.size.add(std::abs(oracle_[place]));
    errors_.magnitude.add(plain_.magnitudes[place]);
    errors_.exact.add(plain_.exact.empty() ? 0 : plain_.exact[place]);
    ++errors_.count;
  }

  /// w(n) of the head of this file.
  double luck(double independent) const { return is_lse() ? 1.0 : std::min(1.0, 4 / std::sqrt(independent)); }

  /// The floor of the head of this file, for |X| = x, A = a and one smallest step = step.
  double floor(double x, double a, double a_exact, double step) const {
    const double of_type = is_lse() ? 0 : unit_roundoff(problem_type_) * luck(implementation_.rows);
    const double of_exact = is_lse() ? 0 : unit_roundoff(problem_type_) - of_type;
    const double of_float = unit_roundoff(Type::kF32) *
                            (2 + implementation_.score_roundings * (1 + implementation_.score_magnitude) *
                                     luck(implementation_.rows));
    return unit_roundoff(out_) * x +
           (of_type + of_float + 2 * (implementation_.score_step + implementation_.tanh_step)) * a +
           of_exact * a_exact + step;
  }

  /// Holds both errors, the largest and the Frobenius norm, against their bounds.
  std::string judge(Margin* margin) const {
    const Errors& e = errors_;
    const double step = smallest_step(out_);
    const double allowed =
        2 * e.plain_error.largest + floor(e.size.largest, e.magnitude.largest, e.exact.largest, step);
    const double allowed_frobenius = 2 * e.plain_error.frobenius() +
                                     floor(e.size.frobenius(), e.magnitude.frobenius(), e.exact.frobenius(),
                                           step * std::sqrt(static_cast<double>(e.count)));
    if (margin) {
      margin->largest = std::max(margin->largest, e.error.largest / allowed);
      margin->frobenius = std::max(margin->frobenius, e.error.frobenius() / allowed_frobenius);
    }
    std::ostringstream why;
    why.precision(4);
    if (e.error.largest > allowed) {
      why << "error " << e.error.largest << " > 2 * plain " << e.plain_error.largest << " + floor "
          << allowed - 2 * e.plain_error.largest;
      return fail(e.worst, why.str());
    }
    if (e.error.frobenius() > allowed_frobenius) {
      const double norm = e.size.squares > 0 ? e.size.frobenius() : 1;
      why << "relative Frobenius error " << e.error.frobenius() / norm << " > 2 * plain "
          << e.plain_error.frobenius() / norm << " + floor "
          << (allowed_frobenius - 2 * e.plain_error.frobenius()) / norm;
      return fail(e.worst, why.str());
    }
    return {};
  }

  Role role_;
  Type problem_type_, out_;
  std::vector<double> values_;
  const std::vector<double>& oracle_;
  const Plain& implementation_;
  const PlainOutput& plain_;
  Errors errors_;
};

}  // namespace detail

/// "" when `got` is right, else one line with the error.
inline std::string compare(Role role, Type problem_type, const OwnedTensor& got,
                           const std::vector<double>& oracle, const Plain& implementation,
                           Margin* margin = nullptr) {
  return detail::Comparison(role, problem_type, got, oracle, implementation).run(margin);
}

}  // namespace fovea::verify
