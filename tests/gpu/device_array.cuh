// Arrays in device memory, for tests of single instructions.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace fovea_test {

/// "" when a GPU can run these kernels, else the reason against it.
inline const char* why_no_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count > 0 ? "" : "there is no GPU";
}

#define FOVEA_SKIP_WITHOUT_GPU()                                             \
  if (const char* why = fovea_test::why_no_gpu(); *why) GTEST_SKIP() << why; \
  static_assert(true)

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, count_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  explicit DeviceArray(size_t count) : DeviceArray(std::vector<T>(count)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  /// Waits for all kernels; their errors fail the test.
  std::vector<T> values() const {
    std::vector<T> host(count_);
    EXPECT_STREQ(cudaGetErrorString(cudaDeviceSynchronize()), "no error");
    EXPECT_EQ(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace fovea_test
