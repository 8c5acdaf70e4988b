// Makes a plan: asks each backend in turn, and collects the reasons.
#include "plan/make_plan.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/environment.hpp"
#include "core/status.hpp"
#include "cpu/backends.hpp"
#include "cuda/launch/cuda.hpp"
#include "expr/problem_terms.hpp"
#include "plan/append.hpp"
#include "plan/layout.hpp"
#include "plan/slopes.hpp"
#include "plan/text.hpp"
#include "plan/validate.hpp"
#include "tile/kv_range.hpp"

namespace fovea::plan {
namespace {

/// Sum of clamp(first + i, 0, limit) over i in [0, count), in closed form.
double sum_of_ramp(int64_t first, int64_t count, int64_t limit) {
  const int64_t rising_from = std::clamp<int64_t>(-first, 0, count);
  const int64_t level_from = std::clamp<int64_t>(limit - first, rising_from, count);
  const auto rising = static_cast<double>(level_from - rising_from);
  const auto mean =
      (static_cast<double>(first + rising_from) + static_cast<double>(first + level_from - 1)) / 2;
  return (rising > 0 ? rising * mean : 0.0) +
         static_cast<double>(count - level_from) * static_cast<double>(limit);
}

/// What tile::Window::kept_pairs counts row by row, without the loop: lengths may be huge while a plan is made.
double kept_pairs(const tile::Window& w) {
  if (w.seqlen_q == 0 || w.seqlen_k == 0) return 0;
  const double ends = w.right < 0 ? static_cast<double>(w.seqlen_q) * static_cast<double>(w.seqlen_k)
                                  : sum_of_ramp(w.diagonal(0) + w.right + 1, w.seqlen_q, w.seqlen_k);
  const double begins = w.left < 0 ? 0.0 : sum_of_ramp(w.diagonal(0) - w.left, w.seqlen_q, w.seqlen_k);
  return ends - begins;
}

/// The problem on `backend`, or why it cannot be done there on this machine. Where the answer is not `needed`, because another
/// backend is taken, neither if it would cost seconds: GPUs compile kernels for expressions.
Preparation try_backend(const Backend& backend, const AttentionProblem& problem,
                        const PrepareOptions& options, bool needed) {
  if (const TensorDesc& q = problem[Role::kQ]; q.device != backend.device) {
    return {nullptr, std::string("computes on ") +
                         (backend.device == DeviceType::kCpu ? "the CPU" : "a GPU") +
                         ", and the tensors are in memory of " + device_text(q.device, q.device_id)};
  }
  if (std::string missing = backend.unavailable_because(); !missing.empty())
    return {nullptr, std::move(missing)};
  if (problem.arriving_keys > 0 && backend.device == DeviceType::kCpu)
    return {nullptr, "computes when all keys are there"};
  if (!needed && backend.device == DeviceType::kCuda && problem.expressions) return {};
  return with_named_slopes(problem, try_prepare(backend, problem, options));
}

std::string names_of(std::span<const Backend* const> list) {
  std::string names;
  for (const Backend* backend : list) {
    if (!names.empty()) names += ", ";
    names += backend->name;
  }
  return names;
}

const Backend* find(std::string_view name) {
  for (const Backend* backend : backends()) {
    if (name == backend->name) return backend;
  }
  throw_invalid("backend", "\"" + std::string(name) + "\"", "one of " + names_of(backends()),
                "leave it NULL to take the first that can");
}

/// The problem with what kernels need no expression for as arguments.
AttentionProblem with_arguments(const AttentionProblem& valid) {
  return expr::with_slopes(expr::with_windows(valid));
}

/// Fills in plan.backend, plan.prepared and plan.reason. `arguments`: with_arguments() of the plan's problem.
void choose(Plan& plan, const AttentionProblem& arguments, const char* named, const PrepareOptions& options) {
  const Backend* forced = named ? find(named) : nullptr;
  for (const Backend* backend : backends()) {
    const bool needed = !plan.backend && (!forced || backend == forced);
    Preparation attempt =
        try_backend(*backend, backend->as_asked ? plan.problem : arguments, options, needed);
    std::string verdict;
    if (!attempt.clause.empty()) {
      verdict = "passed over: " + attempt.clause;
    } else if (plan.backend) {
      verdict = "passed over: " + std::string(plan.backend->name) + " comes first";
    } else if (forced && backend != forced) {
      verdict = "passed over: " + std::string(forced->name) + " was asked for";
    } else {
      plan.backend = backend;
      plan.prepared = std::move(attempt.prepared);
      verdict = forced ? "chosen, as asked for" : "chosen";
      if (!plan.prepared->summary.empty()) verdict += ": " + plan.prepared->summary;
    }
    if (!plan.reason.empty()) plan.reason += '\n';
    plan.reason += (backend == plan.backend ? "> " : "  ") + std::string(backend->name) + ": " + verdict;
    if (backend == forced && plan.backend != forced) {
      throw RequestError(Status::kUnsupported, "backend",
                         "backend: got \"" + std::string(forced->name) +
                             "\", which cannot do this problem: " + attempt.clause +
                             "; leave it NULL to take the first that can");
    }
  }
  if (!plan.backend) {
    throw RequestError(
        Status::kUnsupported, "backend",
        "backend: got a problem that none of the backends can do; what rules each out:\n" + plan.reason);
  }
}

/// A tensor that came with data must lie where it says: validation reads some of those that say CPU.
void check_places(const std::string& name, const TensorDesc& t) {
  if (!t.present || t.data == nullptr || !has_elements(t)) return;
  const cuda::Memory memory = cuda::memory_of(t.data);
  const bool elsewhere = t.device == DeviceType::kCpu
                             ? memory.place == cuda::Place::kDevice
                             : memory.place == cuda::Place::kHost || memory.place == cuda::Place::kPinned ||
                                   (memory.place == cuda::Place::kDevice && memory.device != t.device_id);
  if (!elsewhere) return;
  throw_invalid(name, cuda::text_of(memory),
                "memory of " + device_text(t.device, t.device_id) + ", as the tensor says",
                "set its device, or copy it");
}
void check_places(const ProblemDescription& description) {
  if (!cuda::can_tell_memory()) return;
  for (size_t i = 0; i < kRoleCount; ++i) check_places(name_of(static_cast<Role>(i)), description.tensors[i]);
  for (const NamedTensor& named : description.named) {
    check_places("named." + named.name, named.tensor);
    check_places("named." + named.name + ".gradient", named.gradient);
  }
}

/// Takes the data pointers out of a problem: runs bring pointers of their own. Returns those that the host can read.
Buffers take_data(AttentionProblem& problem) {
  Buffers known;
  for (size_t i = 0; i < kPlaceCount; ++i) {
    if (!problem.at(i).present) continue;
    TensorDesc& t = problem.at(i);
    if (t.device == DeviceType::kCpu) known.data[i] = t.data;
    t.data = nullptr;
  }
  return known;
}

int threads_of(int asked) {
  if (asked < 0 || asked > kMaxThreads) {
    throw_invalid("num_threads", std::to_string(asked), "0 to " + std::to_string(kMaxThreads),
                  "use 0 for all processors that the process may use");
  }
  return asked > 0 ? asked : std::max(cpu::default_threads(), 1);
}

/// The options of a valid problem.
PrepareOptions prepare_options(const PlanOptions& options, const AttentionProblem& problem,
                               const Buffers& known) {
  return {.num_threads = threads_of(options.num_threads),
          .deterministic = options.deterministic,
          .flops = count_flops(problem, known),
          .splits = options.splits,
          .flops_of_sequence = count_flops(problem.of_one_sequence(), {}),
          .sm_margin = options.sm_margin,
          .is_part = options.is_part};
}

/// Refuses numbers that mean nothing, and lengths that would come from the batch where nothing may.
void check_options(const ProblemDescription& description, const PlanOptions& options) {
  if (options.sm_margin < 0)
    throw_invalid("sm_margin", std::to_string(options.sm_margin), "0 or more",
                  "give how many multiprocessors attention leaves to other kernels");
  const KeySplits& splits = options.splits;
  if (splits.most < 0) {
    throw_invalid("num_splits", std::to_string(splits.most), "0 or more",
                  "use 0 for as many parts as pay, and 1 for keys that are not split");
  }
  if (!splits.batch_invariant || description.pass == Pass::kBackward) return;
  const auto check = [&](Role starts, const char* name, int64_t longest) {
    if (!description.tensors[index_of(starts)].present || longest > 0) return;
    throw_invalid(name, std::to_string(longest),
                  "a length with batch_invariant, as " + std::string(name_of(starts)) + " is given",
                  "give the longest that any batch may have: what is read from this one depends on it");
  };
  check(Role::kCuSeqlensQ, "max_seqlen_q", description.max_seqlen_q);
  check(Role::kCuSeqlensK, "max_seqlen_k", description.max_seqlen_k);
}

}  // namespace

std::span<const Backend* const> backends() {
  static const std::vector<const Backend*> all = [] {
    std::vector<const Backend*> list;
    for (const auto& some : {cuda::backends(), cpu::backends()})
      list.insert(list.end(), some.begin(), some.end());
    return list;
  }();
  return all;
}

double count_flops(const AttentionProblem& p, const Buffers& buffers) {
  const auto* starts_q = buffers.get<const int32_t>(Role::kCuSeqlensQ);
  const auto* starts_k = buffers.get<const int32_t>(Role::kCuSeqlensK);
  const auto* used_q = buffers.get<const int32_t>(Role::kSeqUsedQ);
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  const auto* pads = buffers.get<const int32_t>(Role::kLeftPadK);
  const auto* starts_new = buffers.get<const int32_t>(Role::kCuSeqlensKNew);
  const auto pairs_of = [&](int64_t queries, int64_t keys) {
    return p.has(Role::kKeys) ? static_cast<double>(queries) * static_cast<double>(p.list_size)
                              : kept_pairs({queries, keys, p.window_left, p.window_right});
  };
  double pairs = 0;
  if (!starts_q && !starts_k && !used_q && !used_k && !pads) {
    pairs = static_cast<double>(p.batch) * pairs_of(p.seqlen_q, p.seqlen_k);
  } else {
    const auto length = [](const int32_t* used, const int32_t* starts, int64_t seqlen, int64_t b) {
      return used ? int64_t{used[b]} : starts ? int64_t{starts[b + 1]} - starts[b] : seqlen;
    };
    for (int64_t b = 0; b < p.batch; ++b) {
      int64_t keys = length(used_k, starts_k, p.seqlen_k, b) - (pads ? pads[b] : 0);
      if (p.appends() && used_k)
        keys += p.packed_new() ? (starts_new ? int64_t{starts_new[b + 1]} - starts_new[b] : 0) : p.new_rows;
      pairs += pairs_of(length(used_q, starts_q, p.seqlen_q, b), keys);
    }
  }
  const auto size = static_cast<double>(p.score_dim()), size_v = static_cast<double>(p.head_dim_v);
  const double per_pair = p.pass == Pass::kForward ? 2 * (size + size_v) : 6 * size + 4 * size_v;
  return pairs * static_cast<double>(p.heads_q) * per_pair;
}

Plan make_plan(const ProblemDescription& description, const PlanOptions& options) {
  check_options(description, options);
  check_places(description);
  Plan plan;
  plan.problem = validate(description);
  plan.check_contents = options.check_contents || environment("FOVEA_CHECK_CONTENTS") == "1";
  plan.problem.arriving_keys = options.arriving_keys;
  plan.problem.arriving_heads = options.arriving_heads;
  if (const TensorDesc& q = plan.problem[Role::kQ]; q.device == DeviceType::kCuda) {
    cuda::check_device("q", q.device_id);
  }
  const Buffers known = take_data(plan.problem);
  plan.flops = count_flops(plan.problem, known);
  const AttentionProblem problem = with_arguments(plan.problem);
  choose(plan, problem, options.backend, prepare_options(options, problem, known));
  return plan;
}

std::vector<cuda::AheadKernel> compile_ahead(const ProblemDescription& description,
                                             const PlanOptions& options, cuda::AheadRequest request) {
  check_options(description, options);
  check_places(description);
  AttentionProblem valid = validate(description);
  const Buffers known = take_data(valid);
  const AttentionProblem problem = with_arguments(valid);
  const PrepareOptions prepare = prepare_options(options, problem, known);
  request.backend = options.backend;
  request.deterministic = options.deterministic;
  request.sm_margin = options.sm_margin;
  request.flops = prepare.splits.batch_invariant ? prepare.flops_of_sequence : prepare.flops;
  request.splits = options.splits;
  return cuda::compile_ahead(once_appended(problem), request);
}

}  // namespace fovea::plan
