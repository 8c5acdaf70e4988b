// Conversions in vectors: ggml's own functions are plain loops, and take as long as the attention of a query, or a prompt on tiles.
#include "blocks.hpp"

// Leaves out targets that bring nothing over their neighbours here, and those whose vectors have a size that the compiler does not know.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/ggml/blocks.cpp"
// Highway compiles the code from here to HWY_AFTER_NAMESPACE once for each instruction set.
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <bit>
#include <cstring>

#include "integrations/ggml/blocks-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea_ggml::HWY_NAMESPACE {

template <BlockType kType>
void to_float(const void* blocks, float* out, int64_t count) {
  using OfType = Block<kType>;
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t i = 0; i < count; i += kBlockElements, block += OfType::kBytes) {
    const V scale = hn::Set(D(), scale_of(block));
    const V least = OfType::kHasLeast ? hn::Set(D(), scale_of(block + sizeof(uint16_t))) : hn::Zero(D());
    for (int x = 0; x < kVectors; ++x) {
      const V product = hn::Mul(OfType::numbers(block, x), scale);
      hn::StoreU(OfType::kHasLeast ? hn::Add(product, least) : product, D(), out + i + x * kLanes);
    }
  }
}

/// A float32 as bfloat16, rounded to nearest even.
inline uint16_t rounded(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void bf16(const void* floats, uint16_t* out, int64_t count) {
  const D d;
  const auto* in = static_cast<const float*>(floats);
  const hn::RebindToUnsigned<D> du;
  int64_t x = 0;
  for (; x + kLanes <= count; x += kLanes) {
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
  const auto* in = static_cast<const uint16_t*>(halves);
  int64_t x = 0;
  for (; x + kLanes <= count; x += kLanes) hn::StoreU(from_halves(in + x), D(), out + x);
  for (; x < count; ++x) out[x] = scale_of(reinterpret_cast<const uint8_t*>(in + x));
}

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fovea_ggml {
namespace {

#if defined(__x86_64__)

// Instructions that Highway's targets here lack. They take subnormal numbers for zeros.
#define FOVEA_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

FOVEA_BFLOAT16 void bf16_by_instruction(const void* floats, uint16_t* out, int64_t count) {
  const auto* in = static_cast<const float*>(floats);
  for (int64_t x = 0; x < count; x += 32) {
    const int64_t left = count - x;
    const __mmask32 there = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    const auto low = static_cast<__mmask16>(there), high = static_cast<__mmask16>(there >> 16);
    const __m512 a = _mm512_maskz_loadu_ps(low, in + x), b = _mm512_maskz_loadu_ps(high, in + x + 16);
    _mm512_mask_storeu_epi16(out + x, there, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
  }
}

/// scale * numbers of a block, whose first two bytes are the scale.
FOVEA_BFLOAT16 inline void store_block(const uint8_t* block, __m512i first, __m512i second, uint16_t* out) {
  uint16_t half;
  std::memcpy(&half, block, sizeof(half));
  const __m512 scale = _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(half)));
  const __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(first), scale);
  const __m512 b = _mm512_mul_ps(_mm512_cvtepi32_ps(second), scale);
  _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

FOVEA_BFLOAT16 inline __m128i load16(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

FOVEA_BFLOAT16 void bf16_of_q8_0(const void* blocks, uint16_t* out, int64_t count) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t i = 0; i < count; i += kBlockElements, block += block_bytes(BlockType::kQ8_0)) {
    const uint8_t* numbers = block + sizeof(uint16_t);
    store_block(block, _mm512_cvtepi8_epi32(load16(numbers)), _mm512_cvtepi8_epi32(load16(numbers + 16)),
                out + i);
  }
}

FOVEA_BFLOAT16 void bf16_of_q4_0(const void* blocks, uint16_t* out, int64_t count) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  const __m512i low = _mm512_set1_epi32(15), middle = _mm512_set1_epi32(8);
  for (int64_t i = 0; i < count; i += kBlockElements, block += block_bytes(BlockType::kQ4_0)) {
    const __m512i both = _mm512_cvtepu8_epi32(load16(block + sizeof(uint16_t)));
    store_block(block, _mm512_sub_epi32(_mm512_and_si512(both, low), middle),
                _mm512_sub_epi32(_mm512_srli_epi32(both, 4), middle), out + i);
  }
}

#undef FOVEA_BFLOAT16

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

Conversions best_conversions() {
  Conversions c{FOVEA_BEST(f16),
                {FOVEA_BEST(to_float<BlockType::kQ8_0>), FOVEA_BEST(to_float<BlockType::kQ4_0>),
                 FOVEA_BEST(to_float<BlockType::kQ4_1>), FOVEA_BEST(to_float<BlockType::kQ5_0>),
                 FOVEA_BEST(to_float<BlockType::kQ5_1>), FOVEA_BEST(to_float<BlockType::kIq4Nl>)},
                FOVEA_BEST(bf16),
                {}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    c.from_float = bf16_by_instruction;
    c.bf16_of_blocks[static_cast<int>(BlockType::kQ8_0)] = bf16_of_q8_0;
    c.bf16_of_blocks[static_cast<int>(BlockType::kQ4_0)] = bf16_of_q4_0;
  }
#endif
  return c;
}

}  // namespace

const Conversions& conversions() {
  static const Conversions best = best_conversions();
  return best;
}

}  // namespace fovea_ggml
#endif
