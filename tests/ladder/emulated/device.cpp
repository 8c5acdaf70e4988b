// The emulated device of tests/emulation, as a device of the ladder.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <new>

#include <cuda_runtime_api.h>

#include "emulation/hopper.hpp"
#include "ladder/harness/device.hpp"

/// Finds the one driver function for which rungs ask.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *pointer = known ? reinterpret_cast<void*>(&fovea::emulation::tensor_map_encode_tiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

namespace ladder {

const char* running_rung = "";
int running_capability = 0;

namespace {

/// Places unmapped memory behind each allocation, so that accesses beyond it end the process.
class Emulated final : public Device {
 public:
  std::string text() const override { return "an emulated device"; }
  int capability() const override { return 90; }
  int id() const override { return 0; }
  void* stream() const override { return nullptr; }
  double peak(Bound) override { return 0; }

  void* allocate(size_t bytes) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (std::max<size_t>(bytes, 1) + 15) / 16 * 16, mapped = (used + page - 1) / page * page;
    void* memory = mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(memory) + mapped, page, PROT_NONE);
    std::memset(memory, 0xff, mapped);  // NaN
    char* start = static_cast<char*>(memory) + (mapped - used);
    mapped_[start] = {memory, mapped + page};
    asked_[start] = bytes;
    in_use_ += bytes;
    most_in_use_ = std::max(most_in_use_, in_use_);
    return start;
  }
  void release(void* start) override {
    const auto found = mapped_.find(start);
    if (found == mapped_.end()) return;
    munmap(found->second.first, found->second.second);
    mapped_.erase(found);
    in_use_ -= asked_[start];
  }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void synchronize() override {}
  std::vector<std::vector<double>> time(const std::vector<std::function<void()>>& contenders,
                                        const Protocol&) override {
    return std::vector<std::vector<double>>(contenders.size());
  }
  void profile(const std::function<void()>& run) override { run(); }
  size_t peak_bytes(const std::function<void()>& work) override {
    const size_t before = most_in_use_ = in_use_;
    work();
    return most_in_use_ - before;
  }

 private:
  std::map<void*, std::pair<void*, size_t>> mapped_;
  std::map<void*, size_t> asked_;
  size_t in_use_ = 0, most_in_use_ = 0;
};

}  // namespace

std::unique_ptr<Device> gpu_device(int, std::string&) {
  return std::make_unique<Emulated>();
}

}  // namespace ladder
