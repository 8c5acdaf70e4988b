// The definitions of calls.hpp.
#include "calls.hpp"

#include <cstdint>
#include <cstdlib>

namespace fovea::python {

Description::Description(const Request& request, bool with_data)
    : with_data_(with_data), problem_(request.problem) {
#define FOVEA_PYTHON_DESCRIBE(name, Name, forward, backward, meaning) \
  problem_.name = add(request.at(Tensor::name));
  FOVEA_TENSORS(FOVEA_PYTHON_DESCRIBE)
#undef FOVEA_PYTHON_DESCRIBE
  for (const NamedArrays::One& one : request.named_list())
    named_[static_cast<size_t>(problem_.num_named++)] = {one.name.c_str(), add(one.tensor),
                                                         add(one.gradient)};
  problem_.named = named_.data();
}

const fovea_tensor* Description::add(const Array& array) {
  if (!array.present()) return nullptr;
  fovea_tensor& t = tensors_[used_++];
  t = array.tensor();
  if (!with_data_) {
    t.data = nullptr;
    t.byte_offset = 0;
  }
  return &t;
}

fovea_buffers buffers_of(const Request& request) {
  fovea_buffers buffers = FOVEA_BUFFERS_INIT;
#define FOVEA_PYTHON_ADDRESS(name, Name, forward, backward, meaning) \
  if (const Array& array = request.at(Tensor::name); array.present()) buffers.name = array.address();
  FOVEA_TENSORS(FOVEA_PYTHON_ADDRESS)
#undef FOVEA_PYTHON_ADDRESS
  for (size_t i = 0; i < request.named_list().size(); ++i) {
    const NamedArrays::One& one = request.named_list()[i];
    buffers.named[i] = one.tensor.address();
    if (one.gradient.present()) buffers.named_gradients[i] = one.gradient.address();
  }
  buffers.seed = request.seed;
  buffers.offset = request.offset;
  return buffers;
}

Workspace::Workspace(size_t size, fovea_device device, const ArrayType& type) : device_(device) {
  if (size == 0) return;
  if (device_.type == FOVEA_CPU) {
    constexpr size_t kAlignment = 256;  // of plans over ranks; others are content with less
    static_assert(kAlignment % FOVEA_WORKSPACE_ALIGNMENT == 0);
    memory_ = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    if (memory_ == nullptr) {
      PyErr_NoMemory();
      throw PythonError();
    }
  } else if (take_from(type.exchange, size)) {
    memory_ = static_cast<char*>(managed_->tensor.data) + managed_->tensor.byte_offset;
  } else if (type.allocate) {
    const Ref bytes = checked(PyLong_FromSize_t(size));
    const Ref id = checked(PyLong_FromLong(device_.id));
    kept_ = checked(PyObject_CallFunctionObjArgs(type.allocate.get(), bytes.get(), id.get(), nullptr));
    memory_ = PyLong_AsVoidPtr(PyTuple_GetItem(kept_.get(), 1));
    if (PyErr_Occurred()) throw PythonError();
  } else {
    check(fovea_workspace_create(device_, size, &memory_));
  }
}

Workspace::~Workspace() {
  if (kept_) return;
  if (managed_ != nullptr) {
    if (managed_->deleter != nullptr) managed_->deleter(managed_);
  } else if (device_.type == FOVEA_CPU) {
    std::free(memory_);
  } else {
    fovea_workspace_destroy(device_, memory_);
  }
}

/// The same allocator as `ArrayType::allocate` asks, without Python in between. False where it fails: asked
/// again through Python, the library raises its own exception.
bool Workspace::take_from(const DLExchangeApi* library, size_t size) {
  if (library == nullptr || library->allocate == nullptr) return false;
  int64_t bytes = static_cast<int64_t>(size);
  fovea_tensor prototype{};
  prototype.device = device_;
  prototype.ndim = 1;
  prototype.dtype = {FOVEA_CODE_UINT, 8, 1};
  prototype.shape = &bytes;
  const WithoutGil others_run;
  return library->allocate(&prototype, &managed_, nullptr, [](void*, const char*, const char*) {}) == 0;
}

}  // namespace fovea::python
