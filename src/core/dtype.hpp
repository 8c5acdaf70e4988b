// Element types and the conversions of single values. Rounding is to nearest even, NaN stays NaN.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace fovea {

/// kF32 is 0: kernels ask for it at run time, and a comparison with 0 takes no register.
enum class DType : uint8_t { kF32, kF64, kF16, kBF16, kI64, kI32, kU8, kBool, kE4M3 };

/// What each type is called, and how DLPack tells it (fovea_dtype_code).
struct DTypeInfo {
  DType type;
  std::string_view name;
  int code, bits;
};
/// In the order in which messages list them.
inline constexpr std::array<DTypeInfo, 9> kDTypes = {{{DType::kF32, "float32", 2, 32},
                                                      {DType::kF16, "float16", 2, 16},
                                                      {DType::kBF16, "bfloat16", 4, 16},
                                                      {DType::kF64, "float64", 2, 64},
                                                      {DType::kI32, "int32", 0, 32},
                                                      {DType::kI64, "int64", 0, 64},
                                                      {DType::kBool, "bool", 6, 8},
                                                      {DType::kU8, "uint8", 1, 8},
                                                      {DType::kE4M3, "float8_e4m3fn", 10, 8}}};

constexpr const DTypeInfo& info_of(DType t) {
  size_t i = 0;
  while (i + 1 < kDTypes.size() && kDTypes[i].type != t) ++i;
  return kDTypes[i];
}
constexpr std::string_view name_of(DType t) {
  return info_of(t).name;
}

inline constexpr std::array<uint8_t, kDTypes.size()> kDTypeSizes = [] {
  std::array<uint8_t, kDTypes.size()> sizes{};
  for (const DTypeInfo& info : kDTypes)
    sizes[static_cast<size_t>(info.type)] = static_cast<uint8_t>(info.bits / 8);
  return sizes;
}();
/// Bytes of an element.
constexpr int64_t size_of(DType t) {
  return kDTypeSizes[static_cast<size_t>(t)];
}

/// Storage of the 16-bit types; arithmetic happens in float.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
/// Storage of float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, NaN where all seven are 1 (Micikevicius et al.,
/// "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, table 1).
struct E4M3 {
  uint8_t bits;
};

constexpr float to_float(float x) {
  return x;
}
constexpr float to_float(double x) {
  return static_cast<float>(x);
}
constexpr float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
constexpr float to_float(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

constexpr float to_float(E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = x.bits & 0x80u;
  if (magnitude == 0x7fu) return std::bit_cast<float>((sign << 24) | 0x7fc00000u);
  // Seven bits further left they are those of the float16 that is 256 times smaller.
  return 256 * to_float(F16{static_cast<uint16_t>((sign << 8) | (magnitude << 7))});
}

template <class T>
constexpr T from_float(float x);
template <>
constexpr float from_float<float>(float x) {
  return x;
}
template <>
constexpr double from_float<double>(float x) {
  return x;
}
template <>
constexpr Bf16 from_float<Bf16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
constexpr F16 from_float<F16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (magnitude >= 0x38800000u) {                                                // a normal float16
    const uint32_t rebased = magnitude - (112u << 23);
    return {static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13))};
  }
  // Adding 0.5 leaves the subnormal's 10 bits, correctly rounded, at the bottom of the mantissa of a float.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
}
/// What is too large becomes the largest finite number, 448, as cvt.rn.satfinite has it.
template <>
constexpr E4M3 from_float<E4M3>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // 448 and more
  if (magnitude >= 0x3c800000u) {  // a normal number, 2^-6 and more
    const uint32_t rebased = magnitude - (120u << 23);
    return {static_cast<uint8_t>(sign | ((rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20))};
  }
  // Beside 2^14 the last bit of a float is worth 2^-9, as that of a subnormal number is here.
  const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
  return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u))};
}
/// Rounds once: a double that is given to float first would be rounded twice for the 16-bit types, by at most
/// half a unit of float, which is below every tolerance here.
template <class T>
constexpr T from_double(double x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return from_float<T>(static_cast<float>(x));
  }
}

}  // namespace fovea
