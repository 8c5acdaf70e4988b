// The bound of a result. For every output, both for the largest error and for the Frobenius norm of the errors:
//
//   error  <=  2 * (error of the plain implementation)  +  floor
//
// where errors are distances from the float64 oracle. The floor allows for roundings that the plain implementation
// escapes by luck. It consists of these, with A = the plain implementation's magnitudes (plain.hpp):
//
//   u_out |X|                        the output itself is rounded
//   u_type A w(rows)                 one factor of each product is rounded to the type of the problem
//   u_f32 A (2 + 8 (1 + S) w(rows))  sums, exponentials and scores in float32; S = the largest magnitude of a
//                                    score, because an absolute error of a score, or of lse, is a relative
//                                    error of weights
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

/// "" when `got` is right, else one line with the error.
inline std::string compare(Role role, Type problem_type, const OwnedTensor& got,
                           const std::vector<double>& oracle, const Plain& implementation,
                           Margin* margin = nullptr) {
  const std::vector<double> values = got.values();
  const PlainOutput& plain = implementation.outputs.at(role);
  const Type out = got.type();
  const bool is_lse = role == Role::kLse;
  const auto fail = [&](size_t place, const char* what) {
    std::ostringstream message;
    message.precision(9);
    message << name_of(role) << "[" << place << " of " << values.size() << "] = " << values[place]
            << ", oracle " << oracle[place] << ", plain " << plain.values[place] << ": " << what;
    return message.str();
  };

  double error = 0, plain_error = 0, size = 0, magnitude = 0, exact = 0;
  double error2 = 0, plain_error2 = 0, size2 = 0, magnitude2 = 0, exact2 = 0;
  size_t worst = 0, count = 0;
  for (size_t place = 0; place < values.size(); ++place) {
    const double expected = oracle[place], value = values[place];
    if (std::isnan(expected) || std::isnan(value)) {
      if (std::isnan(expected) != std::isnan(value)) return fail(place, "NaN in one of them");
      continue;
    }
    if (std::isinf(expected)) {
      if (value != expected) return fail(place, "the oracle is infinite");
      continue;
    }
    if (std::isinf(value)) {
      const bool overflows = std::abs(expected) >= largest(out) * (1 - 4 * unit_roundoff(problem_type));
      if (!overflows || std::signbit(value) != std::signbit(expected)) return fail(place, "infinite");
      continue;
    }
    const double a = plain.magnitudes[place], a_exact = plain.exact.empty() ? 0 : plain.exact[place];
    if (!is_lse && a == 0 && value != 0) return fail(place, "nothing is summed here, so it must be 0");
    const double distance = std::abs(value - expected);
    double plain_distance = std::abs(plain.values[place] - expected);
    if (!std::isfinite(plain_distance)) plain_distance = 0;
    if (distance > error) worst = place;
    error = std::max(error, distance);
    plain_error = std::max(plain_error, plain_distance);
    size = std::max(size, std::abs(expected));
    magnitude = std::max(magnitude, a);
    exact = std::max(exact, a_exact);
    error2 += distance * distance;
    plain_error2 += plain_distance * plain_distance;
    size2 += expected * expected;
    magnitude2 += a * a;
    exact2 += a_exact * a_exact;
    ++count;
  }
  if (count == 0) return {};

  const double n = static_cast<double>(count);
  const auto luck = [&](double independent) {
    return is_lse ? 1.0 : std::min(1.0, 4 / std::sqrt(independent));
  };
  const double of_type = is_lse ? 0 : unit_roundoff(problem_type) * luck(implementation.rows);
  const double of_exact = is_lse ? 0 : unit_roundoff(problem_type) - of_type;
  const double of_float =
      unit_roundoff(Type::kF32) * (2 + 8 * (1 + implementation.score_magnitude) * luck(implementation.rows));
  const auto floor = [&](double x, double a, double a_exact, double step) {
    return unit_roundoff(out) * x + (of_type + of_float) * a + of_exact * a_exact + step;
  };
  const double allowed = 2 * plain_error + floor(size, magnitude, exact, smallest_step(out));
  const double allowed_frobenius =
      2 * std::sqrt(plain_error2) +
      floor(std::sqrt(size2), std::sqrt(magnitude2), std::sqrt(exact2), smallest_step(out) * std::sqrt(n));
  if (margin) {
    margin->largest = std::max(margin->largest, error / allowed);
    margin->frobenius = std::max(margin->frobenius, std::sqrt(error2) / allowed_frobenius);
  }
  std::ostringstream why;
  why.precision(4);
  if (error > allowed) {
    why << "error " << error << " > 2 * plain " << plain_error << " + floor " << allowed - 2 * plain_error;
    return fail(worst, why.str().c_str());
  }
  if (std::sqrt(error2) > allowed_frobenius) {
    const double norm = size2 > 0 ? std::sqrt(size2) : 1;
    why << "relative Frobenius error " << std::sqrt(error2) / norm << " > 2 * plain "
        << std::sqrt(plain_error2) / norm << " + floor "
        << (allowed_frobenius - 2 * std::sqrt(plain_error2)) / norm;
    return fail(worst, why.str().c_str());
  }
  return {};
}

}  // namespace fovea::verify
