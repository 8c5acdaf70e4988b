#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cli/picture/colors.hpp"

namespace fovea::cli {

/// A picture to draw on. What falls outside is left out.
class Canvas {
 public:
  Canvas(int64_t width, int64_t height, Color background);

  int64_t width() const { return width_; }
  int64_t height() const { return height_; }
  std::span<const uint8_t> bytes() const { return pixels_; }

  void set(int64_t x, int64_t y, Color color);
  void fill(int64_t x, int64_t y, int64_t width, int64_t height, Color color);
  /// The outline of a rectangle, `thickness` pixels wide, around (not over) what it encloses.
  void frame(int64_t x, int64_t y, int64_t width, int64_t height, Color color, int64_t thickness = 1);

  /// Letters `size` times the font's, from x to the right; y is the top of a capital.
  void text(int64_t x, int64_t y, std::string_view text, Color color, int64_t size);
  /// Turned to the left: reads upwards from y; x is where the tops of capitals are.
  void text_upwards(int64_t x, int64_t y, std::string_view text, Color color, int64_t size);

  static int64_t text_width(std::string_view text, int64_t size);

 private:
  int64_t width_, height_;
  std::vector<uint8_t> pixels_;
};

}  // namespace fovea::cli
