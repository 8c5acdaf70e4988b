// How arrays are read: by the exchange table of their type, by its own description, or by __dlpack__.
#include "arrays.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace fovea::python {
namespace {

std::unordered_map<PyObject*, std::unique_ptr<ArrayType>>& known_types() {
  // Never destroyed: it holds references, and the interpreter may be gone by then.
  static auto* types = new std::unordered_map<PyObject*, std::unique_ptr<ArrayType>>;
  return *types;
}
PyObject* type_hook = nullptr;

/// The attribute `name` of `object`, or none where it has none.
Ref attribute(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, name);
  if (found == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError();
    PyErr_Clear();
  }
  return Ref(found);
}

const DLExchangeApi* exchange_api(PyObject* type) {
  const Ref capsule = attribute(type, "__dlpack_c_exchange_api__");
  if (!capsule || !PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) return nullptr;
  const auto* api =
      static_cast<const DLExchangeApi*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major > kDLMajor) api = api->previous;
  const bool usable = api != nullptr && api->version.major == kDLMajor && api->describe != nullptr;
  return usable ? api : nullptr;
}

Ref item(PyObject* tuple, Py_ssize_t index) {
  Ref given = Ref::to(PyTuple_GetItem(tuple, index));
  if (!given) throw PythonError();
  return given.get() == Py_None ? Ref() : std::move(given);
}

std::string name_of_type(PyObject* object) {
  const Ref name = checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.get(), &size);
  if (text == nullptr) throw PythonError();
  return std::string(text, static_cast<size_t>(size));
}

[[noreturn]] void throw_not_an_array(PyObject* object, const char* name) {
  PyErr_Format(PyExc_TypeError,
               "%s: got %s; expected an array of numpy, PyTorch, JAX, CuPy, or another with __dlpack__; "
               "convert it, for instance by numpy.asarray",
               name, name_of_type(object).c_str());
  throw PythonError();
}

int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

}  // namespace

void set_hook(PyObject* hook) {
  Py_XDECREF(type_hook);
  Py_XINCREF(hook);
  type_hook = hook;
}

ArrayType& array_type(PyObject* object) {
  PyObject* key = reinterpret_cast<PyObject*>(Py_TYPE(object));
  static ArrayType* last = nullptr;  // the arrays of a call are mostly of one type
  if (last != nullptr && last->type.get() == key) return *last;
  auto& types = known_types();
  if (const auto found = types.find(key); found != types.end()) return *(last = found->second.get());

  auto made = std::make_unique<ArrayType>();
  made->type = Ref::to(key);
  if (type_hook != nullptr) {
    const Ref given = checked(PyObject_CallFunctionObjArgs(type_hook, key, nullptr));
    if (given.get() != Py_None) {
      made->describe = item(given.get(), 0);
      made->allocate = item(given.get(), 1);
      made->stream = item(given.get(), 2);
      made->describe_first = PyObject_IsTrue(PyTuple_GetItem(given.get(), 3)) == 1;
      if (PyTuple_Size(given.get()) > 4) {
        made->empty_like = item(given.get(), 4);
        made->new_empty = item(given.get(), 5);
        made->new_float32 = item(given.get(), 6);
        made->new_bfloat16 = item(given.get(), 7);
      }
    }
  }
  if (!made->describe_first) made->exchange = exchange_api(key);
  return *types.emplace(key, std::move(made)).first->second;
}

void Array::describe(PyObject* object, const char* name) {
  ArrayType& type = array_type(object);
  if (type.exchange != nullptr) {
    if (type.exchange->describe(object, &tensor_) != 0) {
      if (!type.describe) throw PythonError();
      PyErr_Clear();  // the type's own description says better what it is that is not taken
      from_description(object, name);
    }
  } else if (type.describe_first) {
    from_description(object, name);
  } else {
    from_dlpack(object, name);
  }
  type_ = &type;
  object_ = object;
}

void Array::require_writable(const char* name) const {
  if (!read_only_) return;
  PyErr_Format(PyExc_ValueError,
               "%s: got a read-only array; expected memory that may be written; give a copy of it", name);
  throw PythonError();
}

void Array::from_description(PyObject* object, const char* name) {
  const Ref given = checked(PyObject_CallFunctionObjArgs(array_type(object).describe.get(), object, nullptr));
  PyObject* fields[8];
  for (Py_ssize_t i = 0; i < 8; ++i) {
    fields[i] = PyTuple_GetItem(given.get(), i);
    if (fields[i] == nullptr) throw PythonError();
  }
  read_only_ = PyObject_IsTrue(fields[7]) == 0;
  const Py_ssize_t rank = PyTuple_Size(fields[5]);
  if (rank < 0) throw PythonError();
  if (rank > kMaxRank) throw_not_an_array(object, name);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    shape_[static_cast<size_t>(i)] = integer(PyTuple_GetItem(fields[5], i));
    strides_[static_cast<size_t>(i)] = integer(PyTuple_GetItem(fields[6], i));
  }
  tensor_.data = PyLong_AsVoidPtr(fields[0]);
  if (PyErr_Occurred()) throw PythonError();
  tensor_.dtype = {static_cast<uint8_t>(integer(fields[1])), static_cast<uint8_t>(integer(fields[2])), 1};
  tensor_.device = {static_cast<int32_t>(integer(fields[3])), static_cast<int32_t>(integer(fields[4]))};
  tensor_.ndim = static_cast<int32_t>(rank);
  tensor_.shape = shape_.data();
  tensor_.strides = strides_.data();
  tensor_.byte_offset = 0;
}

void Array::from_dlpack(PyObject* object, const char* name) {
  ArrayType& type = array_type(object);
  const Ref method = attribute(object, "__dlpack__");
  if (!method) throw_not_an_array(object, name);
  // Work goes to the stream on which the array's library works, so nothing is to be waited for: stream -1.
  static PyObject* const no_arguments = PyTuple_New(0);
  static PyObject* const on_cpu = Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
  static PyObject* const on_gpu = Py_BuildValue("{s:(ii),s:i}", "max_version", 1, 0, "stream", -1);
  const bool gpu = static_cast<bool>(type.stream);
  PyObject* made =
      type.versioned ? PyObject_Call(method.get(), no_arguments, gpu ? on_gpu : on_cpu) : nullptr;
  if (made == nullptr && (!type.versioned || PyErr_ExceptionMatches(PyExc_TypeError))) {
    PyErr_Clear();
    type.versioned = false;  // made before max_version was
    made = PyObject_Call(method.get(), no_arguments, nullptr);
  }
  if (made == nullptr && type.describe && PyErr_ExceptionMatches(PyExc_BufferError)) {
    PyErr_Clear();  // read-only memory, or a type of elements that this numpy has no name for
    from_description(object, name);
    return;
  }
  capsule_ = checked(made);
  if (PyCapsule_IsValid(made, "dltensor_versioned")) {
    const auto* managed =
        static_cast<const DLManagedTensorVersioned*>(PyCapsule_GetPointer(made, "dltensor_versioned"));
    if (managed->version.major != kDLMajor) throw_not_an_array(object, name);
    read_only_ = (managed->flags & kDLReadOnly) != 0;
    tensor_ = managed->tensor;
  } else {
    const auto* managed = static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(made, "dltensor"));
    if (managed == nullptr) throw PythonError();
    tensor_ = managed->tensor;
  }
}

void Array::transpose() {
  const auto rank = static_cast<size_t>(tensor_.ndim);
  for (size_t i = rank; i-- > 0;) {
    const bool last = i + 1 == rank;
    const int64_t dense = last ? 1 : strides_[i + 1] * tensor_.shape[i + 1];
    strides_[i] = tensor_.strides == nullptr ? dense : tensor_.strides[i];
  }
  std::copy_n(tensor_.shape, rank, shape_.data());
  std::swap(shape_[1], shape_[2]);
  std::swap(strides_[1], strides_[2]);
  tensor_.shape = shape_.data();
  tensor_.strides = strides_.data();
}

void* Array::address() const {
  return tensor_.data == nullptr ? nullptr : static_cast<char*>(tensor_.data) + tensor_.byte_offset;
}

void* current_stream(const ArrayType& type, fovea_device device) {
  void* stream = nullptr;
  if (type.exchange != nullptr && type.exchange->current_stream != nullptr) {
    if (type.exchange->current_stream(device.type, device.id, &stream) != 0) throw PythonError();
  } else if (type.stream) {
    const Ref id = checked(PyLong_FromLong(device.id));
    const Ref given = checked(PyObject_CallFunctionObjArgs(type.stream.get(), id.get(), nullptr));
    stream = PyLong_AsVoidPtr(given.get());
    if (PyErr_Occurred()) throw PythonError();
  }
  return stream;
}

}  // namespace fovea::python
