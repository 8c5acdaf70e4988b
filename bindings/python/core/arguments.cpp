// Reads keyword arguments: which tensor, number or expression a name means, and the value.
#include "arguments.hpp"

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "arrays.hpp"

namespace fovea::python {
namespace {

// The numbers, in the order of fovea/_arguments.py; rotary_interleaved goes with new rows (fovea/_cache.py).
// clang-format off
#define FOVEA_PYTHON_NUMBERS(X)                                                           \
  X(scale) X(causal) X(window) X(softcap) X(dropout) X(block_size)                        \
  X(max_seqlen_q) X(max_seqlen_k) X(seed) X(offset) X(deterministic) X(backend) X(num_threads)      \
  X(num_splits) X(batch_invariant) X(sm_margin) X(rotary_interleaved)
// clang-format on

enum Number {
#define FOVEA_PYTHON_ENUMERATOR(name) name,
  FOVEA_PYTHON_NUMBERS(FOVEA_PYTHON_ENUMERATOR)
#undef FOVEA_PYTHON_ENUMERATOR
      kNumbers
};

// Expressions: two texts, and dicts of arrays by name.
#define FOVEA_PYTHON_EXPRESSIONS(X) X(score) X(sees) X(tensors) X(tensor_gradients)
enum Expression {
#define FOVEA_PYTHON_ENUMERATOR(name) name,
  FOVEA_PYTHON_EXPRESSIONS(FOVEA_PYTHON_ENUMERATOR)
#undef FOVEA_PYTHON_ENUMERATOR
      kExpressions
};
constexpr size_t kFirstExpression = kTensors + kNumbers;
constexpr size_t kArguments = kFirstExpression + kExpressions;
constexpr std::array<const char*, kArguments> kNames = {
#define FOVEA_PYTHON_NAME(name, ...) #name,
    FOVEA_TENSORS(FOVEA_PYTHON_NAME) FOVEA_PYTHON_NUMBERS(FOVEA_PYTHON_NAME)
        FOVEA_PYTHON_EXPRESSIONS(FOVEA_PYTHON_NAME)
#undef FOVEA_PYTHON_NAME
};

/// Interned, so that a keyword is mostly found by its address.
std::array<PyObject*, kArguments> interned_names;

size_t index_of(PyObject* name, size_t expected) {
  for (size_t at = expected; at < kArguments; ++at) {  // callers name them in this order
    if (interned_names[at] == name) return at;
  }
  for (size_t at = 0; at < expected; ++at) {
    if (interned_names[at] == name) return at;
  }
  for (size_t i = 0; i < kArguments; ++i) {
    if (PyUnicode_Compare(interned_names[i], name) == 0) return i;
  }
  PyErr_Format(PyExc_TypeError, "unexpected argument %R", name);
  throw PythonError();
}

double as_double(PyObject* object, const char* name) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; expected a number", name, object);
    throw PythonError();
  }
  return value;
}
/// The two integers of a tuple, or of anything that can be made into one.
void as_pair(PyObject* object, const char* name, int64_t& first, int64_t& second) {
  const Ref tuple = PyTuple_Check(object) ? Ref::to(object) : Ref(PySequence_Tuple(object));
  if (!tuple || PyTuple_Size(tuple.get()) != 2) {
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s: got %R; expected two integers; give them as a tuple", name, object);
    throw PythonError();
  }
  first = PyLong_AsLongLong(PyTuple_GetItem(tuple.get(), 0));
  if (!PyErr_Occurred()) second = PyLong_AsLongLong(PyTuple_GetItem(tuple.get(), 1));
  if (PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; expected two integers; give them as a tuple", name, object);
    throw PythonError();
  }
}

uint64_t as_word(PyObject* object, const char* name) {
  // Any integer: its low 64 bits.
  const unsigned long long value = PyLong_AsUnsignedLongLongMask(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; expected an integer", name, object);
    throw PythonError();
  }
  return value;
}

void set_number(Request& r, size_t number, PyObject* value) {
  const char* name = kNames[kTensors + number];
  switch (number) {
    case scale:
      r.problem.scale = as_double(value, name);
      if (r.problem.scale == 0) {  // to the C ABI it is the default
        PyErr_SetString(PyExc_ValueError,
                        "scale: got 0; expected another number, or None for 1/sqrt(head size)");
        throw PythonError();
      }
      break;
    case causal:
      r.problem.causal = as_truth(value);
      break;
    case window:
      as_pair(value, name, r.problem.window_left, r.problem.window_right);
      break;
    case softcap:
      r.problem.softcap = as_double(value, name);
      break;
    case dropout:
      r.problem.dropout = as_double(value, name);
      break;
    case seed:
      r.seed = as_word(value, name);
      break;
    case offset:
      r.offset = as_word(value, name);
      break;
    case block_size:
      as_pair(value, name, r.problem.block_q, r.problem.block_k);
      break;
    case max_seqlen_q:
      r.problem.max_seqlen_q = as_integer(value, name);
      break;
    case max_seqlen_k:
      r.problem.max_seqlen_k = as_integer(value, name);
      break;
    case deterministic:
      r.options.deterministic = as_truth(value);
      break;
    case rotary_interleaved:
      r.problem.rotary_interleaved = as_truth(value);
      break;
    case num_splits:
      r.options.num_splits = as_count(value, name);
      break;
    case batch_invariant:
      r.options.batch_invariant = as_truth(value);
      break;
    case sm_margin:
      r.options.sm_margin = as_count(value, name);
      break;
    case num_threads:
      r.options.num_threads = as_count(value, name);
      break;
    case backend: {
      Py_ssize_t size = 0;
      r.options.backend = PyUnicode_AsUTF8AndSize(value, &size);  // lives as long as the argument
      if (r.options.backend == nullptr) throw PythonError();
      break;
    }
    default:
      break;
  }
}

std::string as_text(PyObject* object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) throw PythonError();
  return {text, static_cast<size_t>(size)};
}

/// Calls visit(name, array) for a dict of arrays.
template <class Visit>
void for_each_array(PyObject* dict, const char* argument, Visit&& visit) {
  if (!PyDict_Check(dict)) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; expected a dict of names and arrays", argument, dict);
    throw PythonError();
  }
  PyObject *name, *value;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &name, &value) != 0) {
    if (!PyUnicode_Check(name)) {
      PyErr_Format(PyExc_TypeError, "%s: got the name %R; expected text", argument, name);
      throw PythonError();
    }
    Ref kept = Ref::to(value);
    visit(as_text(name), std::move(kept));
  }
}

void set_tensors(Request& r, PyObject* dict) {
  if (!PyDict_Check(dict) || PyDict_Size(dict) > 0) r.named = std::make_unique<NamedArrays>();
  for_each_array(dict, "tensors", [&](std::string name, Ref array) {
    if (r.named->count == FOVEA_MAX_NAMED_TENSORS) {
      PyErr_Format(PyExc_ValueError,
                   "tensors: got more than %d; put several into one, with an index that chooses",
                   FOVEA_MAX_NAMED_TENSORS);
      throw PythonError();
    }
    NamedArrays::One& one = r.named->list[r.named->count++];
    one.name = std::move(name);
    one.kept = std::move(array);
    one.tensor.describe(one.kept.get(), ("tensors." + one.name).c_str());
  });
}

/// After set_tensors.
void set_gradients(Request& r, PyObject* dict) {
  for_each_array(dict, "tensor_gradients", [&](const std::string& name, Ref array) {
    for (size_t i = 0; r.named && i < r.named->count; ++i) {
      NamedArrays::One& one = r.named->list[i];
      if (one.name != name) continue;
      const std::string argument = "tensor_gradients." + name;
      one.gradient.describe(array.get(), argument.c_str());  // the caller holds it
      one.gradient.require_writable(argument.c_str());
    }
  });
}

void set_expression(Request& r, size_t which, PyObject* value) {
  if (which == tensors) return set_tensors(r, value);
  if (which == tensor_gradients) return set_gradients(r, value);
  if (!PyUnicode_Check(value)) {
    r.is_traced = false;  // a function, of which the Python code makes text
    return;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value, &size);  // lives as long as the argument
  if (text == nullptr) throw PythonError();
  (which == score ? r.problem.score : r.problem.sees) = text;
}

bool is_output(size_t tensor, bool backward) {
  constexpr std::array<std::array<fovea_access, 2>, kTensors> kAccess = {{
#define FOVEA_PYTHON_ACCESS(name, Name, in_forward, in_backward, meaning) {in_forward, in_backward},
      FOVEA_TENSORS(FOVEA_PYTHON_ACCESS)
#undef FOVEA_PYTHON_ACCESS
  }};
  return kAccess[tensor][backward ? 1 : 0] == FOVEA_WRITE;
}

/// Reads one argument, and returns the index of the next in kNames; None stands for one that is left out.
size_t read_argument(Request& r, bool backward, PyObject* name, PyObject* value, size_t expected) {
  const size_t at = index_of(name, expected);
  if (value == Py_None) return at + 1;
  if (at < kTensors) {
    r.arrays[at].describe(value, kNames[at]);
    if (is_output(at, backward)) r.arrays[at].require_writable(kNames[at]);
  } else if (at < kFirstExpression) {
    set_number(r, at - kTensors, value);
  } else {
    set_expression(r, at - kFirstExpression, value);
  }
  return at + 1;
}

}  // namespace

int64_t as_integer(PyObject* object, const char* name) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; expected an integer", name, object);
    throw PythonError();
  }
  return value;
}

int32_t as_count(PyObject* object, const char* name) {
  const int64_t value = as_integer(object, name);
  if (value < 0 || value > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%s: got %R; expected 0 to 2147483647", name, object);
    throw PythonError();
  }
  return static_cast<int32_t>(value);
}

int32_t as_truth(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw PythonError();
  return value;
}

const char* argument_name(size_t tensor) {
  return kNames[tensor];
}

bool intern_argument_names() {
  for (size_t i = 0; i < kArguments; ++i) {
    interned_names[i] = PyUnicode_InternFromString(kNames[i]);
    if (interned_names[i] == nullptr) return false;
  }
  return true;
}

void read_keywords(Request& r, bool backward, PyObject* const* values, PyObject* keywords) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  size_t expected = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (values[i] == Py_None) continue;
    expected = read_argument(r, backward, PyTuple_GetItem(keywords, i), values[i], expected);
  }
}

void read_options(Request& r, PyObject* options) {
  if (!PyDict_Check(options)) {
    PyErr_SetString(PyExc_TypeError, "options: expected a dict");
    throw PythonError();
  }
  PyObject *name, *value;
  Py_ssize_t place = 0;
  size_t expected = kTensors;  // mostly numbers
  while (PyDict_Next(options, &place, &name, &value) != 0) {
    // Held: what reads the value may run code that changes the dict.
    const Ref kept = Ref::to(value);
    expected = read_argument(r, false, name, value, expected);
  }
}

void require_writable_cache(const Request& r) {
  if (!r.at(Tensor::k_new).present()) return;
  r.at(Tensor::k).require_writable("k");
  r.at(Tensor::v).require_writable("v");
}

void read(Request& r, bool backward, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  if (positional != 0) {
    PyErr_SetString(PyExc_TypeError, "arguments are given by keyword");
    throw PythonError();
  }
  r.problem.pass = backward ? FOVEA_BACKWARD : FOVEA_FORWARD;
  read_keywords(r, backward, values, keywords);
  require_writable_cache(r);
  if (!r.at(Tensor::q).present()) {
    PyErr_SetString(PyExc_TypeError, "q: got None; expected an array");
    throw PythonError();
  }
  if (!r.is_traced) {
    PyErr_SetString(PyExc_TypeError, "score, sees: got a function; expected text");
    throw PythonError();
  }
}

}  // namespace fovea::python
