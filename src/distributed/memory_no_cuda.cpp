// memory_cuda.hpp in builds without CUDA.
#include "core/status.hpp"
#include "distributed/memory_cuda.hpp"

namespace fovea::distributed {
namespace {

[[noreturn]] void refuse() {
  throw RequestError(
      Status::kUnsupported, "transport.device",
      "transport.device: got a GPU, but this build was made without CUDA; configure it with -DFOVEA_CUDA=ON");
}

}  // namespace

std::unique_ptr<Memory> open_cuda_memory(int) {
  refuse();
}
std::unique_ptr<CudaEvent> make_cuda_event(int) {
  refuse();
}
bool link_devices(int, int) {
  refuse();
}
void copy_between_devices(int, void*, int, const void*, size_t, void*) {
  refuse();
}

}  // namespace fovea::distributed
