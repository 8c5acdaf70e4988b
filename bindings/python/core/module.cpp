// fovea._core: the C ABI for Python. It takes arrays and numbers by keyword, finds or makes a plan, and runs
// it; what is asked, and where results lie, is decided by the Python code above.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "arrays.hpp"
#include "plans.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "xla.hpp"

#if defined(FOVEA_PYTHON_CLI)
namespace fovea::cli {
int run_program(int argc, char** argv);
}
#endif

namespace fovea::python {
namespace {

// ---- forward, backward and plan

template <bool kBackward>
PyObject* compute(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    Request request;
    read(request, kBackward, values, positional, keywords);
    const std::shared_ptr<const Plan> plan = plan_for(request);
    run(*plan, request);
    Py_RETURN_NONE;
  });
}

// ---- attend(q, k, v, need_lse, heads_first, checks, options): results are made here

/// Whether the elements of a row follow each other, as the library wants it.
bool has_contiguous_rows(const fovea_tensor& t) {
  if (t.strides == nullptr || t.strides[t.ndim - 1] == 1 || t.shape[t.ndim - 1] == 1) return true;
  return std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
}

/// Memory for o: strides as q has them where it lies without gaps. Of bfloat16 where q has 8 bits.
Ref new_output(PyObject* q, const ArrayType& type, const fovea_tensor& of_q, const fovea_tensor& of_v) {
  const int64_t* shape = of_q.shape;
  const int64_t size = of_v.shape[of_v.ndim - 1];
  const bool of_8_bits = of_q.dtype.code == FOVEA_CODE_FLOAT8_E4M3FN;
  if (size == shape[of_q.ndim - 1] && !of_8_bits) {
    return checked(PyObject_CallFunctionObjArgs(type.empty_like.get(), q, nullptr));
  }
  PyObject* maker = of_8_bits ? type.new_bfloat16.get() : type.new_empty.get();
  return of_q.ndim == 3
             ? checked(PyObject_CallFunction(maker, "O(nnn)", q, shape[0], shape[1], size))
             : checked(PyObject_CallFunction(maker, "O(nnnn)", q, shape[0], shape[1], shape[2], size));
}

/// What the caller's library has to be asked before memory of its arrays may be read and results without
/// gradients may be made: functions without arguments.
class Checks {
 public:
  /// `functions`: None, or a tuple. The first tells whether gradients are recorded; arrays have requires_grad
  /// then. If one of the others gives true, nothing may be computed.
  explicit Checks(PyObject* functions) : functions_(functions == Py_None ? nullptr : functions) {
    if (functions_ != nullptr && (!PyTuple_Check(functions_) || PyTuple_Size(functions_) == 0)) {
      PyErr_SetString(PyExc_TypeError, "checks: expected None, or a tuple of functions");
      throw PythonError();
    }
  }

  bool forbid() {
    if (functions_ == nullptr) return false;
    for (Py_ssize_t i = PyTuple_Size(functions_) - 1; i > 0; --i) {
      if (is_true(i)) return true;
    }
    records_gradients_ = is_true(0);
    return false;
  }

  /// After forbid().
  bool forbid(PyObject* array) const {
    if (!records_gradients_ || array == nullptr) return false;
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    return as_truth(checked(PyObject_GetAttr(array, requires_grad)).get()) != 0;
  }

 private:
  bool is_true(Py_ssize_t i) const {
    return as_truth(checked(PyObject_CallNoArgs(PyTuple_GetItem(functions_, i))).get()) != 0;
  }

  PyObject* functions_;
  bool records_gradients_ = false;
};

PyObject* attend(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (positional != 6 && positional != 7) {
      PyErr_SetString(PyExc_TypeError,
                      "expected q, k, v, need_lse, heads_first, checks, options and keywords");
      throw PythonError();
    }
    PyObject* given_q = values[0];
    const ArrayType& type = array_type(given_q);
    if (!type.empty_like) Py_RETURN_NONE;
    for (int i = 1; i < 3; ++i) {
      if (array_type(values[i]).empty_like.get() != type.empty_like.get()) Py_RETURN_NONE;
    }
    Checks checks(values[5]);
    if (checks.forbid()) Py_RETURN_NONE;
    for (int i = 0; i < 3; ++i) {
      if (checks.forbid(values[i])) Py_RETURN_NONE;
    }
    Request request;
    const auto array = [&](Tensor tensor) -> Array& { return request.arrays[static_cast<size_t>(tensor)]; };
    request.problem.pass = FOVEA_FORWARD;
    if (positional == 7) read_options(request, values[6]);
    read_keywords(request, false, values + positional, keywords);
    for (const Array& given : request.arrays) {
      if (given.present() && given.type().empty_like.get() != type.empty_like.get()) Py_RETURN_NONE;
    }
    for (const Tensor each : {Tensor::bias, Tensor::sink, Tensor::k_new, Tensor::v_new, Tensor::qv}) {
      if (checks.forbid(request.at(each).object())) Py_RETURN_NONE;
    }
    if (!request.is_traced) Py_RETURN_NONE;
    for (const NamedArrays::One& one : request.named_list()) {
      if (one.tensor.type().empty_like.get() != type.empty_like.get()) Py_RETURN_NONE;
      if (checks.forbid(one.tensor.object())) Py_RETURN_NONE;
    }
    Array &q = array(Tensor::q), &k = array(Tensor::k), &v = array(Tensor::v);
    q.describe(given_q, "q");
    k.describe(values[1], "k");
    v.describe(values[2], "v");
    require_writable_cache(request);
    const bool need_lse = as_truth(values[3]) != 0;
    const bool heads_first = as_truth(values[4]) != 0;
    const int32_t rank = q.tensor().ndim;
    const bool packed = rank == 3 && !heads_first;
    const int32_t rank_k = k.tensor().ndim;
    // Packed queries may attend to keys of a cache, which are not packed.
    const bool caches = packed && rank_k == 4 && request.at(Tensor::cu_seqlens_q).present();
    if ((rank != 4 && !packed) || (rank_k != rank && !caches) || v.tensor().ndim != rank_k) Py_RETURN_NONE;
    for (const Tensor each : {Tensor::q, Tensor::k, Tensor::v, Tensor::qv}) {
      if (const Array& rows = request.at(each); rows.present() && !has_contiguous_rows(rows.tensor()))
        Py_RETURN_NONE;
    }
    Ref o = Ref::to(request.at(Tensor::o).object());
    if (!o) {
      o = new_output(given_q, type, q.tensor(), v.tensor());
      array(Tensor::o).describe(o.get(), "o");
    }
    if (heads_first) {
      for (Array* each : {&q, &k, &v, &array(Tensor::o)}) each->transpose();
    }
    Ref lse;
    if (need_lse) {
      const int64_t* shape = q.tensor().shape;
      PyObject* maker = type.new_float32.get();
      lse = checked(packed ? PyObject_CallFunction(maker, "O(nn)", given_q, shape[1], shape[0])
                           : PyObject_CallFunction(maker, "O(nnn)", given_q, shape[0], shape[2], shape[1]));
      array(Tensor::lse).describe(lse.get(), "lse");
    }
    const std::shared_ptr<const Plan> plan = plan_for(request);
    run(*plan, request);
    return need_lse ? PyTuple_Pack(2, o.get(), lse.get()) : o.release();
  });
}

template <bool kBackward>
PyObject* plan(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    Request request;
    read(request, kBackward, values, positional, keywords);
    const std::shared_ptr<const Plan> made = plan_for(request);
    const fovea_plan* handle = made->handle.get();
    return Py_BuildValue("(ssnds)", fovea_plan_backend(handle), fovea_plan_reason(handle),
                         static_cast<Py_ssize_t>(made->workspace_size), fovea_plan_flops(handle),
                         fovea_plan_expressions(handle));
  });
}

// ---- seen_blocks(batch, head, block_q, block_k, and keywords as forward)

PyObject* blocks(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (positional != 4) {
      PyErr_SetString(PyExc_TypeError, "expected batch, head, block_q, block_k, and keywords");
      throw PythonError();
    }
    BlockGrid grid{as_integer(values[0], "batch"), as_integer(values[1], "head"),
                   as_integer(values[2], "block_size"), as_integer(values[3], "block_size")};
    if (grid.block_q < 1 || grid.block_k < 1) {
      PyErr_SetString(PyExc_ValueError, "block_size: got a size below 1; expected 1 or more; 128 is usual");
      throw PythonError();
    }
    Request request;
    read(request, false, values + positional, 0, keywords);
    find_longest(request);
    const auto count = [&](Tensor rows, int64_t longest, int64_t block) {
      const fovea_tensor& t = request.at(rows).tensor();
      const int64_t length = t.ndim == 4 ? t.shape[1] : longest > 0 ? longest : t.ndim > 0 ? t.shape[0] : 0;
      return (length + block - 1) / block;
    };
    grid.rows = count(Tensor::q, request.problem.max_seqlen_q, grid.block_q);
    grid.columns =
        request.at(Tensor::k).present() ? count(Tensor::k, request.problem.max_seqlen_k, grid.block_k) : 0;
    const std::vector<uint8_t> seen = seen_blocks(request, grid);
    return Py_BuildValue("(y#nn)", reinterpret_cast<const char*>(seen.data()),
                         static_cast<Py_ssize_t>(seen.size()), static_cast<Py_ssize_t>(grid.rows),
                         static_cast<Py_ssize_t>(grid.columns));
  });
}

// ---- compile(backward, chip, num_sms, folder, and keywords as forward or backward)

PyObject* compile_ahead(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (positional != 4) {
      PyErr_SetString(PyExc_TypeError, "expected backward, chip, num_sms, folder, and keywords");
      throw PythonError();
    }
    if (!PyUnicode_Check(values[1])) {
      PyErr_Format(PyExc_TypeError, "chip: got %R; expected a name; 'sm_90' is one", values[1]);
      throw PythonError();
    }
    Py_ssize_t size = 0;
    const char* chip = PyUnicode_AsUTF8AndSize(values[1], &size);
    if (chip == nullptr) throw PythonError();
    char* folder = nullptr;
    // Without a place for the size, zeros inside are refused.
    if (values[3] != Py_None && PyBytes_AsStringAndSize(values[3], &folder, nullptr) != 0)
      throw PythonError();
    Request request;
    read(request, as_truth(values[0]) != 0, values + positional, 0, keywords);
    const std::string report = compile(request, chip, as_count(values[2], "num_sms"), folder);
    return PyUnicode_DecodeFSDefaultAndSize(report.data(), static_cast<Py_ssize_t>(report.size()));
  });
}

// ---- merge(o_parts, lse_parts, o, lse)

PyObject* merge(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *o_parts, *lse_parts, *o, *lse;
    if (!PyArg_ParseTuple(arguments, "O!O!OO", &PyTuple_Type, &o_parts, &PyTuple_Type, &lse_parts, &o,
                          &lse)) {
      throw PythonError();
    }
    const auto count = static_cast<size_t>(PyTuple_Size(o_parts));
    if (static_cast<size_t>(PyTuple_Size(lse_parts)) != count) {
      PyErr_SetString(PyExc_ValueError, "lse_parts: expected one for each of o_parts");
      throw PythonError();
    }
    std::vector<Array> arrays(2 * count + 2);
    std::vector<const fovea_tensor*> tensors(2 * count);
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      arrays[i].describe(PyTuple_GetItem(o_parts, at), "o_parts");
      arrays[count + i].describe(PyTuple_GetItem(lse_parts, at), "lse_parts");
    }
    for (size_t i = 0; i < 2 * count; ++i) tensors[i] = &arrays[i].tensor();
    Array& merged = arrays[2 * count];
    Array& merged_lse = arrays[2 * count + 1];
    merged.describe(o, "o");
    merged.require_writable("o");
    merged_lse.describe(lse, "lse");
    merged_lse.require_writable("lse");
    const fovea_device device = merged.tensor().device;
    void* const stream = device.type == FOVEA_CUDA ? current_stream(merged.type(), device) : nullptr;
    fovea_status status;
    {
      const WithoutGil others_run;
      status = fovea_merge(static_cast<int32_t>(count), tensors.data(), tensors.data() + count,
                           &merged.tensor(), &merged_lse.tensor(), stream);
    }
    check(status);
    Py_RETURN_NONE;
  });
}

// ---- the library and the machine

PyObject* backends(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    const int32_t count = fovea_backend_count();
    Ref list = checked(PyList_New(count));
    for (int32_t i = 0; i < count; ++i) {
      Ref row = checked(Py_BuildValue("(sss)", fovea_backend_name(i),
                                      fovea_backend_device_type(i) == FOVEA_CUDA ? "cuda" : "cpu",
                                      fovea_backend_unavailable_because(i)));
      PyList_SetItem(list.get(), i, row.release());
    }
    return list.release();
  });
}

PyObject* machine(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    const int32_t count = fovea_cuda_device_count();
    Ref gpus = checked(PyList_New(count));
    for (int32_t i = 0; i < count; ++i) {
      PyList_SetItem(gpus.get(), i, checked(PyUnicode_FromString(fovea_cuda_device(i))).release());
    }
    return Py_BuildValue("(sisO)", fovea_machine(), fovea_default_threads(), fovea_cuda(), gpus.get());
  });
}

PyObject* version(PyObject*, PyObject*) {
  return PyUnicode_FromString(fovea_version());
}

PyObject* number_of_plans(PyObject*, PyObject*) {
  return PyLong_FromSize_t(plan_count());
}

PyObject* clear_plans(PyObject*, PyObject*) {
  forget_plans();
  Py_RETURN_NONE;
}

PyObject* handler_of_xla(PyObject*, PyObject* platform) {
  return guarded([&]() -> PyObject* {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(platform, &size);
    if (text == nullptr) throw PythonError();
    void* handler = xla_handler(text);
    if (handler == nullptr) {
      PyErr_Format(PyExc_ValueError, "platform: got %R; expected 'cpu' or 'cuda'", platform);
      throw PythonError();
    }
    return PyCapsule_New(handler, nullptr, nullptr);
  });
}

PyObject* roles(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    Ref names = checked(PyTuple_New(static_cast<Py_ssize_t>(kTensors)));
    for (size_t i = 0; i < kTensors; ++i) {
      PyTuple_SetItem(names.get(), static_cast<Py_ssize_t>(i),
                      checked(PyUnicode_FromString(argument_name(i))).release());
    }
    return names.release();
  });
}

PyObject* on_new_type(PyObject*, PyObject* hook) {
  set_hook(hook);
  Py_RETURN_NONE;
}

#if defined(FOVEA_PYTHON_CLI)
PyObject* main_program(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    std::vector<std::string> words;
    const Py_ssize_t count = PyList_Size(arguments);
    if (count < 0) throw PythonError();
    for (Py_ssize_t i = 0; i < count; ++i) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(PyList_GetItem(arguments, i), &size);
      if (text == nullptr) throw PythonError();
      words.emplace_back(text, static_cast<size_t>(size));
    }
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    int status;
    {
      const WithoutGil others_run;
      status = fovea::cli::run_program(static_cast<int>(words.size()), pointers.data());
    }
    return PyLong_FromLong(status);
  });
}
#endif

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"forward", as_method(compute<false>), METH_FASTCALL | METH_KEYWORDS, "Computes o, and lse where given."},
    {"backward", as_method(compute<true>), METH_FASTCALL | METH_KEYWORDS,
     "Computes dq, dk, dv, and more where given."},
    {"attend", as_method(attend), METH_FASTCALL | METH_KEYWORDS,
     "attend(q, k, v, need_lse, heads_first, checks, options={}, **more of them): o or (o, lse), made as q "
     "is; "
     "or None where a row is not contiguous, a rank is not that of attention, the arrays are not of one "
     "library "
     "whose arrays are made here, or a check forbids it. heads_first: (batch, heads, seqlen, size). checks: "
     "None, "
     "or a tuple of functions: whether gradients are recorded (q, k, v, bias, sink or qv with requires_grad "
     "forbid it "
     "then), and others that forbid it where they give true. options: arguments of forward."},
    {"plan_forward", as_method(plan<false>), METH_FASTCALL | METH_KEYWORDS,
     "(backend, reason, workspace bytes, floating-point operations, expressions) of what forward would do."},
    {"plan_backward", as_method(plan<true>), METH_FASTCALL | METH_KEYWORDS, "The same of backward."},
    {"seen_blocks", as_method(blocks), METH_FASTCALL | METH_KEYWORDS,
     "seen_blocks(batch, head, block_q, block_k, **arguments of forward): (a byte for each block, rows, "
     "columns)."},
    {"compile", as_method(compile_ahead), METH_FASTCALL | METH_KEYWORDS,
     "compile(backward, chip, num_sms, folder, **arguments of forward or backward): the report of "
     "fovea_compile. "
     "folder: bytes, or None."},
    {"merge", merge, METH_VARARGS, "merge(o_parts, lse_parts, o, lse): fovea_merge."},
    {"open_ranks", open_ranks, METH_VARARGS,
     "open_ranks(channel, rank, size): CPU ranks, whose messages the channel carries: start(sends, receives) "
     "with lists of (peer, "
     "memory), finish(), stop(reason)."},
    {"open_nccl_ranks", open_nccl_ranks, METH_VARARGS,
     "open_nccl_ranks(communicator, device, deadline_ms): fovea_nccl_transport_open."},
    {"check_ranks", check_ranks, METH_O, "Raises what went wrong so far with messages of GPUs."},
    {"close_ranks", close_ranks, METH_O, "fovea_nccl_transport_close, where the ranks are NCCL's."},
    {"plan_ranks", as_method(plan_ranks), METH_FASTCALL | METH_KEYWORDS,
     "plan_ranks(ranks, backward, pieces, key_pieces, cu_seqlens_q, cu_seqlens_k, (heads_ranks, stages, "
     "ranks_per_host, "
     "memory_limit), **arguments of forward or backward): fovea_distributed_plan_create. All ranks call it."},
    {"explain_ranks", explain_ranks, METH_O, "(reason, workspace bytes, messages, bytes that a run sends)"},
    {"run_ranks", as_method(run_ranks), METH_FASTCALL | METH_KEYWORDS,
     "run_ranks(plan, **arrays): fovea_distributed_run. All ranks call it."},
    {"roles", roles, METH_NOARGS, "Names of the tensors of a call, in the order of their indices."},
    {"backends", backends, METH_NOARGS, "[(name, device, why it is not available or '')]"},
    {"machine", machine, METH_NOARGS, "(processor, threads, CUDA, [GPU])"},
    {"version", version, METH_NOARGS, "Version of the library."},
    {"plan_count", number_of_plans, METH_NOARGS, "How many plans are kept."},
    {"clear_plans", clear_plans, METH_NOARGS, "Forgets the plans that are kept."},
    {"xla_handler", handler_of_xla, METH_O,
     "The handler of XLA's custom calls for 'cpu' or 'cuda', in a capsule."},
    {"on_new_type", on_new_type, METH_O,
     "Sets what is asked about a type of arrays seen for the first time."},
#if defined(FOVEA_PYTHON_CLI)
    {"main", main_program, METH_O, "The command line; returns its exit status."},
#endif
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "fovea._core",
                          "The C ABI of Fovea.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace fovea::python

PyMODINIT_FUNC PyInit__core() {
  using namespace fovea::python;
  if (!intern_argument_names()) return nullptr;
  return PyModule_Create(&definition);
}
