// What the choice of kernels and the schedule know of a GPU. Plain data, so that tests make up their own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

namespace fovea::cuda {

struct DeviceProperties {
  int id = 0;
  std::string name;
  int capability = 0;  ///< 10 * major + minor
  int sm_count = 0;
  size_t shared_per_sm = 0;
  size_t shared_per_cta = 0;  ///< after opting in
  int threads_per_sm = 0;
  size_t memory_bytes = 0, l2_bytes = 0;

  /// What attention takes of the GPU where it leaves `margin` multiprocessors to others: one at least.
  DeviceProperties without_sms(int margin) const {
    DeviceProperties rest = *this;
    rest.sm_count = std::max(1, sm_count - std::max(0, margin));
    return rest;
  }
};

}  // namespace fovea::cuda
