// Drawings by Cairo with text by Pango, written as PNG or SVG.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "cli/picture/colors.hpp"
#include "cli/picture/figure.hpp"

namespace fovea::cli {

/// A PNG has this many pixels a unit, so that letters stay sharp on screens of high density.
inline constexpr int64_t kPixelsPerUnit = 2;

struct Box {
  double x, y, width, height;
};

/// Which part of a text lies at the point that is given for it.
enum class Align { start, middle, end };

struct TextStyle {
  double size = 9;  ///< of the font, in units
  Color color = {};
  bool bold = false;
  bool upwards = false;  ///< turned to the left: reads from the bottom to the top
  double longest = 0;    ///< a longer text ends in an ellipsis; 0: no limit
};

/// A plane without borders to draw on: x grows to the right, y down, in units of one CSS pixel.
class Drawing {
 public:
  struct Canvas;  ///< Cairo's side
  explicit Drawing(Canvas& canvas) : canvas_(canvas) {}

  void fill(const Box& box, Color color);
  /// The outline of a rectangle, around (not over) what it encloses.
  void frame(const Box& box, Color color, double thickness);
  /// A grid of rows x columns cells that fills `box`, with sharp edges.
  void cells(const Box& box, int64_t rows, int64_t columns,
             const std::function<Color(int64_t row, int64_t column)>& color);
  /// One line in any script. y (x when upwards) is the middle of capitals.
  void text(double x, double y, std::string_view text, Align align, const TextStyle& style);
  double text_width(std::string_view text, const TextStyle& style) const;

 private:
  Canvas& canvas_;
};

/// What `draw` draws, with a margin around it. `draw` runs twice: to find the size, then on the picture. At most 32,767
/// pixels a side. Throws Failure when Cairo, Pango or every font is missing or Cairo reports an error, std::bad_alloc.
Picture make_picture(PictureFormat format, Color background, double margin,
                     const std::function<void(Drawing&)>& draw);

}  // namespace fovea::cli
