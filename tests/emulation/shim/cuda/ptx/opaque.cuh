// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

template <class T>
inline void make_opaque(T&) {}

}  // namespace fovea::cuda::ptx
