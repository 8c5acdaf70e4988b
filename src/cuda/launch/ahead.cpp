// Chooses kernels as a plan does, for a chip by its name, and keeps their code.
#include "cuda/launch/ahead.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <utility>

#include "core/status.hpp"
#include "cuda/launch/cubin.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/kernel_choice.hpp"
#include "cuda/launch/kernel_set.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/runtime_kernel.hpp"

namespace fovea::cuda {
namespace {

struct Chip {
  int capability, sm_count, shared_per_sm, shared_per_cta, threads_per_sm;  ///< shared memory in KiB
};
/// By the tables of compute capabilities of the CUDA programming guide; SMs of the largest usual GPU.
constexpr std::array kChips = {Chip{75, 72, 64, 64, 1024},     Chip{80, 108, 164, 163, 2048},
                               Chip{86, 84, 100, 99, 1536},    Chip{87, 16, 164, 163, 1536},
                               Chip{89, 142, 100, 99, 1536},   Chip{90, 132, 228, 227, 2048},
                               Chip{100, 148, 228, 227, 2048}, Chip{103, 148, 228, 227, 2048},
                               Chip{120, 188, 100, 99, 1536},  Chip{121, 48, 100, 99, 1536}};

DeviceProperties properties_of_chip(const AheadRequest& request) {
  constexpr int kMostSms = 4096;
  if (request.num_sms < 0 || request.num_sms > kMostSms) {
    throw_invalid("num_sms", std::to_string(request.num_sms), "0 to " + std::to_string(kMostSms),
                  "use 0 for the number that the chip's usual GPU has");
  }
  std::string names;
  for (const Chip& chip : kChips) {
    const std::string name = "sm_" + std::to_string(chip.capability);
    names += (names.empty() ? "" : ", ") + name;
    if (request.chip != name) continue;
    DeviceProperties properties;
    properties.name = name;
    properties.capability = chip.capability;
    properties.sm_count = request.num_sms > 0 ? static_cast<int>(request.num_sms) : chip.sm_count;
    properties.shared_per_sm = size_t{1024} * static_cast<size_t>(chip.shared_per_sm);
    properties.shared_per_cta = size_t{1024} * static_cast<size_t>(chip.shared_per_cta);
    properties.threads_per_sm = chip.threads_per_sm;
    return properties.without_sms(request.sm_margin);
  }
  throw_invalid("chip", "\"" + request.chip + "\"", "one of " + names,
                "`fovea info` prints the compute capability of this machine's GPUs: 9.0 is sm_90");
}

KernelCache cache_of(const char* folder) {
  if (folder == nullptr) {
    KernelCache cache = KernelCache::of_user();
    if (cache.folder().empty()) {
      throw_invalid("folder", "none, and the user has no cache", "a folder",
                    "name one, or set FOVEA_CACHE_DIR to an absolute path");
    }
    return cache;
  }
  if (!std::filesystem::path(folder).is_absolute()) {
    throw_invalid("folder", "'" + std::string(folder) + "'", "an absolute path",
                  "leave it NULL for the user's cache");
  }
  return KernelCache(folder);
}

/// The code of a chip, compiled once for each kernel and text.
class AheadCode {
 public:
  AheadCode(int capability, KernelCache cache) : capability_(capability), cache_(std::move(cache)) {}

  /// Makes code at once that `of` is going to be asked for.
  void expect(const std::vector<NeededCode>& code) {
    std::vector<Made> made(code.size());
    compile_at_once(code.size(), [&](size_t i) { made[i] = make(*code[i].kernel, code[i].text); });
    for (size_t i = 0; i < code.size(); ++i) {
      if (made[i].is_made) made_.emplace(Key(code[i].kernel, code[i].text), std::move(made[i]));
    }
  }
  KernelCode of(const Kernel& kernel, const std::string& text) {
    if (text.empty() && kernel.entry != nullptr) return {};  // the library holds it
    const Key key(&kernel, text);
    if (!made_.contains(key)) made_.emplace(key, make(kernel, text));
    const Made& made = made_.at(key);
    if (!made.note.empty()) {
      throw_invalid("folder", "one in which nothing can be kept: " + made.note,
                    "a folder that this user alone can write to", "name another");
    }
    lacks_nvrtc_ = lacks_nvrtc_ || made.lacks_nvrtc;
    const bool listed = std::find(order_.begin(), order_.end(), key) != order_.end();
    if (made.has_code && !listed) order_.push_back(key);
    return made.code;
  }
  bool lacks_nvrtc() const { return lacks_nvrtc_; }
  /// Of the code that was asked for.
  std::vector<AheadKernel> reports() const {
    std::vector<AheadKernel> all;
    for (const Key& key : order_) all.push_back(made_.at(key).report);
    return all;
  }

 private:
  using Key = std::pair<const Kernel*, std::string>;
  struct Made {
    KernelCode code;
    AheadKernel report;
    std::string note;
    bool is_made = false, has_code = false, lacks_nvrtc = false;
  };
  Made make(const Kernel& kernel, const std::string& text) const {
    const auto start = std::chrono::steady_clock::now();
    Made made;
    const CompiledKernel compiled =
        compile_ahead(kernel, text, capability_, nvrtc(), cache_, made.report.file);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const CubinUsage usage = usage_of(compiled.code);
    made.report.name = kernel.name;
    made.report.registers = usage.registers;
    made.report.local_bytes = usage.local_bytes;
    made.report.seconds = seconds.count();
    made.report.from_disk = compiled.from_disk;
    made.note = compiled.note;
    made.has_code = compiled.clause.empty();
    made.lacks_nvrtc = !made.has_code && compiled.clause == nvrtc().missing;
    made.code.local_bytes = std::max(usage.local_bytes, 0);
    if (!made.has_code) {
      made.code.clause = std::string(kernel.name) + " " + compiled.clause;
    } else if (made.code.local_bytes > kMostSpilledBytes) {
      made.code.clause = std::string(kernel.name) + " spills registers with this expression (" +
                         std::to_string(made.code.local_bytes) + " bytes a thread)";
    }
    made.is_made = true;
    return made;
  }

  int capability_;
  KernelCache cache_;
  std::map<Key, Made> made_;
  std::vector<Key> order_;  ///< those that have code
  bool lacks_nvrtc_ = false;
};

SetRequest request_of(const AheadRequest& request) {
  return {.name_pattern = kernel_name_pattern(),
          .flops = request.flops,
          .splits = request.splits,
          .deterministic = request.deterministic};
}

/// Both sets of a plan of this family; why there is none, else "".
std::string try_family(Family family, const AttentionProblem& problem, const AheadRequest& request,
                       const KernelTarget& target) {
  SetRequest asked = request_of(request);
  KernelSet first = choose_kernels(family, problem, asked, target);
  if (!first.clause.empty() || !first.main->aligned_only) return first.clause;
  asked.any_address = true;
  return choose_kernels(family, problem, asked, target).clause;
}

}  // namespace

std::vector<AheadKernel> compile_ahead(const AttentionProblem& problem, const AheadRequest& request) {
  const DeviceProperties properties = properties_of_chip(request);
  AheadCode code(properties.capability, cache_of(request.folder));
  const KernelTarget target{
      properties, [&](const Kernel& kernel, const std::string& text) { return code.of(kernel, text); }};
  std::string clauses = never_because(problem, request.deterministic), names;
  if (!clauses.empty())
    throw RequestError(Status::kUnsupported, "deterministic", "deterministic: " + clauses);
  bool known = request.backend == nullptr;
  const AttentionProblem p = with_a_sequence(problem);
  for (int i = 0; i < kFamilyCount; ++i) {
    const auto family = static_cast<Family>(i);
    const std::string name = backend_name(family);
    names += (names.empty() ? "" : ", ") + name;
    if (request.backend != nullptr && name != request.backend) continue;
    known = true;
    code.expect(expected_code(family, p, request_of(request), properties));
    const std::string clause = try_family(family, p, request, target);
    if (clause.empty()) return code.reports();
    clauses += (clauses.empty() ? "" : "; ") + name + " " + clause;
  }
  if (!known)
    throw_invalid("backend", "\"" + std::string(request.backend) + "\"", "one of " + names,
                  "leave it NULL to take the first that can");
  if (code.lacks_nvrtc()) throw RequestError(Status::kUnsupported, "problem", "problem: " + nvrtc().missing);
  throw RequestError(Status::kUnsupported, "problem",
                     "problem: no kernels for " + request.chip + " can do it: " + clauses);
}

}  // namespace fovea::cuda
