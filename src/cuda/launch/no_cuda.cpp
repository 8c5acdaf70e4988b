// The face of a build without CUDA: every backend is listed, and says that it is not there.
#include <array>
#include <string>
#include <utility>

#include "core/status.hpp"
#include "cuda/launch/ahead.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/kernel_table.hpp"

namespace fovea::cuda {
namespace {

template <Family kFamily>
const Backend& backend() {
  // A backend that is unavailable is asked nothing else.
  static const Backend the_backend = {backend_name(kFamily), unavailable_because, nullptr, nullptr,
                                      DeviceType::kCuda};
  return the_backend;
}

/// The backend of each family, in the order of preference.
template <size_t... kFamily>
std::span<const Backend* const> list(std::index_sequence<kFamily...>) {
  static const std::array all = {&backend<static_cast<Family>(kFamily)>()...};
  return all;
}

[[noreturn]] void refuse(const std::string& argument, const std::string& got) {
  throw RequestError(Status::kUnsupported, argument,
                     argument + ": got " + got +
                         ", but this build was made without CUDA; configure it with -DFOVEA_CUDA=ON");
}
std::string name_of(int device) {
  return "cuda:" + std::to_string(device);
}

}  // namespace

std::span<const Backend* const> backends() {
  return list(std::make_index_sequence<kFamilyCount>());
}

std::string unavailable_because() {
  return "not in this build (it was made without CUDA: configure it with -DFOVEA_CUDA=ON)";
}
std::string versions_text() {
  return "";
}
int device_count() {
  return 0;
}
std::string device_description(int) {
  return "";
}
void check_device(const char*, int) {}

bool can_tell_memory() {
  return false;
}
Memory memory_of(const void*) noexcept {
  return {};
}
std::string text_of(const Memory&) {
  return "unknown memory";
}

void* allocate(int device, size_t) {
  refuse("device", name_of(device));
}
void release(int, void*) noexcept {}
void copy_to_host(std::span<const HostCopy>, int device, void*) {
  refuse("device", name_of(device));
}
void merge(std::span<const TensorDesc>, std::span<const TensorDesc>, const TensorDesc& o, const TensorDesc&,
           void*) {
  refuse("o", "memory of " + name_of(o.device_id));
}

void move(std::span<const Box>, DType, DType, bool, int device, void*, int64_t) {
  refuse("device", name_of(device));
}

std::vector<AheadKernel> compile_ahead(const AttentionProblem&, const AheadRequest& request) {
  refuse("chip", request.chip);
}

}  // namespace fovea::cuda
