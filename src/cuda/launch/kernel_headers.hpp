// The headers that kernels include, as text inside the library, for kernels that are compiled at run time. The build generates
// the definitions (tools/embed_headers.py).
#pragma once

#include <span>

namespace fovea::cuda {

struct KernelHeader {
  const char* name;  ///< as programs include it: "cuda/warp/mma_tile.cuh"
  const char* text;
};
std::span<const KernelHeader> kernel_headers();

/// SHA-256 of all of them, in hexadecimal digits.
const char* kernel_headers_digest();

}  // namespace fovea::cuda
