// Boxes as rectangles, which copy engines of GPUs take: lines of bytes, one pitch apart.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/box.hpp"

namespace fovea::distributed {

struct Rectangle {
  const char* from = nullptr;
  char* to = nullptr;
  int64_t from_pitch = 0, to_pitch = 0, width = 0, lines = 1;  ///< bytes, and how many lines
};

/// Visits a box in as few rectangles as its strides allow: axes of which each entry follows the one before in both memories are one, and
/// the longest of the others is that of lines.
template <class Visit>
void for_each_rectangle(const Box& box, int64_t element_bytes, Visit&& visit) {
  struct Axis {
    int64_t size = 1, from = 0, to = 0;
  };
  std::array<Axis, 3> axes;
  int64_t width = box.elements * element_bytes;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (box.size[i] == 0) return;
    if (box.size[i] > 1) axes[i] = {box.size[i], box.from_stride[i], box.to_stride[i]};
  }
  if (width == 0) return;
  const auto absorb = [&](int64_t from, int64_t to, int64_t& into) {
    for (bool found = true; found;) {
      found = false;
      for (Axis& axis : axes) {
        if (axis.size == 1 || axis.from != from * into || axis.to != to * into) continue;
        into *= axis.size;
        axis = {};
        found = true;
      }
    }
  };
  absorb(1, 1, width);
  const auto longest = std::max_element(axes.begin(), axes.end(),
                                        [](const Axis& a, const Axis& b) { return a.size < b.size; });
  const Axis line = *longest;
  *longest = {};
  int64_t lines = line.size;
  if (lines > 1) absorb(line.from, line.to, lines);
  for (int64_t i = 0; i < axes[0].size; ++i) {
    for (int64_t j = 0; j < axes[1].size; ++j) {
      for (int64_t k = 0; k < axes[2].size; ++k) {
        visit(Rectangle{box.from + i * axes[0].from + j * axes[1].from + k * axes[2].from,
                        box.to + i * axes[0].to + j * axes[1].to + k * axes[2].to, line.from, line.to, width,
                        lines});
      }
    }
  }
}

}  // namespace fovea::distributed
