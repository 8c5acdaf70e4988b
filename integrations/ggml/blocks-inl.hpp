// Numbers of blocks of Q8_0 and Q4_0 in vectors.
//
// Included once per instruction set: the guard lets it in again for each.
#if defined(FOVEA_GGML_BLOCKS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_GGML_BLOCKS_INL_HPP
#undef FOVEA_GGML_BLOCKS_INL_HPP
#else
#define FOVEA_GGML_BLOCKS_INL_HPP
#endif

#include <hwy/highway.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "integrations/ggml/blocks.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea_ggml::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;  // half of a block at most
using DI = hn::RebindToSigned<D>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = hn::MaxLanes(D());
constexpr int kVectors = kBlockElements / kLanes;  ///< of a block

/// A float16 as float32: its bits are moved into place, which also serves subnormal numbers after the multiplication.
inline float scale_of(const uint8_t* block) {
  uint16_t half;
  std::memcpy(&half, block, sizeof(half));
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  constexpr float kRebias = 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * kRebias) | sign);
}

/// The float16 at p. Highway's own conversion takes infinity for a number where the processor has none.
HWY_INLINE V from_halves(const uint16_t* p) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
  const hn::Rebind<hwy::float16_t, D> halves;
  return hn::PromoteTo(D(), hn::LoadU(halves, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  float x[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) x[i] = scale_of(reinterpret_cast<const uint8_t*>(p + i));
  return hn::LoadU(D(), x);
#endif
}

/// Vector x of a block's numbers, without its scale.
struct Q8Block {
  static constexpr int64_t kBytes = kQ8Bytes;
  static HWY_INLINE V numbers(const uint8_t* block, int x) {
    const auto* bytes = reinterpret_cast<const int8_t*>(block + sizeof(uint16_t));
    return hn::ConvertTo(D(), hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<int8_t, D>(), bytes + x * kLanes)));
  }
};
struct Q4Block {
  static constexpr int64_t kBytes = kQ4Bytes;
  static HWY_INLINE V numbers(const uint8_t* block, int x) {
    constexpr int kHalf = kVectors / 2;
    const uint8_t* pairs = block + sizeof(uint16_t) + x % kHalf * kLanes;
    const auto both = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<uint8_t, D>(), pairs));
    const auto bits = x < kHalf ? hn::And(both, hn::Set(DI(), 15)) : hn::ShiftRight<4>(both);
    return hn::ConvertTo(D(), hn::Sub(bits, hn::Set(DI(), 8)));
  }
};

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_GGML_BLOCKS_INL_HPP
