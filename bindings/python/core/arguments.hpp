// The keyword arguments of forward, backward, plan and the functions made of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plans.hpp"
#include "python.hpp"

namespace fovea::python {

/// What the keyword of a tensor is called, by its place in FOVEA_TENSORS.
const char* argument_name(size_t tensor);

/// Once, before anything is read; false with a Python exception.
bool intern_argument_names();

// All of these throw PythonError with the Python exception set. `name` is what messages call a value.

int64_t as_integer(PyObject* object, const char* name);
/// 0 to INT32_MAX.
int32_t as_count(PyObject* object, const char* name);
int32_t as_truth(PyObject* object);

/// The values that stand before their names, as vectorcall passes them; None stands for one that is left out.
void read_keywords(Request& r, bool backward, PyObject* const* values, PyObject* keywords);
/// The same of a dict: to unpack it into keywords costs a call 0.2 us.
void read_options(Request& r, PyObject* options);
/// Of a request that is read: rows to append make k and v outputs.
void require_writable_cache(const Request& r);
/// A whole call by keywords alone, with q and with expressions as texts.
void read(Request& r, bool backward, PyObject* const* values, Py_ssize_t positional, PyObject* keywords);

}  // namespace fovea::python
