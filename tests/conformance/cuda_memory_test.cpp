// Tests of the suite itself, on GPUs: it must find a write outside a tensor.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

class CudaMemory : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) GTEST_SKIP() << cudaGetErrorString(status);
    if (!environment("FOVEA_TEST_EXACT", "").empty())
      GTEST_SKIP() << "there are no guards with FOVEA_TEST_EXACT";
    for (size_t i = 0; i < first_.size(); ++i) first_[i] = static_cast<unsigned char>(i);
    for (size_t i = 0; i < second_.size(); ++i) second_[i] = static_cast<unsigned char>(3 * i);
  }

  static constexpr size_t kSkew = 6, kWorkspace = 1000;
  std::vector<DeviceMemory::Block> blocks() {
    return {{"first", first_.data(), first_.size()},
            {"second", second_.data() + kSkew, second_.size() - kSkew}};
  }
  /// What finish() says after `count` bytes at `offset` from place `which` (0, 1: the tensors, 2: the
  /// workspace) became 0.
  std::string verdict(size_t which, std::ptrdiff_t offset, size_t count) {
    DeviceMemory& memory = open_device_memory();
    const std::vector<void*> places = memory.place(blocks(), kWorkspace, 0x3c);
    EXPECT_EQ(cudaMemsetAsync(static_cast<char*>(places[which]) + offset, 0, count,
                              static_cast<cudaStream_t>(memory.stream())),
              cudaSuccess);
    return memory.finish(blocks());
  }

  std::vector<unsigned char> first_ = std::vector<unsigned char>(333),
                             second_ = std::vector<unsigned char>(4096);
};

TEST_F(CudaMemory, MirrorsHoldWhatTheHostHolds) {
  const auto first = first_, second = second_;
  DeviceMemory& memory = open_device_memory();
  const std::vector<void*> places = memory.place(blocks(), kWorkspace, 0x3c);
  ASSERT_EQ(places.size(), 3u);
  std::vector<unsigned char> seen(first.size()), workspace(kWorkspace);
  const auto stream = static_cast<cudaStream_t>(memory.stream());
  ASSERT_EQ(cudaMemcpyAsync(seen.data(), places[0], seen.size(), cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(workspace.data(), places[2], kWorkspace, cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(seen, first);
  EXPECT_EQ(workspace, std::vector<unsigned char>(kWorkspace, 0x3c));
  first_.assign(first_.size(), 1);
  second_.assign(second_.size(), 1);
  EXPECT_EQ(memory.finish(blocks()), "");
  EXPECT_EQ(first_, first);
  EXPECT_EQ(std::vector<unsigned char>(second_.begin() + kSkew, second_.end()),
            std::vector<unsigned char>(second.begin() + kSkew, second.end()));
}

TEST_F(CudaMemory, MirrorsAreAlignedAsTheHostIs) {
  const std::vector<DeviceMemory::Block> given = blocks();
  const std::vector<void*> places = open_device_memory().place(given, kWorkspace, 0);
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(places[i]) % 64, reinterpret_cast<uintptr_t>(given[i].host) % 64);
  }
  EXPECT_EQ(reinterpret_cast<uintptr_t>(places[2]) % (2 * FOVEA_WORKSPACE_ALIGNMENT),
            FOVEA_WORKSPACE_ALIGNMENT);
  EXPECT_EQ(open_device_memory().finish(given), "");
}

TEST_F(CudaMemory, SeesWhatIsWrittenInside) {
  EXPECT_EQ(verdict(0, 10, 3), "");
  EXPECT_EQ(first_[9], 9);
  EXPECT_EQ(first_[10], 0);
  EXPECT_EQ(first_[13], 13);
  EXPECT_EQ(verdict(2, 0, kWorkspace), "");
}

TEST_F(CudaMemory, SeesWhatIsWrittenOutside) {
  const auto size = static_cast<std::ptrdiff_t>(first_.size());
  const auto size_second = static_cast<std::ptrdiff_t>(second_.size() - kSkew);
  EXPECT_NE(verdict(0, -1, 1).find("at the start"), std::string::npos);
  EXPECT_NE(verdict(0, -400, 1).find("at the start"), std::string::npos);
  EXPECT_NE(verdict(0, size, 1).find("behind first"), std::string::npos);
  EXPECT_NE(verdict(1, -1, 1).find("behind first"), std::string::npos);
  EXPECT_NE(verdict(1, size_second, 1).find("behind second"), std::string::npos);
  EXPECT_NE(verdict(2, -1, 1).find("before the workspace"), std::string::npos);
  EXPECT_NE(verdict(2, kWorkspace, 1).find("behind the workspace"), std::string::npos);
  EXPECT_NE(verdict(2, kWorkspace + 511, 1).find("behind the workspace"), std::string::npos);
}

}  // namespace
}  // namespace fovea::conformance
