// How many numbers of a row a lane takes at once in kernels that only move and add.
#pragma once

namespace fovea::cuda {

/// 16 bytes of a 16-bit type.
inline constexpr int kColumns = 8;

}  // namespace fovea::cuda
