// A result of the same queries over other keys, to which a forward adds its own: o and lse become those over both.
#pragma once

#include <array>
#include <cstdint>

namespace fovea {

struct EarlierResult {
  void* o = nullptr;    ///< float32, (batch, queries, heads, columns of v), columns side by side
  void* lse = nullptr;  ///< float32, (batch, heads, queries); -inf: no key, and o counts for nothing
  std::array<int64_t, 3> o_stride{}, lse_stride{};  ///< in elements, in these orders
};

}  // namespace fovea
