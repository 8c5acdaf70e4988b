// Conversions in vectors for the types that caches are usually kept in.
#pragma once

#include <cstdint>

namespace fovea_ggml {

/// Elements of a block of Q8_0 and of Q4_0, and its bytes: a float16 scale, and 32 numbers of 8 or of 4 bits.
inline constexpr int64_t kBlockElements = 32, kQ8Bytes = 34, kQ4Bytes = 18;

/// `count` elements, whole blocks: scale * number.
void q8_0_to_float(const void* blocks, float* out, int64_t count);
/// scale * (number - 8); byte i holds element i in its low half, element i + 16 in its high half.
void q4_0_to_float(const void* blocks, float* out, int64_t count);

/// `count` float16.
void f16_to_float(const void* halves, float* out, int64_t count);
/// Rounds to nearest even.
void float_to_bf16(const float* in, uint16_t* out, int64_t count);

}  // namespace fovea_ggml
