// Kernels compiled at run time, for an expression: the program of a kernel, NVRTC, and the caches around it.
#pragma once

#include <string>

#include "cuda/launch/kernel.hpp"
#include "cuda/launch/kernel_cache.hpp"
#include "cuda/launch/nvrtc.hpp"

namespace fovea::cuda {

/// The machine code of a kernel for one kind of chip.
struct CompiledKernel {
  std::string code;    ///< a cubin, or PTX where NVRTC is older than the chip
  std::string symbol;  ///< what the kernel is called in it
  std::string clause;  ///< why there is none, behind the kernel's name; "" when there is
  std::string note;    ///< why it was not kept on the disk; "" when it was, or need not be
  bool from_disk = false;
};

/// Compiles a kernel for an expression, given as the text that replaces cuda/warp/expression.cuh; "" leaves the header as it is.
/// Needs no GPU. Of any number of threads that ask for the same code, one compiles; it stays for the life of the process.
const CompiledKernel& compile_kernel(const Kernel& kernel, const std::string& expression, int capability);
/// Whether this process has asked for that code.
bool is_compiled(const Kernel& kernel, const std::string& expression, int capability);
/// The same without the memory of this process. Takes what compile_ahead has kept, also where there is no NVRTC.
CompiledKernel compile_kernel(const Kernel& kernel, const std::string& expression, int capability,
                              const Nvrtc& nvrtc, const KernelCache& cache);
/// Compiles a kernel, unless it was, so that processes of any NVRTC, or of none, find it. `file`, where the cache has a folder: of
/// the code.
CompiledKernel compile_ahead(const Kernel& kernel, const std::string& expression, int capability,
                             const Nvrtc& nvrtc, const KernelCache& cache, std::string& file);

}  // namespace fovea::cuda
