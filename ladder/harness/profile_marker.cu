// A kernel that does nothing: the kernels behind it in a profiler's list are those of the next rung.
#include "ladder/harness/launch.cuh"

namespace ladder {
namespace {

__global__ void profile_marker() {}

}  // namespace

void launch_profile_marker() {
  launch(profile_marker, {}, 1, 0);
}

}  // namespace ladder
