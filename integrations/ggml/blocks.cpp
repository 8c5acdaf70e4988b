// Conversions in vectors: ggml's own functions are plain loops, and take as long as the attention of a query, or a prompt on tiles.
#include "blocks.hpp"

// Leaves out targets that bring nothing over their neighbours here.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/ggml/blocks.cpp"
// Highway compiles the code from here to HWY_AFTER_NAMESPACE once for each instruction set.
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <bit>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace fovea_ggml::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;  // half of a block at most
using DI = hn::RebindToSigned<D>;
using DB = hn::Rebind<int8_t, D>;

/// A float16 as float32: its bits are moved into place, which also serves subnormal numbers after the multiplication.
inline float scale_of(const uint8_t* block) {
  uint16_t half;
  std::memcpy(&half, block, sizeof(half));
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  constexpr float kRebias = 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * kRebias) | sign);
}

void q8_0(const void* blocks, float* out, int64_t count) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t i = 0; i < count; i += kBlockElements, block += kQ8Bytes) {
    const auto scale = hn::Set(d, scale_of(block));
    const auto* numbers = reinterpret_cast<const int8_t*>(block + sizeof(uint16_t));
    for (int64_t x = 0; x < kBlockElements; x += lanes) {
      const auto number = hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(DB(), numbers + x)));
      hn::StoreU(hn::Mul(number, scale), d, out + i + x);
    }
  }
}

void q4_0(const void* blocks, float* out, int64_t count) {
  const D d;
  constexpr int64_t kHalf = kBlockElements / 2;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* block = static_cast<const uint8_t*>(blocks);
  const auto low = hn::Set(DI(), 15), middle = hn::Set(DI(), 8);
  for (int64_t i = 0; i < count; i += kBlockElements, block += kQ4Bytes) {
    const auto scale = hn::Set(d, scale_of(block));
    const uint8_t* pairs = block + sizeof(uint16_t);
    for (int64_t x = 0; x < kHalf; x += lanes) {
      const auto both = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<uint8_t, D>(), pairs + x));
      const auto first = hn::Sub(hn::And(both, low), middle);
      const auto second = hn::Sub(hn::ShiftRight<4>(both), middle);
      hn::StoreU(hn::Mul(hn::ConvertTo(d, first), scale), d, out + i + x);
      hn::StoreU(hn::Mul(hn::ConvertTo(d, second), scale), d, out + i + kHalf + x);
    }
  }
}

/// A float32 as bfloat16, rounded to nearest even.
inline uint16_t rounded(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void bf16(const float* in, uint16_t* out, int64_t count) {
  const D d;
  const hn::RebindToUnsigned<D> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t x = 0;
  for (; x + lanes <= count; x += lanes) {
    const auto value = hn::LoadU(d, in + x);
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto half = hn::Add(odd, hn::Set(du, 0x7fff));
    const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
    const auto raised = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, hn::Add(bits, half));
    hn::StoreU(hn::TruncateTo(hn::Rebind<uint16_t, D>(), hn::ShiftRight<16>(raised)),
               hn::Rebind<uint16_t, D>(), out + x);
  }
  for (; x < count; ++x) out[x] = rounded(in[x]);
}

void f16(const void* halves, float* out, int64_t count) {
  const D d;
  const hn::Rebind<hwy::float16_t, D> dh;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* in = static_cast<const uint8_t*>(halves);
  int64_t x = 0;
  for (; x + lanes <= count; x += lanes) {
    const auto half = hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(in) + x);
    hn::StoreU(hn::PromoteTo(d, half), d, out + x);
  }
  for (; x < count; ++x) out[x] = scale_of(in + 2 * x);
}

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea_ggml {
namespace {

using Convert = void (*)(const void*, float*, int64_t);

#if defined(__x86_64__)
template <class Function>
Function* best(Function* avx512, Function* avx2, Function* any) {
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? avx512 : __builtin_cpu_supports("avx2") ? avx2 : any;
}
#define FOVEA_BEST(function) best(N_AVX3::function, N_AVX2::function, HWY_STATIC_DISPATCH(function))
#else
#define FOVEA_BEST(function) HWY_STATIC_DISPATCH(function)
#endif

}  // namespace

void q8_0_to_float(const void* blocks, float* out, int64_t count) {
  static const Convert convert = FOVEA_BEST(q8_0);
  convert(blocks, out, count);
}

void q4_0_to_float(const void* blocks, float* out, int64_t count) {
  static const Convert convert = FOVEA_BEST(q4_0);
  convert(blocks, out, count);
}

void f16_to_float(const void* halves, float* out, int64_t count) {
  static const Convert convert = FOVEA_BEST(f16);
  convert(halves, out, count);
}

void float_to_bf16(const float* in, uint16_t* out, int64_t count) {
  static const auto convert = FOVEA_BEST(bf16);
  convert(in, out, count);
}

}  // namespace fovea_ggml
#endif
