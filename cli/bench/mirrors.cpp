// The definitions of mirrors.hpp.
#include "cli/bench/mirrors.hpp"

namespace fovea::cli {

void Mirrors::add(const Array& array) {
  if (gpu_ == nullptr || array.shape.empty()) return;
  mirrors_[&array] = gpu_->allocate(array.bytes.size());
  upload(array);
}

void Mirrors::upload(const Array& array) const {
  if (gpu_ != nullptr) gpu_->upload(mirrors_.at(&array), array);
}

void Mirrors::download(Array& array) const {
  if (gpu_ != nullptr) gpu_->download(array, mirrors_.at(&array));
}

void* Mirrors::address(const Array& array) const {
  return gpu_ == nullptr ? view(array).data() : mirrors_.at(&array);
}

Tensor Mirrors::tensor(const Array& array) const {
  const Tensor here = view(array);
  return gpu_ == nullptr ? here : Tensor(address(array), here.dtype(), here.shape()).on(gpu_->device());
}

}  // namespace fovea::cli
