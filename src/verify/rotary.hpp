// Rotary embedding in float64, for what appending is compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace fovea::verify {

/// Turns pairs of elements by angles of positions: the rule of fovea.h.
struct Rotary {
  std::vector<double> cosines, sines;  ///< (positions, half)
  int64_t half = 0;                    ///< pairs; 0: nothing is turned
  bool interleaved = false;

  /// Position p turns pair j by p 10000^(-j / half).
  static Rotary usual(int64_t positions, int64_t half) {
    Rotary made;
    made.half = half;
    for (int64_t position = 0; position < positions; ++position) {
      for (int64_t j = 0; j < half; ++j) {
        const double angle = static_cast<double>(position) *
                             std::pow(10000.0, -static_cast<double>(j) / static_cast<double>(half));
        made.cosines.push_back(std::cos(angle));
        made.sines.push_back(std::sin(angle));
      }
    }
    return made;
  }
  /// The row of `size` numbers at `x`, turned. `sums`, where it is not null, gets what was added up for each: |x cos| + |y sin|.
  std::vector<double> turned(const double* x, int64_t size, int64_t position,
                             std::vector<double>* sums) const {
    std::vector<double> out(x, x + size);
    if (sums) sums->assign(static_cast<size_t>(size), 0);
    for (int64_t j = 0; j < half; ++j) {
      const auto a = static_cast<size_t>(interleaved ? 2 * j : j),
                 b = static_cast<size_t>(interleaved ? 2 * j + 1 : j + half),
                 at = static_cast<size_t>(position * half + j);
      const double c = cosines[at], s = sines[at];
      out[a] = x[a] * c - x[b] * s;
      out[b] = x[a] * s + x[b] * c;
      if (!sums) continue;
      (*sums)[a] = std::abs(x[a] * c) + std::abs(x[b] * s);
      (*sums)[b] = std::abs(x[a] * s) + std::abs(x[b] * c);
    }
    return out;
  }
};

}  // namespace fovea::verify
