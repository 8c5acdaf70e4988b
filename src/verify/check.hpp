// Checks one problem on one backend, forward and backward: accuracy, memory, workspace, repetition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "verify/appended.hpp"
#include "verify/compare.hpp"
#include "verify/device_memory.hpp"
#include "verify/owned_problem.hpp"
#include "verify/plain.hpp"

namespace fovea::verify {

inline constexpr const char* kOracle = "reference";

/// Backends that this machine has and for which this program has memory, in the library's order.
inline std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    const char* name = fovea_backend_name(i);
    if (is_cuda(name) && open_device_memory == nullptr) continue;
    if (*fovea_backend_unavailable_because(i) == '\0') names.emplace_back(name);
  }
  return names;
}

/// The memory of runs of one pass on one backend: the tensors of `x`, or their mirrors on a device, and a workspace.
class RunMemory {
 public:
  RunMemory(const OwnedProblem& x, fovea_pass pass, const std::string& backend, bool without_lse = false)
      : x_(x),
        pass_(pass),
        without_lse_(without_lse),
        device_(is_cuda(backend) ? &open_device_memory() : nullptr) {
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (!takes_part(role) || x_[role].data() == nullptr || lies_in_keys(role)) continue;
      const Memory& memory = x_[role].memory();
      blocks_.push_back({name_of(role), memory.data(), memory.size()});
      block_roles_.push_back(r);
    }
  }

  /// The problem for fovea_plan_create, valid until the next call of any function.
  std::unique_ptr<OwnedProblem::Description> description() {
    if (device_) place(0, kPattern);
    auto description = x_.description(pass_, device_ ? &addresses_ : nullptr,
                                      device_ ? device_->device() : fovea_device{FOVEA_CPU, 0});
    if (device_ && x_.spec.data_seed % 2 == 1) {
      // A plan holds for any pointers: those of a run may be less aligned than those of the plan.
      for (fovea_tensor& t : description->tensors) {
        const auto address = reinterpret_cast<uintptr_t>(t.data);
        t.data = static_cast<char*>(t.data) - address % FOVEA_WORKSPACE_ALIGNMENT;
      }
    }
    if (without_lse_) description->problem.lse = nullptr;
    return description;
  }

  /// Fills the outputs and a workspace of `workspace_size` bytes with patterns and runs. "" when the run
  /// obeyed the rules of memory and status.
  std::string run(const fovea_plan* plan, size_t workspace_size, unsigned char workspace_fill) {
    std::map<Role, std::vector<unsigned char>> inputs;
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (!takes_part(role)) continue;
      const Memory& memory = x_[role].memory();
      if (OwnedProblem::is_output(role, pass_)) {
        x_[role].poison();
      } else {
        inputs[role].assign(memory.whole(), memory.whole() + memory.whole_size());
      }
    }
    const std::string failure = device_ ? run_on_device(plan, workspace_size, workspace_fill)
                                        : run_on_host(plan, workspace_size, workspace_fill);
    if (!failure.empty()) return failure;
    for (const auto& [role, before] : inputs) {
      if (x_.is_written(role, pass_)) {
        if (const std::string wrong = check_appended(role, before); !wrong.empty()) return wrong;
        std::memcpy(x_[role].memory().whole(), before.data(), before.size());  // for the next run
      }
      if (std::memcmp(before.data(), x_[role].memory().whole(), before.size()) != 0) {
        return std::string(name_of(role)) + ": an input was changed";
      }
    }
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (!takes_part(role) || !OwnedProblem::is_output(role, pass_)) continue;
      const std::string wrong = x_[role].check_written();
      if (!wrong.empty()) return std::string(name_of(role)) + ": " + wrong;
    }
    return {};
  }

 private:
  /// What a run left of k or v, which held `before`: the new rows, and all else as it was.
  std::string check_appended(Role role, const std::vector<unsigned char>& before) const {
    const std::vector<double> after = x_[role].values();
    std::vector<unsigned char> rest(x_[role].memory().whole(), x_[role].memory().whole() + before.size());
    std::memcpy(x_[role].memory().whole(), before.data(), before.size());
    std::vector<double> slack;
    const std::vector<double> expected = once_appended(x_, &slack)[role].values();
    const std::vector<double> old = x_[role].values();
    const size_t size = size_of(x_[role].type());
    std::string wrong;
    x_[role].for_each([&](size_t place, const unsigned char* at) {
      const double off = role == Role::kK ? slack[place] : 0;
      const bool same = after[place] == expected[place] || std::abs(after[place] - expected[place]) <= off ||
                        (std::isnan(after[place]) && std::isnan(expected[place]));
      if (!same && wrong.empty()) {
        wrong = name_of(role) + ("[" + std::to_string(place) + "]: is " + std::to_string(after[place]) +
                                 " after the run, expected " + std::to_string(expected[place]) + ", was " +
                                 std::to_string(old[place]));
      }
      std::memcpy(rest.data() + (at - x_[role].memory().whole()), at, size);
    });
    if (wrong.empty() && rest != before)
      wrong = std::string(name_of(role)) + ": written outside its elements";
    return wrong;
  }
  bool takes_part(Role role) const {
    return x_.takes_part(role, pass_) && !(without_lse_ && role == Role::kLse);
  }
  bool lies_in_keys(Role role) const { return role == Role::kV && x_.spec.values_in_keys; }

  std::string run_on_host(const fovea_plan* plan, size_t workspace_size, unsigned char workspace_fill) {
    const Memory workspace(workspace_size, 0, Placement::kGuarded);
    std::memset(workspace.data(), workspace_fill, workspace_size);
    const auto forbid_guards = [&](bool forbid) {
      workspace.forbid_guards(forbid);
      for (size_t r = 0; r < kRoles; ++r) {
        const auto role = static_cast<Role>(r);
        if (takes_part(role)) x_[role].memory().forbid_guards(forbid);
      }
    };
    fovea_buffers buffers = buffers_of(workspace.data(), workspace_size, nullptr);
    forbid_guards(true);
    const fovea_status ran = fovea_run(plan, &buffers);
    forbid_guards(false);
    if (ran != FOVEA_OK) return std::string("run: ") + fovea_last_error();
    return workspace.guards_intact() ? "" : "workspace: written outside";
  }

  std::string run_on_device(const fovea_plan* plan, size_t workspace_size, unsigned char workspace_fill) {
    void* workspace = place(workspace_size, workspace_fill);
    fovea_buffers buffers = buffers_of(workspace, workspace_size, &addresses_);
    buffers.stream = device_->stream();
    const fovea_status ran = fovea_run(plan, &buffers);
    const std::string run_error = ran == FOVEA_OK ? "" : fovea_last_error();
    const std::string wrong = device_->finish(blocks_);
    return ran == FOVEA_OK ? wrong : "run: " + run_error;
  }

  void* place(size_t workspace_size, unsigned char workspace_fill) {
    const std::vector<void*> placed = device_->place(blocks_, workspace_size, workspace_fill);
    for (size_t i = 0; i < block_roles_.size(); ++i) addresses_[block_roles_[i]] = placed[i];
    if (lies_in_keys(Role::kV))
      addresses_[static_cast<size_t>(Role::kV)] = addresses_[static_cast<size_t>(Role::kK)];
    return placed.back();
  }

  fovea_buffers buffers_of(void* workspace, size_t workspace_size,
                           const OwnedProblem::Addresses* elsewhere) const {
    fovea_buffers buffers = x_.buffers(pass_, elsewhere);
    if (without_lse_) buffers.lse = nullptr;
    buffers.workspace = workspace_size > 0 ? workspace : nullptr;
    buffers.workspace_size = workspace_size;
    return buffers;
  }

  const OwnedProblem& x_;
  fovea_pass pass_;
  bool without_lse_;
  DeviceMemory* device_;  ///< null: the backend works on host memory
  std::vector<DeviceMemory::Block> blocks_;
  std::vector<size_t> block_roles_;
  OwnedProblem::Addresses addresses_{};
};

struct RunOptions {
  std::string backend;
  int32_t num_threads = 1;
  bool deterministic = false;
  int32_t num_splits = 0;
  bool batch_invariant = false;
  bool without_lse = false;             ///< forward: leave the optional lse out
  unsigned char workspace_fill = 0xff;  ///< what the workspace holds before: nothing may depend on it
};

struct RunResult {
  bool unsupported = false;
  std::string failure;  ///< "" when the run obeyed the rules of memory and status
};

inline RunResult failed(const std::string& what) {
  return {false, what};
}

/// Plans and runs one pass on the tensors of `x`, whose outputs then hold the result. Checks all but the numbers.
inline RunResult run_pass(const OwnedProblem& x, fovea_pass pass, const RunOptions& how) {
  if (is_cuda(how.backend) && open_device_memory == nullptr) {
    return failed("this program has no device memory for " + how.backend);
  }
  RunMemory memory(x, pass, how.backend, how.without_lse);
  const auto description = memory.description();
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = how.backend.c_str();
  options.num_threads = how.num_threads;
  options.deterministic = how.deterministic ? 1 : 0;
  options.num_splits = how.num_splits;
  options.batch_invariant = how.batch_invariant ? 1 : 0;
  fovea_plan* made = nullptr;
  const fovea_status planned = fovea_plan_create(&description->problem, &options, &made);
  if (planned == FOVEA_UNSUPPORTED) return {true, {}};
  if (planned != FOVEA_OK) return failed(std::string("plan: ") + fovea_last_error());
  const std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan(made,
                                                                [](fovea_plan* p) { fovea_plan_destroy(p); });
  if (how.backend != fovea_plan_backend(made)) return failed("the plan names another backend");
  return {false, memory.run(made, fovea_plan_workspace_size(made), how.workspace_fill)};
}

/// Bytes of all outputs of a pass, in the order of their indices.
inline std::map<Role, std::vector<unsigned char>> output_bytes(const OwnedProblem& x, fovea_pass pass) {
  std::map<Role, std::vector<unsigned char>> bytes;
  for (size_t r = 0; r < kRoles; ++r) {
    const auto role = static_cast<Role>(r);
    if (x.takes_part(role, pass) && OwnedProblem::is_output(role, pass)) bytes[role] = x[role].bytes();
  }
  return bytes;
}

struct CheckOptions {
  bool backward = true;
  /// The first runs against the oracle; the others must agree with it bit for bit. (Backends of GPUs have no
  /// use for the numbers: they repeat once.)
  std::vector<int32_t> threads = {1, 2};
  /// Without repetitions each pass runs once without and once with `deterministic`, where that makes a difference.
  bool repeat = true;
  int32_t num_splits = 0;
  bool batch_invariant = false;
  std::map<Role, Margin>* margins = nullptr;
};

/// A problem with its oracle and its plain results, to be compared with any number of backends.
class Checker {
 public:
  Checker(OwnedProblem& problem, CheckOptions options)
      : x_(problem),
        options_(std::move(options)),
        whole_(once_appended(problem)),
        oracle_(whole_.in_float64()),
        plain_(whole_) {
    options_.backward &= !problem.spec.forward_only();
    if (problem.spec.rotary > 0) plain_.allow_for_rotation();
    for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
      if (pass == FOVEA_BACKWARD && !options_.backward) break;
      if (x_.spec.has_meaning()) {
        pass == FOVEA_FORWARD ? plain_.forward() : plain_.backward();
      }
      run_oracle(oracle_, pass);
      if (!x_.spec.has_meaning() && oracle_failure_.empty()) run_disturbed(pass);
      if (!oracle_failure_.empty()) return;
    }
  }

  /// One line for the first error, "" without any. `ran` counts the passes that the backend can do.
  std::string check(const std::string& backend, int* ran = nullptr) {
    if (!oracle_failure_.empty()) return oracle_failure_;
    plain_.allow_for_scores_of(backend);
    std::string failure = check_pass(backend, FOVEA_FORWARD, ran);
    if (failure.empty() && options_.backward) failure = check_pass(backend, FOVEA_BACKWARD, ran);
    return failure.empty() ? failure : backend + ": " + failure;
  }
  /// Compares what the problem's outputs hold with the oracle: all errors in one line, "" without any.
  std::string check_outputs(fovea_pass pass) {
    return oracle_failure_.empty() ? compare_outputs(pass) : oracle_failure_;
  }
  /// Where the next checks store their margins.
  void count_margins_in(std::map<Role, Margin>* margins) { options_.margins = margins; }

 private:
  std::string check_pass(const std::string& backend, fovea_pass pass, int* ran) {
    const std::string name = pass == FOVEA_FORWARD ? "forward: " : "backward: ";
    RunOptions how{backend};
    how.num_threads = options_.threads.front();
    how.num_splits = options_.num_splits;
    how.batch_invariant = options_.batch_invariant;
    if (pass == FOVEA_BACKWARD) {
      const std::string missing = provide_forward(backend);
      if (!missing.empty()) return missing;
    }
    RunResult result = run_pass(x_, pass, how);
    if (result.unsupported) return {};
    if (ran) ++*ran;
    if (!result.failure.empty()) return name + result.failure;
    std::string wrong = compare_outputs(pass);
    if (!wrong.empty()) return name + wrong + with_threads(how.num_threads);
    // The bits that later runs must give again. On GPUs a backward without `deterministic` may give others; on
    // CPUs the first run sets them.
    std::map<Role, std::vector<unsigned char>> first;
    const bool forward_on_device = pass == FOVEA_FORWARD && is_cuda(backend);
    if (forward_on_device) first = output_bytes(x_, pass);

    if (pass == FOVEA_FORWARD && options_.repeat) {
      how.without_lse = true;
      result = run_pass(x_, pass, how);
      if (!result.unsupported) {
        if (!result.failure.empty()) return name + "without lse: " + result.failure;
        wrong = compare_output(Role::kO);
        if (!wrong.empty()) return name + "without lse: " + wrong;
      }
      how.without_lse = false;
    }
    if (forward_on_device && !options_.repeat) return {};

    // A repetition and other thread counts, over other workspace contents.
    how.deterministic = true;
    how.workspace_fill = 0x3c;
    result = run_pass(x_, pass, how);
    if (result.unsupported) return {};
    if (!result.failure.empty()) return name + "deterministic: " + result.failure;
    wrong = compare_outputs(pass);
    if (!wrong.empty()) return name + "deterministic: " + wrong + with_threads(how.num_threads);
    if (forward_on_device) {
      wrong = differing_bits(first, pass);
      if (!wrong.empty()) return name + wrong + " when run again";
    }
    if (!options_.repeat) return {};
    first = output_bytes(x_, pass);
    how.workspace_fill = 0xff;
    const std::vector<int32_t> thread_counts = is_cuda(backend) ? std::vector<int32_t>{1} : options_.threads;
    for (const int32_t n : thread_counts) {
      how.num_threads = n;
      result = run_pass(x_, pass, how);
      if (!result.failure.empty()) return name + result.failure + with_threads(n);
      wrong = differing_bits(first, pass);
      if (!wrong.empty())
        return name + wrong + with_threads(n) + " as it was" + with_threads(options_.threads.front());
    }
    return {};
  }

  static std::string with_threads(int32_t n) { return " with " + std::to_string(n) + " threads"; }

  std::string differing_bits(const std::map<Role, std::vector<unsigned char>>& first, fovea_pass pass) const {
    const auto again = output_bytes(x_, pass);
    for (const auto& [role, bytes] : first) {
      const auto& other = again.at(role);
      for (size_t b = 0; b < bytes.size(); ++b) {
        if (bytes[b] == other[b]) continue;
        return name_of(role) +
               ("[" + std::to_string(b / size_of(x_[role].type())) + "] is not the same, bit for bit,");
      }
    }
    return {};
  }

  /// Writes o, lse and rng_state of the backend's own forward (or the oracle's, if the backend has none) to the
  /// tensors that the backward reads.
  std::string provide_forward(const std::string& backend) {
    for (const std::string& name : {backend, std::string(kOracle)}) {
      RunOptions how{name};
      const RunResult result = run_pass(x_, FOVEA_FORWARD, how);
      if (result.unsupported) continue;
      return result.failure.empty() ? std::string() : "forward: " + result.failure;
    }
    return "no forward";
  }

  std::string compare_output(Role role) {
    const bool rounded_type = role != Role::kLse;
    Margin* margin = options_.margins ? &(*options_.margins)[role] : nullptr;
    return compare(role, rounded_type ? whole_.spec.weight_type() : Type::kF32, x_[role],
                   oracle_[role].values(), plain_, margin);
  }
  /// All errors of the outputs of a pass, in one line.
  std::string compare_outputs(fovea_pass pass) {
    std::string all;
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (!x_.takes_part(role, pass) || !OwnedProblem::is_output(role, pass)) continue;
      const std::string wrong = role == Role::kRngState ? check_rng_state() : compare_output(role);
      if (!wrong.empty()) all += (all.empty() ? "" : "; ") + wrong;
    }
    return all;
  }
  std::string check_rng_state() {
    const auto state = x_[Role::kRngState].bytes();
    const uint64_t expected[2] = {x_.spec.seed, x_.spec.offset};
    const bool right =
        state.size() == sizeof expected && std::memcmp(state.data(), expected, sizeof expected) == 0;
    return right ? "" : "rng_state is not seed and offset";
  }

  void run_oracle(OwnedProblem& problem, fovea_pass pass) {
    const RunResult result = run_pass(problem, pass, {kOracle});
    if (!result.failure.empty()) oracle_failure_ = std::string(kOracle) + " in float64: " + result.failure;
    if (result.unsupported) oracle_failure_ = "the oracle cannot do the problem";
  }
  /// In place of the plain implementation, where it lacks the meaning of an expression: the oracle again, on inputs that are off by
  /// roundings of float32, and of o.
  void run_disturbed(fovea_pass pass) {
    if (!disturbed_) {
      disturbed_ = std::make_unique<OwnedProblem>(whole_.in_float64());
      Random random(x_.spec.data_seed);
      for (size_t r = 0; r < kRoles; ++r) {
        const auto role = static_cast<Role>(r);
        if (!disturbed_->has(role) || is_written(role)) continue;
        OwnedTensor& tensor = (*disturbed_)[role];
        if (tensor.type() != Type::kF64 && tensor.type() != Type::kF32) continue;
        std::vector<double> values = tensor.values();
        // A few roundings: products of a score add up d terms, functions are right but for the last bits.
        for (double& value : values) value *= 1 + 0x1p-21 * (2 * random.uniform() - 1);
        tensor.assign(values);
      }
    } else {
      disturb_sums();
    }
    run_oracle(*disturbed_, pass);
    if (!oracle_failure_.empty()) return;
    plain_.rows = 1;
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (x_.takes_part(role, pass) && OwnedProblem::is_output(role, pass) && role != Role::kRngState)
        plain_.outputs[role] = disturbed_output(role);
    }
  }
  /// A backward takes the sum of d_o * o of a row from an o that is rounded. The oracle does not read o, but subtracts dlse from
  /// that sum, so the error goes there.
  void disturb_sums() {
    if (!x_.has(Role::kDLse) || x_.spec.packed()) return;
    const std::vector<double> o = (*disturbed_)[Role::kO].values(), d_o = (*disturbed_)[Role::kDO].values();
    OwnedTensor& dlse = (*disturbed_)[Role::kDLse];
    std::vector<double> values = dlse.values();
    const auto heads = static_cast<size_t>(x_.spec.heads_q), queries = static_cast<size_t>(x_.spec.seqlen_q),
               size = static_cast<size_t>(x_.spec.head_dim_v);
    for (size_t i = 0; i < o.size(); ++i) {
      const size_t head = i / size % heads, query = i / size / heads % queries,
                   batch = i / size / heads / queries;
      const double error = rounded(o[i], x_[Role::kO].type()) - o[i];
      if (std::isfinite(error)) values[(batch * heads + head) * queries + query] -= d_o[i] * error;
    }
    dlse.assign(values);
  }
  static bool is_written(Role role) {
    return OwnedProblem::is_output(role, FOVEA_FORWARD) || OwnedProblem::is_output(role, FOVEA_BACKWARD);
  }
  /// Stands for the plain implementation's output. One disturbance shows the size of errors, not the largest of many; and sums of terms of
  /// either sign are as large as a few of their terms, or more. Nothing is known to be an empty sum.
  PlainOutput disturbed_output(Role role) const {
    constexpr double kLuck = 4, kTerms = 8, kTiny = 1e-30;
    const std::vector<double> exact = oracle_[role].values();
    PlainOutput output{(*disturbed_)[role].values(), exact};
    double squares = 0, count = 0;
    for (const double value : exact) {
      if (!std::isfinite(value)) continue;
      squares += value * value;
      ++count;
    }
    const double usual = std::max(std::sqrt(squares / std::max(count, 1.0)), kTiny);
    for (size_t i = 0; i < exact.size(); ++i) {
      output.magnitudes[i] = role == Role::kLse ? 1 : kTerms * (std::abs(exact[i]) + usual);
      output.values[i] = rounded(exact[i] + kLuck * (output.values[i] - exact[i]), x_[role].type());
    }
    return output;
  }

  OwnedProblem& x_;
  CheckOptions options_;
  OwnedProblem whole_;  ///< x_ once its new rows are appended
  OwnedProblem oracle_;
  std::unique_ptr<OwnedProblem> disturbed_;
  Plain plain_;
  std::string oracle_failure_;
};

}  // namespace fovea::verify
