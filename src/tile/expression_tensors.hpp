// The tensors that an expression of a score reads (docs/expressions.md), as GPU kernels see them. Plain data.
#pragma once

#include <cstdint>

namespace fovea::tile {

/// As many as FOVEA_MAX_NAMED_TENSORS; together they take 768 of the 4,096 bytes of a launch's parameters.
inline constexpr int kMaxNamedTensors = 8;

/// Element (i, j, ...) lies at `data` + (i stride[0] + j stride[1] + ...) elements. A dimension of size 1 that is indexed by the
/// name of a pair alone stands for all: it has stride 0, and the extent of that name.
struct NamedTensor {
  const char* data = nullptr;
  float* gradient = nullptr;  ///< null where nobody asks for it
  int64_t stride[4] = {}, gradient_stride[4] = {};
  int extent[4] = {};
};

struct ExpressionTensors {
  /// Whether there is a score: its kernels take what it makes in natural units, without a factor.
  bool has_score = false;
  NamedTensor at[kMaxNamedTensors];
};

}  // namespace fovea::tile
