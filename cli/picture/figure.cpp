// The layout of pictures: maps of weights, axes, names of tokens, the colour bar, strongest looks.
#include "cli/picture/figure.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cli/picture/drawing.hpp"

namespace fovea::cli {
namespace {

constexpr Color kPaper = {252, 251, 248}, kInk = {28, 26, 36}, kSoftInk = {110, 106, 122},
                kGap = {44, 40, 58}, kMark = {90, 200, 250};
constexpr double kMargin = 14;
constexpr TextStyle kTitle = {.size = 15, .color = kInk, .bold = true};
constexpr TextStyle kHeading = {.size = 9.5, .color = kInk, .bold = true};
constexpr TextStyle kBody = {.size = 9.5, .color = kSoftInk};
constexpr TextStyle kAxis = {.size = 9.5, .color = kSoftInk, .upwards = true};
constexpr TextStyle kNumber = {.size = 8.5, .color = kInk};
constexpr TextStyle kSoftNumber = {.size = 8.5, .color = kSoftInk};
constexpr TextStyle kLabel = {.size = 8.5, .color = kInk, .longest = 80};

/// Weights to colours. Most weights are far below the largest, so the colour follows a root.
class Shading {
 public:
  explicit Shading(float largest) : largest_(largest > 0 ? static_cast<double>(largest) : 1.0) {
    for (size_t i = 0; i < colors_.size(); ++i) {
      colors_[i] = colormap(static_cast<double>(i) / static_cast<double>(colors_.size() - 1));
    }
  }
  double place(double weight) const { return std::pow(std::clamp(weight / largest_, 0.0, 1.0), kExponent); }
  Color at(double place) const {
    return colors_[static_cast<size_t>(std::lround(place * static_cast<double>(colors_.size() - 1)))];
  }
  Color color(float weight) const { return at(place(static_cast<double>(weight))); }
  double largest() const { return largest_; }

 private:
  static constexpr double kExponent = 0.4;
  double largest_;
  std::array<Color, 1024> colors_;
};

float largest_of(const WeightGrid& grid) {
  return grid.values.empty() ? 0 : *std::max_element(grid.values.begin(), grid.values.end());
}

void draw_weights(Drawing& drawing, const Box& box, const WeightGrid& grid, const Shading& shading) {
  drawing.frame(box, kSoftInk, 0.5);
  drawing.cells(box, grid.rows, grid.columns,
                [&](int64_t row, int64_t column) { return shading.color(grid.at(row, column)); });
}

/// From 0 to the largest weight, with weights below it where there is room. Returns where it ends.
double draw_color_bar(Drawing& drawing, double x, double y, double width, const Shading& shading) {
  constexpr double kHeight = 8, kApart = 7;
  constexpr int64_t kSteps = 512;
  drawing.text(x, y, "weight", Align::start, kBody);
  const Box bar = {x, y + 9, width, kHeight};
  drawing.frame(bar, kSoftInk, 0.5);
  drawing.cells(bar, 1, kSteps, [&](int64_t, int64_t step) {
    return shading.at((static_cast<double>(step) + 0.5) / static_cast<double>(kSteps));
  });
  const double line = bar.y + kHeight;
  double end = -kMargin;  // of the text before
  const auto tick = [&](double weight) {
    const std::string text =
        weight == 0 || weight >= 1e-4 ? fmt::format("{:g}", weight) : fmt::format("{:.0e}", weight);
    const double at = x + shading.place(weight) * width, half = drawing.text_width(text, kNumber) / 2;
    if (weight > 0 && at - half < end + kApart) return;
    drawing.fill({at - 0.25, line, 0.5, 3.5}, kInk);
    drawing.text(at, line + 10, text, Align::middle, kNumber);
    end = at + half;
  };
  tick(0);
  for (int exponent = -8; exponent <= 0; ++exponent) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double weight = digit * std::pow(10.0, exponent);
      if (weight <= std::min(shading.largest(), 1.0)) tick(weight);
    }
  }
  return line + 16;
}

/// The smallest of 1, 2, 5, 10, 20, 50, ... that cuts `tokens` into at most `most` parts.
int64_t tick_step(int64_t tokens, double most) {
  for (int64_t power = 1;; power *= 10) {
    for (const int64_t digit : {1, 2, 5}) {
      if (static_cast<double>(tokens) <= most * static_cast<double>(digit * power)) return digit * power;
    }
  }
}

/// Token numbers along the left and the top of `box`.
void draw_positions(Drawing& drawing, const Box& box, Range queries, Range keys) {
  const auto for_ticks = [](Range tokens, double length, double apart, const auto& draw) {
    const int64_t step = tick_step(tokens.size(), std::clamp(length / apart, 1.0, 8.0));
    for (int64_t token = (tokens.first + step - 1) / step * step; token < tokens.last; token += step) {
      const double middle = static_cast<double>(token - tokens.first) + 0.5;
      draw(middle * length / static_cast<double>(tokens.size()), std::to_string(token));
    }
  };
  const double widest = drawing.text_width(std::to_string(keys.last), kNumber);
  for_ticks(keys, box.width, widest + 8, [&](double at, const std::string& text) {
    drawing.fill({box.x + at - 0.25, box.y - 4, 0.5, 3.5}, kInk);
    drawing.text(box.x + at, box.y - 10, text, Align::middle, kNumber);
  });
  for_ticks(queries, box.height, 14, [&](double at, const std::string& text) {
    drawing.fill({box.x - 4, box.y + at - 0.25, 3.5, 0.5}, kInk);
    drawing.text(box.x - 6, box.y + at, text, Align::end, kNumber);
  });
}

/// Title and subtitle, above `bottom`.
void draw_titles(Drawing& drawing, double x, double bottom, const std::string& title,
                 const std::string& subtitle) {
  drawing.text(x, bottom - 27, title, Align::start, kTitle);
  drawing.text(x, bottom - 8, subtitle, Align::start, kBody);
}

/// Cells of the window, apart from each other, between the names of their tokens. Returns the room that names take.
double draw_window(Drawing& drawing, const LabelledMap& map, double pitch, const Shading& shading) {
  const auto count = static_cast<double>(map.tokens.size());
  const Box box = {0, 0, count * pitch, count * pitch};
  draw_weights(drawing, box, map.window, shading);
  TextStyle upwards = kLabel;
  upwards.upwards = true;
  double room = 0;
  for (size_t i = 0; i < map.tokens.size(); ++i) {
    const double at = static_cast<double>(i) * pitch;
    drawing.fill({0, at + pitch - 0.5, box.width, 0.5}, kGap);
    drawing.fill({at + pitch - 0.5, 0, 0.5, box.height}, kGap);
    drawing.text(-5, at + pitch / 2, map.tokens[i], Align::end, kLabel);
    drawing.text(at + pitch / 2, -5, map.tokens[i], Align::start, upwards);
    room = std::max(room, drawing.text_width(map.tokens[i], kLabel));
  }
  return room + 5;
}

/// All tokens, with a frame around the window. Returns where it ends.
double draw_all_tokens(Drawing& drawing, const LabelledMap& map, const Box& box, const Shading& shading) {
  drawing.text(box.x, box.y - 25, fmt::format("All {} tokens", map.seqlen), Align::start, kHeading);
  draw_weights(drawing, box, map.overview, shading);
  draw_positions(drawing, box, {0, map.seqlen}, {0, map.seqlen});
  const double token = box.width / static_cast<double>(map.seqlen);
  const double from = static_cast<double>(map.range.first) * token,
               size = static_cast<double>(map.range.size()) * token;
  drawing.frame({box.x + from, box.y + from, size, size}, kMark, 1);
  drawing.text(box.x, box.y + box.height + 12, "The frame is the window on the left.", Align::start, kBody);
  return box.y + box.height + 18;
}

/// A line for each look: its weight, who looks, at whom. Returns where they end.
double draw_looks(Drawing& drawing, const LabelledMap& map, double x, double y) {
  constexpr double kLine = 14, kWeight = 20, kApart = 8, kArrow = 14, kNames = 78;
  drawing.text(x, y, "Strongest looks at another token", Align::start, kHeading);
  TextStyle name = kNumber;
  name.longest = kNames;
  const double numbers = drawing.text_width(std::to_string(map.range.last), kNumber);
  const double query = x + kWeight + kApart + numbers, key = query + kNames + kApart + kArrow + numbers;
  for (const Look& look : map.looks) {
    y += kLine;
    drawing.text(x + kWeight, y, fmt::format("{:.2f}", look.weight), Align::end, kNumber);
    for (const auto& [at, token] : {std::pair{query, look.query}, {key, look.key}}) {
      drawing.text(at, y, std::to_string(token), Align::end, kSoftNumber);
      drawing.text(at + 4, y, map.tokens[static_cast<size_t>(token - map.range.first)], Align::start, name);
    }
    drawing.text(key - numbers - kArrow, y, "→", Align::start, kSoftNumber);
  }
  return y + kLine / 2;
}

}  // namespace

Picture draw_overview(const Overview& overview, int64_t size, PictureFormat format) {
  const WeightGrid& grid = overview.grid;
  const auto pixels = static_cast<double>(std::max<int64_t>(1, size / std::max(grid.rows, grid.columns)));
  const double pitch = pixels / kPixelsPerUnit;
  const Box box = {0, 0, static_cast<double>(grid.columns) * pitch, static_cast<double>(grid.rows) * pitch};
  const Shading shading(largest_of(grid));
  return make_picture(format, kPaper, kMargin, [&](Drawing& drawing) {
    draw_weights(drawing, box, grid, shading);
    draw_positions(drawing, box, overview.queries, overview.keys);
    const double left = -drawing.text_width(std::to_string(overview.queries.last), kNumber) - 16;
    drawing.text(box.x, -25, "keys", Align::start, kBody);
    drawing.text(left, 0, "queries", Align::end, kAxis);
    draw_color_bar(drawing, box.x, box.height + 16, std::clamp(box.width, 128.0, 256.0), shading);
    draw_titles(drawing, left - 4, -38, overview.title, overview.subtitle);
  });
}

Picture draw_labelled_map(const LabelledMap& map, PictureFormat format) {
  constexpr double kPitch = 10, kApart = 20, kOverviewSide = 256, kLeastBar = 128;
  const Shading shading(std::max(largest_of(map.window), largest_of(map.overview)));
  return make_picture(format, kPaper, kMargin, [&](Drawing& drawing) {
    const double room = draw_window(drawing, map, kPitch, shading);
    drawing.text(0, -room - 10, "keys: what is looked at", Align::start, kBody);
    drawing.text(-room - 10, 0, "queries: who looks", Align::end, kAxis);
    draw_titles(drawing, -room - 14, -room - 24, map.title, map.subtitle);

    const auto cells = static_cast<double>(map.overview.rows);
    const double side =
        cells * std::max(1.0, std::floor(kOverviewSide * kPixelsPerUnit / cells)) / kPixelsPerUnit;
    // Whole units: cells of the overview are pixels of the picture.
    const double numbers = std::ceil(drawing.text_width(std::to_string(map.seqlen), kNumber) + 6);
    const double x = static_cast<double>(map.tokens.size()) * kPitch + kApart + numbers;
    double y = draw_all_tokens(drawing, map, {x, 0, side, side}, shading);
    y = draw_looks(drawing, map, x, y + 18);
    draw_color_bar(drawing, x, y + 20, std::max(side, kLeastBar), shading);
  });
}

}  // namespace fovea::cli
