// The tensors of a problem as TMA finds them (cuTensorMapEncodeTiled).
#pragma once

#include "core/problem.hpp"
#include "cuda/kernels/tma_args.hpp"

namespace fovea::cuda {

/// The arguments of a launch: the maps of q, k, v, and of o where it can be stored by TMA. `args` has its
/// pointers; `tile_n` keys a box. Throws RequestError(kCudaError) where the driver refuses, in the name of
/// `kernel`.
TmaForwardArgs with_tensor_maps(const ForwardArgs& args, DType dtype, int tile_n, const char* kernel);

}  // namespace fovea::cuda
