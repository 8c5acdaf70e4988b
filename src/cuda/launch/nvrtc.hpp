// NVRTC, the compiler of CUDA code that is a library. It is looked for at run time and never linked, so that one binary starts on
// machines with and without it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/launch/kernel_headers.hpp"

namespace fovea::cuda {

struct NvrtcFunctions;

struct Nvrtc {
  const NvrtcFunctions* functions = nullptr;  ///< for the life of the process
  int version = 0;                            ///< 1000 * major + 10 * minor
  std::vector<int> chips;                     ///< 10 * major + minor, ascending: those that it compiles for
  std::string file;                           ///< the name that it was opened by
  std::string missing;                        ///< a clause; "" when it is there
};

/// Opened on first use. What is missing then stays missing.
const Nvrtc& nvrtc();
/// The first of `files` that can be opened and is new enough.
Nvrtc open_nvrtc(std::span<const std::string> files);
/// Where it is looked for: the file that the environment variable FOVEA_NVRTC names and no other; else by the loader's path,
/// in the toolkit of CUDA_HOME, CUDA_PATH or /usr/local/cuda, and in Python's packages around the file `library`.
std::vector<std::string> nvrtc_candidates(const std::string& library);

/// The newest chip that `capability` runs the code of: "sm_90", with `specific` "sm_90a", or "compute_90" (PTX, which the driver
/// compiles) where this NVRTC is older than the chip. "" when there is none.
std::string nvrtc_architecture(const Nvrtc& nvrtc, int capability, bool specific);

struct NvrtcProgram {
  std::string text;
  std::vector<KernelHeader> headers;
  std::vector<std::string> options;
  std::string architecture;  ///< of nvrtc_architecture
  std::string entry;         ///< the __global__ function, with its template arguments
};
struct NvrtcOutput {
  std::string code;    ///< a cubin; of "compute_90" PTX
  std::string symbol;  ///< what `entry` is called in it
  std::string error;   ///< the compiler's log, when there is no code
};
NvrtcOutput compile(const Nvrtc& nvrtc, const NvrtcProgram& program);

}  // namespace fovea::cuda
