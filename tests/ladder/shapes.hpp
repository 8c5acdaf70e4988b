// Shapes with tails in every direction, for a group of rungs.
#pragma once

#include <gtest/gtest.h>

#include <ostream>

#include "ladder/harness/run.hpp"

namespace ladder {

inline void PrintTo(const Rung& rung, std::ostream* stream) {
  *stream << rung.name;
}

inline std::vector<Shape> shapes_with_tails(const Rung& rung) {
  switch (rung.group->family) {
    case Family::matmul:
      return {{1, 1, 1},      {5, 3, 7},      {16, 16, 16}, {65, 33, 17},
              {128, 128, 32}, {130, 132, 36}, {64, 257, 99}};
    case Family::softmax:
      return {{1, 1},    {3, 5},    {5, 32},   {2, 257},  {7, 512},
              {3, 1000}, {130, 31}, {2, 1024}, {1, 4097}, {1, 16384}};
    case Family::attention:
    case Family::causal:
    case Family::gradient:
      break;
  }
  std::vector<Shape> all;
  for (const Shape s : {Shape{1, 1, 1}, Shape{2, 5, 3}, Shape{1, 32, 32}, Shape{2, 65, 33}, Shape{3, 100, 64},
                        Shape{1, 129, 96}, Shape{1, 257, 128}, Shape{2, 128, 128}, Shape{1, 1, 128},
                        Shape{1, 15, 128}, Shape{2, 191, 128}, Shape{1, 193, 64}, Shape{1, 320, 64}}) {
    if (rung.accepts(s)) all.push_back(s);
  }
  // For persistent blocks: more tiles, and more sequences, than the emulated device runs blocks at once.
  if (!rung.newer_too || rung.group->family == Family::causal) all.push_back({5, 300, 128});
  return all;
}

/// Every row of every output.
inline void expect_right(Problem& problem, const Rung& rung) {
  const Checked checked = problem.check(1 << 30);
  EXPECT_TRUE(checked.right);
  for (const OutputError& error : checked.errors)
    EXPECT_LE(error.relative, rung.tolerance) << error.tensor << ", largest error " << error.largest;
}
/// The same for each shape.
inline void expect_right(Device& device, const Rung& rung) {
  for (const Shape shape : shapes_with_tails(rung)) {
    SCOPED_TRACE(shape_text(rung.group->family, shape));
    Problem problem(device, rung, shape, static_cast<uint64_t>(shape.b));
    expect_right(problem, rung);
  }
}

inline std::string name_of(const testing::TestParamInfo<Rung>& info) {
  return info.param.name;
}
inline std::vector<Rung> rungs_of(Where where) {
  std::vector<Rung> found;
  for (const Rung& rung : rungs()) {
    if (rung.group->where == where && !rung.in_python) found.push_back(rung);
  }
  return found;
}

}  // namespace ladder
