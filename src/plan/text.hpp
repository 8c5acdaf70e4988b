// Wording of shapes, numbers and types in error messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/problem.hpp"

namespace fovea::plan {

/// "(2, 128, 8, 64)"; "()" for no dimension.
std::string shape_text(std::span<const int64_t> shape);
/// The shape of `t`.
std::string shape_text(const TensorDesc& t);
/// "strides (8192, 64, 1)", in elements.
std::string strides_text(const TensorDesc& t);
/// Shortest text that reads back as `x`; "nan", "inf".
std::string number_text(double x);
/// The digits of `x`.
inline std::string whole(int64_t x) {
  return std::to_string(x);
}
/// "cpu" or "cuda:1".
std::string device_text(DeviceType type, int id);

}  // namespace fovea::plan
