// The terms that a problem has as arguments of their own, as an expression: softcap, ALiBi, bias, mask and block mask. It has
// the functions of warp/expression.cuh, but finds out at run time which of the terms there are.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/warp/elements.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// T: the elements of a bias that is not float32.
template <class T>
struct ArgumentTerms {
  /// `p` outlives it.
  struct Head {
    const tile::AttentionParams& p;
    const tile::SequenceSpan& span;
    int b, h;

    __device__ __forceinline__ Head(const tile::AttentionParams& params, const tile::SequenceSpan& s,
                                    int batch, int head)
        : p(params), span(s), b(batch), h(head) {}
  };
  struct Query {
    int64_t bias = 0, mask = 0, block_mask = 0;  ///< element offsets of key 0
    float slope = 0;
    int diagonal;  ///< key position at which the query stands

    __device__ __forceinline__ Query(const Head& head, int q)
        : diagonal(q + head.span.used_k - head.span.used_q) {
      const tile::AttentionParams& p = head.p;
      if (p.bias.data != nullptr) bias = p.bias.offset(head.b, head.h, q, 0);
      if (p.mask.data != nullptr) mask = p.mask.offset(head.b, head.h, q, 0);
      if (p.block_mask.data != nullptr) block_mask = p.block_mask.offset(head.b, head.h, q / p.block_q, 0);
      if (p.alibi != nullptr) slope = p.alibi[head.b * p.alibi_batch + head.h * p.alibi_head];
    }
  };
  struct Key {
    int j;
    __device__ __forceinline__ Key(const Head&, int k) : j(k) {}
  };

  __device__ __forceinline__ static bool has_score(const tile::AttentionParams& p) {
    return p.softcap > 0 || p.alibi != nullptr || p.bias.data != nullptr;
  }
  __device__ __forceinline__ static bool has_sees(const tile::AttentionParams& p) {
    return p.mask.data != nullptr || p.block_mask.data != nullptr;
  }
  /// Whether the score's derivative by s may differ from 1. It is never negative.
  __device__ __forceinline__ static bool has_slope(const tile::AttentionParams& p) { return p.softcap > 0; }

  __device__ __forceinline__ static float score(const Head& head, const Query& query, const Key& key,
                                                float s) {
    const tile::AttentionParams& p = head.p;
    if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);
    if (p.alibi != nullptr) s -= query.slope * fabsf(static_cast<float>(query.diagonal - key.j));
    if (p.bias.data != nullptr)
      s += load_either<T>(p.bias.data, query.bias + key.j * p.bias.column, p.bias_is_f32());
    return s;
  }
  /// The score's derivative by s.
  __device__ __forceinline__ static float slope(const Head& head, float s) {
    if (head.p.softcap <= 0) return 1.0f;
    const float t = tanhf(s / head.p.softcap);
    return 1.0f - t * t;
  }
  /// Whether mask and block mask let the query see the key, and then `rest` does: an answer that passed through one more function
  /// would take registers.
  template <class Rest>
  __device__ __forceinline__ static bool sees(const Head& head, const Query& query, const Key& key,
                                              const Rest& rest) {
    const tile::AttentionParams& p = head.p;
    if (p.mask.data != nullptr && p.mask.data[query.mask + key.j * p.mask.column] == 0) return false;
    if (p.block_mask.data != nullptr &&
        p.block_mask.data[query.block_mask + (key.j / p.block_k) * p.block_mask.column] == 0) {
      return false;
    }
    return rest();
  }
};

/// In place of ArgumentTerms, where the problem's expression says the terms of the arguments as well.
struct NoArgumentTerms {
  struct Head {
    __device__ __forceinline__ Head(const tile::AttentionParams&, const tile::SequenceSpan&, int, int) {}
  };
  struct Query {
    __device__ __forceinline__ Query(const Head&, int) {}
  };
  struct Key {
    __device__ __forceinline__ Key(const Head&, int) {}
  };
  __device__ __forceinline__ static bool has_score(const tile::AttentionParams&) { return false; }
  __device__ __forceinline__ static bool has_sees(const tile::AttentionParams&) { return false; }
  __device__ __forceinline__ static bool has_slope(const tile::AttentionParams&) { return false; }
  __device__ __forceinline__ static float score(const Head&, const Query&, const Key&, float s) { return s; }
  __device__ __forceinline__ static float slope(const Head&, float) { return 1.0f; }
  template <class Rest>
  __device__ __forceinline__ static bool sees(const Head&, const Query&, const Key&, const Rest& rest) {
    return rest();
  }
};

}  // namespace fovea::cuda
