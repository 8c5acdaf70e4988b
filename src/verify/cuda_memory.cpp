// Mirrors of tensors in device memory, between guards: the definitions of cuda_memory.hpp.
#include "verify/cuda_memory.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "verify/owned_tensor.hpp"

namespace fovea::verify {
namespace {

/// Before the first tensor, between any two, and behind the last. Wider than any vector that a kernel moves
/// at once (a warp's 16-byte accesses: 512 bytes), so that an index that is one vector off hits a guard.
constexpr size_t kDeviceGuard = 512;
/// Mirrors keep the host's offset from this alignment.
constexpr size_t kCongruence = 64;

int device_under_test() {
  const char* text = std::getenv("FOVEA_TEST_DEVICE");
  return text ? std::atoi(text) : 0;
}
bool exact_allocations() {
  const char* text = std::getenv("FOVEA_TEST_EXACT");
  return text && *text && std::strcmp(text, "0") != 0;
}

/// An error of the runtime ends the program: after most of them the context is lost, and every later result
/// would be an error with the same cause. (The library has returned FOVEA_OK before its work gets here.)
void demand(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::fflush(nullptr);
  std::abort();  // the handler of main.cpp names the problems that were running
}

size_t offset_in_line(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kCongruence;
}
/// The smallest place from `from` on with the given offset from the alignment.
size_t congruent(size_t from, size_t offset) {
  const size_t line = from / kCongruence * kCongruence + offset;
  return line >= from ? line : line + kCongruence;
}

class CudaMemory final : public DeviceMemory {
 public:
  explicit CudaMemory(int id) : id_(id) {
    demand(cudaSetDevice(id_), "cudaSetDevice");
    demand(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaMemory() override {
    // At the end of the process the runtime may be gone, and with it the memory.
    release();
    cudaStreamDestroy(stream_);
  }

  fovea_device device() const override { return {FOVEA_CUDA, id_}; }
  void* stream() const override { return stream_; }

  std::vector<void*> place(const std::vector<Block>& blocks, size_t workspace_size,
                           unsigned char workspace_fill) override {
    return exact_ ? place_exactly(blocks, workspace_size)
                  : place_in_arena(blocks, workspace_size, workspace_fill);
  }

  std::string finish(const std::vector<Block>& blocks) override {
    if (exact_) return finish_exactly(blocks);
    demand(cudaMemcpyAsync(host_, arena_, workspace_, cudaMemcpyDeviceToHost, stream_), "copy to host");
    demand(cudaMemcpyAsync(host_ + workspace_, arena_ + workspace_ + workspace_size_, kDeviceGuard,
                           cudaMemcpyDeviceToHost, stream_),
           "copy to host");
    demand(cudaStreamSynchronize(stream_), "a kernel failed");

    std::string wrong;
    const auto check_guard = [&](size_t from, size_t to, const std::string& where) {
      for (size_t at = from; at < to && wrong.empty(); ++at) {
        if (host_[at] == kPattern) continue;
        wrong = "device memory outside of the tensors was written: byte " + std::to_string(at - from) +
                " of the " + std::to_string(to - from) + " " + where;
      }
    };
    size_t checked = 0;
    std::string before = "at the start";
    for (size_t i = 0; i < blocks.size(); ++i) {
      check_guard(checked, places_[i], before);
      std::memcpy(blocks[i].host, host_ + places_[i], blocks[i].size);
      checked = places_[i] + blocks[i].size;
      before = std::string("behind ") + blocks[i].name;
    }
    check_guard(checked, workspace_, before + ", before the workspace");
    check_guard(workspace_, workspace_ + kDeviceGuard, "behind the workspace");
    return wrong;
  }

 private:
  /// One allocation: guard, tensor, guard, tensor, ..., guard, workspace, guard.
  std::vector<void*> place_in_arena(const std::vector<Block>& blocks, size_t workspace_size,
                                    unsigned char workspace_fill) {
    places_.clear();
    size_t end = 0;
    for (const Block& block : blocks) {
      places_.push_back(congruent(end + kDeviceGuard, offset_in_line(block.host)));
      end = places_.back() + block.size;
    }
    workspace_size_ = workspace_size;
    // Exactly FOVEA_WORKSPACE_ALIGNMENT: a kernel that needs more must align by itself.
    workspace_ = congruent(end + kDeviceGuard, 0);
    if (workspace_ % (2 * FOVEA_WORKSPACE_ALIGNMENT) == 0) workspace_ += FOVEA_WORKSPACE_ALIGNMENT;
    reserve(workspace_ + workspace_size + kDeviceGuard, workspace_ + kDeviceGuard);

    std::memset(host_, kPattern, workspace_);
    std::vector<void*> addresses;
    for (size_t i = 0; i < blocks.size(); ++i) {
      std::memcpy(host_ + places_[i], blocks[i].host, blocks[i].size);
      addresses.push_back(arena_ + places_[i]);
    }
    demand(cudaMemcpyAsync(arena_, host_, workspace_, cudaMemcpyHostToDevice, stream_), "copy to device");
    unsigned char* workspace = arena_ + workspace_;
    if (workspace_size > 0)
      demand(cudaMemsetAsync(workspace, workspace_fill, workspace_size, stream_), "fill");
    demand(cudaMemsetAsync(workspace + workspace_size, kPattern, kDeviceGuard, stream_), "fill");
    addresses.push_back(arena_ + workspace_);
    return addresses;
  }

  std::vector<void*> place_exactly(const std::vector<Block>& blocks, size_t workspace_size) {
    release();
    std::vector<void*> addresses;
    for (const Block& block : blocks) {
      const size_t offset = block.size > 0 ? offset_in_line(block.host) : 0;
      unsigned char* memory = allocate(offset + block.size);
      addresses.push_back(memory + offset);
      // All of it: the bytes before the tensor hold the pattern, for kernels that round addresses down.
      std::vector<unsigned char> bytes(offset + block.size, kPattern);
      std::memcpy(bytes.data() + offset, block.host, block.size);
      demand(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "copy to device");
    }
    addresses.push_back(allocate(workspace_size));
    demand(cudaDeviceSynchronize(), "copy to device");
    exact_addresses_ = addresses;
    return addresses;
  }
  std::string finish_exactly(const std::vector<Block>& blocks) {
    demand(cudaStreamSynchronize(stream_), "a kernel failed");
    for (size_t i = 0; i < blocks.size(); ++i) {
      demand(cudaMemcpy(blocks[i].host, exact_addresses_[i], blocks[i].size, cudaMemcpyDeviceToHost),
             "copy to host");
    }
    release();
    return {};
  }

  unsigned char* allocate(size_t size) {
    void* memory = nullptr;
    demand(cudaMalloc(&memory, std::max<size_t>(size, 1)), "cudaMalloc");
    allocations_.push_back(memory);
    return static_cast<unsigned char*>(memory);
  }
  void reserve(size_t device_bytes, size_t host_bytes) {
    if (device_bytes > arena_size_ || host_bytes > host_size_) {
      release();
      arena_size_ = 2 * device_bytes;
      host_size_ = 2 * host_bytes;
      arena_ = allocate(arena_size_);
      demand(cudaMallocHost(reinterpret_cast<void**>(&host_), host_size_), "cudaMallocHost");
    }
  }
  void release() {
    for (void* memory : allocations_) cudaFree(memory);
    allocations_.clear();
    if (host_ != nullptr) cudaFreeHost(host_);
    host_ = nullptr;
    arena_ = nullptr;
    arena_size_ = host_size_ = 0;
  }

  int id_;
  bool exact_ = exact_allocations();
  cudaStream_t stream_ = nullptr;
  std::vector<void*> allocations_;

  unsigned char* arena_ = nullptr;
  unsigned char* host_ = nullptr;  ///< page-locked: the upload, then the download
  size_t arena_size_ = 0, host_size_ = 0;
  std::vector<size_t> places_;  ///< of the tensors in the arena
  size_t workspace_ = 0, workspace_size_ = 0;
  std::vector<void*> exact_addresses_;
};

DeviceMemory& memory_of_this_thread() {
  thread_local CudaMemory memory(device_under_test());
  return memory;
}

}  // namespace

void use_cuda_memory() {
  open_device_memory = memory_of_this_thread;
}

}  // namespace fovea::verify
