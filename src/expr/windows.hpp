// What expressions say of the distance between a query's place and a key that kernels have without an expression: the part of `sees` that is a
// window, an interval of it, and a score that falls with it as ALiBi's does.
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

/// The slopes of a score s - slope |distance|: elements of a float32 tensor that b and h index, or h alone.
struct Slopes {
  size_t tensor;
  bool by_batch;  ///< indices are b and h
};

/// Those of a score that says no more. `causal`: no key lies behind a query's place, so that its distance may stand without `abs`.
std::optional<Slopes> slopes_of(const Expression& score, const std::optional<KnownLengths>& lengths,
                                bool causal);

}  // namespace fovea::expr
