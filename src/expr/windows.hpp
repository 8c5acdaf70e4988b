// The part of `sees` that is a window: an interval of the distance between a query's place and a key, which kernels have without an
// expression.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "expr/graph.hpp"

namespace fovea::expr {

/// The lengths of all sequences, where they are the same and known.
struct KnownLengths {
  int64_t nq = 0, nk = 0;
};

/// Keys of a query by their distance k - (q + nk - nq), both ends included. 0 is inside.
struct KeyWindow {
  static constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();
  int64_t lowest = -kNoEnd, highest = kNoEnd;
  friend bool operator==(const KeyWindow&, const KeyWindow&) = default;
};

/// `sees` is true where the distance lies in the window and the rest is true.
struct WindowAndRest {
  KeyWindow window;
  std::optional<Expression> rest;  ///< nothing where the window says all
};

/// Takes those terms of a conjunction that compare a multiple of the distance, or its absolute value, with a number. Others stay as they
/// are: with lengths that are not known, those that speak of k - q without them, and windows that leave the diagonal out.
WindowAndRest split_window(const Expression& sees, const std::optional<KnownLengths>& lengths);

}  // namespace fovea::expr
