// One problem through one backend, forward and backward, and everything that must hold.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "conformance/compare.hpp"
#include "conformance/owned_problem.hpp"
#include "conformance/plain.hpp"
#include "fovea/fovea.h"

namespace fovea::conformance {

inline constexpr const char* kOracle = "reference";

/// Backends that this machine has, in the library's order.
inline std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (*fovea_backend_unavailable_because(i) == '\0') names.emplace_back(fovea_backend_name(i));
  }
  return names;
}

struct RunOptions {
  std::string backend;
  int32_t num_threads = 1;
  bool deterministic = false;
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

/// Plans and runs one pass on the tensors of `x`, whose outputs then hold the result. Checks all but the
/// numbers.
inline RunResult run_pass(const OwnedProblem& x, fovea_pass pass, const RunOptions& how) {
  const auto description = x.description(pass);
  fovea_buffers buffers = x.buffers(pass);
  if (how.without_lse) {
    description->problem.lse = nullptr;
    buffers.lse = nullptr;
  }
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = how.backend.c_str();
  options.num_threads = how.num_threads;
  options.deterministic = how.deterministic ? 1 : 0;
  fovea_plan* made = nullptr;
  const fovea_status planned = fovea_plan_create(&description->problem, &options, &made);
  if (planned == FOVEA_UNSUPPORTED) return {true, {}};
  if (planned != FOVEA_OK) return failed(std::string("plan: ") + fovea_last_error());
  const std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan(made,
                                                                [](fovea_plan* p) { fovea_plan_destroy(p); });
  if (how.backend != fovea_plan_backend(made)) return failed("the plan names another backend");

  const size_t workspace_size = fovea_plan_workspace_size(made);
  const Memory workspace(workspace_size, 0, Placement::kGuarded);
  std::memset(workspace.data(), how.workspace_fill, workspace_size);
  buffers.workspace = workspace_size > 0 ? workspace.data() : nullptr;
  buffers.workspace_size = workspace_size;

  std::map<Role, std::vector<unsigned char>> inputs;
  for (size_t r = 0; r < kRoles; ++r) {
    const auto role = static_cast<Role>(r);
    if (!x.takes_part(role, pass)) continue;
    const Memory& memory = x[role].memory();
    if (OwnedProblem::is_output(role, pass)) {
      if (!(how.without_lse && role == Role::kLse)) x[role].poison();
    } else {
      inputs[role].assign(memory.whole(), memory.whole() + memory.whole_size());
    }
  }
  const auto forbid_guards = [&](bool forbid) {
    workspace.forbid_guards(forbid);
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (x.takes_part(role, pass)) x[role].memory().forbid_guards(forbid);
    }
  };
  forbid_guards(true);
  const fovea_status ran = fovea_run(made, &buffers);
  forbid_guards(false);
  if (ran != FOVEA_OK) return failed(std::string("run: ") + fovea_last_error());

  if (!workspace.guards_intact()) return failed("workspace: written outside");
  for (const auto& [role, before] : inputs) {
    if (std::memcmp(before.data(), x[role].memory().whole(), before.size()) != 0) {
      return failed(std::string(name_of(role)) + ": an input was changed");
    }
  }
  for (size_t r = 0; r < kRoles; ++r) {
    const auto role = static_cast<Role>(r);
    if (!x.takes_part(role, pass) || !OwnedProblem::is_output(role, pass)) continue;
    if (how.without_lse && role == Role::kLse) continue;
    const std::string wrong = x[role].check_written();
    if (!wrong.empty()) return failed(std::string(name_of(role)) + ": " + wrong);
  }
  return {};
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
  /// The first runs against the oracle; the others must agree with it bit for bit.
  std::vector<int32_t> threads = {1, 2};
  std::map<Role, Margin>* margins = nullptr;
};

/// A problem with its oracle and its plain results, to be compared with any number of backends.
class Checker {
 public:
  Checker(OwnedProblem& problem, CheckOptions options)
      : x_(problem), options_(std::move(options)), oracle_(problem.in_float64()), plain_(problem) {
    const RunOptions how{kOracle};
    for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
      if (pass == FOVEA_BACKWARD && !options_.backward) break;
      if (pass == FOVEA_FORWARD) {
        plain_.forward();
      } else {
        plain_.backward();
      }
      const RunResult result = run_pass(oracle_, pass, how);
      if (!result.failure.empty()) oracle_failure_ = std::string(kOracle) + " in float64: " + result.failure;
      if (result.unsupported) oracle_failure_ = "the oracle cannot do the problem";
      if (!oracle_failure_.empty()) return;
    }
  }

  /// One line for the first thing that is wrong, "" when nothing is. `ran` counts the passes that the backend
  /// could do.
  std::string check(const std::string& backend, int* ran = nullptr) {
    if (!oracle_failure_.empty()) return oracle_failure_;
    std::string failure = check_pass(backend, FOVEA_FORWARD, ran);
    if (failure.empty() && options_.backward) failure = check_pass(backend, FOVEA_BACKWARD, ran);
    return failure.empty() ? failure : backend + ": " + failure;
  }

 private:
  std::string check_pass(const std::string& backend, fovea_pass pass, int* ran) {
    const std::string name = pass == FOVEA_FORWARD ? "forward: " : "backward: ";
    const auto threads = [](int32_t n) { return " with " + std::to_string(n) + " threads"; };
    RunOptions how{backend};
    how.num_threads = options_.threads.front();
    if (pass == FOVEA_BACKWARD) {
      const std::string missing = provide_forward(backend);
      if (!missing.empty()) return missing;
    }
    RunResult result = run_pass(x_, pass, how);
    if (result.unsupported) return {};
    if (ran) ++*ran;
    if (!result.failure.empty()) return name + result.failure;
    std::string wrong = compare_outputs(pass);
    if (!wrong.empty()) return name + wrong + threads(how.num_threads);

    if (pass == FOVEA_FORWARD) {
      how.without_lse = true;
      result = run_pass(x_, pass, how);
      if (!result.unsupported) {
        if (!result.failure.empty()) return name + "without lse: " + result.failure;
        wrong = compare_output(Role::kO);
        if (!wrong.empty()) return name + "without lse: " + wrong;
      }
      how.without_lse = false;
    }

    // Bit for bit: the first run of these against a repetition and other thread counts, over other workspace
    // contents.
    how.deterministic = true;
    how.workspace_fill = 0x3c;
    result = run_pass(x_, pass, how);
    if (result.unsupported) return {};
    if (!result.failure.empty()) return name + "deterministic: " + result.failure;
    wrong = compare_outputs(pass);
    if (!wrong.empty()) return name + "deterministic: " + wrong + threads(how.num_threads);
    const auto first = output_bytes(x_, pass);
    how.workspace_fill = 0xff;
    for (const int32_t n : options_.threads) {
      how.num_threads = n;
      result = run_pass(x_, pass, how);
      if (!result.failure.empty()) return name + result.failure + threads(n);
      const auto again = output_bytes(x_, pass);
      for (const auto& [role, bytes] : first) {
        const auto& other = again.at(role);
        for (size_t b = 0; b < bytes.size(); ++b) {
          if (bytes[b] == other[b]) continue;
          return name + name_of(role) + "[" + std::to_string(b / size_of(x_[role].type())) +
                 "] is not the same, bit for bit," + threads(n) + " as it was" +
                 threads(options_.threads.front());
        }
      }
    }
    return {};
  }

  /// Puts o, lse and rng_state of the backend's own forward (where it has one, else the oracle's) where the
  /// backward reads them.
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
    return compare(role, rounded_type ? x_.spec.type : Type::kF32, x_[role], oracle_[role].values(), plain_,
                   margin);
  }
  /// Everything that is wrong with the outputs of a pass, in one line.
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

  OwnedProblem& x_;
  CheckOptions options_;
  OwnedProblem oracle_;
  Plain plain_;
  std::string oracle_failure_;
};

}  // namespace fovea::conformance
