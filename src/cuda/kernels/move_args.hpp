// The parameter of the kernel that copies or adds boxes of elements (cuda::move). Plain data, as tile/attention_params.hpp.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "cuda/kernels/columns.hpp"

namespace fovea::cuda {

/// A Box of core/box.hpp as the kernel reads it.
struct MoveBox {
  const char* from = nullptr;
  char* to = nullptr;
  int64_t from_stride[3] = {}, to_stride[3] = {};  ///< bytes
  uint32_t size[3] = {};
  uint32_t elements = 0;
  uint32_t end = 0;  ///< units of kColumns elements of a run, counted over all boxes up to this one
  bool vectors =
      false;  ///< every run starts at a multiple of 16 bytes, and its elements are a multiple of kColumns
};

/// Boxes that one launch takes: a kernel's parameters hold 4 KB on every driver.
inline constexpr int kMostMoveBoxes = 40;
/// Units of a launch: with the steps of the grid that a thread goes beyond the last, numbers of 32 bits count them.
inline constexpr int64_t kMostMoveUnits = int64_t{1} << 31;

struct MoveArgs {
  MoveBox boxes[kMostMoveBoxes];
  int count = 0;
  DType from = DType::kF32, to = DType::kF32;
  bool add = false;             ///< to += from, in float32
  bool copies_vectors = false;  ///< elements are 16 bits of anything, and each box has `vectors`
};
static_assert(sizeof(MoveArgs) <= 4096);

inline constexpr int kMoveThreads = 256;

}  // namespace fovea::cuda
