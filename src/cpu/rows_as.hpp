// Rows of elements of 8 bits as those that the products take.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.hpp"

namespace fovea::cpu {

/// What each float8_e4m3fn is in T, which has all of its values.
template <class T>
inline constexpr std::array<T, 256> kE4M3As = [] {
  std::array<T, 256> values{};
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = from_float<T>(to_float(E4M3{static_cast<uint8_t>(i)}));
  return values;
}();

template <class T>
void copy_e4m3_as(const uint8_t* from, int64_t size, char* to) {
  auto* const out = reinterpret_cast<T*>(to);
  for (int64_t c = 0; c < size; ++c) out[c] = kE4M3As<T>[from[c]];
}

/// Copies a row of `size` elements of type `from_type` as those of type `as`: the same, or what float8_e4m3fn becomes.
inline void copy_row_as(const char* from, DType from_type, int64_t size, DType as, char* to) {
  if (from_type == as) {
    std::memcpy(to, from, static_cast<size_t>(size * size_of(as)));
    return;
  }
  const auto* const bytes = reinterpret_cast<const uint8_t*>(from);
  if (as == DType::kBF16) return copy_e4m3_as<Bf16>(bytes, size, to);
  if (as == DType::kF16) return copy_e4m3_as<F16>(bytes, size, to);
  copy_e4m3_as<float>(bytes, size, to);
}

}  // namespace fovea::cpu
