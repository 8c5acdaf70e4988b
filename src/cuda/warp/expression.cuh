// The user's expressions of the score, and of which keys a query sees: none, in the kernels that the library holds. Kernels that are
// compiled at run time include the text of expr/cuda_text.hpp in place of this file, which has the same names.
#pragma once

#include <cuda_bf16.h>

#include "tile/expression_tensors.hpp"

namespace fovea::cuda {

struct Expression {
  static constexpr bool kHasScore = false, kHasSees = false;
  /// Whether score and sees say softcap, slopes, bias and masks as well: then nobody else is to.
  static constexpr bool kHasTerms = false;
  /// Whether the score's derivative by s is 1 everywhere.
  static constexpr bool kSlopeIsOne = true;
  /// Whether Query or Key reads tensors by the query or the key without looking whether these are inside.
  static constexpr bool kReadsByQuery = false, kReadsByKey = false;
  /// Whether add_gradients does anything.
  static constexpr bool kHasGradients = false;
  /// Whether score reads an element of a tensor for each pair whose rows, of one query, lie in one piece. Who has loaded
  /// these asks score_with in place of score.
  static constexpr bool kReadsPairs = false;
  using PairElement = __nv_bfloat16;

  /// What depends on the sequence and the head alone. `t` outlives it.
  struct Head {
    __device__ __forceinline__ Head(const tile::ExpressionTensors& t, int b, int h, int hk, int nq, int nk) {}
  };
  /// What depends on the query, and not on the key.
  struct Query {
    __device__ __forceinline__ Query(const Head& head, int q) {}
    /// Whether sees cannot tell it from the other.
    __device__ __forceinline__ bool alike(const Query& other) const { return true; }
  };
  /// What depends on the key, and not on the query.
  struct Key {
    __device__ __forceinline__ Key(const Head& head, int k) {}
    __device__ __forceinline__ bool alike(const Key& other) const { return true; }
  };

  __device__ __forceinline__ static float score(const Head&, const Query&, const Key&, float s) { return s; }
  /// The score, and its derivative by s.
  __device__ __forceinline__ static float score(const Head&, const Query&, const Key&, float s,
                                                float& slope) {
    slope = 1.0f;
    return s;
  }
  __device__ __forceinline__ static float score_with(const Head&, const Query&, const Key&, float s,
                                                     float pair) {
    return s;
  }
  __device__ __forceinline__ static float score_with(const Head&, const Query&, const Key&, float s,
                                                     float pair, float& slope) {
    slope = 1.0f;
    return s;
  }
  /// The element of key 0, and how far those of the next query are behind it.
  __device__ __forceinline__ static const PairElement* pair_row(const Head&, const Query&) { return nullptr; }
  __device__ __forceinline__ static int64_t pair_row_step(const Head&) { return 0; }
  __device__ __forceinline__ static bool sees(const Head&, const Query&, const Key&) { return true; }
  /// Calls add(place, x) for each element whose gradient is asked for: where that gradient is, and d_score times the derivative of
  /// the score by the element.
  template <class Add>
  __device__ __forceinline__ static void add_gradients(const Head&, const Query&, const Key&, float s,
                                                       float d_score, const Add& add) {}
};

}  // namespace fovea::cuda
