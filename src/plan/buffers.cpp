// Checks the pointers of one run: presence, alignment, overlaps, contents of lengths.
#include "plan/buffers.hpp"

#include <algorithm>
#include <string>

#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "plan/layout.hpp"
#include "plan/validate.hpp"

namespace fovea::plan {
namespace {

/// Half-open bytes, as integers: comparing pointers into different arrays is not defined.
struct Bytes {
  uintptr_t begin = 0, end = 0;
  bool meets(const Bytes& other) const { return begin < other.end && other.begin < end; }
};

Bytes bytes_at(const void* data, int64_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>(size)};
}

}  // namespace

BufferRules::BufferRules(const AttentionProblem& problem, size_t workspace_size)
    : workspace_size_(workspace_size) {
  for (size_t i = 0; i < problem.tensors.size(); ++i) {
    const TensorDesc& t = problem.tensors[i];
    const Role role = static_cast<Role>(i);
    if (!t.present) {
      absent_ |= uint32_t{1} << i;
    } else if (has_memory(t)) {
      rules_.push_back({role, is_output(role, problem.pass), static_cast<uint8_t>(size_of(t.dtype)),
                        extent_bytes(t).value()});
    }
  }
  const auto inputs =
      std::stable_partition(rules_.begin(), rules_.end(), [](const Rule& rule) { return rule.output; });
  outputs_ = static_cast<size_t>(inputs - rules_.begin());
  tells_memory_ = problem[Role::kQ].device == DeviceType::kCpu && cuda::can_tell_memory();
  has_sequence_lengths_ = problem[Role::kQ].device == DeviceType::kCpu &&
                          (problem.packed || problem.has(Role::kSeqUsedQ) || problem.has(Role::kSeqUsedK));
}

void BufferRules::check(const AttentionProblem& problem, const Buffers& buffers) const {
  uint32_t given = 0;
  for (size_t i = 0; i < buffers.data.size(); ++i) given |= uint32_t{buffers.data[i] != nullptr} << i;
  if (const uint32_t surplus = given & absent_) {
    const Role role = static_cast<Role>(__builtin_ctz(surplus));
    throw_invalid(name_of(role), "a pointer", "NULL, as the plan's problem has no such tensor",
                  "leave it out, or make a plan with the tensor");
  }
  for (const Rule& rule : rules_) {
    const void* data = buffers.data[index_of(rule.role)];
    if (data == nullptr) {
      throw_invalid(name_of(rule.role), "a null pointer", "the memory of the plan's tensor",
                    "set this field");
    }
    if ((reinterpret_cast<uintptr_t>(data) & (rule.element_size - 1u)) != 0) {
      throw_invalid(name_of(rule.role),
                    "an address that is no multiple of " + std::to_string(rule.element_size) + " bytes",
                    "elements at multiples of their size", "check the pointer, or copy the tensor");
    }
  }
  if (workspace_size_ > 0) {
    if (buffers.workspace == nullptr) {
      throw_invalid("workspace", "a null pointer", std::to_string(workspace_size_) + " bytes",
                    "allocate fovea_plan_workspace_size() bytes");
    }
    if (buffers.workspace_size < workspace_size_) {
      throw_invalid("workspace_size", std::to_string(buffers.workspace_size),
                    "at least " + std::to_string(workspace_size_) + " bytes",
                    "allocate fovea_plan_workspace_size() bytes");
    }
    if (reinterpret_cast<uintptr_t>(buffers.workspace) % kWorkspaceAlignment != 0) {
      throw_invalid("workspace", "an address that is no multiple of " + std::to_string(kWorkspaceAlignment),
                    "alignment to FOVEA_WORKSPACE_ALIGNMENT", "use aligned_alloc or the like");
    }
  }
  check_overlaps(problem, buffers);
  if (tells_memory_) check_memory(buffers);
  if (has_sequence_lengths_) check_sequence_lengths(problem, buffers);
}

void BufferRules::check_memory(const Buffers& buffers) const {
  const auto check = [](const char* name, const void* data) {
    const cuda::Memory memory = cuda::memory_of(data);
    if (memory.place != cuda::Place::kDevice) return;
    throw_invalid(name, cuda::text_of(memory), "memory of the CPU, where the plan's tensors are",
                  "make a plan for that device, or copy the tensor");
  };
  for (const Rule& rule : rules_) check(name_of(rule.role), buffers.data[index_of(rule.role)]);
  if (workspace_size_ > 0) check("workspace", buffers.workspace);
}

void BufferRules::check_overlaps(const AttentionProblem& problem, const Buffers& buffers) const {
  const Bytes workspace = bytes_at(buffers.workspace, static_cast<int64_t>(workspace_size_));
  for (const Rule& rule : rules_) {
    if (workspace_size_ == 0) break;
    if (workspace.meets(bytes_at(buffers.data[index_of(rule.role)], rule.extent))) {
      throw_invalid("workspace", std::string("memory that overlaps ") + name_of(rule.role),
                    "memory that nothing else uses during the run", "allocate a workspace of its own");
    }
  }
  for (size_t i = 0; i < outputs_; ++i) {
    const char* output = buffers.get<const char>(rules_[i].role);
    const Bytes written = bytes_at(output, rules_[i].extent);
    for (size_t j = i + 1; j < rules_.size(); ++j) {
      const char* other = buffers.get<const char>(rules_[j].role);
      if (!written.meets(bytes_at(other, rules_[j].extent))) continue;
      const auto distance =
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(other) - reinterpret_cast<uintptr_t>(output));
      if (interleave_without_overlap(problem[rules_[i].role], problem[rules_[j].role], distance)) continue;
      throw_invalid(name_of(rules_[i].role), std::string("memory that overlaps ") + name_of(rules_[j].role),
                    "memory of its own for each output",
                    "allocate the output apart: nothing is computed in place");
    }
  }
}

}  // namespace fovea::plan
