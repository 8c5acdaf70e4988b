// The definitions of choose.hpp.
#include "distributed/choose.hpp"

#include <algorithm>
#include <cstdio>

#include "core/status.hpp"
#include "distributed/program.hpp"
#include "distributed/simulate.hpp"

namespace fovea::distributed {
namespace {

/// Rows of two holdings that are the same, by host: within the rank's own, and from others.
class Volume {
 public:
  Volume(const LocalProblem& p, const Machine& machine, int rank) : p_(p), machine_(machine), rank_(rank) {}

  /// Seconds of the messages that bring `rows` to the rank, with `bytes` a row, each of which packing or unpacking reads or writes
  /// `touches` times.
  double arrives(const Rows& rows, const Placement& from, double bytes, double touches) {
    double near = 0, far = 0;
    for (int peer = 0; peer < p_.shape.ranks; ++peer) {
      if (peer == rank_) continue;
      const auto common_rows =
          static_cast<double>(count(common(rows, rows_of(from.of_rank[static_cast<size_t>(peer)]))));
      (same_host(peer) ? near : far) += common_rows * bytes;
    }
    total_ += near + far;
    if (near + far == 0) return 0;
    return machine_.step + near / machine_.link + far / machine_.host_link +
           touches * (near + far) / machine_.memory;
  }
  double total() const { return total_; }

 private:
  bool same_host(int peer) const {
    return machine_.ranks_per_host == 0 || peer / machine_.ranks_per_host == rank_ / machine_.ranks_per_host;
  }
  const LocalProblem& p_;
  const Machine& machine_;
  int rank_;
  double total_ = 0;
};

/// The times of one rank: stages arrive and leave while others are computed, as Builder::pipeline has it.
class RankModel {
 public:
  RankModel(const LocalProblem& p, const Schedule& schedule, const Machine& machine, int rank)
      : p_(p),
        schedule_(schedule),
        machine_(machine),
        rank_(rank),
        volume_(p, machine, rank),
        one_call_(keys_arrive_in_calls(p, schedule)) {
    for (int i = 0; i < schedule.stages(); ++i) {
      for (const Call& call : calls_.emplace_back(schedule.calls(rank, i)))
        queries_of_calls_ += static_cast<double>(call.q_rows);
    }
  }

  Estimate times() {
    const int stages = schedule_.stages();
    Estimate e;
    double leaving = 0;
    e.messages = arriving(0);
    for (int i = 0; i < stages; ++i) {
      const double computing = computing_of(i);
      const double beside = (i + 1 < stages ? arriving(i + 1) : 0) + leaving;
      e.computing += computing;
      e.messages += machine_.overlaps ? std::max(0.0, beside - computing) : beside;
      leaving = leaving_of(i);
    }
    e.messages += leaving + sums_of_terms();
    if (p_.shape.queries_everywhere)
      e.messages +=
          machine_.step + rows() * (p_.shape.ranks - 1) * result_bytes(sizeof(float), 0) / machine_.link;
    e.bytes = volume_.total();
    e.moving = moving_;
    e.seconds = e.computing + e.messages + e.moving;
    return e;
  }

 private:
  bool grouped() const { return schedule_.method().heads_ranks > 1; }
  bool queries_travel() const { return schedule_.queries_travel(); }
  /// Some of the heads of a row are packed by their owner, or unpacked by it; all of them lie side by side.
  double touches() const { return grouped() && !p_.by_copies ? 2 : 0; }
  bool last(int i) const { return schedule_.stages_are_heads() || i + 1 == schedule_.stages(); }
  double batch() const { return static_cast<double>(p_.shape.batch); }
  double bytes() const { return p_[kQ].type.bits / 8.0; }
  double d() const { return static_cast<double>(p_.shape.head_dim); }
  double d_v() const { return static_cast<double>(p_.shape.head_dim_v); }
  double rows() const { return static_cast<double>(count(schedule_.queries(rank_))); }
  double heads_q(int i) const { return static_cast<double>(schedule_.heads_q(rank_, i).size()); }
  double heads_kv(int i) const { return static_cast<double>(schedule_.heads_kv(rank_, i).size()); }
  /// Of a row of the heads of a stage: o, or dq.
  double result_bytes(double element, int i) const {
    return (p_.backward() ? d() : d_v()) * batch() * heads_q(i) * element;
  }

  double arriving(int i) {
    double seconds = 0;
    if (!schedule_.in_place(rank_, i))
      seconds += volume_.arrives(rows_of(schedule_.keys(rank_, i)), p_.shape.keys,
                                 (d() + d_v()) * batch() * heads_kv(i) * bytes(), touches());
    if (queries_travel() && (i == 0 || schedule_.stages_are_heads())) {
      const double row = (p_.backward() ? d() + 2 * d_v() : d()) * batch() * heads_q(i) * bytes();
      seconds += volume_.arrives(rows_of(schedule_.queries(rank_)), p_.shape.queries, row, touches());
    }
    return seconds;
  }
  double leaving_of(int i) {
    double seconds = 0;
    if (queries_travel() && last(i))
      seconds += volume_.arrives(rows_of(schedule_.queries(rank_)), p_.shape.queries,
                                 result_bytes(bytes(), i), touches());
    if (p_.backward()) {
      const double element = schedule_.groups() == 1 ? bytes() : sizeof(float);
      const double sums = schedule_.groups() == 1 ? touches() : 3;  // the message, and the sum twice
      seconds += volume_.arrives(rows_of(schedule_.keys(rank_, i)), p_.shape.keys,
                                 (d() + d_v()) * batch() * heads_kv(i) * element, sums);
    }
    return seconds;
  }
  /// Gradients of tensors of terms: each rank gets its share of all, then the sums of the others.
  double sums_of_terms() {
    int64_t elements = 0;
    for (size_t i = kDBias; i < kPlaces; ++i) {
      if (i == kDBias || i >= kNamedGradient) elements += p_.tensors[i].elements;
    }
    const int64_t ranks = p_.shape.ranks;
    if (elements == 0 || ranks == 1) return 0;
    Placement whole{elements, {}}, shares{elements, {}};
    for (int64_t rank = 0; rank < ranks; ++rank) {
      whole.of_rank.push_back({{{0, elements}, 0}});
      shares.of_rank.push_back({{{elements * rank / ranks, elements * (rank + 1) / ranks}, 0}});
    }
    return volume_.arrives(rows_of(shares.of_rank[static_cast<size_t>(rank_)]), whole, sizeof(float), 3) +
           volume_.arrives({{0, elements}}, shares, sizeof(float), 0);
  }
  double computing_of(int i) {
    const std::vector<Call>& calls = calls_[static_cast<size_t>(i)];
    double seconds = 0, copies = 0, queries = 0, keys = 0;
    for (const Call& call : calls) {
      seconds += seconds_of(machine_, flops_of(p_, call, schedule_.heads_q(rank_, i).size()),
                            longest_tile_of(p_, call));
      copies += copies_of(p_, call, schedule_.heads_q(rank_, i).size());
      queries += static_cast<double>(call.q_rows);
      keys += static_cast<double>(call.k_rows);
    }
    if (one_call_) return i > 0 && !calls.empty() ? seconds - machine_.call : seconds;
    count_sums(i, queries, keys);
    return seconds + copies / machine_.memory;
  }
  /// What a call adds to a sum of several is float32: parts of o are written and read, parts of gradients added to a sum as well, which is
  /// read and written. Where each query is in one call, as in packed sequences that no cut divides, nothing is added. Sums over groups are
  /// cleared, added to and converted.
  void count_sums(int i, double queries, double keys) {
    constexpr double kTouches = 4;
    const double touches_of_results = p_.backward() ? kTouches : 2;
    const double key_bytes = (d() + d_v()) * batch() * heads_kv(i) * sizeof(float);
    const double held = static_cast<double>(count(schedule_.keys(rank_, i)));
    double bytes = 0;
    if (!schedule_.stages_are_heads() && queries_of_calls_ > rows())
      bytes += touches_of_results * queries * result_bytes(sizeof(float), i);
    if (p_.backward() && keys > held) bytes += kTouches * keys * key_bytes;
    if (p_.backward() && schedule_.groups() > 1) bytes += kTouches * held * key_bytes;
    moving_ += bytes / machine_.memory;
  }

  const LocalProblem& p_;
  const Schedule& schedule_;
  const Machine& machine_;
  int rank_;
  Volume volume_;
  bool one_call_;                         ///< has the keys of both stages
  std::vector<std::vector<Call>> calls_;  ///< by stage
  double queries_of_calls_ = 0, moving_ = 0;
};

/// The most stages of a method: a rank's heads, where all ranks share them, else groups.
int most_stages(const Shape& shape, int heads_ranks) {
  if (heads_ranks < shape.ranks || shape.ranks == 1) return shape.ranks / heads_ranks;
  return static_cast<int>(std::max<int64_t>(1, (shape.heads_kv + shape.ranks - 1) / shape.ranks));
}

std::vector<Method> methods(const Shape& shape, const fovea_distributed_options& options) {
  if (shape.queries_everywhere) return {{1, 1}};
  std::vector<Method> all;
  for (int heads_ranks = 1; heads_ranks <= shape.ranks; ++heads_ranks) {
    if (shape.ranks % heads_ranks != 0) continue;
    if (options.heads_ranks != 0 && heads_ranks != options.heads_ranks) continue;
    const int most = most_stages(shape, heads_ranks);
    for (int stages = 1; stages <= most; ++stages) {
      if (options.stages != 0 && stages != options.stages) continue;
      // All at once, its own first, one at a time; of heads powers of two.
      const bool of_heads = heads_ranks == shape.ranks;
      const bool usual = of_heads ? (stages & (stages - 1)) == 0 : stages <= 2 || stages == most;
      if (usual || options.stages != 0) all.push_back({heads_ranks, stages});
    }
  }
  return all;
}

void check_options(const Shape& shape, const fovea_distributed_options& o) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  if (o.heads_ranks < 0 || (o.heads_ranks > 0 && shape.ranks % o.heads_ranks != 0))
    throw_invalid("heads_ranks", number(o.heads_ranks),
                  "a divisor of " + number(shape.ranks) + ", the number of ranks", "0 chooses");
  int most = 1;
  for (int heads_ranks = 1; heads_ranks <= shape.ranks; ++heads_ranks) {
    if (shape.ranks % heads_ranks == 0 && (o.heads_ranks == 0 || o.heads_ranks == heads_ranks))
      most = std::max(most, most_stages(shape, heads_ranks));
  }
  if (o.stages < 0 || o.stages > most)
    throw_invalid(
        "stages", number(o.stages),
        "at most " + number(most) + ": the groups of ranks, or the key heads of a rank where all share heads",
        "0 chooses");
  if (o.ranks_per_host < 0 || o.memory_limit < 0)
    throw_invalid(o.memory_limit < 0 ? "memory_limit" : "ranks_per_host", "a negative number", "0 or more",
                  "0 says none");
  for (const auto& [name, value] : {std::pair{"flops_per_second", o.flops_per_second},
                                    {"link_bytes_per_second", o.link_bytes_per_second},
                                    {"host_link_bytes_per_second", o.host_link_bytes_per_second}}) {
    if (!(value >= 0 && value <= 1e30))
      throw_invalid(name, std::to_string(value), "0 or more", "0 takes that of the usual device");
  }
}

}  // namespace

Machine machine_of(const LocalProblem& problem, const fovea_distributed_options& options) {
  // An H100, and two of one host by NCCL; a core with AVX-512, and AMX for bfloat16 (docs/distributed.md). Attention takes all SMs of
  // a GPU, and kernels that pack and unpack wait for them; ranks on CPUs pack and unpack themselves.
  const Machine gpu = {.flops = problem.backward() ? 600e12 : 720e12,
                       .link = 250e9,
                       .host_link = 40e9,
                       .memory = 2.5e12,
                       .step = 30e-6,
                       .call = 60e-6,
                       .overlaps = false};
  // Two of one host whose copy engines copy: attention keeps all SMs.
  const Machine copying = {.flops = gpu.flops,
                           .tile_flops = 7.3e12,
                           .link = 340e9,
                           .host_link = gpu.host_link,
                           .memory = 2.1e12,
                           .step = 13e-6,
                           .call = problem.backward() ? 50e-6 : 25e-6,
                           .overlaps = true};
  const Machine cpu = {.flops = problem[kQ].type.code == FOVEA_CODE_BFLOAT ? 400e9 : 150e9,
                       .link = 8e9,
                       .host_link = 1e9,
                       .memory = 10e9,
                       .step = 20e-6,
                       .call = 20e-6,
                       .overlaps = false};
  Machine machine = problem.device.type != FOVEA_CUDA ? cpu : problem.by_copies ? copying : gpu;
  if (options.flops_per_second > 0) machine.flops = options.flops_per_second;
  if (options.link_bytes_per_second > 0) machine.link = options.link_bytes_per_second;
  if (options.host_link_bytes_per_second > 0) machine.host_link = options.host_link_bytes_per_second;
  machine.ranks_per_host = options.ranks_per_host;
  return machine;
}

Estimate estimate(const LocalProblem& problem, Method method, const Machine& machine) {
  const Schedule schedule(problem.shape, method);
  Estimate slowest;
  double bytes = 0;
  for (int rank = 0; rank < problem.shape.ranks; ++rank) {
    const Estimate e = RankModel(problem, schedule, machine, rank).times();
    bytes = std::max(bytes, e.bytes);
    if (e.seconds >= slowest.seconds) slowest = e;
  }
  slowest.method = method;
  slowest.bytes = bytes;
  return slowest;
}

namespace {

double flops_of_pair(const LocalProblem& p) {
  const auto d = static_cast<double>(p.shape.head_dim), d_v = static_cast<double>(p.shape.head_dim_v);
  return p.backward() ? 6 * d + 4 * d_v : 2 * (d + d_v);
}

}  // namespace

double longest_tile_of(const LocalProblem& p, const Call& call) {
  constexpr int64_t kTile = 128;  // rows of queries forward, of keys backward
  const auto [left, right] = p.shape.window;
  const int64_t longest = p.backward() ? call.longest_q : call.longest_k;
  const int64_t seen = left < 0 || right < 0 ? longest : std::min(longest, left + right + kTile);
  return static_cast<double>(kTile * seen) * flops_of_pair(p);
}

double flops_of(const LocalProblem& p, const Call& call, int64_t heads) {
  const double per_pair = flops_of_pair(p);
  const int64_t batch = call.starts_q.empty() ? p.shape.batch : 1;
  return pairs_of(call) * per_pair * static_cast<double>(heads * batch);
}

double copies_of(const LocalProblem& p, const Call& call, int64_t heads) {
  if (p.device.type != FOVEA_CPU) return 0;
  const bool packed = !call.starts_q.empty();
  const int64_t batch = packed ? 1 : p.shape.batch, heads_kv = heads * p.shape.heads_kv / p.shape.heads_q;
  const int64_t key = heads_kv * (p.shape.head_dim + p.shape.head_dim_v) * bytes_of(p[kQ].type);
  const auto staged = static_cast<double>(2 * batch * call.k_rows * key);
  if (!p.backward()) return staged;
  // dq in float32 is cleared, added to, and converted.
  constexpr int64_t kTouches = 3;
  const int64_t row = heads * p.shape.head_dim * int64_t{sizeof(float)};
  return staged + static_cast<double>(kTouches * batch * call.q_rows * row);
}

bool keys_arrive_in_calls(const LocalProblem& p, const Schedule& schedule) {
  constexpr int64_t kVector = 8;         // elements of 16 bits, which kernels copy at least
  constexpr int64_t kMostColumns = 128;  // of those that wait
  const Shape& s = p.shape;
  const bool columns = s.head_dim % kVector == 0 && s.head_dim_v % kVector == 0 &&
                       std::max(s.head_dim, s.head_dim_v) <= kMostColumns;
  return p.by_copies && p.device.type == FOVEA_CUDA && !p.backward() && s.joins && p.softcap == 0 &&
         s.sequences.size() == 1 && s.batch > 0 && s.ranks == 2 && schedule.method() == Method{1, 2} &&
         !schedule.queries_travel() && schedule.in_place(0, 0) && p[kQ].type.bits == 16 && columns;
}

double part_bytes_of(const LocalProblem& p, const Call& call, int64_t heads) {
  if (p.device.type == FOVEA_CPU || p.backward()) return 0;
  return static_cast<double>(p.shape.batch * call.q_rows * heads * p.shape.head_dim_v *
                             int64_t{sizeof(float)});
}

namespace {

constexpr int kMostSimulated = 64;  ///< messages of all ranks to all others, for each method

/// What the programs of all ranks say, which are made without plans and kept for the clock alone.
void look_at_programs(const LocalProblem& problem, const Machine& machine, bool with_clock, Estimate& e) {
  const Schedule schedule(problem.shape, e.method);
  ProgramOptions sizes;
  sizes.only_sizes = true;
  std::vector<Program> programs;
  for (int rank = 0; rank < problem.shape.ranks; ++rank) {
    Program program = make_program(problem, schedule, rank, sizes);
    // The limit is to mean the same on all ranks, so the largest workspace counts.
    e.workspace = std::max(e.workspace, program.workspace);
    if (with_clock) programs.push_back(std::move(program));
  }
  if (with_clock) e.simulated = simulate(programs, machine);
}

/// The fastest first; those above the limit last, the smallest of them first.
void sort(std::vector<Estimate>& all, int64_t memory_limit) {
  const auto too_large = [&](const Estimate& e) { return memory_limit > 0 && e.workspace > memory_limit; };
  std::stable_sort(all.begin(), all.end(), [&](const Estimate& a, const Estimate& b) {
    if (too_large(a) != too_large(b)) return too_large(b);
    if (too_large(a)) return a.workspace < b.workspace;
    return a.expected() < b.expected();
  });
}

std::vector<Estimate> weigh(const LocalProblem& problem, const fovea_distributed_options& options,
                            bool with_programs, bool with_clock) {
  check_options(problem.shape, options);
  const Machine machine = machine_of(problem, options);
  std::vector<Estimate> all;
  for (const Method& method : methods(problem.shape, options)) {
    Estimate& e = all.emplace_back(estimate(problem, method, machine));
    if (with_programs) look_at_programs(problem, machine, with_clock, e);
  }
  sort(all, options.memory_limit);
  return all;
}

}  // namespace

std::vector<Estimate> weigh(const LocalProblem& problem, const fovea_distributed_options& options) {
  return weigh(problem, options, true, problem.shape.ranks <= kMostSimulated);
}

std::vector<Estimate> weigh_on_paper(const LocalProblem& given, const fovea_distributed_options& options) {
  LocalProblem problem = given;
  const bool few = problem.shape.ranks <= kMostSimulated;
  const bool one_host = options.ranks_per_host == 0 || problem.shape.ranks <= options.ranks_per_host;
  problem.by_copies = problem.device.type == FOVEA_CUDA && problem.shape.ranks > 1 && few && one_host;
  return weigh(problem, options, few, few);
}

std::string describe(const Estimate& e, const Shape& shape) {
  const int groups = shape.ranks / e.method.heads_ranks;
  std::string name;
  if (shape.queries_everywhere) {
    name = "parts of keys, merged on all ranks";
  } else if (e.method.heads_ranks == shape.ranks && shape.ranks > 1) {
    name = "all-to-all over heads";
    if (e.method.stages > 1) name += " in " + std::to_string(e.method.stages) + " parts";
  } else {
    if (e.method.heads_ranks > 1)
      name = "all-to-all over heads in groups of " + std::to_string(e.method.heads_ranks) + ", ";
    name += e.method.stages == 1        ? "all keys gathered"
            : e.method.stages == groups ? "keys of one group at a time"
                                        : "keys in " + std::to_string(e.method.stages) + " stages";
  }
  char numbers[200];
  std::snprintf(numbers, sizeof numbers,
                ": %.3g ms (computing %.3g, messages %.3g, moving %.3g), %.3g MB sent, workspace %.3g MB",
                e.seconds * 1e3, e.computing * 1e3, e.messages * 1e3, e.moving * 1e3, e.bytes / 1e6,
                static_cast<double>(e.workspace) / 1e6);
  name += numbers;
  if (e.simulated > 0) {
    std::snprintf(numbers, sizeof numbers, "; simulated %.3g ms", e.simulated * 1e3);
    name += numbers;
  }
  return name;
}

}  // namespace fovea::distributed
