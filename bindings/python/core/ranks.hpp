// fovea_distributed.h for Python: transports, plans of one problem over several ranks, and their runs.
#pragma once

#include "python.hpp"

namespace fovea::python {

// Functions of the module; fovea/_core.pyi shows their arguments.

PyObject* open_ranks(PyObject*, PyObject* arguments);
PyObject* open_nccl_ranks(PyObject*, PyObject* arguments);
PyObject* check_ranks(PyObject*, PyObject* ranks);
PyObject* close_ranks(PyObject*, PyObject* ranks);
PyObject* plan_ranks(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords);
PyObject* explain_ranks(PyObject*, PyObject* plan);
PyObject* run_ranks(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords);

}  // namespace fovea::python
