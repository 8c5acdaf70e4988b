// Elements of tensors as numbers: written from the definitions of the formats, independent of the library's own
// conversions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fovea/fovea.h"

namespace fovea::verify {

enum class Type : uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kU8, kBool, kE4M3 };

constexpr size_t size_of(Type t) {
  switch (t) {
    case Type::kF64:
    case Type::kI64:
      return 8;
    case Type::kF32:
    case Type::kI32:
      return 4;
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kU8:
    case Type::kBool:
    case Type::kE4M3:
      break;
  }
  return 1;
}

constexpr const char* name_of(Type t) {
  constexpr const char* kNames[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool", "e4m3"};
  return kNames[static_cast<size_t>(t)];
}

constexpr fovea_dtype dtype_of(Type t) {
  const auto bits = static_cast<uint8_t>(8 * size_of(t));
  switch (t) {
    case Type::kF64:
    case Type::kF32:
    case Type::kF16:
      return {FOVEA_CODE_FLOAT, bits, 1};
    case Type::kBF16:
      return {FOVEA_CODE_BFLOAT, bits, 1};
    case Type::kI64:
    case Type::kI32:
      return {FOVEA_CODE_INT, bits, 1};
    case Type::kU8:
      return {FOVEA_CODE_UINT, bits, 1};
    case Type::kE4M3:
      return {FOVEA_CODE_FLOAT8_E4M3FN, bits, 1};
    case Type::kBool:
      break;
  }
  return {FOVEA_CODE_BOOL, bits, 1};
}

/// Largest relative error of one rounding to the type.
constexpr double unit_roundoff(Type t) {
  switch (t) {
    case Type::kF64:
      return 0x1p-53;
    case Type::kF32:
      return 0x1p-24;
    case Type::kF16:
      return 0x1p-11;
    case Type::kBF16:
      return 0x1p-8;
    case Type::kE4M3:
      return 0x1p-4;
    default:
      return 0;
  }
}

/// Largest finite value, and the distance of the smallest values.
constexpr double largest(Type t) {
  if (t == Type::kF16) return 65504;
  if (t == Type::kF64) return std::numeric_limits<double>::max();
  return t == Type::kBF16 ? 0x1.fep127 : double{std::numeric_limits<float>::max()};
}
constexpr double smallest_step(Type t) {
  if (t == Type::kF16) return 0x1p-24;
  return t == Type::kF64 ? 0x1p-1022 : 0x1p-126;  // backends may flush float32 and bfloat16 below this to 0
}

constexpr double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

/// A binary format of 16 bits whose normal numbers have exponents from `min_exponent` to `max_exponent`.
struct Format16 {
  int mantissa_bits, min_exponent, max_exponent;
  constexpr uint32_t infinity() const {
    return static_cast<uint32_t>(max_exponent - min_exponent + 2) << mantissa_bits;
  }
};
inline constexpr Format16 kF16Format = {10, -14, 15};
inline constexpr Format16 kBF16Format = {7, -126, 127};

/// To nearest, ties to even; one rounding.
inline uint16_t encode(double x, Format16 f) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const auto sign = static_cast<uint32_t>(bits >> 63) << 15;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | f.infinity() | (1u << (f.mantissa_bits - 1)));
  const int exponent = std::max(static_cast<int>(bits >> 52 & 0x7ff) - 1023, f.min_exponent);
  if (exponent > f.max_exponent) return static_cast<uint16_t>(sign | f.infinity());
  const double mantissa = std::nearbyint(std::abs(x) * power_of_two(f.mantissa_bits - exponent));
  // The hidden bit of a normal number carries into the exponent field, as does rounding up to the next power of two.
  const uint32_t code =
      (static_cast<uint32_t>(exponent - f.min_exponent) << f.mantissa_bits) + static_cast<uint32_t>(mantissa);
  return static_cast<uint16_t>(sign | std::min(code, f.infinity()));
}

inline double decode(uint16_t code, Format16 f) {
  const double sign = code & 0x8000u ? -1.0 : 1.0;
  const uint32_t magnitude = code & 0x7fffu;
  if (magnitude > f.infinity()) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == f.infinity()) return sign * std::numeric_limits<double>::infinity();
  const auto field = static_cast<int>(magnitude >> f.mantissa_bits);
  const uint32_t hidden = field == 0 ? 0u : 1u << f.mantissa_bits;
  const uint32_t mantissa = (magnitude & ((1u << f.mantissa_bits) - 1)) + hidden;
  return sign * mantissa * power_of_two(std::max(field, 1) - 1 + f.min_exponent - f.mantissa_bits);
}

/// float8_e4m3fn: exponents from -6 to 8, no infinities, NaN where all bits but the sign are 1. Numbers beyond 448 become that.
inline constexpr int kE4M3Mantissa = 3, kE4M3MinExponent = -6;
inline uint8_t encode_e4m3(double x) {
  const auto sign = static_cast<uint8_t>(std::signbit(x) ? 0x80 : 0);
  if (std::isnan(x)) return sign | 0x7f;
  if (std::abs(x) >= 448) return sign | 0x7e;
  const int exponent = x == 0 ? kE4M3MinExponent : std::max(std::ilogb(x), kE4M3MinExponent);
  const double mantissa = std::nearbyint(std::abs(x) * power_of_two(kE4M3Mantissa - exponent));
  const int code = ((exponent - kE4M3MinExponent) << kE4M3Mantissa) + static_cast<int>(mantissa);
  return static_cast<uint8_t>(sign | code);
}
inline double decode_e4m3(uint8_t code) {
  const int magnitude = code & 0x7f, field = magnitude >> kE4M3Mantissa;
  if (magnitude == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const int mantissa = (magnitude & 7) + (field == 0 ? 0 : 8);
  const double size = mantissa * power_of_two(std::max(field, 1) - 1 + kE4M3MinExponent - kE4M3Mantissa);
  return code & 0x80 ? -size : size;
}

template <class T>
T read_as(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
void write_as(void* to, T x) {
  std::memcpy(to, &x, sizeof x);
}

inline double load(const void* from, Type t) {
  switch (t) {
    case Type::kF64:
      return read_as<double>(from);
    case Type::kF32:
      return static_cast<double>(read_as<float>(from));
    case Type::kF16:
      return decode(read_as<uint16_t>(from), kF16Format);
    case Type::kBF16:
      return decode(read_as<uint16_t>(from), kBF16Format);
    case Type::kI64:
      return static_cast<double>(read_as<int64_t>(from));
    case Type::kI32:
      return read_as<int32_t>(from);
    case Type::kE4M3:
      return decode_e4m3(read_as<uint8_t>(from));
    case Type::kU8:
    case Type::kBool:
      break;
  }
  return read_as<uint8_t>(from);
}

inline void store(void* to, Type t, double x) {
  switch (t) {
    case Type::kF64:
      return write_as(to, x);
    case Type::kF32:
      return write_as(to, static_cast<float>(x));
    case Type::kF16:
      return write_as(to, encode(x, kF16Format));
    case Type::kBF16:
      return write_as(to, encode(x, kBF16Format));
    case Type::kI64:
      return write_as(to, static_cast<int64_t>(x));
    case Type::kI32:
      return write_as(to, static_cast<int32_t>(x));
    case Type::kU8:
    case Type::kBool:
      return write_as(to, static_cast<uint8_t>(x));
    case Type::kE4M3:
      return write_as(to, encode_e4m3(x));
  }
}

/// `x` after one rounding to the type.
inline double rounded(double x, Type t) {
  if (t == Type::kF16) return decode(encode(x, kF16Format), kF16Format);
  if (t == Type::kBF16) return decode(encode(x, kBF16Format), kBF16Format);
  if (t == Type::kE4M3) return decode_e4m3(encode_e4m3(x));
  return t == Type::kF32 ? static_cast<double>(static_cast<float>(x)) : x;
}

}  // namespace fovea::verify
