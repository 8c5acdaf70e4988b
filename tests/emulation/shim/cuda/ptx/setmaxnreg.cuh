// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

namespace fovea::cuda::ptx {

template <int kRegisters>
inline void setmaxnreg_dec() {}
template <int kRegisters>
inline void setmaxnreg_inc() {}

}  // namespace fovea::cuda::ptx
