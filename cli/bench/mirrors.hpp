// Arrays and their mirrors in the memory of a GPU, where there is one.
#pragma once

#include <map>

#include "cli/data/elements.hpp"
#include "cli/measure/gpu.hpp"

namespace fovea::cli {

/// Mirrors are found by the address of an array, which has to stay where it is.
class Mirrors {
 public:
  /// `gpu` may be null: then arrays are their own mirrors. It has to outlive this.
  explicit Mirrors(Gpu* gpu) : gpu_(gpu) {}

  /// Makes a mirror with the same bytes; of an array without a shape none.
  void add(const Array& array);
  void upload(const Array& array) const;
  void download(Array& array) const;
  void* address(const Array& array) const;
  /// The array's elements where they are computed with.
  Tensor tensor(const Array& array) const;
  /// `here`, a tensor over address(), as one of that device.
  Tensor on_device(const Tensor& here) const { return gpu_ == nullptr ? here : here.on(gpu_->device()); }

 private:
  Gpu* gpu_;
  std::map<const Array*, void*> mirrors_;
};

}  // namespace fovea::cli
