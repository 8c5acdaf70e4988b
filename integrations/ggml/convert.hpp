// Rows of ggml's types as rows of another.
#pragma once

#include <ggml.h>

#include <cstdint>

namespace fovea_ggml {

/// Rows [first, first + count) of heads [head, head + heads) of one sequence of K or V, as float32 or bfloat16: [heads][count][ne0].
void rows_as(ggml_type type, const ggml_tensor& tensor, int64_t batch, int64_t head, int64_t heads,
             int64_t first, int64_t count, int threads, void* out);

/// The queries in `type` (float16 or bfloat16), as (batch, query, head, element).
void queries_as(const ggml_tensor& q, ggml_type type, int threads, void* out);

}  // namespace fovea_ggml
