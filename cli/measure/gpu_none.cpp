// The GPU of builds without CUDA: making one fails, with the reason.
#include "cli/measure/gpu.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

struct Gpu::Impl {};

Gpu::Gpu(int) {
  throw Failure(
      Exit::problem,
      "this program was built without CUDA; build it where nvcc is (see docs/dependencies.md), or ask for a "
      "backend of the CPU");
}
Gpu::~Gpu() = default;

// Unreachable: no Gpu can be made.
fovea_device Gpu::device() const {
  return cpu();
}
std::string Gpu::text() const {
  return {};
}
void* Gpu::stream() const {
  return nullptr;
}
void Gpu::synchronize() {}
void* Gpu::allocate(size_t) {
  return nullptr;
}
void Gpu::upload(void*, const Array&) {}
void Gpu::download(Array&, const void*) {}
void Gpu::copy(void*, const void*, size_t) {}
Timing Gpu::measure(const std::function<void()>&, double, int) {
  return {};
}
double Gpu::host_seconds(const std::function<void()>&) {
  return 0;
}

}  // namespace fovea::cli
