// The definitions of choose.hpp.
#include "distributed/choose.hpp"

#include <algorithm>
#include <cstdio>

#include "core/status.hpp"
#include "distributed/program.hpp"

namespace fovea::distributed {
namespace {

/// Rows of two holdings that are the same, by host: within the rank's own, and from others.
class Volume {
 public:
  Volume(const LocalProblem& p, const Machine& machine, int rank) : p_(p), machine_(machine), rank_(rank) {}

  /// Seconds of the messages that bring `rows` to the rank, with `bytes` a row, and those bytes.
  double arrives(const Rows& rows, const Placement& from, double bytes) {
    double near = 0, far = 0;
    for (int peer = 0; peer < p_.shape.ranks; ++peer) {
      if (peer == rank_) continue;
      const auto common_rows =
          static_cast<double>(count(common(rows, rows_of(from.of_rank[static_cast<size_t>(peer)]))));
      (same_host(peer) ? near : far) += common_rows * bytes;
    }
    total_ += near + far;
    if (near + far == 0) return 0;
    return machine_.step + near / machine_.link + far / machine_.host_link;
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

/// The times of one rank.
Estimate of_rank(const LocalProblem& p, const Schedule& schedule, const Machine& machine, int rank) {
  const Shape& shape = p.shape;
  const bool grouped = schedule.method().heads_ranks > 1;
  const auto batch = static_cast<double>(shape.batch), bytes = p[kQ].type.bits / 8.0;
  const auto heads_q = static_cast<double>(schedule.heads_q(rank).size());
  const auto heads_kv = static_cast<double>(schedule.heads_kv(rank).size());
  const auto d = static_cast<double>(shape.head_dim), d_v = static_cast<double>(shape.head_dim_v);
  const double per_pair = p.backward() ? 6 * d + 4 * d_v : 2 * (d + d_v);
  const auto rows = static_cast<double>(count(schedule.queries(rank)));
  Estimate e;
  Volume volume(p, machine, rank);
  const double queries_back = p.backward() ? d : d_v;
  if (grouped) {
    const Rows all = rows_of(schedule.queries(rank));
    const double in = (p.backward() ? d + 2 * d_v : d) * batch * heads_q * bytes;
    e.messages += volume.arrives(all, shape.queries, in) +
                  volume.arrives(all, shape.queries, queries_back * batch * heads_q * bytes);
  }
  double before = 0;  // seconds of computing that messages of the stage may hide behind
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const std::vector<Call> calls = schedule.calls(rank, stage);
    double pairs = 0;
    for (const Call& call : calls) pairs += pairs_of(call);
    const double computing =
        pairs * per_pair * heads_q * batch / machine.flops + machine.call * static_cast<double>(calls.size());
    double messages = 0;
    if (!schedule.in_place(rank, stage)) {
      const Rows keys = rows_of(schedule.keys(rank, stage));
      messages = volume.arrives(keys, shape.keys, (d + d_v) * batch * heads_kv * bytes);
      if (p.backward())
        messages += volume.arrives(keys, shape.keys, (d + d_v) * batch * heads_kv * sizeof(float));
    }
    e.computing += computing;
    e.messages += std::max(0.0, messages - before);
    before = computing;
    if (schedule.stages() > 1 ||
        shape.queries_everywhere)  // o of a call is written, read, and added to the sum
      e.moving += 4 * rows * heads_q * queries_back * batch * sizeof(float) / machine.memory;
  }
  if (shape.queries_everywhere)
    e.messages +=
        machine.step + rows * (shape.ranks - 1) * heads_q * d_v * batch * sizeof(float) / machine.link;
  e.bytes = volume.total();
  e.seconds = e.computing + e.messages + e.moving;
  return e;
}

std::vector<Method> methods(const Shape& shape, const fovea_distributed_options& options) {
  if (shape.queries_everywhere) return {{1, 1}};
  std::vector<Method> all;
  for (int heads_ranks = 1; heads_ranks <= shape.ranks; ++heads_ranks) {
    if (shape.ranks % heads_ranks != 0) continue;
    if (options.heads_ranks != 0 && heads_ranks != options.heads_ranks) continue;
    const int groups = shape.ranks / heads_ranks;
    for (int stages = 1; stages <= groups; ++stages) {
      if (options.stages != 0 && stages != options.stages) continue;
      const bool usual = stages <= 2 || stages == groups;  // all at once, its own first, one at a time
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
  const int groups = o.heads_ranks > 0 ? shape.ranks / o.heads_ranks : shape.ranks;
  if (o.stages < 0 || o.stages > groups)
    throw_invalid("stages", number(o.stages), "at most " + number(groups) + ", the groups of ranks",
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

Machine machine_of(fovea_device device, const fovea_distributed_options& options) {
  // An H200, and two H200s of one host by NCCL; two cores with AVX-512 (docs/distributed.md).
  Machine machine = device.type == FOVEA_CUDA ? Machine{600e12, 250e9, 40e9, 3e12, 20e-6, 8e-6, 0}
                                              : Machine{150e9, 5e9, 1e9, 5e9, 20e-6, 20e-6, 0};
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
    const Estimate e = of_rank(problem, schedule, machine, rank);
    bytes = std::max(bytes, e.bytes);
    if (e.seconds >= slowest.seconds) slowest = e;
  }
  slowest.method = method;
  slowest.bytes = bytes;
  return slowest;
}

std::vector<Estimate> weigh(const LocalProblem& problem, int rank, const fovea_distributed_options& options) {
  check_options(problem.shape, options);
  const Machine machine = machine_of(problem.device, options);
  std::vector<Estimate> all;
  for (const Method& method : methods(problem.shape, options)) {
    Estimate e = estimate(problem, method, machine);
    // The limit is to mean the same on all ranks, so the largest workspace counts.
    for (int other = 0; other < problem.shape.ranks; ++other) {
      ProgramOptions sizes;
      sizes.only_sizes = true;
      const int64_t bytes = make_program(problem, Schedule(problem.shape, method), other, sizes).workspace;
      e.workspace = other == rank ? std::max(e.workspace, bytes) : std::max(e.workspace, bytes);
    }
    all.push_back(e);
  }
  const auto too_large = [&](const Estimate& e) {
    return options.memory_limit > 0 && e.workspace > options.memory_limit;
  };
  std::stable_sort(all.begin(), all.end(), [&](const Estimate& a, const Estimate& b) {
    if (too_large(a) != too_large(b)) return too_large(b);
    if (too_large(a)) return a.workspace < b.workspace;
    return a.seconds < b.seconds;
  });
  return all;
}

std::string describe(const Estimate& e, const Shape& shape) {
  const int groups = shape.ranks / e.method.heads_ranks;
  std::string name;
  if (shape.queries_everywhere) {
    name = "parts of keys, merged on all ranks";
  } else if (e.method.heads_ranks == shape.ranks && shape.ranks > 1) {
    name = "all-to-all over heads";
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
  return name + numbers;
}

}  // namespace fovea::distributed
