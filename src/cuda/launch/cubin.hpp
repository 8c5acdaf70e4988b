// What a cubin says of its kernel: registers, and local memory. A cubin is an ELF file whose section .nv.info holds attributes.
#pragma once

#include <string>

namespace fovea::cuda {

struct CubinUsage {
  int registers = -1;
  int local_bytes = -1;  ///< of a thread: the frame, which holds spilled registers, too
};

/// Of a cubin with one kernel; -1 where it does not say, or where it is PTX.
CubinUsage usage_of(const std::string& cubin);

}  // namespace fovea::cuda
