// Elements of arrays: names of their types, conversions, and arrays as the library's tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/fovea.hpp"
#include "io/array.hpp"

namespace fovea::cli {

using io::Array;
using io::ElementType;

/// "float16", "float32" ...: the names numpy uses.
const char* type_name(ElementType type);
/// From the options: f16, float16, bf16, bfloat16, f32, float32, f64, float64, e4m3, float8_e4m3fn.
std::optional<ElementType> type_from_option(std::string_view name);
bool is_real(ElementType type);
/// The type of o beside q of `type`, where nothing else is asked: bfloat16 for 8 bits, else the same.
ElementType output_type(ElementType type);
/// Largest relative error of one rounding to a real type.
double unit_roundoff(ElementType type);

/// A tensor over the array's elements, with the array's shape or another of as many elements.
Tensor view(const Array& array);
Tensor view(const Array& array, std::span<const int64_t> shape);

/// An array of a real type in another, each element rounded once, to nearest, ties to even. Moves the array
/// through when it has the type already.
Array converted(Array array, ElementType type);

std::vector<float> to_floats(const Array& array);
std::vector<double> to_doubles(const Array& array);

float decode_e4m3(uint8_t code);
float decode_float16(uint16_t code);
float decode_bfloat16(uint16_t code);
uint8_t encode_e4m3(double value);
uint16_t encode_float16(double value);
uint16_t encode_bfloat16(double value);

}  // namespace fovea::cli
