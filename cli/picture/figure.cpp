#include "cli/picture/figure.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cli/picture/font.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

constexpr Color kPaper = {252, 251, 248}, kInk = {28, 26, 36}, kSoftInk = {110, 106, 122},
                kMark = {90, 200, 250};
constexpr int64_t kMargin = 28;
constexpr int64_t kBarWidth = 18;

/// Weights to colours. Most weights are far below the largest, so the colour follows a root.
class Shading {
 public:
  explicit Shading(float largest) : largest_(largest > 0 ? static_cast<double>(largest) : 1.0) {}
  double place(double weight) const { return std::pow(std::clamp(weight / largest_, 0.0, 1.0), kExponent); }
  Color color(float weight) const { return colormap(place(static_cast<double>(weight))); }
  double largest() const { return largest_; }

 private:
  static constexpr double kExponent = 0.4;
  double largest_;
};

float largest_of(const WeightGrid& grid) {
  return grid.values.empty() ? 0 : *std::max_element(grid.values.begin(), grid.values.end());
}

/// Cells of `pitch` pixels, of which the last `gap` are left as they are.
void draw_grid(Canvas& canvas, int64_t x, int64_t y, const WeightGrid& grid, int64_t pitch, int64_t gap,
               const Shading& shading) {
  for (int64_t row = 0; row < grid.rows; ++row) {
    for (int64_t column = 0; column < grid.columns; ++column) {
      canvas.fill(x + column * pitch, y + row * pitch, pitch - gap, pitch - gap,
                  shading.color(grid.at(row, column)));
    }
  }
}

std::string weight_text(double weight) {
  if (weight == 0) return "0";
  return weight >= 1e-4 ? fmt::format("{:g}", weight) : fmt::format("{:.0e}", weight);
}

/// From top (largest) to bottom (0), with the weights beside it.
void draw_color_bar(Canvas& canvas, int64_t x, int64_t y, int64_t height, const Shading& shading) {
  for (int64_t row = 0; row < height; ++row) {
    const double place = 1 - (static_cast<double>(row) + 0.5) / static_cast<double>(height);
    canvas.fill(x, y + row, kBarWidth, 1, colormap(place));
  }
  canvas.frame(x, y, kBarWidth, height, kSoftInk);
  const auto tick = [&](double weight, const std::string& text) {
    const auto at = y + std::lround((1 - shading.place(weight)) * static_cast<double>(height - 1));
    canvas.fill(x + kBarWidth + 1, at, 5, 1, kInk);
    canvas.text(x + kBarWidth + 10, at - kCapHeight, text, kInk, 2);
  };
  // 0.1, 0.2, 0.5 and so on, from the largest down, where there is room.
  double below = 0;
  tick(0, "0");
  const double room = 30.0 / static_cast<double>(height);
  std::vector<double> ticks;
  for (int exponent = -8; exponent <= 0; ++exponent) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double weight = digit * std::pow(10.0, exponent);
      if (weight > shading.largest() || weight > 1) continue;
      if (shading.place(weight) - below < room) continue;
      below = shading.place(weight);
      tick(weight, weight_text(weight));
    }
  }
}

constexpr int64_t kBarSpace = kBarWidth + 10 + 6 * kGlyphAdvance * 2;  // the bar with its numbers

/// Token numbers along the left and the top.
void draw_positions(Canvas& canvas, int64_t x, int64_t y, int64_t width, int64_t height, Range queries,
                    Range keys) {
  const auto step_for = [](int64_t tokens) {
    int64_t step = 1;
    for (const int64_t factor : {2, 5, 10}) {
      for (int64_t power = 1; power <= 1'000'000'000; power *= 10) {
        const int64_t candidate = factor * power;
        if (tokens / candidate <= 8 && (step == 1 || candidate < step)) step = candidate;
      }
    }
    return tokens <= 8 ? int64_t{1} : step;
  };
  const auto first_tick = [](int64_t first, int64_t step) { return (first + step - 1) / step * step; };
  const int64_t key_step = step_for(keys.size()), query_step = step_for(queries.size());
  for (int64_t key = first_tick(keys.first, key_step); key < keys.last; key += key_step) {
    const int64_t at = x + (2 * (key - keys.first) + 1) * width / (2 * keys.size());
    const std::string text = std::to_string(key);
    canvas.fill(at, y - 6, 1, 5, kInk);
    canvas.text(at - Canvas::text_width(text, 2) / 2, y - 24, text, kInk, 2);
  }
  for (int64_t query = first_tick(queries.first, query_step); query < queries.last; query += query_step) {
    const int64_t at = y + (2 * (query - queries.first) + 1) * height / (2 * queries.size());
    const std::string text = std::to_string(query);
    canvas.fill(x - 6, at, 5, 1, kInk);
    canvas.text(x - 10 - Canvas::text_width(text, 2), at - kCapHeight, text, kInk, 2);
  }
}

/// As much of `text` as fits, with two dots where it was cut.
std::string cut(std::string text, size_t letters) {
  if (text.size() <= letters) return text;
  return text.substr(0, letters > 2 ? letters - 2 : 0) + "..";
}

}  // namespace

Canvas draw_overview(const Overview& overview, int64_t size) {
  const WeightGrid& grid = overview.grid;
  const int64_t pitch = std::max<int64_t>(1, size / std::max<int64_t>({grid.rows, grid.columns, 1}));
  const int64_t map_width = grid.columns * pitch, map_height = grid.rows * pitch;
  const auto digits =
      static_cast<int64_t>(std::to_string(std::max<int64_t>(overview.queries.last, 1)).size());
  const int64_t left = kMargin + 22 + digits * kGlyphAdvance * 2 + 10;
  const int64_t top = kMargin + 21 + 14 + 14 + 22 + 18 + 30;
  const int64_t text_room =
      std::max(Canvas::text_width(overview.title, 3), Canvas::text_width(overview.subtitle, 2));
  const int64_t width = std::max(left + map_width + 24 + kBarSpace, kMargin + text_room) + kMargin;
  const int64_t height = top + std::max<int64_t>(map_height, 120) + kMargin;
  Canvas canvas(width, height, kPaper);
  const Shading shading(largest_of(grid));

  canvas.text(kMargin, kMargin, overview.title, kInk, 3);
  canvas.text(kMargin, kMargin + 21 + 14, overview.subtitle, kSoftInk, 2);
  canvas.text(left, top - 50, "keys", kSoftInk, 2);
  canvas.text_upwards(kMargin, top + Canvas::text_width("queries", 2), "queries", kSoftInk, 2);
  canvas.frame(left, top, map_width, map_height, kSoftInk);
  draw_grid(canvas, left, top, grid, pitch, 0, shading);
  if (grid.rows > 0 && grid.columns > 0) {
    draw_positions(canvas, left, top, map_width, map_height, overview.queries, overview.keys);
  }
  const int64_t bar = left + map_width + 24;
  canvas.text(bar, top - 50, overview.unit, kSoftInk, 2);
  draw_color_bar(canvas, bar, top, std::max<int64_t>(std::min<int64_t>(map_height, 480), 120), shading);
  return canvas;
}

Canvas draw_labelled_map(const LabelledMap& map) {
  constexpr int64_t kPitch = 17, kLabelSize = 2;
  constexpr size_t kLongestLabel = 14;
  const auto count = map.range.size();
  std::vector<std::string> labels;
  int64_t label_space = 0;
  for (const std::string& token : map.tokens) {
    labels.push_back(cut(safe_text(token), kLongestLabel));
    label_space = std::max(label_space, Canvas::text_width(labels.back(), kLabelSize));
  }
  const int64_t side = count * kPitch;
  const int64_t left = kMargin + 24 + label_space + 10;
  const int64_t top = kMargin + 21 + 14 + 14 + 26 + 24 + label_space + 10;

  const int64_t overview_pitch = std::max<int64_t>(1, 512 / std::max<int64_t>(map.overview.rows, 1));
  const int64_t overview_side = map.overview.rows * overview_pitch;
  const int64_t bar = left + side + 24;
  const int64_t overview_left = bar + kBarSpace + 64;
  const int64_t text_end =
      kMargin + std::max(Canvas::text_width(map.title, 3), Canvas::text_width(map.subtitle, 2));
  Canvas canvas(std::max(overview_left + overview_side, text_end) + kMargin,
                top +
                    std::max(side, overview_side + 16 + 24 * (2 + static_cast<int64_t>(map.remarks.size()))) +
                    kMargin,
                kPaper);

  canvas.text(kMargin, kMargin, map.title, kInk, 3);
  canvas.text(kMargin, kMargin + 21 + 14, map.subtitle, kSoftInk, 2);

  const Shading shading(std::max(largest_of(map.window), largest_of(map.overview)));
  canvas.text(left, top - label_space - 10 - 26, "keys: what is looked at", kSoftInk, 2);
  canvas.text_upwards(kMargin, top + Canvas::text_width("queries: who looks", 2), "queries: who looks",
                      kSoftInk, 2);
  canvas.fill(left, top, side - 1, side - 1, {44, 40, 58});  // seen between the cells
  canvas.frame(left, top, side - 1, side - 1, kSoftInk);
  draw_grid(canvas, left, top, map.window, kPitch, 1, shading);
  for (int64_t i = 0; i < count; ++i) {
    const std::string& label = labels[static_cast<size_t>(i)];
    constexpr int64_t kInset = (kPitch - kCapHeight * kLabelSize) / 2;
    canvas.text(left - 8 - Canvas::text_width(label, kLabelSize), top + i * kPitch + kInset, label, kInk,
                kLabelSize);
    canvas.text_upwards(left + i * kPitch + kInset, top - 8, label, kInk, kLabelSize);
  }
  canvas.text(bar, top - 26, "weight", kSoftInk, 2);
  draw_color_bar(canvas, bar, top, 420, shading);

  canvas.text(overview_left, top - 62, fmt::format("all {} tokens", map.seqlen), kInk, 2);
  draw_grid(canvas, overview_left, top, map.overview, overview_pitch, 0, shading);
  canvas.frame(overview_left, top, overview_side, overview_side, kSoftInk);
  draw_positions(canvas, overview_left, top, overview_side, overview_side, {0, map.seqlen}, {0, map.seqlen});
  if (map.seqlen > 0) {
    const int64_t from = map.range.first * overview_side / map.seqlen,
                  to = map.range.last * overview_side / map.seqlen;
    canvas.frame(overview_left + from, top + from, to - from, to - from, kMark, 2);
  }
  canvas.text(overview_left, top + overview_side + 16, "The frame is the window on the left.", kSoftInk, 2);
  int64_t line = top + overview_side + 16 + 48;
  for (const std::string& remark : map.remarks) {
    canvas.text(overview_left, line, remark, kInk, 2);
    line += 24;
  }
  return canvas;
}

}  // namespace fovea::cli
