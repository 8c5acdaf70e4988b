// Arrays of Python as tensors of fovea.h: their memory is described, never copied.
#pragma once

#include <fovea/fovea.h>

#include <array>
#include <memory>
#include <vector>

#include "dlpack.hpp"
#include "python.hpp"

namespace fovea::python {

constexpr int kMaxRank = 8;

/// How arrays of one Python type are read, and where a GPU's workspace and stream come from.
struct ArrayType {
  Ref type;
  const DLExchangeApi* exchange = nullptr;  // where there is one, it is used; else `__dlpack__`
  Ref describe;  // object -> (address, code, bits, device type, device id, shape, strides, writable), or NULL
  bool describe_first = false;  // before `__dlpack__`; else for arrays that `__dlpack__` refuses
  // (bytes, device id) -> (what keeps it alive, address), where `exchange` does not allocate; NULL or None:
  // fovea_workspace_create
  Ref allocate;
  Ref stream;  // device id -> the current stream's address; NULL or None: the default stream
  // array -> one as it, without contents; (array, shape) -> one of its type, of float32 and of bfloat16. NULL:
  // `attend` makes none.
  Ref empty_like, new_empty, new_float32, new_bfloat16;
  bool versioned = true;  // whether its `__dlpack__` knows max_version
};

/// The type of `object`, found once for each type. `hook`: see set_hook.
ArrayType& array_type(PyObject* object);

/// Called for a type seen for the first time; returns None or (describe, allocate, stream, describe_first),
/// which (empty_like, new_empty, new_float32, new_bfloat16) may follow.
void set_hook(PyObject* hook);

/// A fovea_tensor over the memory of a Python array. Neither copied nor moved, as its tensor points into it.
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  /// `name` for messages.
  void describe(PyObject* object, const char* name);
  /// Refuses memory that must not be written.
  void require_writable(const char* name) const;
  bool present() const { return type_ != nullptr; }
  const fovea_tensor& tensor() const { return tensor_; }
  const ArrayType& type() const { return *type_; }
  /// Borrowed: lives as long as the call's arguments. NULL where there is no array.
  PyObject* object() const { return object_; }
  void* address() const;
  /// Shape and strides of the array exchange their dimensions 1 and 2; it has both.
  void transpose();

 private:
  void from_dlpack(PyObject* object, const char* name);
  void from_description(PyObject* object, const char* name);

  fovea_tensor tensor_{};
  const ArrayType* type_ = nullptr;
  PyObject* object_ = nullptr;
  bool read_only_ = false;
  Ref capsule_;  // keeps what `__dlpack__` gave
  std::array<int64_t, kMaxRank> shape_, strides_;
};

/// The stream that the caller's library works on.
void* current_stream(const ArrayType& type, fovea_device device);

}  // namespace fovea::python
