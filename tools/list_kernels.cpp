// Writes the kernels of this build to a file, one a line: name, threads, dynamic shared memory in bytes. Needs no GPU.
// tools/resources.py reads it.
#include <cstdio>

#include "cuda/launch/kernel.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: list_kernels FILE\n", stderr);
    return 2;
  }
  std::FILE* file = std::fopen(argv[1], "w");
  if (file == nullptr) {
    std::perror(argv[1]);
    return 1;
  }
  for (const fovea::cuda::KernelUnit unit : fovea::cuda::kernel_units()) {
    for (const fovea::cuda::Kernel& kernel : unit()) {
      if (kernel.entry == nullptr) continue;  // compiled at run time: the compiler of the build has no report
      std::fprintf(file, "%s\t%d\t%zu\n", kernel.name, kernel.threads, kernel.shared_bytes);
    }
  }
  return std::fclose(file) == 0 ? 0 : 1;
}
