// The definitions of local_ranks.hpp.
#include "distributed/local_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <thread>

#if defined(FOVEA_TEST_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace fovea::distributed_tests {

using namespace verify;

namespace {

constexpr std::array kRowRoles = {Role::kQ,  Role::kK,    Role::kV,  Role::kO,  Role::kLse,
                                  Role::kDO, Role::kDLse, Role::kDQ, Role::kDK, Role::kDV};

/// Whether every rank has the whole tensor.
bool is_whole(Role role) {
  return std::find(kRowRoles.begin(), kRowRoles.end(), role) == kRowRoles.end();
}

bool is_statistic(Role role) {
  return role == Role::kLse || role == Role::kDLse;
}

/// Memory ends at an unreadable page on some ranks.
Placement placement_on(int rank) {
  return rank % 3 == 1 ? Placement::kPageEnd : Placement::kGuarded;
}

/// NaN is as itself.
bool same_values(const OwnedTensor& a, const OwnedTensor& b) {
  const std::vector<double> x = a.values(), y = b.values();
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](double left, double right) {
    return left == right || (std::isnan(left) && std::isnan(right));
  });
}

/// All elements. Integers of 64 bits are no doubles.
void copy(const OwnedTensor& from, OwnedTensor& to) {
  if (from.type() == Type::kI64) {
    std::memcpy(to.data(), from.data(), static_cast<size_t>(from.count()) * sizeof(int64_t));
  } else {
    to.assign(from.values());
  }
}

/// The axis of rows of a tensor.
size_t row_axis(Role role, bool packed) {
  if (is_statistic(role)) return packed ? 1 : 2;
  return packed ? 0 : 1;
}

/// Visits the indices of a shape in dense order.
template <class Visit>
void for_each_index(const Sizes& shape, Visit&& visit) {
  Sizes index(shape.size(), 0);
  for (int64_t n = product(shape); n > 0; --n) {
    visit(index);
    for (size_t axis = shape.size(); axis-- > 0;) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
}

}  // namespace

/// Copies of host memory on a device, guards and all, and a workspace behind guards. In programs without CUDA there is none.
class Mirrors {
 public:
#if defined(FOVEA_TEST_CUDA)
  Mirrors(int device, size_t workspace) : workspace_size_(workspace) {
    cudaSetDevice(device);
    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    cudaMalloc(&workspace_, workspace + kGuard);
    cudaMemset(workspace_, kPattern, workspace + kGuard);
  }
  Mirrors(const Mirrors&) = delete;
  Mirrors& operator=(const Mirrors&) = delete;
  ~Mirrors() {
    for (const Copy& copy : copies_) cudaFree(copy.device);
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }
  void* add(const OwnedTensor& tensor) {
    const Memory& memory = tensor.memory();
    void* device = nullptr;
    cudaMalloc(&device, memory.whole_size());
    cudaMemcpy(device, memory.whole(), memory.whole_size(), cudaMemcpyHostToDevice);
    copies_.push_back({memory.whole(), device, memory.whole_size()});
    return tensor.data() == nullptr ? nullptr : static_cast<char*>(device) + memory.begin();
  }
  /// Waits, and copies all back. "" when nothing behind the workspace was written.
  std::string finish() {
    if (const cudaError_t error = cudaStreamSynchronize(stream_); error != cudaSuccess)
      return cudaGetErrorString(error);
    for (const Copy& copy : copies_) cudaMemcpy(copy.host, copy.device, copy.size, cudaMemcpyDeviceToHost);
    std::vector<unsigned char> guard(kGuard);
    cudaMemcpy(guard.data(), static_cast<char*>(workspace_) + workspace_size_, kGuard,
               cudaMemcpyDeviceToHost);
    const bool intact =
        std::all_of(guard.begin(), guard.end(), [](unsigned char b) { return b == kPattern; });
    return intact ? "" : "workspace: written outside";
  }
  void* workspace() const {
    return workspace_;
  }
  void* stream() const {
    return stream_;
  }

 private:
  static constexpr size_t kGuard = 512;
  struct Copy {
    void *host, *device;
    size_t size;
  };
  size_t workspace_size_;
  std::vector<Copy> copies_;
  void* workspace_ = nullptr;
  cudaStream_t stream_ = nullptr;
#else
  Mirrors(int, size_t) {}
  void* add(const OwnedTensor&) {
    return nullptr;
  }
  std::string finish() {
    return "this program has no memory of GPUs";
  }
  void* workspace() const {
    return nullptr;
  }
  void* stream() const {
    return nullptr;
  }
#endif
};

/// One rank's tensors, with guards.
struct LocalRanks::Rank {
  int number = 0;
  fovea_device device{FOVEA_CPU, 0};
  std::map<Role, std::unique_ptr<OwnedTensor>> tensors;
  std::array<fovea_tensor, kRoles> views{};
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named{};
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_buffers buffers = FOVEA_BUFFERS_INIT;
  std::string reason, failure;
  int64_t messages = 0, bytes = 0;  ///< by the plan
};

LocalRanks::LocalRanks(const OwnedProblem& problem, Division division)
    : x_(problem), division_(std::move(division)) {
  if (!x_.spec.packed()) return;
  starts_q_ = starts_k_ = {0};
  for (const int32_t length : x_.spec.lengths_q) starts_q_.push_back(starts_q_.back() + length);
  for (const int32_t length : x_.spec.lengths_k) starts_k_.push_back(starts_k_.back() + length);
}

bool LocalRanks::has_rows_of_keys(Role role) const {
  return role == Role::kK || role == Role::kV || role == Role::kDK || role == Role::kDV;
}

std::vector<int64_t> LocalRanks::rows_of(int rank, bool keys) const {
  std::vector<int64_t> rows;
  if (!keys && division_.queries_everywhere) {
    const int64_t total = x_[Role::kQ].shape()[row_axis(Role::kQ, x_.spec.packed())];
    for (int64_t row = 0; row < total; ++row) rows.push_back(row);
    return rows;
  }
  for (const fovea_piece& piece : keys ? division_.keys : division_.queries) {
    if (piece.rank != rank) continue;
    for (int64_t row = piece.begin; row < piece.end; ++row) rows.push_back(row);
  }
  return rows;
}

void LocalRanks::deal(Rank& rank, Role role, bool empty) {
  const OwnedTensor& whole = x_[role];
  const size_t axis = row_axis(role, x_.spec.packed());
  const std::vector<int64_t> rows = rows_of(rank.number, has_rows_of_keys(role));
  Sizes shape = whole.shape();
  shape[axis] = static_cast<int64_t>(rows.size());
  // Gaps between rows on every second rank.
  Sizes strides = compact_strides(shape);
  if (rank.number % 2 == 1) {
    int64_t next = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      strides[i] = next;
      next = next * std::max<int64_t>(shape[i], 1) + division_.gap;
    }
  }
  auto& tensor = rank.tensors[role];
  tensor =
      std::make_unique<OwnedTensor>(whole.type(), shape, strides, placement_on(rank.number), division_.skew);
  tensor->poison();
  if (empty) return;
  for_each_index(shape, [&](const Sizes& index) {
    Sizes from = index;
    from[axis] = rows[static_cast<size_t>(index[axis])];
    tensor->set(index, whole.get(from));
  });
}

void LocalRanks::collect(const Rank& rank, Role role) {
  const size_t axis = row_axis(role, x_.spec.packed());
  const std::vector<int64_t> rows = rows_of(rank.number, has_rows_of_keys(role));
  const OwnedTensor& tensor = *rank.tensors.at(role);
  for_each_index(tensor.shape(), [&](const Sizes& index) {
    Sizes to = index;
    to[axis] = rows[static_cast<size_t>(index[axis])];
    x_[role].set(to, tensor.get(index));
  });
}

void LocalRanks::describe(Rank& rank, fovea_pass pass) {
  for (const Role role : kRowRoles) {
    if (!x_.takes_part(role, pass)) continue;
    deal(rank, role, OwnedProblem::is_output(role, pass));
  }
  for (size_t i = 0; i < kRoles; ++i) {
    const auto role = static_cast<Role>(i);
    const bool starts = role == Role::kCuSeqlensQ || role == Role::kCuSeqlensK;
    if (!x_.takes_part(role, pass) || !is_whole(role) || starts) continue;
    auto& tensor = rank.tensors[role];
    tensor = std::make_unique<OwnedTensor>(x_[role].type(), x_[role].shape(), x_[role].strides(),
                                           placement_on(rank.number));
    tensor->poison();
    if (!OwnedProblem::is_output(role, pass)) copy(x_[role], *tensor);
  }
  for (const auto& [role, tensor] : rank.tensors) {
    const auto place = static_cast<size_t>(role);
    rank.views[place] = tensor->view(rank.device.type == FOVEA_CPU);
    rank.views[place].device = rank.device;
    if (place < kFirstNamed) rank.problem.*kRoleInfos[place].tensor = &rank.views[place];
    set_pointer(rank.buffers, role, tensor->data());
  }
  for (size_t i = 0; i < x_.named().size(); ++i) {
    const bool has_gradient = rank.tensors.contains(gradient_role(i));
    rank.named[i] = {x_.named()[i]->name, &rank.views[kFirstNamed + i],
                     has_gradient ? &rank.views[kFirstGradient + i] : nullptr};
  }
  const ProblemSpec& s = x_.spec;
  rank.problem.named = x_.named().empty() ? nullptr : rank.named.data();
  rank.problem.num_named = static_cast<int64_t>(x_.named().size());
  rank.problem.score = s.score ? s.score->text : nullptr;
  rank.problem.sees = s.sees ? s.sees->text : nullptr;
  rank.problem.block_q = s.block_mask ? s.block_q : 0;
  rank.problem.block_k = s.block_mask ? s.block_k : 0;
  rank.problem.pass = pass;
  rank.problem.scale = s.scale;
  rank.problem.causal = s.causal ? 1 : 0;
  rank.problem.window_left = s.window_left;
  rank.problem.window_right = s.window_right;
  rank.problem.softcap = s.softcap;
  rank.problem.dropout = s.dropout;
  // A backward with rng_state does not look at these.
  const bool from_state = pass == FOVEA_BACKWARD && s.rng_state;
  rank.buffers.seed = from_state ? ~s.seed : s.seed;
  rank.buffers.offset = from_state ? ~s.offset : s.offset;
}

std::string LocalRanks::run_rank(Rank& rank, fovea_pass pass, const fovea_transport& transport) {
  describe(rank, pass);
  fovea_distributed_problem problem{};
  problem.struct_size = sizeof problem;
  problem.local = &rank.problem;
  problem.queries = division_.queries_everywhere ? nullptr : division_.queries.data();
  problem.num_queries = static_cast<int64_t>(division_.queries.size());
  problem.keys = division_.keys.data();
  problem.num_keys = static_cast<int64_t>(division_.keys.size());
  if (x_.spec.packed()) {
    problem.num_sequences = static_cast<int64_t>(x_.spec.lengths_q.size());
    problem.cu_seqlens_q = starts_q_.data();
    problem.cu_seqlens_k = starts_k_.data();
  }
  fovea_options attention = FOVEA_OPTIONS_INIT;
  // Calls are divided for the threads of their rank.
  attention.num_threads = rank.number == 2 && x_.spec.data_seed % 4 == 0 ? 2 : 1;
  attention.backend = division_.backend;
  attention.deterministic = division_.deterministic ? 1 : 0;
  fovea_distributed_options options{};
  options.struct_size = sizeof options;
  options.attention = &attention;
  options.heads_ranks = division_.heads_ranks;
  options.stages = division_.stages;
  options.memory_limit = division_.memory_limit;
  fovea_distributed_plan* made = nullptr;
  if (fovea_distributed_plan_create(&transport, &problem, &options, &made) != FOVEA_OK)
    return std::string("plan: ") + fovea_last_error();
  const std::unique_ptr<fovea_distributed_plan, void (*)(fovea_distributed_plan*)> plan(
      made, [](fovea_distributed_plan* p) { fovea_distributed_plan_destroy(p); });
  rank.reason = fovea_distributed_plan_reason(made);
  fovea_distributed_plan_sends(made, &rank.messages, &rank.bytes);
  const std::string failure = run_plan(rank, made);
  return failure.empty() ? check(rank, pass) : failure;
}

std::string LocalRanks::run_plan(Rank& rank, const fovea_distributed_plan* plan) {
  const size_t size = fovea_distributed_plan_workspace_size(plan);
  rank.buffers.workspace_size = size;
  if (rank.device.type == FOVEA_CUDA) {
    Mirrors mirrors(rank.device.id, size);
    for (const auto& [role, tensor] : rank.tensors) set_pointer(rank.buffers, role, mirrors.add(*tensor));
    rank.buffers.workspace = mirrors.workspace();
    rank.buffers.stream = mirrors.stream();
    if (fovea_distributed_run(plan, &rank.buffers) != FOVEA_OK)
      return std::string("run: ") + fovea_last_error();
    return mirrors.finish();
  }
  constexpr size_t kAlignment = 256;
  std::vector<unsigned char> memory(size + 2 * kAlignment, kPattern);
  auto* aligned = memory.data() + kAlignment - reinterpret_cast<uintptr_t>(memory.data()) % kAlignment;
  rank.buffers.workspace = aligned;
  if (fovea_distributed_run(plan, &rank.buffers) != FOVEA_OK)
    return std::string("run: ") + fovea_last_error();
  const auto* end = memory.data() + memory.size();
  const bool intact = std::all_of(aligned + size, const_cast<unsigned char*>(end),
                                  [](unsigned char b) { return b == kPattern; });
  return intact ? "" : "workspace: written outside";
}

/// "" when the outputs, and nothing beside them, were written.
std::string LocalRanks::check(const Rank& rank, fovea_pass pass) const {
  for (const auto& [role, tensor] : rank.tensors) {
    if (!OwnedProblem::is_output(role, pass)) continue;
    if (const std::string wrong = tensor->check_written(); !wrong.empty())
      return name_of(role) + (": " + wrong);
  }
  return "";
}

std::vector<Role> LocalRanks::outputs(fovea_pass pass) const {
  std::vector<Role> roles;
  for (size_t i = 0; i < kRoles; ++i) {
    const auto role = static_cast<Role>(i);
    if (x_.takes_part(role, pass) && OwnedProblem::is_output(role, pass)) roles.push_back(role);
  }
  return roles;
}

std::string LocalRanks::run_one(fovea_pass pass, const fovea_transport& transport) {
  Rank rank;
  rank.number = transport.rank;
  rank.failure = run_rank(rank, pass, transport);
  reason_ = rank.reason;
  for (const Role role : outputs(pass)) {
    x_[role].poison();
    x_[role].assign(std::vector<double>(static_cast<size_t>(x_[role].count())));
    const bool everywhere = is_whole(role) || division_.queries_everywhere;
    if (!rank.failure.empty() || (everywhere && rank.number > 0)) continue;
    if (is_whole(role)) {
      copy(*rank.tensors.at(role), x_[role]);
    } else {
      collect(rank, role);
    }
  }
  return rank.failure;
}

bool LocalRanks::by_copies(const Rank& rank) {
  return rank.reason.find("copied between the memories of ranks") != std::string::npos;
}

/// "" when the rank has sent what its plan says.
std::string LocalRanks::check_messages(const fovea_thread_group* group, const Rank& rank) const {
  // Making the plan takes a message to each other rank.
  int64_t messages = 0, bytes = 0;
  fovea_thread_sent(group, rank.number, &messages, &bytes);
  messages -= division_.ranks - 1;
  if (messages == rank.messages) return "";
  return "rank " + std::to_string(rank.number) + " sent " + std::to_string(messages) +
         " messages, the plan says " + std::to_string(rank.messages);
}

std::string LocalRanks::run(fovea_pass pass) {
  fovea_thread_options options{};
  options.struct_size = sizeof options;
  options.deadline_ms = 60'000;  // ranks wait for each other's plans, too, which NVRTC makes
  options.delay_us = division_.delay_us;
  options.seed = x_.spec.data_seed;
  options.peer_copies = division_.peer_copies;
  fovea_thread_group* group = nullptr;
  if (fovea_thread_group_create(division_.ranks,
                                division_.devices.empty() ? nullptr : division_.devices.data(), &options,
                                &group) != FOVEA_OK)
    return fovea_last_error();
  std::vector<Rank> ranks(static_cast<size_t>(division_.ranks));
  std::vector<std::thread> threads;
  for (int i = 0; i < division_.ranks; ++i) {
    Rank& rank = ranks[static_cast<size_t>(i)];
    rank.number = i;
    if (!division_.devices.empty()) rank.device = division_.devices[static_cast<size_t>(i)];
    threads.emplace_back([this, &rank, pass, group] {
      fovea_transport transport{};
      rank.failure = fovea_thread_transport(group, rank.number, &transport) == FOVEA_OK
                         ? run_rank(rank, pass, transport)
                         : fovea_last_error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string failure;
  for (int i = 0; i < division_.ranks && failure.empty(); ++i) {
    const Rank& rank = ranks[static_cast<size_t>(i)];
    if (!rank.failure.empty()) failure = "rank " + std::to_string(i) + ": " + rank.failure;
    if (failure.empty() && !by_copies(rank)) failure = check_messages(group, rank);
  }
  fovea_thread_group_destroy(group);
  if (!failure.empty()) return failure;
  reason_ = ranks[0].reason;
  for (const Role role : outputs(pass)) {
    x_[role].poison();
    for (const Rank& rank : ranks) {
      if (is_whole(role)) {
        if (rank.number > 0 && !same_values(*rank.tensors.at(role), *ranks[0].tensors.at(role)))
          return std::string(name_of(role)) + " is not the same on all ranks";
        copy(*rank.tensors.at(role), x_[role]);
      } else {
        collect(rank, role);
      }
    }
  }
  return "";
}

}  // namespace fovea::distributed_tests
