// Colours of pictures.
#pragma once

#include <cstdint>

namespace fovea::cli {

struct Color {
  uint8_t red = 0, green = 0, blue = 0;
};

/// From nearly black over violet and orange to pale yellow, for t in [0, 1]: equal steps of t look like equal
/// steps of lightness.
Color colormap(double t);

}  // namespace fovea::cli
