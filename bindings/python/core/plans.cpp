// Keys of plans, the plans that are kept, and one run of a plan.
#include "plans.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "calls.hpp"

namespace fovea::python {
namespace {

// Programs have tens of shapes; one that never repeats a shape must not grow for ever.
constexpr size_t kMostPlans = 1024;

struct KeyHash {
  using is_transparent = void;
  size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>()(bytes); }
};
using Plans = std::unordered_map<std::string, std::shared_ptr<const Plan>, KeyHash, std::equal_to<>>;

Plans& plans() {
  static auto* kept = new Plans;  // never destroyed: the CUDA driver may be gone before
  return *kept;
}

/// The last call's plan and its key: most calls repeat it, and comparing keys is faster than hashing one.
struct LastPlan {
  std::string key;
  std::shared_ptr<const Plan> plan;
};

LastPlan& last_plan() {
  static auto* last = new LastPlan;  // never destroyed, as above
  return *last;
}

// Of expressions and of the names in them. Longer ones are cut, which does not matter: the library refuses them.
constexpr size_t kLongestText = 4200, kLongestName = 128;

/// Bytes that decide the plan, in a buffer of fixed size.
class Key {
 public:
  template <class T>
  void add(const T& value) {
    add(&value, sizeof value);
  }
  void add(const void* bytes, size_t size) {
    if (size > sizeof bytes_ - size_) {  // cannot be: every rank and name that gets here is limited
      PyErr_SetString(PyExc_RuntimeError, "the description of the problem is too long");
      throw PythonError();
    }
    std::memcpy(bytes_ + size_, bytes, size);
    size_ += size;
  }
  void add_text(const char* text, size_t longest) {
    const size_t size = text == nullptr ? 0 : std::strlen(text);
    add(size);
    if (size > 0) add(text, std::min(size, longest));
  }
  std::string_view view() const { return {bytes_, size_}; }

 private:
  static constexpr size_t kOfTensor = 32 + 2 * kMaxRank * sizeof(int64_t);
  char bytes_[kTensors * kOfTensor + 2 * kLongestText +
              2 * FOVEA_MAX_NAMED_TENSORS * (kOfTensor + kLongestName) + 1024];
  size_t size_ = 0;
};

void add_tensor(Key& key, const Array& array) {
  if (!array.present()) {
    key.add(int8_t{-1});
    return;
  }
  const fovea_tensor& t = array.tensor();
  const auto rank = std::clamp(t.ndim, 0, kMaxRank);
  key.add(static_cast<int8_t>(rank));
  key.add(t.dtype);
  key.add(t.device);
  key.add(t.shape, static_cast<size_t>(rank) * sizeof(int64_t));
  key.add(t.strides != nullptr);
  if (t.strides != nullptr) key.add(t.strides, static_cast<size_t>(rank) * sizeof(int64_t));
}

void fill_key(Key& key, const Request& r) {
  for (const Array& array : r.arrays) add_tensor(key, array);
  const fovea_problem& p = r.problem;
  const struct {
    double scale, softcap, dropout;
    int64_t window_left, window_right, block_q, block_k, max_seqlen_q, max_seqlen_k;
    int32_t pass, causal, num_threads, deterministic, num_splits, batch_invariant;
    int64_t sm_margin, rotary_interleaved;
  } numbers = {p.scale,
               p.softcap,
               p.dropout,
               p.window_left,
               p.window_right,
               p.block_q,
               p.block_k,
               p.max_seqlen_q,
               p.max_seqlen_k,
               p.pass,
               p.causal,
               r.options.num_threads,
               r.options.deterministic,
               r.options.num_splits,
               r.options.batch_invariant,
               r.options.sm_margin,
               p.rotary_interleaved};
  key.add(numbers);
  if (p.score != nullptr || p.sees != nullptr || r.named) {
    key.add_text(p.score, kLongestText);
    key.add_text(p.sees, kLongestText);
    for (const NamedArrays::One& one : r.named_list()) {
      key.add_text(one.name.c_str(), kLongestName);
      add_tensor(key, one.tensor);
      add_tensor(key, one.gradient);
    }
  }
  // No backend has so long a name; what is cut off does not matter to one that will not be found.
  if (r.options.backend != nullptr)
    key.add(r.options.backend, std::min<size_t>(std::strlen(r.options.backend), 64));
}

/// The longest sequence that cu_seqlens on the CPU describe:
/// 0 where the library is to say what is wrong with them.
int64_t longest(const Array& starts) {
  const fovea_tensor& t = starts.tensor();
  const bool readable = t.device.type == FOVEA_CPU && t.ndim == 1 && t.dtype.code == FOVEA_CODE_INT &&
                        t.dtype.bits == 32 && (t.strides == nullptr || t.strides[0] == 1) &&
                        starts.address() != nullptr;
  int64_t most = 0;
  if (!readable) return most;
  const auto* rows = static_cast<const int32_t*>(starts.address());
  for (int64_t i = 1; i < t.shape[0]; ++i) most = std::max(most, int64_t{rows[i]} - rows[i - 1]);
  return most;
}

std::shared_ptr<const Plan> make_plan(const Request& request) {
  const Description description(request, false);
  fovea_plan* made = nullptr;
  check(fovea_plan_create(description.problem(), &request.options, &made));
  auto plan = std::make_shared<Plan>();
  plan->handle.reset(made);
  plan->workspace_size = fovea_plan_workspace_size(made);
  plan->device = fovea_plan_device(made);
  return plan;
}

}  // namespace

void check(fovea_status status) {
  if (status == FOVEA_OK) return;
  PyObject* type = PyExc_RuntimeError;
  if (status == FOVEA_INVALID_ARGUMENT || status == FOVEA_UNSUPPORTED) type = PyExc_ValueError;
  if (status == FOVEA_OUT_OF_MEMORY) type = PyExc_MemoryError;
  PyErr_SetString(type, fovea_last_error());
  throw PythonError();
}

void find_longest(Request& request) {
  // Where nothing may depend on the batch, the library asks for lengths that do not come from it.
  if (request.options.batch_invariant != 0 && request.problem.pass == FOVEA_FORWARD) return;
  const Array& starts_q = request.at(Tensor::cu_seqlens_q);
  const Array& starts_k = request.at(Tensor::cu_seqlens_k);
  if (starts_q.present() && request.problem.max_seqlen_q == 0)
    request.problem.max_seqlen_q = longest(starts_q);
  if (starts_k.present() && request.problem.max_seqlen_k == 0)
    request.problem.max_seqlen_k = longest(starts_k);
}

std::vector<uint8_t> seen_blocks(Request& request, const BlockGrid& grid) {
  find_longest(request);
  std::vector<uint8_t> seen(static_cast<size_t>(grid.rows * grid.columns));
  const Description description(request, true);
  check(fovea_seen_blocks(description.problem(), grid.batch, grid.head, grid.block_q, grid.block_k,
                          seen.data(), seen.size()));
  return seen;
}

std::string compile(Request& request, const char* chip, int32_t num_sms, const char* folder) {
  find_longest(request);
  const Description description(request, false);
  const char* report = "";
  fovea_status status;
  {
    const WithoutGil others_run;
    status = fovea_compile(description.problem(), &request.options, chip, num_sms, folder, &report);
  }
  check(status);
  return report;
}

std::shared_ptr<const Plan> plan_for(Request& request) {
  find_longest(request);
  Key key;
  fill_key(key, request);
  LastPlan& last = last_plan();
  if (last.key == key.view()) return last.plan;
  Plans& kept = plans();
  auto found = kept.find(key.view());
  if (found == kept.end()) {
    auto made = make_plan(request);
    if (kept.size() >= kMostPlans) kept.clear();
    found = kept.emplace(std::string(key.view()), std::move(made)).first;
  }
  last.key = found->first;
  last.plan = found->second;
  return last.plan;
}

void run(const Plan& plan, const Request& request) {
  fovea_buffers buffers = buffers_of(request);
  const ArrayType& type = request.at(Tensor::q).type();
  const Workspace workspace(plan.workspace_size, plan.device, type);
  buffers.workspace = workspace.memory();
  buffers.workspace_size = plan.workspace_size;
  if (plan.device.type == FOVEA_CUDA) buffers.stream = current_stream(type, plan.device);

  fovea_status status;
  {
    const WithoutGil others_run;
    status = fovea_run(plan.handle.get(), &buffers);
  }
  check(status);
}

size_t plan_count() {
  return plans().size();
}
void forget_plans() {
  plans().clear();
  last_plan() = {};
}

}  // namespace fovea::python
