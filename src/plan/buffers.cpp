// Checks the pointers of one run: presence, alignment, overlaps, contents of lengths and lists.
#include "plan/buffers.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

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

namespace {

/// Bytes of the tensor that a run gives: keys that arrive lie elsewhere.
int64_t given_bytes(const AttentionProblem& problem, size_t place) {
  TensorDesc t = problem.at(place);
  const bool keys = place == index_of(Role::kK) || place == index_of(Role::kV);
  if (keys) t.shape[1] -= problem.arriving_keys;
  return extent_bytes(t).value();
}

/// Whether check_sequence_lengths() or check_key_lists() read what the tensor holds.
bool has_contents(size_t place) {
  constexpr std::array kRoles = {
      Role::kCuSeqlensQ, Role::kCuSeqlensK, Role::kSeqUsedQ,      Role::kSeqUsedK, Role::kLeftPadK,
      Role::kCacheBatch, Role::kPageTable,  Role::kCuSeqlensKNew, Role::kKeys,     Role::kRotaryPositions,
      Role::kQDescale,   Role::kKDescale,   Role::kVDescale};
  return std::ranges::any_of(kRoles, [&](Role role) { return index_of(role) == place; });
}

}  // namespace

BufferRules::BufferRules(const AttentionProblem& problem, size_t workspace_size, bool check_contents)
    : workspace_size_(workspace_size), on_gpu_(problem[Role::kQ].device == DeviceType::kCuda) {
  static_assert(kPlaceCount <= 64, "sets of places are 64-bit masks");
  for (size_t i = 0; i < kPlaceCount; ++i) {
    const TensorDesc& t = problem.at(i);
    if (!t.present) {
      absent_ |= uint64_t{1} << i;
    } else if (has_memory(t)) {
      rules_.push_back({static_cast<uint8_t>(i), problem.writes(i), static_cast<uint8_t>(size_of(t.dtype)),
                        given_bytes(problem, i)});
    }
  }
  const auto inputs =
      std::stable_partition(rules_.begin(), rules_.end(), [](const Rule& rule) { return rule.output; });
  outputs_ = static_cast<size_t>(inputs - rules_.begin());
  tells_memory_ = !on_gpu_ && cuda::can_tell_memory();
  const bool checks = !on_gpu_ || check_contents;
  has_sequence_lengths_ =
      checks && (problem.packed || problem.has(Role::kSeqUsedQ) || problem.has(Role::kSeqUsedK) ||
                 problem.has_cache() || problem.has(Role::kQDescale) || problem.has(Role::kKDescale) ||
                 problem.has(Role::kVDescale));
  has_key_lists_ = checks && problem.has(Role::kKeys);
}

void BufferRules::check(const AttentionProblem& problem, const Buffers& buffers) const {
  uint64_t given = 0;
  for (size_t i = 0; i < kPlaceCount; ++i) given |= uint64_t{buffers.data[i] != nullptr} << i;
  if (const uint64_t surplus = given & absent_) {
    throw_invalid(problem.name_at(static_cast<size_t>(__builtin_ctzll(surplus))), "a pointer",
                  "NULL, as the plan's problem has no such tensor",
                  "leave it out, or make a plan with the tensor");
  }
  for (const Rule& rule : rules_) {
    const void* data = buffers.data[rule.place];
    if (data == nullptr) {
      throw_invalid(problem.name_at(rule.place), "a null pointer", "the memory of the plan's tensor",
                    "set this field");
    }
    if ((reinterpret_cast<uintptr_t>(data) & (rule.element_size - 1u)) != 0) {
      throw_invalid(problem.name_at(rule.place),
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
  if (tells_memory_) check_memory(problem, buffers);
  if (on_gpu_) {
    if (has_sequence_lengths_ || has_key_lists_) check_contents_of_gpu(problem, buffers);
    return;
  }
  if (has_sequence_lengths_) check_sequence_lengths(problem, buffers);
  if (has_key_lists_) check_key_lists(problem, buffers);
}

void BufferRules::check_contents_of_gpu(const AttentionProblem& problem, const Buffers& buffers) const {
  Buffers on_host;
  std::vector<cuda::HostCopy> copies;
  std::vector<std::vector<std::byte>> memory;  // of std::allocator, so aligned for any element
  for (const Rule& rule : rules_) {
    if (!has_contents(rule.place)) continue;
    std::vector<std::byte>& copy = memory.emplace_back(static_cast<size_t>(rule.extent));
    on_host.data[rule.place] = copy.data();
    copies.push_back({problem.name_at(rule.place), buffers.data[rule.place], copy.data(), copy.size()});
  }
  cuda::copy_to_host(copies, problem[Role::kQ].device_id, buffers.stream);
  check_sequence_lengths(problem, on_host);
  check_key_lists(problem, on_host);
}

void BufferRules::check_memory(const AttentionProblem& problem, const Buffers& buffers) const {
  const auto check = [](const auto& name_of_it, const void* data) {
    const cuda::Memory memory = cuda::memory_of(data);
    if (memory.place != cuda::Place::kDevice) return;
    throw_invalid(name_of_it(), cuda::text_of(memory), "memory of the CPU, where the plan's tensors are",
                  "make a plan for that device, or copy the tensor");
  };
  for (const Rule& rule : rules_)
    check([&] { return problem.name_at(rule.place); }, buffers.data[rule.place]);
  if (workspace_size_ > 0) check([] { return std::string("workspace"); }, buffers.workspace);
}

void BufferRules::check_overlaps(const AttentionProblem& problem, const Buffers& buffers) const {
  const Bytes workspace = bytes_at(buffers.workspace, static_cast<int64_t>(workspace_size_));
  for (const Rule& rule : rules_) {
    if (workspace_size_ == 0) break;
    if (workspace.meets(bytes_at(buffers.data[rule.place], rule.extent))) {
      throw_invalid("workspace", "memory that overlaps " + problem.name_at(rule.place),
                    "memory that nothing else uses during the run", "allocate a workspace of its own");
    }
  }
  for (size_t i = 0; i < outputs_; ++i) {
    const void* output = buffers.data[rules_[i].place];
    const Bytes written = bytes_at(output, rules_[i].extent);
    for (size_t j = i + 1; j < rules_.size(); ++j) {
      const void* other = buffers.data[rules_[j].place];
      if (!written.meets(bytes_at(other, rules_[j].extent))) continue;
      const auto distance =
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(other) - reinterpret_cast<uintptr_t>(output));
      const TensorDesc &a = problem.at(rules_[i].place), &b = problem.at(rules_[j].place);
      if (interleave_without_overlap(a, b, distance)) continue;
      // Of pages the table decides which are k's and which v's.
      const bool are_caches = rules_[i].place == index_of(Role::kK) && rules_[j].place == index_of(Role::kV);
      if (are_caches && problem.has(Role::kPageTable) && are_whole_pages_apart(a, b, distance)) continue;
      throw_invalid(
          problem.name_at(rules_[i].place), "memory that overlaps " + problem.name_at(rules_[j].place),
          "memory of its own for each output", "allocate the output apart: nothing is computed in place");
    }
  }
}

}  // namespace fovea::plan
