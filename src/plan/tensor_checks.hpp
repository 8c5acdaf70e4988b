// What every tensor of a problem must be, whatever it is for: device, sizes, strides, alignment.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/problem.hpp"

namespace fovea::plan {

/// Largest size of a dimension.
inline constexpr int64_t kMaxDimension = 0x7fffffff;

struct MemoryRules {
  bool contiguous = false;  ///< the last dimension has stride 1
  bool output = false;      ///< each element has memory of its own
};

/// Throws RequestError(kInvalidArgument) for a tensor that breaks them, or is elsewhere than q. Strides of dimensions that are never
/// stepped along become those of a compact tensor.
void check_memory(std::string_view name, TensorDesc& tensor, const TensorDesc& q, const MemoryRules& rules);

}  // namespace fovea::plan
