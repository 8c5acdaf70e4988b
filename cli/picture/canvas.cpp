#include "cli/picture/canvas.hpp"

#include <algorithm>

#include "cli/picture/font.hpp"

namespace fovea::cli {
namespace {

/// Calls pixel(column, row) for each pixel of the text that is set, in pixels of the font.
template <class Pixel>
void for_each_pixel(std::string_view text, const Pixel& pixel) {
  int64_t left = 0;
  for (const char character : text) {
    const Glyph& glyph = glyph_of(character);
    for (int row = 0; row < kGlyphRows; ++row) {
      for (int column = 0; column < kGlyphColumns; ++column) {
        const unsigned bits = glyph[static_cast<size_t>(row)];
        if ((bits >> (kGlyphColumns - 1 - column) & 1u) != 0) pixel(left + column, int64_t{row});
      }
    }
    left += kGlyphAdvance;
  }
}

}  // namespace

Canvas::Canvas(int64_t width, int64_t height, Color background)
    : width_(width), height_(height), pixels_(static_cast<size_t>(width * height * 3)) {
  fill(0, 0, width, height, background);
}

void Canvas::set(int64_t x, int64_t y, Color color) {
  if (x < 0 || y < 0 || x >= width_ || y >= height_) return;
  uint8_t* pixel = pixels_.data() + (y * width_ + x) * 3;
  pixel[0] = color.red;
  pixel[1] = color.green;
  pixel[2] = color.blue;
}

void Canvas::fill(int64_t x, int64_t y, int64_t width, int64_t height, Color color) {
  for (int64_t row = std::max<int64_t>(y, 0); row < std::min(y + height, height_); ++row) {
    for (int64_t column = std::max<int64_t>(x, 0); column < std::min(x + width, width_); ++column) {
      set(column, row, color);
    }
  }
}

void Canvas::frame(int64_t x, int64_t y, int64_t width, int64_t height, Color color, int64_t thickness) {
  fill(x - thickness, y - thickness, width + 2 * thickness, thickness, color);
  fill(x - thickness, y + height, width + 2 * thickness, thickness, color);
  fill(x - thickness, y, thickness, height, color);
  fill(x + width, y, thickness, height, color);
}

void Canvas::text(int64_t x, int64_t y, std::string_view text, Color color, int64_t size) {
  for_each_pixel(
      text, [&](int64_t column, int64_t row) { fill(x + column * size, y + row * size, size, size, color); });
}

void Canvas::text_upwards(int64_t x, int64_t y, std::string_view text, Color color, int64_t size) {
  for_each_pixel(text, [&](int64_t column, int64_t row) {
    fill(x + row * size, y - (column + 1) * size, size, size, color);
  });
}

int64_t Canvas::text_width(std::string_view text, int64_t size) {
  if (text.empty()) return 0;
  return (static_cast<int64_t>(text.size()) * kGlyphAdvance - (kGlyphAdvance - kGlyphColumns)) * size;
}

}  // namespace fovea::cli
