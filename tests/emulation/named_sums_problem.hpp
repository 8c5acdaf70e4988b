// The score of named_sums_test.cpp: its tensors have an element for each head, one that is looked up, one for each pair, and one.
#pragma once

namespace fovea::emulation {

inline constexpr const char* kScoreOfNamedSums =
    "s * scales[h] + table[h, clamp(k - q, -3, 3) + 3] + 0.5 * full[b, h, q, k] + 2 * one";

}  // namespace fovea::emulation
