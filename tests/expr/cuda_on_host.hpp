// What CUDA text of expressions uses of CUDA, for the host's compiler.
#pragma once

#include <math.h>

#include <bit>
#include <cstdint>

#include "core/dtype.hpp"
#include "text_cases.hpp"
#include "tile/expression_tensors.hpp"

#define __device__
#define __forceinline__ inline

struct __half {
  fovea::F16 value;
  operator float() const { return fovea::to_float(value); }
};
struct __nv_bfloat16 {
  fovea::Bf16 value;
  operator float() const { return fovea::to_float(value); }
};
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}

namespace fovea::expr {

/// The functions of one text as functions of a pair.
template <class Text>
struct OnHost {
  struct Parts {
    typename Text::Head head;
    typename Text::Query query;
    typename Text::Key key;
    Parts(const tile::ExpressionTensors& t, const Pair& p)
        : head(t, static_cast<int>(p.b), static_cast<int>(p.h), static_cast<int>(p.hk),
               static_cast<int>(p.nq), static_cast<int>(p.nk)),
          query(head, static_cast<int>(p.q)),
          key(head, static_cast<int>(p.k)) {}
  };
  static float score(const tile::ExpressionTensors& t, const Pair& pair) {
    const Parts parts(t, pair);
    return Text::score(parts.head, parts.query, parts.key, static_cast<float>(pair.s));
  }
  static float slope(const tile::ExpressionTensors& t, const Pair& pair) {
    const Parts parts(t, pair);
    float slope = 0;
    Text::score(parts.head, parts.query, parts.key, static_cast<float>(pair.s), slope);
    return slope;
  }
  static bool sees(const tile::ExpressionTensors& t, const Pair& pair) {
    const Parts parts(t, pair);
    return Text::sees(parts.head, parts.query, parts.key);
  }
  static void add_gradients(const tile::ExpressionTensors& t, const Pair& pair, float d_score) {
    const Parts parts(t, pair);
    Text::add_gradients(parts.head, parts.query, parts.key, static_cast<float>(pair.s), d_score,
                        [](float* gradient, float x) { *gradient += x; });
  }
  static constexpr CompiledText kText = {Text::kHasScore,
                                         Text::kHasSees,
                                         Text::kSlopeIsOne,
                                         Text::kReadsByQuery || Text::kReadsByKey,
                                         Text::kHasGradients,
                                         score,
                                         slope,
                                         sees,
                                         add_gradients};
};

}  // namespace fovea::expr
