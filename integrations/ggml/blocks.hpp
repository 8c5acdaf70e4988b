// Conversions in vectors for the types that caches are usually kept in.
#pragma once

#include <cstdint>

namespace fovea_ggml {

/// Elements of a block of Q8_0 and of Q4_0, and its bytes: a float16 scale, and 32 numbers of 8 or of 4 bits.
inline constexpr int64_t kBlockElements = 32, kQ8Bytes = 34, kQ4Bytes = 18;

/// `count` elements; of blocks whole ones: scale * number, for Q4_0 scale * (number - 8), where byte i holds element i in its low half and
/// element i + 16 in its high half.
using ToFloat = void (*)(const void* in, float* out, int64_t count);
/// The same, rounded to nearest even.
using ToBfloat16 = void (*)(const void* in, uint16_t* out, int64_t count);

struct Conversions {
  ToFloat f16, q8_0, q4_0;
  ToBfloat16 from_float;
  ToBfloat16 bf16_of_q8_0,
      bf16_of_q4_0;  ///< null where a processor lacks instructions for bfloat16: through float32
};

/// The fastest of this processor.
const Conversions& conversions();

}  // namespace fovea_ggml
