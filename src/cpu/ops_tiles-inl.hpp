// Masks and terms of a score tile; transposes and type conversions of rows.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_TILES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_TILES_INL_HPP
#undef FOVEA_CPU_OPS_TILES_INL_HPP
#else
#define FOVEA_CPU_OPS_TILES_INL_HPP
#endif

#include <cstring>
#include <limits>

#include "cpu/ops_vectors-inl.hpp"
#include "cpu/transpose_words.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

void mask_range(float* s, int64_t n, int32_t j0, const int32_t* begin, const int32_t* end) {
  const D d;
  const DI di;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < kVectors; ++v) {
    const auto first = hn::LoadU(di, begin + v * kLanes);
    const auto last = hn::LoadU(di, end + v * kLanes);
    for (int64_t j = 0; j < n; ++j) {
      float* at = s + j * kPanel + v * kLanes;
      const auto key = hn::Set(di, j0 + static_cast<int32_t>(j));
      const auto outside = hn::Or(hn::Lt(key, first), hn::Not(hn::Lt(key, last)));
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, outside), lowest, hn::LoadU(d, at)), d, at);
    }
  }
}

void column_max(const float* s, int64_t n, float* maxima) {
  const D d;
  for (int v = 0; v < kVectors; ++v) {
    V m = hn::LoadU(d, maxima + v * kLanes);
    for (int64_t j = 0; j < n; ++j) m = hn::Max(m, hn::LoadU(d, s + j * kPanel + v * kLanes));
    hn::StoreU(m, d, maxima + v * kLanes);
  }
}

/// tanh(|x|) = 1 - 2 / (exp(2|x|) + 1). That loses all digits near 0, so below 0.2 the odd series to x^7 is
/// used (error 2e-8).
HWY_INLINE V tanh_fast(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const V size = hn::Min(hn::Abs(x), hn::Set(d, 20.0f));
  const V e = exp2_fast<6>(hn::Mul(size, hn::Set(d, 2.88539008177793f)));
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  const V x2 = hn::Mul(size, size);
  V series = hn::MulAdd(x2, hn::Set(d, 62.0f / 2835), hn::Set(d, -17.0f / 315));
  series = hn::MulAdd(series, x2, hn::Set(d, 2.0f / 15));
  series = hn::MulAdd(series, x2, hn::Set(d, -1.0f / 3));
  series = hn::MulAdd(hn::Mul(series, x2), size, size);
  const V magnitude = hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.2f)), series, large);
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(magnitude, x), x);
}

void transpose(const float* src, int64_t ld_src, int64_t rows, int64_t cols, float* dst, int64_t ld_dst) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const D4 d;
  const hn::Repartition<double, D4> dd;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      const auto a0 = hn::LoadU(d, src + (r + 0) * ld_src + c);
      const auto a1 = hn::LoadU(d, src + (r + 1) * ld_src + c);
      const auto a2 = hn::LoadU(d, src + (r + 2) * ld_src + c);
      const auto a3 = hn::LoadU(d, src + (r + 3) * ld_src + c);
      const auto b0 = hn::BitCast(dd, hn::InterleaveLower(d, a0, a1));
      const auto b1 = hn::BitCast(dd, hn::InterleaveUpper(d, a0, a1));
      const auto b2 = hn::BitCast(dd, hn::InterleaveLower(d, a2, a3));
      const auto b3 = hn::BitCast(dd, hn::InterleaveUpper(d, a2, a3));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, b0, b2)), d, dst + (c + 0) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, b0, b2)), d, dst + (c + 1) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, b1, b3)), d, dst + (c + 2) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, b1, b3)), d, dst + (c + 3) * ld_dst + r);
    }
    for (; c < cols; ++c) {
      for (int64_t i = r; i < r + 4; ++i)
        std::memcpy(dst + c * ld_dst + i, src + i * ld_src + c, sizeof(float));
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) std::memcpy(dst + c * ld_dst + r, src + r * ld_src + c, sizeof(float));
  }
}

/// 16 x 16 words.
HWY_INLINE void transpose_block(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
#if HWY_TARGET == HWY_AVX3
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * ld_src);
  transpose_words(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(dst + i * ld_dst, r[i]);
#else
  transpose(src, ld_src, 16, 16, dst, ld_dst);
#endif
}

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
using DH = hn::Rebind<hwy::float16_t, D>;
#endif
using DB = hn::Rebind<hwy::bfloat16_t, D>;

HWY_INLINE V load_as_float(const float* p) {
  return hn::LoadU(D(), p);
}
HWY_INLINE V load_as_float(const F16* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  // Highway's emulation does not convert NaN and Inf of float16.
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = to_float(p[i]);
  return hn::LoadU(D(), values);
#else
  return hn::PromoteTo(D(), hn::LoadU(DH(), reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}
HWY_INLINE V load_as_float(const Bf16* p) {
  return hn::PromoteTo(D(), hn::LoadU(DB(), reinterpret_cast<const hwy::bfloat16_t*>(p)));
}

HWY_INLINE V load_as_float(const E4M3* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = to_float(p[i]);
  return hn::LoadU(D(), values);
#else
  // As in to_float(): the float16 that is 256 times smaller.
  const hn::Rebind<uint16_t, D> halves;
  const auto bits =
      hn::PromoteTo(halves, hn::LoadU(hn::Rebind<uint8_t, D>(), reinterpret_cast<const uint8_t*>(p)));
  const auto magnitude = hn::And(bits, hn::Set(halves, 0x7f));
  const auto is_nan = hn::VecFromMask(halves, hn::Eq(magnitude, hn::Set(halves, 0x7f)));
  const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(halves, 0x80)));
  const auto half =
      hn::Or(hn::Or(sign, hn::ShiftLeft<7>(magnitude)), hn::And(is_nan, hn::Set(halves, 0x7fff)));
  return hn::Mul(hn::Set(D(), 256.0f), hn::PromoteTo(D(), hn::BitCast(DH(), half)));
#endif
}

template <class T>
void widen(const T* src, int64_t count, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_as_float(src + i), D(), dst + i);
  for (; i < count; ++i) dst[i] = to_float(src[i]);
}

void to_float_any(const void* src, DType type, int64_t count, float* dst) {
  if (type == DType::kF16) {
    widen(static_cast<const F16*>(src), count, dst);
  } else if (type == DType::kBF16) {
    widen(static_cast<const Bf16*>(src), count, dst);
  } else if (type == DType::kE4M3) {
    widen(static_cast<const E4M3*>(src), count, dst);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  }
}

/// Whether no element has this exponent, that of infinities and NaN.
template <class T>
bool has_no_exponent(const void* row, int64_t count, T exponent) {
  const auto* data = static_cast<const T*>(row);
  const hn::ScalableTag<T> d;
  const auto special = hn::Set(d, exponent);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto found = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::And(hn::LoadU(d, data + i), special);
    found = hn::Or(found, hn::VecFromMask(d, hn::Eq(bits, special)));
  }
  bool any = !hn::AllFalse(d, hn::Ne(found, hn::Zero(d)));
  for (; i < count; ++i) any = any || static_cast<T>(data[i] & exponent) == exponent;
  return !any;
}

bool finite(const void* row, DType type, int64_t count) {
  switch (type) {
    case DType::kF16:
      return has_no_exponent<uint16_t>(row, count, 0x7c00);
    case DType::kBF16:
      return has_no_exponent<uint16_t>(row, count, 0x7f80);
    case DType::kE4M3:
      return has_no_exponent<uint8_t>(row, count, 0x7f);
    default:
      return has_no_exponent<uint32_t>(row, count, 0x7f800000);
  }
}

template <class T>
float sum_of_squares_of(const T* row, int64_t count) {
  V sums[2] = {hn::Zero(D()), hn::Zero(D())};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    for (int64_t x = 0; x < 2; ++x) {
      const V values = load_as_float(row + i + x * kLanes);
      sums[x] = hn::MulAdd(values, values, sums[x]);
    }
  }
  float sum = hn::GetLane(hn::SumOfLanes(D(), hn::Add(sums[0], sums[1])));
  for (; i < count; ++i) sum += to_float(row[i]) * to_float(row[i]);
  return sum;
}

float sum_of_squares(const void* row, DType type, int64_t count) {
  switch (type) {
    case DType::kF16:
      return sum_of_squares_of(static_cast<const F16*>(row), count);
    case DType::kBF16:
      return sum_of_squares_of(static_cast<const Bf16*>(row), count);
    case DType::kE4M3:
      return sum_of_squares_of(static_cast<const E4M3*>(row), count);
    default:
      return sum_of_squares_of(static_cast<const float*>(row), count);
  }
}

/// As from_float<Bf16>, element by element.
void narrow(const float* src, int64_t count, Bf16* dst) {
  const D d;
  const hn::RebindToUnsigned<D> bits;
  const hn::RebindToSigned<D> words;
  const hn::Rebind<uint16_t, D> halves;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const V x = hn::LoadU(d, src + i);
    const auto u = hn::BitCast(bits, x);
    const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(bits, 1));
    const auto rounded = hn::Add(hn::Add(u, hn::Set(bits, 0x7fff)), odd);
    const auto quiet = hn::Or(u, hn::Set(bits, 0x400000));
    const auto chosen = hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(x)), quiet, rounded);
    const auto high = hn::BitCast(words, hn::ShiftRight<16>(chosen));
    hn::StoreU(hn::DemoteTo(halves, high), halves, reinterpret_cast<uint16_t*>(dst + i));
  }
  for (; i < count; ++i) dst[i] = from_float<Bf16>(src[i]);
}

void from_float_any(const float* src, int64_t count, DType type, void* dst) {
  if (type == DType::kF16) {
    auto* out = static_cast<F16*>(dst);
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<F16>(src[i]);
  } else if (type == DType::kBF16) {
    narrow(src, count, static_cast<Bf16*>(dst));
  } else {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  }
}

void interleave(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* words) {
  if (b == nullptr) {
    for (int64_t c = 0; c < count; ++c) words[c] = a[c];
  } else {
    for (int64_t c = 0; c < count; ++c)
      words[c] = static_cast<uint32_t>(a[c]) | (static_cast<uint32_t>(b[c]) << 16);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_TILES_INL_HPP
