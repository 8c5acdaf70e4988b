// The GPUs of this machine, asked once each.
#pragma once

#include <cuda.h>

#include <string>

#include "cuda/launch/device_properties.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// Properties of device `id`, below device_count(). Creates no context.
const DeviceProperties& properties_of(int id);

/// The context that the runtime shares with everyone in this process. Created on first use and kept.
CUcontext primary_context(int id);

/// A kernel, loaded on a device.
struct LoadedKernel {
  CUfunction function = nullptr;
  int ctas_per_sm = 0;
  std::string clause;   ///< why it cannot run there; "" when it can
  std::string note;     ///< what the user may want to know of a kernel that can
  int chip = 0;         ///< that it was compiled for: 10 * major + minor
  int local_bytes = 0;  ///< of a thread of a kernel that is compiled at run time: registers that it spills
};
/// Kernels that spill more than this are refused: 64 registers, a quarter of those that a thread has.
inline constexpr int kMostSpilledBytes = 256;
/// Loads the kernel and lets it have its shared memory, once for each device. To be called when plans are
/// made: loading allocates, which a run must not.
const LoadedKernel& loaded(const Kernel& kernel, int id);
/// The same; RequestError where it cannot run there.
const LoadedKernel& usable(const Kernel& kernel, int id);
/// The kernel as the library holds it where the text is empty, else compiled for the expression.
const LoadedKernel& loaded(const Kernel& kernel, int id, const std::string& expression);
/// Whether the kernel can be launched to begin while the one before it runs. The code must be that of a chip which has the wait, and
/// a graph must know such launches (CUDA 12.3).
bool can_begin_early(const Kernel& kernel, const LoadedKernel& code);
/// What a launch takes beside the kernel and its parameters.
struct LaunchShape {
  Grid ctas;
  unsigned shared_bytes = 0;  ///< dynamic, of a CTA
  unsigned cluster = 0;       ///< CTAs of a cluster; 0: none
  bool early = false;         ///< may begin before the launch before it has ended
};
/// Launches the kernel. Drivers that know neither clusters nor early launches are asked for neither.
CUresult put_on_stream(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream,
                       void** parameters);
/// How many clusters of so many CTAs device `id` holds at a time, at least 1.
int active_clusters(const Kernel& kernel, const LoadedKernel& code, int id, int cluster);
/// Compiles the kernel for an expression (compile_kernel of runtime_kernel.hpp) and loads that. Refuses code that spills
/// more than a few registers. Threads that ask for different kernels do not wait
/// for each other.
const LoadedKernel& compiled_and_loaded(const Kernel& kernel, int id, const std::string& expression);

}  // namespace fovea::cuda
