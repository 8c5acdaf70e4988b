// A launch that lets the next one begin at once, and writes long after that: who reads before it waits sees what was there before.
#pragma once

#include <cuda_runtime_api.h>

namespace fovea_test {

/// Puts a launch on `stream` that lets the next begin, and 50 us later copies `words` words of 4 bytes.
void write_late(cudaStream_t stream, void* to, const void* from, int words);

}  // namespace fovea_test
