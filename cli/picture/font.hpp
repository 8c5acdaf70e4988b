#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea::cli {

/// A letter of 5 columns: 7 rows from the top to the line that letters stand on, and 2 below it. Bit 4 of a
/// row is its leftmost pixel.
using Glyph = std::array<uint8_t, 9>;

inline constexpr int kGlyphColumns = 5;
inline constexpr int kGlyphRows = 9;
inline constexpr int kGlyphAdvance = 6;  ///< from one letter to the next
inline constexpr int kCapHeight = 7;

/// The glyph of a printable ASCII character; of '?' for any other.
const Glyph& glyph_of(char character);

}  // namespace fovea::cli
