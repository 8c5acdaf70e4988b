// The GPU device of builds without CUDA: there is none.
#include "ladder/harness/device.hpp"

namespace ladder {

std::unique_ptr<Device> gpu_device(int, std::string& why) {
  why = "this build has no CUDA";
  return nullptr;
}

}  // namespace ladder
