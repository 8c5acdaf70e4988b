// Fovea: exact attention, tile by tile. The C++20 face, header-only over the C ABI.
//
// Three lines attend over three buffers:
//
//   const std::initializer_list<int64_t> shape = {batch, seqlen, heads, size};
//   fovea::Tensor q(q_data, shape), k(k_data, shape), v(v_data, shape), o(o_data, shape);
//   fovea::attend(q, k, v, o, {.causal = true});
//
// For repeated calls make a Plan once and run it on pointers:
//
//   fovea::Plan plan({.q = q, .k = k, .v = v, .o = o, .causal = true}, {.num_threads = 8});
//   fovea::Workspace workspace(plan);
//   plan.run({.q = q_data, .k = k_data, .v = v_data, .o = o_data}, workspace);
//
// On a GPU the same, with tensors that say so and a stream that the work is put on:
//
//   fovea::Tensor q = fovea::Tensor(q_data, shape).on(fovea::cuda(0));
//   plan.run({.q = q_data, .k = k_data, .v = v_data, .o = o_data, .stream = stream}, workspace);
//
// Whatever fails throws fovea::Error, and then no output was written.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/tensor.hpp"

/// The inline namespace keeps these names apart from those inside the library at link time, and from other versions.
namespace fovea {
inline namespace v0 {

// ---- what is asked ----

enum class Pass : int32_t { forward = FOVEA_FORWARD, backward = FOVEA_BACKWARD };

/// A tensor that expressions read by its name, and where its gradient goes.
struct NamedTensor {
  std::string name{};
  Tensor tensor{}, gradient{};
};

/// A text of docs/expressions.md, with the tensors that it brings; fovea::score and fovea::sees (score.hpp) make both
/// from C++ operators.
struct Expression {
  std::string text;
  std::vector<NamedTensor> named;

  Expression() = default;
  Expression(std::string given) : text(std::move(given)) {}
  Expression(const char* given) : text(given) {}
  Expression(std::string given, std::vector<NamedTensor> tensors)
      : text(std::move(given)), named(std::move(tensors)) {}
  operator const std::string&() const { return text; }
  bool empty() const { return text.empty(); }
};

/// All that can be asked, by name; fovea_problem in fovea.h documents shapes, types and meaning of each field. Left
/// out means absent. As the options of attend(q, k, v, o, {...}) it names everything beside those four.
struct Problem {
  Pass pass = Pass::forward;
  Tensor q{}, k{}, v{}, o{}, lse{};
  Tensor d_o{}, dlse{}, dq{}, dk{}, dv{}, dbias{}, dsink{};
  Tensor bias{}, mask{}, block_mask{}, alibi{}, sink{};
  Tensor cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{}, rng_state{};
  Tensor keys{};                                    ///< a list of keys for each query
  Tensor page_table{}, cache_batch{}, leftpad_k{};  ///< key-value caches
  Tensor q_descale{}, k_descale{}, v_descale{};     ///< of queries, keys and values of 8 bits
  Tensor qv{};                                      ///< queries that meet the values
  Tensor k_new{}, v_new{}, cu_seqlens_k_new{};      ///< rows that are appended to k and v
  Tensor rotary_cos{}, rotary_sin{}, rotary_positions{};
  bool rotary_interleaved = false;  ///< elements 2j and 2j + 1 are a pair, else j and j + R/2

  double scale = 0;  ///< 0: 1/sqrt(head size), with qv of the sum of both head sizes
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  ///< -1: unlimited
  double softcap = 0;                           ///< 0: none
  double dropout = 0;
  int64_t block_q = 0, block_k = 0;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  Expression score{}, sees{};  ///< "": none
  std::vector<NamedTensor> named{};
  /// `named`, then those that score and sees bring, a name once: the order of Buffers::named.
  std::vector<NamedTensor> all_named() const {
    std::vector<NamedTensor> all = named;
    for (const auto* more : {&score.named, &sees.named}) {
      for (const NamedTensor& tensor : *more) {
        const auto same = [&](const NamedTensor& other) { return other.name == tensor.name; };
        if (std::none_of(all.begin(), all.end(), same)) all.push_back(tensor);
      }
    }
    return all;
  }
  /// Of dropout; read by attend and attend_backward (a Plan takes them per run).
  uint64_t seed = 0, offset = 0;
};

/// How to do it.
struct Options {
  std::string backend{};  ///< "": the first that can
  int num_threads = 0;    ///< 0: all that the process may use
  bool deterministic = false;
  void* stream = nullptr;        ///< CUDA: the cudaStream_t of attend (a Plan takes it per run)
  int num_splits = 0;            ///< parts of the keys of a tile, at most; 0: as many as pay, 1: none
  bool batch_invariant = false;  ///< the bits of a sequence do not depend on the others of its batch
  int sm_margin = 0;             ///< CUDA: multiprocessors left to other kernels (fovea.h)
  bool check_contents = false;   ///< CUDA: runs wait for what lengths and tables hold, and check it (fovea.h)
};

namespace detail {

/// A Problem as the structs of the C ABI. Refers to the Problem, which has to live as long.
class CProblem {
 public:
  explicit CProblem(const Problem& p) {
    const bool backward = p.pass == Pass::backward;
    c_.pass = static_cast<int32_t>(p.pass);
#define FOVEA_SET_TENSOR(field, Name, forward, backward_access, meaning) \
  c_.field = tensor(#field, p.field, backward ? backward_access : forward);
    FOVEA_TENSORS(FOVEA_SET_TENSOR)
#undef FOVEA_SET_TENSOR
    if (p.k_new) {
      require_writable("k", p.k);
      require_writable("v", p.v);
    }
    c_.rotary_interleaved = p.rotary_interleaved;
    c_.scale = p.scale;
    c_.causal = p.causal;
    c_.window_left = p.window_left;
    c_.window_right = p.window_right;
    c_.softcap = p.softcap;
    c_.dropout = p.dropout;
    c_.block_q = p.block_q;
    c_.block_k = p.block_k;
    c_.max_seqlen_q = p.max_seqlen_q;
    c_.max_seqlen_k = p.max_seqlen_k;
    if (!p.score.empty()) c_.score = p.score.text.c_str();
    if (!p.sees.empty()) c_.sees = p.sees.text.c_str();
    set_named(p.all_named());
  }
  CProblem(const CProblem&) = delete;
  CProblem& operator=(const CProblem&) = delete;

  const fovea_problem* get() const {
    return &c_;
  }

 private:
  static void require_writable(const char* name, const Tensor& given) {
    if (!given.read_only()) return;
    throw Error(FOVEA_INVALID_ARGUMENT, name,
                std::string(name) + ": got a pointer to const, expected memory to write; it is an output");
  }
  const fovea_tensor* tensor(const char* name, const Tensor& given, fovea_access access) {
    if (!given) return nullptr;
    if (access == FOVEA_WRITE) require_writable(name, given);
    tensors_[used_] = given.c_tensor();
    return &tensors_[used_++];
  }

  void set_named(std::vector<NamedTensor> tensors) {
    all_named_ = std::move(tensors);
    if (all_named_.size() > FOVEA_MAX_NAMED_TENSORS) {
      throw Error(FOVEA_INVALID_ARGUMENT, "named",
                  "named: got " + std::to_string(all_named_.size()) + " tensors, expected at most " +
                      std::to_string(FOVEA_MAX_NAMED_TENSORS) +
                      "; put several into one, with an index that chooses");
    }
    for (size_t i = 0; i < all_named_.size(); ++i) {
      const NamedTensor& given = all_named_[i];
      const std::string argument = "named." + given.name;
      named_[i] = {given.name.c_str(), tensor(argument.c_str(), given.tensor, FOVEA_READ),
                   tensor((argument + ".gradient").c_str(), given.gradient, FOVEA_WRITE)};
    }
    c_.named = named_.data();
    c_.num_named = static_cast<int64_t>(all_named_.size());
  }

  fovea_problem c_ = FOVEA_PROBLEM_INIT;
  std::vector<NamedTensor> all_named_;
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named_{};
#define FOVEA_COUNT_TENSOR(field, Name, forward, backward, meaning) +1
  std::array<fovea_tensor, 2 * FOVEA_MAX_NAMED_TENSORS FOVEA_TENSORS(FOVEA_COUNT_TENSOR)> tensors_{};
#undef FOVEA_COUNT_TENSOR

  size_t used_ = 0;
};

inline fovea_options c_options(const Options& options) {
  fovea_options c = FOVEA_OPTIONS_INIT;
  c.backend = options.backend.empty() ? nullptr : options.backend.c_str();
  c.num_threads = options.num_threads;
  c.deterministic = options.deterministic;
  c.stream = options.stream;
  c.num_splits = options.num_splits;
  c.batch_invariant = options.batch_invariant;
  c.sm_margin = options.sm_margin;
  c.check_contents = options.check_contents;
  return c;
}

}  // namespace detail

// ---- blocks that are seen ----

enum class Seen : uint8_t { none = FOVEA_SEEN_NONE, all = FOVEA_SEEN_ALL, some = FOVEA_SEEN_SOME };

/// What causal, window and `sees` leave of each block of one query head of one sequence; see fovea_seen_blocks.
struct SeenBlocks {
  int64_t rows = 0, columns = 0;
  std::vector<Seen> seen;
  Seen at(int64_t row, int64_t column) const { return seen[static_cast<size_t>(row * columns + column)]; }
};
/// `rows` and `columns`: those of the longest sequence, in blocks.
inline SeenBlocks seen_blocks(const Problem& problem, int64_t batch, int64_t head, int64_t block_q,
                              int64_t block_k, int64_t rows, int64_t columns) {
  const detail::CProblem c(problem);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * columns));
  detail::check(fovea_seen_blocks(c.get(), batch, head, block_q, block_k, bytes.data(), bytes.size()));
  SeenBlocks found{rows, columns, {}};
  for (const uint8_t byte : bytes) found.seen.push_back(static_cast<Seen>(byte));
  return found;
}

// ---- kernels compiled ahead of time ----

/// The report of fovea_compile on one kernel.
struct CompiledKernel {
  std::string name, file;
  int registers = -1, spilled_bytes = -1;  ///< of a thread; -1: not known
  double seconds = 0;
  bool kept = false;  ///< it was in the folder before
};
/// Compiles what a plan would compile on a GPU of `chip` into `folder` (empty: the user's cache); see fovea_compile.
inline std::vector<CompiledKernel> compile(const Problem& problem, const std::string& chip,
                                           const std::string& folder = "", const Options& options = {},
                                           int num_sms = 0) {
  const detail::CProblem c(problem);
  const fovea_options how = detail::c_options(options);
  const char* report = "";
  detail::check(fovea_compile(c.get(), &how, chip.c_str(), num_sms, folder.empty() ? nullptr : folder.c_str(),
                              &report));
  std::vector<CompiledKernel> kernels;
  const std::string text = report;
  for (size_t at = 0; at < text.size();) {
    const auto field = [&](char end) {
      const size_t stop = std::min(text.find(end, at), text.size());
      std::string part = text.substr(at, stop - at);
      at = stop + 1;
      return part;
    };
    CompiledKernel kernel;
    kernel.name = field('\t');
    kernel.registers = std::stoi(field('\t'));
    kernel.spilled_bytes = std::stoi(field('\t'));
    kernel.seconds = std::stod(field('\t'));
    kernel.kept = field('\t') == "kept";
    kernel.file = field('\n');
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

// ---- plans ----

class Workspace;

/// The pointers of one run, by the names of the tensors they belong to; fovea_buffers in fovea.h documents them.
struct Buffers {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void *o = nullptr, *lse = nullptr;
  const void *d_o = nullptr, *dlse = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr, *dbias = nullptr, *dsink = nullptr;
  const void *bias = nullptr, *mask = nullptr, *block_mask = nullptr, *alibi = nullptr, *sink = nullptr;
  const void *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr, *seqused_q = nullptr, *seqused_k = nullptr;
  void* rng_state = nullptr;
  const void* keys = nullptr;
  const void *page_table = nullptr, *cache_batch = nullptr, *leftpad_k = nullptr;
  const void *q_descale = nullptr, *k_descale = nullptr, *v_descale = nullptr;
  const void* qv = nullptr;
  const void *k_new = nullptr, *v_new = nullptr, *cu_seqlens_k_new = nullptr;
  const void *rotary_cos = nullptr, *rotary_sin = nullptr, *rotary_positions = nullptr;
  /// In the order of Problem::all_named().
  std::array<const void*, FOVEA_MAX_NAMED_TENSORS> named{};
  std::array<void*, FOVEA_MAX_NAMED_TENSORS> named_gradients{};
  uint64_t seed = 0, offset = 0;
  void* stream = nullptr;  ///< CUDA: a cudaStream_t of the plan's device; null is the default stream
};

/// The pointers of a problem's tensors.
inline Buffers buffers_of(const Problem& problem) {
  Buffers buffers;
#define FOVEA_BUFFER(field, Name, forward, backward, meaning) buffers.field = problem.field.data();
  FOVEA_TENSORS(FOVEA_BUFFER)
#undef FOVEA_BUFFER
  const std::vector<NamedTensor> named = problem.all_named();
  for (size_t i = 0; i < named.size() && i < FOVEA_MAX_NAMED_TENSORS; ++i) {
    buffers.named[i] = named[i].tensor.data();
    buffers.named_gradients[i] = named[i].gradient.data();
  }
  buffers.seed = problem.seed;
  buffers.offset = problem.offset;
  return buffers;
}

/// A validated problem and the backend that will do it. Immutable: any number of threads may run one plan at
/// the same time, each with a workspace of its own.
class Plan {
 public:
  /// Validates `problem`; the data pointers of its tensors are not kept.
  explicit Plan(const Problem& problem, const Options& options = {}) {
    const detail::CProblem c(problem);
    const fovea_options c_options = detail::c_options(options);
    fovea_plan* plan = nullptr;
    detail::check(fovea_plan_create(c.get(), &c_options, &plan));
    plan_.reset(plan);
  }

  /// Bytes that each run needs.
  size_t workspace_size() const noexcept { return fovea_plan_workspace_size(plan_.get()); }
  /// Where tensors and workspace lie.
  fovea_device device() const noexcept { return fovea_plan_device(plan_.get()); }
  std::string_view backend() const noexcept { return fovea_plan_backend(plan_.get()); }
  /// One line a backend: which was chosen, and what ruled out each other one.
  std::string_view reason() const noexcept { return fovea_plan_reason(plan_.get()); }
  /// The expressions as the library reads them, and derivatives of the score; see fovea_plan_expressions.
  std::string expressions() const { return fovea_plan_expressions(plan_.get()); }
  /// Floating-point operations of one run.
  double flops() const noexcept { return fovea_plan_flops(plan_.get()); }

  void run(const Buffers& buffers, Workspace& workspace) const;
  /// Only for plans whose workspace_size() is 0.
  void run(const Buffers& buffers) const { run(buffers, nullptr, 0); }
  /// With workspace memory of the caller's, aligned to FOVEA_WORKSPACE_ALIGNMENT.
  void run(const Buffers& b, void* workspace, size_t workspace_size) const {
    fovea_buffers c = FOVEA_BUFFERS_INIT;
#define FOVEA_SET_POINTER(field, Name, forward, backward, meaning) c.field = b.field;
    FOVEA_TENSORS(FOVEA_SET_POINTER)
#undef FOVEA_SET_POINTER
    for (size_t i = 0; i < FOVEA_MAX_NAMED_TENSORS; ++i) {
      c.named[i] = b.named[i];
      c.named_gradients[i] = b.named_gradients[i];
    }
    c.seed = b.seed;
    c.offset = b.offset;
    c.workspace = workspace;
    c.workspace_size = workspace_size;
    c.stream = b.stream;
    detail::check(fovea_run(plan_.get(), &c));
  }

  const fovea_plan* c_plan() const noexcept {
    return plan_.get();
  }

 private:
  struct Destroy {
    void operator()(fovea_plan* plan) const noexcept { fovea_plan_destroy(plan); }
  };
  std::unique_ptr<fovea_plan, Destroy> plan_;
};

/// Scratch memory of one run at a time. On a GPU, making and destroying it synchronises.
class Workspace {
 public:
  explicit Workspace(size_t size, fovea_device device = cpu()) : memory_(nullptr, Free{device}), size_(size) {
    void* memory = nullptr;
    detail::check(fovea_workspace_create(device, size, &memory));
    memory_.reset(memory);
  }
  explicit Workspace(const Plan& plan) : Workspace(plan.workspace_size(), plan.device()) {}

  void* data() noexcept { return memory_.get(); }
  size_t size() const noexcept { return size_; }

 private:
  struct Free {
    fovea_device device;
    void operator()(void* p) const noexcept { fovea_workspace_destroy(device, p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_;
};

inline void Plan::run(const Buffers& buffers, Workspace& workspace) const {
  run(buffers, workspace.data(), workspace.size());
}

// ---- one call ----

/// Plan, workspace and run in one call, on the data of the tensors in `problem`, in the direction of problem.pass.
inline void attend(const Problem& problem, const Options& options = {}) {
  const detail::CProblem c(problem);
  const fovea_options c_options = detail::c_options(options);
  detail::check(fovea_attend(c.get(), &c_options, problem.seed, problem.offset));
}

/// o = softmax(scale q k^T + terms) v. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), o (B, Sq, Hq,
/// Dv); packed sequences without B. `terms` names the rest: {.lse = lse, .causal = true}.
inline void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, Problem terms = {},
                   const Options& options = {}) {
  terms.pass = Pass::forward;
  terms.q = q;
  terms.k = k;
  terms.v = v;
  terms.o = o;
  attend(terms, options);
}

/// The gradients: fills dq, dk, dv (and dbias, dsink where given) from q, k, v, o, lse, d_o and the terms of the
/// forward.
inline void attend_backward(Problem problem, const Options& options = {}) {
  problem.pass = Pass::backward;
  attend(problem, options);
}

/// One partial result over some of the keys.
struct Part {
  Tensor o;    ///< (B, S, H, Dv)
  Tensor lse;  ///< (B, H, S) float32
};

/// Merges partial results over disjoint sets of keys into `into`, which may be one of them; into.lse is optional.
/// `stream` (cudaStream_t): of GPUs.
inline void merge(std::span<const Part> parts, const Part& into, void* stream = nullptr) {
  std::vector<fovea_tensor> tensors;
  std::vector<const fovea_tensor*> o_parts, lse_parts;
  tensors.reserve(2 * parts.size());
  for (const Part& part : parts) {
    tensors.push_back(part.o.c_tensor());
    o_parts.push_back(&tensors.back());
    tensors.push_back(part.lse.c_tensor());
    lse_parts.push_back(&tensors.back());
  }
  const fovea_tensor o = into.o.c_tensor(), lse = into.lse.c_tensor();
  if (into.o.read_only() || into.lse.read_only()) {
    throw Error(FOVEA_INVALID_ARGUMENT, "into",
                "into: got a pointer to const, expected memory to write; it is an output");
  }
  detail::check(fovea_merge(static_cast<int32_t>(parts.size()), o_parts.data(), lse_parts.data(), &o,
                            into.lse ? &lse : nullptr, stream));
}
inline void merge(std::initializer_list<Part> parts, const Part& into, void* stream = nullptr) {
  merge(std::span(parts.begin(), parts.size()), into, stream);
}

// ---- the library and the machine ----

inline std::string_view version() noexcept {
  return fovea_version();
}
/// Processor, instruction sets and threads, one line.
inline std::string_view machine() noexcept {
  return fovea_machine();
}
inline int default_threads() noexcept {
  return fovea_default_threads();
}

/// Versions of the CUDA runtime and the driver, or what is missing, one line.
inline std::string_view cuda_versions() noexcept {
  return fovea_cuda();
}
/// The GPUs that CUDA gives this process, one line each.
inline std::vector<std::string> cuda_devices() {
  std::vector<std::string> list;
  for (int32_t i = 0; i < fovea_cuda_device_count(); ++i) list.emplace_back(fovea_cuda_device(i));
  return list;
}

struct BackendInfo {
  std::string name;
  std::string unavailable_because;  ///< "" when this machine has it
  bool on_gpu = false;              ///< its tensors lie in memory of a GPU
};

/// In order of preference.
inline std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> list;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    list.push_back({fovea_backend_name(i), fovea_backend_unavailable_because(i),
                    fovea_backend_device_type(i) == FOVEA_CUDA});
  }
  return list;
}

}  // namespace v0
}  // namespace fovea

#include "fovea/cascade.hpp"
#include "fovea/score.hpp"
