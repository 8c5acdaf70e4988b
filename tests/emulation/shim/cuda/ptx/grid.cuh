// A launch of the emulated device ends before the next begins.
#pragma once

namespace fovea::cuda::ptx {

inline void let_next_launch_begin() {}
inline void wait_for_launches_before() {}

}  // namespace fovea::cuda::ptx
