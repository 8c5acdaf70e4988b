// Descriptors of wgmma: where an operand lies in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions: shared memory matrix layout"). 64 bits, with addresses and strides in units of 16 bytes.
//
//   bits  0-13  where it begins                         16-29  the leading distance
//        32-45  from eight rows to the next eight       62-63  1: rows of 128 bytes, swizzled (hopper.cuh)
#pragma once

#include "ladder/harness/launch.cuh"

namespace ladder::ptx {

/// Rows of the tile are rows of A, or columns of B: k runs along them. 16 of k are 32 bytes of a strip, and
/// one instruction takes no more, so there is no leading distance.
__device__ __forceinline__ uint64_t k_major(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) / 16;
}
/// Rows of the tile are k, and columns of B run along them: 64 in a strip, then on in the next one,
/// `strip_bytes` away. 16 of k are 2048 bytes.
__device__ __forceinline__ uint64_t mn_major(uint32_t address, uint32_t strip_bytes) {
  return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{strip_bytes / 16} << 16 |
         (address & 0x3ffff) / 16;
}

}  // namespace ladder::ptx
