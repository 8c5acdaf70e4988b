// The C ABI. Every function catches all; none lets a null pointer through.
#include "fovea/fovea.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "capi/convert.hpp"
#include "capi/last_error.hpp"
#include "capi/merge.hpp"
#include "capi/run_part.hpp"
#include "core/backend.hpp"
#include "core/status.hpp"
#include "cpu/backends.hpp"
#include "cuda/launch/cuda.hpp"
#include "plan/buffers.hpp"
#include "plan/expressions.hpp"
#include "plan/make_plan.hpp"
#include "plan/seen_blocks.hpp"
#include "plan/validate.hpp"

struct fovea_plan {
  explicit fovea_plan(fovea::Plan made)
      : plan(std::move(made)), rules(plan.problem, plan.prepared->workspace_size, plan.check_contents) {}

  fovea::Plan plan;
  fovea::plan::BufferRules rules;
};

namespace fovea::capi {
namespace {

std::unique_ptr<fovea_plan> make_plan(const ProblemDescription& description, const fovea_options* given) {
  return std::make_unique<fovea_plan>(plan::make_plan(description, to_plan_options(read_options(given))));
}

void run(const fovea_plan& plan, const Buffers& buffers) {
  plan.rules.check(plan.plan.problem, buffers);
  plan.plan.prepared->run(buffers);
}

/// As GPUs' allocations, and as runs over several ranks need (fovea_distributed.h).
constexpr std::align_val_t kHostAlignment{256};
static_assert(static_cast<size_t>(kHostAlignment) % FOVEA_WORKSPACE_ALIGNMENT == 0);

void* allocate_on_host(size_t size) {
  return ::operator new(size, kHostAlignment);
}
void release_on_host(void* memory) noexcept {
  ::operator delete(memory, kHostAlignment);
}

/// The workspace of one call, of the memory that the plan's backend works in.
class CallWorkspace {
 public:
  CallWorkspace(const Plan& plan, void* stream)
      : memory_(plan.backend->memory), device_(plan.problem[Role::kQ].device_id), stream_(stream) {
    const size_t size = plan.prepared->workspace_size;
    if (size == 0) return;
    data_ = memory_ ? memory_->allocate(device_, size, stream_) : allocate_on_host(size);
  }
  CallWorkspace(const CallWorkspace&) = delete;
  CallWorkspace& operator=(const CallWorkspace&) = delete;
  ~CallWorkspace() {
    if (data_ == nullptr) return;
    if (memory_) {
      memory_->release(device_, data_, stream_);
    } else {
      release_on_host(data_);
    }
  }
  void* data() const { return data_; }

 private:
  const DeviceMemory* memory_;
  int device_;
  void* stream_;
  void* data_ = nullptr;
};

void attend(const fovea_problem* given, const fovea_options* options, uint64_t seed, uint64_t offset) {
  const ProblemDescription description = to_description(read_problem(given));
  const auto plan = make_plan(description, options);
  Buffers buffers;
  for (size_t i = 0; i < kRoleCount; ++i) buffers.data[i] = description.tensors[i].data;
  for (size_t i = 0; i < description.named.size(); ++i) {
    buffers.data[place_of_named(i)] = description.named[i].tensor.data;
    buffers.data[place_of_gradient(i)] = description.named[i].gradient.data;
  }
  buffers.seed = seed;
  buffers.offset = offset;
  buffers.stream = read_options(options).stream;
  const CallWorkspace workspace(plan->plan, buffers.stream);
  buffers.workspace = workspace.data();
  buffers.workspace_size = plan->plan.prepared->workspace_size;
  run(*plan, buffers);
}

void create_workspace(fovea_device device, size_t size, void** workspace) {
  if (workspace == nullptr) {
    throw_invalid("workspace", "NULL", "where to store the memory", "pass the address of a pointer");
  }
  *workspace = nullptr;
  const DeviceType type = to_device_type("device", device);
  if (size == 0) return;
  *workspace = type == DeviceType::kCpu ? allocate_on_host(size) : cuda::allocate(device.id, size);
}

void destroy_workspace(fovea_device device, void* workspace) noexcept {
  if (workspace == nullptr) return;
  if (device.type == FOVEA_CUDA) {
    cuda::release(device.id, workspace);
  } else {
    release_on_host(workspace);
  }
}

const Backend* backend_at(int32_t index) {
  const auto list = plan::backends();
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[static_cast<size_t>(index)] : nullptr;
}

std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan_of(const fovea_problem& problem,
                                                           const PlanOptions& options) {
  return {new fovea_plan(plan::make_plan(to_description(read_problem(&problem)), options)),
          [](fovea_plan* plan) { delete plan; }};
}

/// Text that is made once and then lives as long as the process; `fallback` when there is no memory for it.
template <class Make>
const char* made_once(Make&& make, const char* fallback) noexcept {
  try {
    static const std::string text = make();
    return text.c_str();
  } catch (...) {
    return fallback;
  }
}

}  // namespace

std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan_part(const fovea_problem& problem,
                                                             const fovea_options* given) {
  PlanOptions options = to_plan_options(read_options(given));
  options.is_part = true;
  return plan_of(problem, options);
}

std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan_part_with_arriving(const fovea_problem& problem,
                                                                           const fovea_options* given,
                                                                           int64_t keys, int64_t heads) {
  PlanOptions options = to_plan_options(read_options(given));
  options.is_part = true;
  options.arriving_keys = keys;
  options.arriving_heads = heads;
  options.splits.most = 1;
  try {
    return plan_of(problem, options);
  } catch (const RequestError& error) {
    if (error.status() != Status::kUnsupported) throw;
    return {nullptr, [](fovea_plan*) {}};
  }
}

void run_part(const fovea_plan& plan, const fovea_buffers& given, const DropoutPlace& place,
              const ArrivingKeys& arriving) {
  Buffers buffers = read_buffers(&given);
  buffers.dropout = place;
  buffers.arriving = arriving;
  run(plan, buffers);
}

}  // namespace fovea::capi

static_assert(static_cast<int>(fovea::expr::Seen::kNone) == FOVEA_SEEN_NONE &&
              static_cast<int>(fovea::expr::Seen::kAll) == FOVEA_SEEN_ALL &&
              static_cast<int>(fovea::expr::Seen::kSome) == FOVEA_SEEN_SOME);
static_assert(FOVEA_WORKSPACE_ALIGNMENT == fovea::plan::kWorkspaceAlignment);

using namespace fovea;

fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_options* options,
                               fovea_plan** plan) noexcept {
  return capi::guarded([&] {
    if (plan == nullptr)
      throw_invalid("plan", "NULL", "where to store the plan", "pass the address of a pointer");
    *plan = nullptr;
    *plan = capi::make_plan(capi::to_description(capi::read_problem(problem)), options).release();
  });
}

void fovea_plan_destroy(fovea_plan* plan) noexcept {
  delete plan;
}

size_t fovea_plan_workspace_size(const fovea_plan* plan) noexcept {
  return plan ? plan->plan.prepared->workspace_size : 0;
}
const char* fovea_plan_backend(const fovea_plan* plan) noexcept {
  return plan ? plan->plan.backend->name : "";
}
double fovea_plan_flops(const fovea_plan* plan) noexcept {
  return plan ? plan->plan.flops : 0;
}
const char* fovea_plan_reason(const fovea_plan* plan) noexcept {
  return plan ? plan->plan.reason.c_str() : "";
}

const char* fovea_plan_expressions(const fovea_plan* plan) noexcept {
  // Of this thread, until its next call: derivatives cost more than a plan.
  thread_local std::string text;
  try {
    text = plan ? plan::describe_expressions(plan->plan.problem) : "";
    return text.c_str();
  } catch (...) {
    return "out of memory";
  }
}

fovea_status fovea_seen_blocks(const fovea_problem* problem, int64_t batch, int64_t head, int64_t block_q,
                               int64_t block_k, uint8_t* seen, size_t size) noexcept {
  return capi::guarded([&] {
    if (seen == nullptr && size > 0)
      throw_invalid("seen", "NULL", "where to store the answers", "pass an array");
    const AttentionProblem valid = plan::validate(capi::to_description(capi::read_problem(problem)));
    std::vector<expr::Seen> found(size);
    plan::find_seen_blocks(valid, {batch, head, block_q, block_k}, found);
    std::transform(found.begin(), found.end(), seen, [](expr::Seen s) { return static_cast<uint8_t>(s); });
  });
}

fovea_status fovea_compile(const fovea_problem* problem, const fovea_options* given, const char* chip,
                           int32_t num_sms, const char* folder, const char** report) noexcept {
  if (report != nullptr) *report = "";
  return capi::guarded([&] {
    if (chip == nullptr) throw_invalid("chip", "NULL", "a name such as sm_90", "pass one");
    const auto kernels = plan::compile_ahead(capi::to_description(capi::read_problem(problem)),
                                             capi::to_plan_options(capi::read_options(given)),
                                             {.chip = chip, .num_sms = num_sms, .folder = folder});
    if (report == nullptr) return;
    thread_local std::string text;
    text.clear();
    for (const cuda::AheadKernel& kernel : kernels) {
      text += (text.empty() ? "" : "\n") + kernel.name + '\t' + std::to_string(kernel.registers) + '\t' +
              std::to_string(kernel.local_bytes) + '\t' + std::to_string(kernel.seconds) + '\t' +
              (kernel.from_disk ? "kept" : "compiled") + '\t' + kernel.file;
    }
    *report = text.c_str();
  });
}

fovea_device fovea_plan_device(const fovea_plan* plan) noexcept {
  if (plan == nullptr) return {FOVEA_CPU, 0};
  const TensorDesc& q = plan->plan.problem[Role::kQ];
  return {q.device == DeviceType::kCpu ? FOVEA_CPU : FOVEA_CUDA, q.device_id};
}

fovea_status fovea_workspace_create(fovea_device device, size_t size, void** workspace) noexcept {
  return capi::guarded([&] { capi::create_workspace(device, size, workspace); });
}
void fovea_workspace_destroy(fovea_device device, void* workspace) noexcept {
  capi::destroy_workspace(device, workspace);
}

fovea_status fovea_run(const fovea_plan* plan, const fovea_buffers* buffers) noexcept {
  return capi::guarded([&] {
    if (plan == nullptr) throw_invalid("plan", "NULL", "a plan", "make one with fovea_plan_create");
    capi::run(*plan, capi::read_buffers(buffers));
  });
}

fovea_status fovea_attend(const fovea_problem* problem, const fovea_options* options, uint64_t seed,
                          uint64_t offset) noexcept {
  return capi::guarded([&] { capi::attend(problem, options, seed, offset); });
}

fovea_status fovea_merge(int32_t num_parts, const fovea_tensor* const* o_parts,
                         const fovea_tensor* const* lse_parts, const fovea_tensor* o, const fovea_tensor* lse,
                         void* stream) noexcept {
  return capi::guarded([&] { capi::merge(num_parts, o_parts, lse_parts, o, lse, stream); });
}

#define FOVEA_TEXT_OF(x) #x
#define FOVEA_VERSION_TEXT(major, minor, patch) \
  FOVEA_TEXT_OF(major) "." FOVEA_TEXT_OF(minor) "." FOVEA_TEXT_OF(patch)

const char* fovea_version(void) noexcept {
  return FOVEA_VERSION_TEXT(FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH);
}

const char* fovea_status_name(fovea_status status) noexcept {
  switch (status) {
    case FOVEA_OK:
      return "ok";
    case FOVEA_INVALID_ARGUMENT:
      return "invalid argument";
    case FOVEA_UNSUPPORTED:
      return "unsupported";
    case FOVEA_OUT_OF_MEMORY:
      return "out of memory";
    case FOVEA_INTERNAL:
      return "internal error";
    case FOVEA_CUDA_ERROR:
      return "CUDA error";
    case FOVEA_STATUS_WIDTH:
      break;
  }
  return "unknown status";
}

const char* fovea_last_error(void) noexcept {
  return capi::last_error_message();
}
const char* fovea_last_error_argument(void) noexcept {
  return capi::last_error_argument();
}

int32_t fovea_backend_count(void) noexcept {
  return static_cast<int32_t>(plan::backends().size());
}
const char* fovea_backend_name(int32_t index) noexcept {
  const Backend* backend = capi::backend_at(index);
  return backend ? backend->name : "";
}
const char* fovea_backend_unavailable_because(int32_t index) noexcept {
  const Backend* backend = capi::backend_at(index);
  if (!backend) return "there is no such backend";
  // Of this thread, until its next call: what a machine has is not asked for often.
  thread_local std::string reason;
  try {
    reason = backend->unavailable_because();
    return reason.c_str();
  } catch (...) {
    return "out of memory";
  }
}

int32_t fovea_backend_device_type(int32_t index) noexcept {
  const Backend* backend = capi::backend_at(index);
  if (!backend) return 0;
  return backend->device == DeviceType::kCpu ? FOVEA_CPU : FOVEA_CUDA;
}

const char* fovea_cuda(void) noexcept {
  return capi::made_once(
      [] {
        const std::string missing = cuda::unavailable_because(), versions = cuda::versions_text();
        if (missing.empty()) return versions;
        return versions.empty() ? missing : missing + " (" + versions + ")";
      },
      "unknown");
}
int32_t fovea_cuda_device_count(void) noexcept {
  try {
    return cuda::device_count();
  } catch (...) {
    return 0;
  }
}
const char* fovea_cuda_device(int32_t index) noexcept {
  // Of this thread, until its next call.
  thread_local std::string description;
  try {
    if (index < 0 || index >= cuda::device_count()) return "";
    description = cuda::device_description(index);
    return description.c_str();
  } catch (...) {
    return "";
  }
}

const char* fovea_machine(void) noexcept {
  return capi::made_once([] { return cpu::machine_description(); }, "unknown machine");
}

int32_t fovea_default_threads(void) noexcept {
  try {
    return cpu::default_threads();
  } catch (...) {
    return 1;
  }
}
