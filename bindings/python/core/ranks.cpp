// One problem over several ranks. A transport is NCCL's, or a Python object that carries messages: the library
// works without the GIL, and takes it for the calls of that object alone.
#include "ranks.hpp"

#include <fovea/fovea_distributed.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "arrays.hpp"
#include "calls.hpp"
#include "plans.hpp"

namespace fovea::python {
namespace {

constexpr const char* kRanksName = "fovea.ranks";
constexpr const char* kPlanName = "fovea.ranks_plan";

// ---- transports

struct Ranks {
  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks() { close(); }

  void close() {
    if (is_nccl) fovea_nccl_transport_close(&transport);
    is_nccl = false;
  }

  fovea_transport transport{};
  bool is_nccl = false;
  Ref channel;        ///< what carries messages of CPU ranks: start(sends, receives), finish(), stop(reason)
  std::string error;  ///< of the channel's last call
};

/// The text of the Python exception that is set, which ends here.
std::string take_exception() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref kept_type(type), kept_value(value), kept_trace(trace);
  const Ref shown(value == nullptr ? nullptr : PyObject_Str(value));
  const char* text = shown ? PyUnicode_AsUTF8AndSize(shown.get(), nullptr) : nullptr;
  if (text != nullptr && *text != '\0') return text;
  PyErr_Clear();
  const Ref name(type == nullptr ? nullptr : PyObject_GetAttrString(type, "__name__"));
  text = name ? PyUnicode_AsUTF8AndSize(name.get(), nullptr) : nullptr;
  PyErr_Clear();
  return text != nullptr ? text : "an exception of Python";
}

/// Calls the channel, with the GIL.
template <class Call>
fovea_status call_channel(void* context, const Call& call) {
  Ranks& ranks = *static_cast<Ranks*>(context);
  const WithGil gil;
  try {
    checked(call(ranks.channel.get()));
    return FOVEA_OK;
  } catch (const PythonError&) {
    ranks.error = take_exception();
  } catch (const std::exception& error) {
    ranks.error = error.what();
  }
  return FOVEA_INTERNAL;
}

/// [(peer, memory)] of messages; the memory is valid until their step is finished.
Ref list_of(const fovea_message* messages, int32_t count) {
  constexpr int kWritable = 0x200;  // PyBUF_WRITE, which the headers of 3.10's stable ABI leave out
  Ref list = checked(PyList_New(count));
  for (int32_t i = 0; i < count; ++i) {
    Ref memory = checked(PyMemoryView_FromMemory(static_cast<char*>(messages[i].data),
                                                 static_cast<Py_ssize_t>(messages[i].bytes), kWritable));
    Ref pair = checked(Py_BuildValue("(iO)", messages[i].peer, memory.get()));
    PyList_SetItem(list.get(), i, pair.release());
  }
  return list;
}

fovea_transport channel_transport(Ranks& ranks, int32_t rank, int32_t size) {
  fovea_transport t{};
  t.struct_size = sizeof t;
  t.context = &ranks;
  t.rank = rank;
  t.size = size;
  t.device = {FOVEA_CPU, 0};
  t.start = [](void* context, const fovea_message* sends, int32_t num_sends, const fovea_message* receives,
               int32_t num_receives, void*) {
    return call_channel(context, [&](PyObject* channel) {
      const Ref out = list_of(sends, num_sends), in = list_of(receives, num_receives);
      return PyObject_CallMethod(channel, "start", "OO", out.get(), in.get());
    });
  };
  t.finish = [](void* context, void*) {
    return call_channel(context,
                        [](PyObject* channel) { return PyObject_CallMethod(channel, "finish", nullptr); });
  };
  t.stop = [](void* context, const char* reason) {
    call_channel(context,
                 [&](PyObject* channel) { return PyObject_CallMethod(channel, "stop", "s", reason); });
  };
  t.error = [](void* context) { return static_cast<Ranks*>(context)->error.c_str(); };
  return t;
}

template <class T>
T& in_capsule(PyObject* capsule, const char* name) {
  auto* found = static_cast<T*>(PyCapsule_GetPointer(capsule, name));
  if (found == nullptr) throw PythonError();
  return *found;
}

template <class T>
PyObject* make_capsule(std::unique_ptr<T> owned, const char* name) {
  Ref capsule = checked(PyCapsule_New(owned.get(), name, [](PyObject* object) {
    delete static_cast<T*>(PyCapsule_GetPointer(object, PyCapsule_GetName(object)));
  }));
  static_cast<void>(owned.release());
  return capsule.release();
}

// ---- plans

/// What of an array a plan depends on.
struct Form {
  bool is_present = false;
  std::array<int32_t, 5> type_and_device{};
  std::vector<int64_t> shape, strides;

  explicit Form(const Array& array) : is_present(array.present()) {
    if (!is_present) return;
    const fovea_tensor& t = array.tensor();
    type_and_device = {t.dtype.code, t.dtype.bits, t.dtype.lanes, t.device.type, t.device.id};
    shape.assign(t.shape, t.shape + t.ndim);
    bool has_elements = true;
    for (const int64_t size : shape) has_elements = has_elements && size > 0;
    int64_t dense = 1;
    strides.resize(shape.size());
    for (size_t i = shape.size(); i-- > 0;) {  // those of a dimension of one element mean nothing
      if (has_elements && shape[i] > 1) strides[i] = t.strides != nullptr ? t.strides[i] : dense;
      dense *= shape[i];
    }
  }
  bool operator==(const Form&) const = default;
};

std::vector<Form> forms_of(const Request& request) {
  std::vector<Form> forms(request.arrays.begin(), request.arrays.end());
  for (const NamedArrays::One& one : request.named_list()) {
    forms.emplace_back(one.tensor);
    forms.emplace_back(one.gradient);
  }
  return forms;
}

struct DestroyRanksPlan {
  void operator()(fovea_distributed_plan* plan) const { fovea_distributed_plan_destroy(plan); }
};

struct RanksPlan {
  Ref ranks;  ///< the capsule of its transport, which it uses as long as it lives
  std::unique_ptr<fovea_distributed_plan, DestroyRanksPlan> handle;
  bool is_backward = false;
  std::vector<Form> forms;
};

PyObject* item_of(PyObject* tuple, Py_ssize_t index, const char* name) {
  PyObject* found = PyTuple_Check(tuple) ? PyTuple_GetItem(tuple, index) : nullptr;
  if (found != nullptr) return found;
  PyErr_Clear();
  PyErr_Format(PyExc_TypeError, "%s: got %R; expected a tuple of more items", name, tuple);
  throw PythonError();
}

Py_ssize_t count_of(PyObject* tuple, const char* name) {
  if (PyTuple_Check(tuple)) return PyTuple_Size(tuple);
  PyErr_Format(PyExc_TypeError, "%s: got %R; expected a tuple", name, tuple);
  throw PythonError();
}

int32_t as_int32(PyObject* object, const char* name) {
  const int64_t value = as_integer(object, name);
  if (value >= INT32_MIN && value <= INT32_MAX) return static_cast<int32_t>(value);
  PyErr_Format(PyExc_ValueError, "%s: got %R; expected a number of 32 bits", name, object);
  throw PythonError();
}

/// ((rank, begin, end), ...) or None.
std::vector<fovea_piece> read_pieces(PyObject* given, const char* name) {
  std::vector<fovea_piece> pieces;
  if (given == Py_None) return pieces;
  for (Py_ssize_t i = 0; i < count_of(given, name); ++i) {
    PyObject* piece = item_of(given, i, name);
    pieces.push_back({as_int32(item_of(piece, 0, name), name), as_integer(item_of(piece, 1, name), name),
                      as_integer(item_of(piece, 2, name), name)});
  }
  return pieces;
}

/// (0, ..., rows) or None.
std::vector<int32_t> read_starts(PyObject* given, const char* name) {
  std::vector<int32_t> starts;
  if (given == Py_None) return starts;
  for (Py_ssize_t i = 0; i < count_of(given, name); ++i)
    starts.push_back(as_int32(item_of(given, i, name), name));
  return starts;
}

/// (heads_ranks, stages, ranks_per_host, memory_limit).
fovea_distributed_options read_method(PyObject* given, const fovea_options& attention) {
  fovea_distributed_options options{};
  options.struct_size = sizeof options;
  options.attention = &attention;
  options.heads_ranks = as_count(item_of(given, 0, "heads_ranks"), "heads_ranks");
  options.stages = as_count(item_of(given, 1, "stages"), "stages");
  options.ranks_per_host = as_count(item_of(given, 2, "ranks_per_host"), "ranks_per_host");
  options.memory_limit = as_integer(item_of(given, 3, "memory_limit"), "memory_limit");
  return options;
}

std::unique_ptr<RanksPlan> make_ranks_plan(PyObject* const* values, const Request& request) {
  const Ranks& ranks = in_capsule<Ranks>(values[0], kRanksName);
  const std::vector<fovea_piece> queries = read_pieces(values[2], "pieces");
  const std::vector<fovea_piece> keys = read_pieces(values[3], "key_pieces");
  const std::vector<int32_t> starts_q = read_starts(values[4], "cu_seqlens_q");
  const std::vector<int32_t> starts_k = read_starts(values[5], "cu_seqlens_k");
  if (!starts_k.empty() && starts_k.size() != starts_q.size()) {
    PyErr_Format(PyExc_ValueError, "cu_seqlens_k: got %zu numbers; expected %zu, as many as cu_seqlens_q",
                 starts_k.size(), starts_q.size());
    throw PythonError();
  }
  const fovea_distributed_options options = read_method(values[6], request.options);
  const Description description(request, false);
  fovea_distributed_problem problem{};
  problem.struct_size = sizeof problem;
  problem.local = description.problem();
  problem.queries = values[2] == Py_None ? nullptr : queries.data();
  problem.num_queries = static_cast<int64_t>(queries.size());
  problem.keys = values[3] == Py_None ? nullptr : keys.data();
  problem.num_keys = static_cast<int64_t>(keys.size());
  problem.num_sequences = starts_q.empty() ? 0 : static_cast<int64_t>(starts_q.size()) - 1;
  problem.cu_seqlens_q = starts_q.empty() ? nullptr : starts_q.data();
  problem.cu_seqlens_k = starts_k.empty() ? nullptr : starts_k.data();
  fovea_distributed_plan* made = nullptr;
  fovea_status status;
  {
    const WithoutGil others_run;
    status = fovea_distributed_plan_create(&ranks.transport, &problem, &options, &made);
  }
  check(status);
  auto plan = std::make_unique<RanksPlan>();
  plan->handle.reset(made);
  plan->ranks = Ref::to(values[0]);
  plan->is_backward = request.problem.pass == FOVEA_BACKWARD;
  plan->forms = forms_of(request);
  return plan;
}

/// Other ranks are in the run already: they are told.
void require_planned_forms(const RanksPlan& plan, const Ranks& ranks, const Request& request) {
  const std::vector<Form> given = forms_of(request);
  if (given == plan.forms) return;
  size_t at = 0;
  while (at < given.size() && at < plan.forms.size() && given[at] == plan.forms[at]) ++at;
  const std::string name = at < kTensors ? argument_name(at) : "tensors";
  const std::string what = name +
                           ": got another shape, other strides, or another type or device than the plan has; "
                           "expected the same; make a plan for these";
  const std::string reason = "rank " + std::to_string(ranks.transport.rank) + ": " + what;
  ranks.transport.stop(ranks.transport.context, reason.c_str());
  PyErr_SetString(PyExc_ValueError, what.c_str());
  throw PythonError();
}

}  // namespace

PyObject* open_ranks(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject* channel;
    int rank, size;
    if (!PyArg_ParseTuple(arguments, "Oii", &channel, &rank, &size)) throw PythonError();
    auto ranks = std::make_unique<Ranks>();
    ranks->channel = Ref::to(channel);
    ranks->transport = channel_transport(*ranks, rank, size);
    return make_capsule(std::move(ranks), kRanksName);
  });
}

PyObject* open_nccl_ranks(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    unsigned long long communicator;
    int device;
    long long deadline_ms;
    if (!PyArg_ParseTuple(arguments, "KiL", &communicator, &device, &deadline_ms)) throw PythonError();
    auto ranks = std::make_unique<Ranks>();
    check(fovea_nccl_transport_open(reinterpret_cast<void*>(communicator), device, deadline_ms,
                                    &ranks->transport));
    ranks->is_nccl = true;
    return make_capsule(std::move(ranks), kRanksName);
  });
}

PyObject* check_ranks(PyObject*, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    const Ranks& ranks = in_capsule<Ranks>(capsule, kRanksName);
    if (ranks.is_nccl) check(fovea_nccl_transport_check(&ranks.transport));
    Py_RETURN_NONE;
  });
}

PyObject* close_ranks(PyObject*, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    in_capsule<Ranks>(capsule, kRanksName).close();
    Py_RETURN_NONE;
  });
}

PyObject* plan_ranks(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    constexpr Py_ssize_t kOwn = 7;
    if (positional != kOwn) {
      PyErr_SetString(PyExc_TypeError,
                      "expected ranks, backward, pieces, key_pieces, cu_seqlens_q, cu_seqlens_k, method, and "
                      "keywords");
      throw PythonError();
    }
    Request request;
    read(request, as_truth(values[1]) != 0, values + kOwn, 0, keywords);
    return make_capsule(make_ranks_plan(values, request), kPlanName);
  });
}

PyObject* explain_ranks(PyObject*, PyObject* capsule) {
  return guarded([&]() -> PyObject* {
    const fovea_distributed_plan* plan = in_capsule<RanksPlan>(capsule, kPlanName).handle.get();
    int64_t messages = 0, bytes = 0;
    fovea_distributed_plan_sends(plan, &messages, &bytes);
    return Py_BuildValue("(snLL)", fovea_distributed_plan_reason(plan),
                         static_cast<Py_ssize_t>(fovea_distributed_plan_workspace_size(plan)),
                         static_cast<long long>(messages), static_cast<long long>(bytes));
  });
}

PyObject* run_ranks(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (positional != 1) {
      PyErr_SetString(PyExc_TypeError, "expected a plan, and arrays by keyword");
      throw PythonError();
    }
    const RanksPlan& plan = in_capsule<RanksPlan>(values[0], kPlanName);
    const Ranks& ranks = in_capsule<Ranks>(plan.ranks.get(), kRanksName);
    Request request;
    read(request, plan.is_backward, values + 1, 0, keywords);
    require_planned_forms(plan, ranks, request);
    fovea_buffers buffers = buffers_of(request);
    const ArrayType& type = request.at(Tensor::q).type();
    const fovea_device device = ranks.transport.device;
    buffers.workspace_size = fovea_distributed_plan_workspace_size(plan.handle.get());
    const Workspace workspace(buffers.workspace_size, device, type);
    buffers.workspace = workspace.memory();
    if (device.type == FOVEA_CUDA) buffers.stream = current_stream(type, device);
    fovea_status status;
    {
      const WithoutGil others_run;
      status = fovea_distributed_run(plan.handle.get(), &buffers);
    }
    check(status);
    Py_RETURN_NONE;
  });
}

}  // namespace fovea::python
