// What a plain read of memory reaches: the yardstick of decoding, which reads K and V once and does little
// else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::bench {

/// The sum, modulo 2^32, of the 4-byte words of [data, data + bytes), read by `num_threads` threads: each an
/// equal, contiguous share. `bytes` is rounded down to whole cache lines a thread.
uint32_t read_memory(const void* data, size_t bytes, int num_threads);

}  // namespace fovea::bench
