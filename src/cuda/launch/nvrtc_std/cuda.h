// <cuda.h> for NVRTC, as far as the kernels use it: the driver's tensor map. Its alignment has changed with CUDA 13, so the
// library says how its own header has it.
#pragma once

struct alignas(FOVEA_TENSOR_MAP_ALIGNMENT) CUtensorMap {
  unsigned long long opaque[16];
};
