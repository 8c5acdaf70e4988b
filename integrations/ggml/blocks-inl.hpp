// Numbers of blocks in vectors.
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

/// The numbers that vector x of a block's halves stands for, kIq4Numbers of them.
template <class Halves>
HWY_INLINE V iq4_numbers(Halves halves) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(D(), kIq4Numbers[hn::GetLane(halves)]);
#else
  const hn::Full128<uint8_t> all;
  const auto table = hn::LoadU(all, reinterpret_cast<const uint8_t*>(kIq4Numbers));
  const auto bytes = hn::BitCast(hn::Rebind<int8_t, D>(), hn::TableLookupBytes(table, halves));
  return hn::ConvertTo(D(), hn::PromoteTo(DI(), bytes));
#endif
}

/// A block of a format.
template <BlockType kType>
struct Block {
  static constexpr int64_t kBytes = block_bytes(kType);
  static constexpr bool kHasLeast = has_least(kType);

  /// Vector x of the numbers.
  static HWY_INLINE V numbers(const uint8_t* block, int x) {
    const uint8_t* data = block + numbers_at(kType);
    if constexpr (kType == BlockType::kQ8_0) {
      const auto* bytes = reinterpret_cast<const int8_t*>(data) + x * kLanes;
      return hn::ConvertTo(D(), hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<int8_t, D>(), bytes)));
    } else {
      constexpr int kHalf = kVectors / 2;
      const hn::Rebind<uint8_t, D> du;
      const auto pairs = hn::LoadU(du, data + x % kHalf * kLanes);
      if constexpr (kType == BlockType::kIq4Nl)
        return iq4_numbers(x < kHalf ? hn::And(pairs, hn::Set(du, 15)) : hn::ShiftRight<4>(pairs));
      const auto both = hn::PromoteTo(DI(), pairs);
      const auto bits = x < kHalf ? hn::And(both, hn::Set(DI(), 15)) : hn::ShiftRight<4>(both);
      return hn::ConvertTo(D(), hn::Add(bits, rest_of(block, x)));
    }
  }

 private:
  /// What is added to the halves.
  static HWY_INLINE hn::Vec<DI> rest_of(const uint8_t* block, int x) {
    const auto without = hn::Set(DI(), -middle_of(kType));
    if constexpr (!has_fifth_bits(kType)) return without;
    uint32_t fifths;
    std::memcpy(&fifths, block + fifths_at(kType), sizeof(fifths));
    const auto ours = hn::Set(DI(), static_cast<int32_t>(fifths >> (x * kLanes)));
    const auto lane = hn::Shl(hn::Set(DI(), 1), hn::Iota(DI(), 0));
    return hn::IfThenElse(hn::TestBit(ours, lane), hn::Set(DI(), 16 - middle_of(kType)), without);
  }
};

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_GGML_BLOCKS_INL_HPP
