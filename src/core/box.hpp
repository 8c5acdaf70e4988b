// Runs of contiguous elements in three dimensions of two memories, for copies and sums of parts of tensors.
#pragma once

#include <array>
#include <cstdint>

namespace fovea {

/// (batch, rows, heads) runs. Strides count bytes.
struct Box {
  const char* from = nullptr;
  char* to = nullptr;
  std::array<int64_t, 3> from_stride{}, to_stride{};
  std::array<int64_t, 3> size{};
  int64_t elements = 0;
};

}  // namespace fovea
