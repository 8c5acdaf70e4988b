// What the calls of the C ABI take, made of a Request: the description of a problem, the addresses of its arrays, a workspace.
#pragma once

#include <fovea/fovea.h>

#include <array>
#include <cstddef>

#include "arrays.hpp"
#include "plans.hpp"
#include "python.hpp"

namespace fovea::python {

/// A request as the C ABI describes it. Plans are made without addresses: they serve all arrays of these shapes.
class Description {
 public:
  Description(const Request& request, bool with_data);
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  const fovea_problem* problem() const { return &problem_; }

 private:
  const fovea_tensor* add(const Array& array);

  bool with_data_;
  fovea_problem problem_;
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named_{};
  std::array<fovea_tensor, kTensors + 2 * FOVEA_MAX_NAMED_TENSORS> tensors_;
  size_t used_ = 0;
};

/// The arrays of a run, with seed and offset; no workspace, and the default stream.
fovea_buffers buffers_of(const Request& request);

/// Memory for one run. That of the CPU comes from malloc, that of a GPU from the allocator of the caller's
/// library, which knows the order of its stream: it may be given back as soon as the work is enqueued.
class Workspace {
 public:
  /// `type`: of the arrays of the run.
  Workspace(size_t size, fovea_device device, const ArrayType& type);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();
  void* memory() const { return memory_; }

 private:
  bool take_from(const DLExchangeApi* library, size_t size);

  fovea_device device_;
  void* memory_ = nullptr;
  DLManagedTensorVersioned* managed_ = nullptr;
  Ref kept_;
};

}  // namespace fovea::python
