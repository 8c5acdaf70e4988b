// The C ABI of fovea_distributed.h, but for NCCL.
#include <memory>

#include "capi/last_error.hpp"
#include "core/status.hpp"
#include "distributed/choose.hpp"
#include "distributed/distributed_plan.hpp"
#include "distributed/thread_transport.hpp"
#include "fovea/fovea_distributed.h"

struct fovea_thread_group {
  fovea::distributed::ThreadGroup group;
};
struct fovea_distributed_plan {
  fovea::distributed::DistributedPlan plan;
};

namespace {

using fovea::throw_invalid;
using fovea::capi::guarded;

template <class T>
T& required(const char* name, T* pointer) {
  if (pointer == nullptr) throw_invalid(name, "NULL", "an address", "pass one");
  return *pointer;
}

/// A struct of the caller's header: all of it, as this is the first version.
template <class T>
T read_struct(const char* name, const T* given) {
  T read{};
  read.struct_size = sizeof(T);
  if (given == nullptr) return read;
  if (given->struct_size != sizeof(T))
    throw_invalid(name, "struct_size " + std::to_string(given->struct_size), std::to_string(sizeof(T)),
                  "set struct_size to the size of the struct, and zero the rest");
  return *given;
}

}  // namespace

extern "C" {

fovea_status fovea_thread_group_create(int32_t size, const fovea_device* devices,
                                       const fovea_thread_options* options,
                                       fovea_thread_group** group) FOVEA_NOEXCEPT {
  return guarded([&] {
    required("group", group) = nullptr;
    *group = new fovea_thread_group{{size, devices, read_struct("options", options)}};
  });
}
void fovea_thread_group_destroy(fovea_thread_group* group) FOVEA_NOEXCEPT {
  delete group;
}
fovea_status fovea_thread_transport(fovea_thread_group* group, int32_t rank,
                                    fovea_transport* transport) FOVEA_NOEXCEPT {
  return guarded([&] { required("transport", transport) = required("group", group).group.transport(rank); });
}
fovea_status fovea_thread_sent(const fovea_thread_group* group, int32_t rank, int64_t* messages,
                               int64_t* bytes) FOVEA_NOEXCEPT {
  return guarded([&] { required("group", group).group.sent(rank, messages, bytes); });
}

fovea_status fovea_distributed_plan_create(const fovea_transport* transport,
                                           const fovea_distributed_problem* problem,
                                           const fovea_distributed_options* options,
                                           fovea_distributed_plan** plan) FOVEA_NOEXCEPT {
  return guarded([&] {
    required("plan", plan) = nullptr;
    required("problem", problem);
    *plan = new fovea_distributed_plan{{fovea::distributed::Transport(transport),
                                        read_struct("problem", problem), read_struct("options", options)}};
  });
}
void fovea_distributed_plan_destroy(fovea_distributed_plan* plan) FOVEA_NOEXCEPT {
  delete plan;
}
size_t fovea_distributed_plan_workspace_size(const fovea_distributed_plan* plan) FOVEA_NOEXCEPT {
  return plan ? static_cast<size_t>(plan->plan.workspace_size()) : 0;
}
void fovea_distributed_plan_sends(const fovea_distributed_plan* plan, int64_t* messages,
                                  int64_t* bytes) FOVEA_NOEXCEPT {
  if (messages) *messages = plan ? plan->plan.messages() : 0;
  if (bytes) *bytes = plan ? plan->plan.bytes() : 0;
}
const char* fovea_distributed_plan_reason(const fovea_distributed_plan* plan) FOVEA_NOEXCEPT {
  return plan ? plan->plan.reason().c_str() : "";
}

fovea_status fovea_distributed_on_paper(int32_t ranks, const fovea_distributed_problem* problem,
                                        const fovea_distributed_options* options,
                                        const char** text) FOVEA_NOEXCEPT {
  return guarded([&] {
    required("text", text) = "";
    if (ranks < 1) throw_invalid("ranks", std::to_string(ranks), "1 or more", "say how many ranks there are");
    const auto whole = read_struct("problem", &required("problem", problem));
    const fovea_tensor* q = required("local", whole.local).q;
    const auto how = read_struct("options", options);
    const auto local = fovea::distributed::read_local_problem(whole, 0, ranks, required("local.q", q).device);
    static thread_local std::string lines;
    lines.clear();
    for (const auto& estimate : fovea::distributed::weigh_on_paper(local, how))
      lines += fovea::distributed::describe(estimate, local.shape) + '\n';
    *text = lines.c_str();
  });
}

fovea_status fovea_distributed_run(const fovea_distributed_plan* plan,
                                   const fovea_buffers* buffers) FOVEA_NOEXCEPT {
  return guarded(
      [&] { required("plan", plan).plan.run(read_struct("buffers", &required("buffers", buffers))); });
}

}  // extern "C"
