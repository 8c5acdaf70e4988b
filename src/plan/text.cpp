// Shapes, types and numbers as text for messages.
#include "plan/text.hpp"

#include <array>
#include <charconv>

namespace fovea::plan {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + ")";
}

std::string shape_text(const TensorDesc& t) {
  return shape_text(std::span(t.shape).first(static_cast<size_t>(t.ndim)));
}

std::string strides_text(const TensorDesc& t) {
  return "strides " + shape_text(std::span(t.stride).first(static_cast<size_t>(t.ndim)));
}

std::string number_text(double x) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr;
  return {digits.data(), end};
}

std::string device_text(DeviceType type, int id) {
  return type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(id);
}

}  // namespace fovea::plan
