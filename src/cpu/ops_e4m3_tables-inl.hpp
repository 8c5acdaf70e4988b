// Elements of 8 bits as bfloat16 by VPERMI2B, which looks 64 of them up at once in a table of 128 bytes: one has the upper bytes of what
// they are without their sign, one the lower ones. So subnormals and NaN need nothing of their own.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_E4M3_TABLES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_E4M3_TABLES_INL_HPP
#undef FOVEA_CPU_OPS_E4M3_TABLES_INL_HPP
#else
#define FOVEA_CPU_OPS_E4M3_TABLES_INL_HPP
#endif

#include <algorithm>
#include <array>

#include "cpu/ops_row_elements-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX3

/// A float8_e4m3fn that is looked up in tables.
struct E4M3Code : E4M3 {};
template <>
struct TwoVectors<E4M3Code> : EvenAndOdd {};

using DCodes = hn::Repartition<uint8_t, D>;
using Codes = hn::Vec<DCodes>;
constexpr int64_t kCodes = 64;  // of a vector
static_assert(hn::MaxLanes(DCodes()) == kCodes);

HWY_INLINE Codes load_codes(const E4M3* row) {
  return hn::LoadU(DCodes(), reinterpret_cast<const uint8_t*>(row));
}
/// The first codes of a row, zeros behind them. Nothing behind them is read.
using FirstCodes = hn::Mask<DCodes>;
HWY_INLINE FirstCodes first_codes(int64_t count) {
  return hn::FirstN(DCodes(), static_cast<size_t>(count));
}
HWY_INLINE Codes load_codes(const E4M3* row, FirstCodes first) {
  return hn::MaskedLoad(first, DCodes(), reinterpret_cast<const uint8_t*>(row));
}

/// One byte of the bfloat16 that codes without their sign are.
template <int kShift>
inline constexpr std::array<uint8_t, 128> kBytesOfCodes = [] {
  std::array<uint8_t, 128> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>(from_float<Bf16>(to_float(E4M3{static_cast<uint8_t>(i)})).bits >> kShift);
  return bytes;
}();

/// The tables, in registers.
class E4M3Tables {
 public:
  HWY_INLINE E4M3Tables() : low_(kBytesOfCodes<0>), high_(kBytesOfCodes<8>), sign_(hn::Set(DCodes(), 0x80)) {}
  /// Bytes 16 i to 16 i + 15 of `codes` become bfloat16: those of the first eight are part i of `a`, the others part i of `b`.
  HWY_INLINE void halves(Codes codes, V& a, V& b) const {
    const DCodes d;
    const Codes low = look_up(codes, low_), high = hn::OrAnd(look_up(codes, high_), codes, sign_);
    a = hn::BitCast(D(), hn::InterleaveLower(d, low, high));
    b = hn::BitCast(D(), hn::InterleaveUpper(d, low, high));
  }
  /// The same of two rows: words of both, columns 16 i + 4 x to 16 i + 4 x + 3 in part i of words[x].
  HWY_INLINE void pairs(Codes row, Codes next, V* words) const {
    const DCodes d;
    halves(hn::InterleaveLower(d, row, next), words[0], words[1]);
    halves(hn::InterleaveUpper(d, row, next), words[2], words[3]);
  }

 private:
  struct Table {
    explicit HWY_INLINE Table(const std::array<uint8_t, 128>& bytes)
        : first(hn::LoadU(DCodes(), bytes.data())), second(hn::LoadU(DCodes(), bytes.data() + kCodes)) {}
    Codes first, second;
  };
  /// Bit 7 of an index counts for nothing. Written as asm so that it needs no compiler target of its own; runs only where CPUID reports
  /// AVX512_VBMI.
  static HWY_INLINE Codes look_up(Codes index, const Table& table) {
    asm("vpermi2b %2, %1, %0" : "+v"(index.raw) : "v"(table.first.raw), "v"(table.second.raw));
    return index;
  }

  Table low_, high_;
  Codes sign_;
};

/// Of 32 bfloat16, as floats.
HWY_INLINE V even_of(V halves) {
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::BitCast(DU(), halves)));
}
HWY_INLINE V odd_of(V halves) {
  return hn::BitCast(D(), hn::And(hn::BitCast(DU(), halves), hn::Set(DU(), 0xffff0000u)));
}

/// 64 codes in their order, which halves() leaves where it is: quarters of 16 are then 8 of the first and 8 of the second half.
HWY_INLINE Codes halves_in_turn(Codes codes) {
  alignas(64) static constexpr uint64_t kFrom[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const hn::Repartition<uint64_t, D> d;
  return hn::BitCast(DCodes(), hn::TableLookupLanes(hn::BitCast(d, codes), hn::SetTableIndices(d, kFrom)));
}
/// The words of `size` codes, zeros up to a multiple of 32: bfloat16, or floats in the order of TwoVectors.
template <bool kPairs>
HWY_INLINE void words_of_codes(const E4M3* row, int64_t size, float* words) {
  const E4M3Tables tables;
  constexpr int64_t kVectorsOfHalf = kPairs ? 1 : 2;
  const auto store_half = [&](V half) HWY_ATTR {
    if constexpr (kPairs) {
      hn::StoreU(half, D(), words);
    } else {
      hn::StoreU(even_of(half), D(), words);
      hn::StoreU(odd_of(half), D(), words + kLanes);
    }
    words += kVectorsOfHalf * kLanes;
  };
  for (int64_t c = 0; c < size; c += kCodes) {
    const int64_t count = size - c;
    const Codes codes = count < kCodes ? load_codes(row + c, first_codes(count)) : load_codes(row + c);
    V first, second;
    tables.halves(halves_in_turn(codes), first, second);
    store_half(first);
    if (count > kCodes / 2) store_half(second);
  }
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_E4M3_TABLES_INL_HPP
