// Attention as the textbook writes it, in float32: what `fovea demo` compares the library with.
#pragma once

#include <cstdint>
#include <span>

namespace fovea::cli {

struct TextbookShape {
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v;
};

/// Attention as a textbook writes it, for comparison: for each head the whole N x N matrix of scores in
/// memory, three loops for each product, one thread. All arrays are compact, (batch, seqlen, heads, size).
void textbook_attention(const TextbookShape& shape, float scale, std::span<const float> q,
                        std::span<const float> k, std::span<const float> v, std::span<float> o);

}  // namespace fovea::cli
