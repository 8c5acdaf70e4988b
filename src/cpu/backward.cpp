// The tiled backward with recomputed weights (Dao 2023, "FlashAttention-2", algorithm 2), in the transposed
// form of forward.cpp. For a block of keys and a tile of query rows:
//
//   S^T  = K Q^T,  P^T = exp2(factor * S^T - log2(e) * lse)
//   dP^T = V dO^T, dS^T = P^T * (dP^T - delta),           delta = rowsum(dO * O) - dlse
//   dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T        (dK and dQ times scale at the end)
//
// A work item is one key head with a range of its keys. It owns the dK and dV of those keys, and adds to a
// float32 copy of dQ that belongs to its range; the copies are summed in order afterwards. Nothing is added
// atomically, so each run gives the same bits, for any number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/backward_work.hpp"
#include "cpu/forward.hpp"
#include "cpu/key_reach.hpp"
#include "cpu/panel.hpp"
#include "cpu/parallel.hpp"

namespace fovea::cpu {

using namespace backward_pass;

namespace backward_pass {
namespace {

void clear_rows(const MatrixView& out, DType type, int64_t begin, int64_t end, int64_t size) {
  for (int64_t j = begin; j < end; ++j) {
    std::memset(out.data + j * out.stride * size_of(type), 0, static_cast<size_t>(size * size_of(type)));
  }
}

}  // namespace

void row_statistics(const Staging& s, const Group& group, const Lanes& lanes, float* lse2, float* delta) {
  const AttentionProblem& p = *group.problem;
  const DType o_type = p[Role::kO].dtype;
  for (int x = 0; x < kPanel; ++x) {
    lse2[x] = std::numeric_limits<float>::infinity();
    delta[x] = 0;
    if (x >= lanes.count) continue;
    const int64_t row = lanes.first_row + x;
    const float lse = *group.stat(Role::kLse, row);
    if (lse == -std::numeric_limits<float>::infinity()) continue;
    lse2[x] = lse * kLog2e;
    const char* o = group.row_data(Role::kO, row);
    const char* d_o = group.row_data(Role::kDO, row);
    float sum = 0;
    for (int64_t c = 0; c < s.d_v; ++c) sum += load_element(o, o_type, c) * load_element(d_o, s.type, c);
    delta[x] = p.has(Role::kDLse) ? sum - *group.stat(Role::kDLse, row) : sum;
  }
}

void write_query_rows(const Staging& s, const Group& group, const Lanes& lanes, const float* dq,
                      float* temp) {
  s.ops->transpose(dq, kPanel, s.d, kPanel, temp, s.padded_d);
  const auto scale = static_cast<float>(group.problem->scale);
  for (int x = 0; x < lanes.count; ++x) {
    float* row = temp + x * s.padded_d;
    for (int64_t c = 0; c < s.d; ++c) row[c] *= scale;
    s.ops->from_float(row, s.d, (*group.problem)[Role::kDQ].dtype,
                      group.row_data(Role::kDQ, lanes.first_row + x));
  }
}

void sink_gradient(const AttentionProblem& p, const Buffers& buffers, const Shared& shared, int64_t head) {
  const float sink2 = buffers.get<const float>(Role::kSink)[head * p[Role::kSink].stride[0]] * kLog2e;
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Group group(p, buffers, b, head / p.group());
    const int64_t stats = shared.stats_of(b * p.heads_kv + head / p.group(), 0);
    for (int64_t row = head % p.group(); row < group.rows(); row += p.group()) {
      const float weight = std::exp2(sink2 - shared.lse2[stats + row]);
      if (weight != 0) sum -= static_cast<double>(weight) * shared.delta[stats + row];
    }
  }
  buffers.get<float>(Role::kDSink)[head * p[Role::kDSink].stride[0]] = static_cast<float>(sum);
}

void clear_rows_of_no_sequence(const AttentionProblem& p, const Buffers& buffers) {
  const auto clear = [&](Role role, int64_t heads, int64_t rows, int64_t size) {
    for (int64_t head = 0; head < heads; ++head)
      clear_rows(rows_of(p, buffers, role, 0, head, 0), p[role].dtype, 0, rows, size);
  };
  clear(Role::kDQ, p.heads_q, p.total_q, p.head_dim);
  clear(Role::kDK, p.heads_kv, p.total_k, p.head_dim);
  clear(Role::kDV, p.heads_kv, p.total_k, p.head_dim_v);
}

void clear_unused_rows(const Staging& s, const Group& group) {
  const AttentionProblem& p = *group.problem;
  for (int64_t row = group.rows(); row < group.span.length_q * group.size(); ++row) {
    clear_rows({group.row_data(Role::kDQ, row)}, p[Role::kDQ].dtype, 0, 1, s.d);
  }
  const auto clear = [&](Role role, int64_t size) {
    clear_rows(group.keys(role), p[role].dtype, group.span.used_k, group.span.length_k, size);
  };
  clear(Role::kDK, s.d);
  clear(Role::kDV, s.d_v);
}

}  // namespace backward_pass

namespace {

constexpr double kMinFlopsPerThread = 1e6;

void write_query_gradients(const Problem& a, int64_t panel) {
  const Staging& s = a.s;
  const Lanes lanes(a.group, panel * kPanel);
  float* sum = a.shared.dq_of(a.group_index, 0, panel);
  for (int64_t range = 1; range < a.shared.schedule->ranges; ++range) {
    if (range * a.shared.schedule->range_keys >= a.group.span.used_k) break;  // no work item wrote this range
    const float* part = a.shared.dq_of(a.group_index, range, panel);
    for (int64_t i = 0; i < s.d * kPanel; ++i) sum[i] += part[i];
  }
  write_query_rows(s, a.group, lanes, sum, a.t.temp);
}

int64_t thread_bytes(const AttentionProblem& p, const Staging& s, const Schedule& schedule,
                     const PairPrograms& programs) {
  Scratch count(nullptr);
  ThreadScratch(count, p, s, schedule, programs);
  return count.used();
}

int64_t shared_bytes(const Schedule& schedule, const TensorGradients& gradients) {
  Scratch count(nullptr);
  Shared(count, schedule, gradients);
  return count.used();
}

ItemIndex items_of(const AttentionProblem& p, const Schedule& schedule) {
  return {p.batch, p.heads_kv, schedule.ranges};
}

/// Where chains of work items take whole groups together, keys are divided into more ranges, so that enough threads
/// have work.
Schedule schedule_of(const AttentionProblem& p, const Staging& s, const PrepareOptions& options) {
  const int64_t wanted = wanted_items(options.num_threads, options.is_part);
  const Schedule schedule(p, s, wanted);
  const TensorGradients gradients(p, items_of(p, schedule));
  const int64_t one_thread =
      (gradients.chains(kItemBatch) ? p.batch : 1) * (gradients.chains(kItemHead) ? p.heads_kv : 1);
  return Schedule(p, s, wanted, std::max<int64_t>(1, one_thread));
}

int threads_for(const PrepareOptions& options, const Schedule& schedule) {
  const auto by_work = static_cast<int64_t>(options.flops / kMinFlopsPerThread);
  const int64_t items = std::max(schedule.groups * schedule.ranges, schedule.groups);
  return static_cast<int>(std::clamp<int64_t>(std::min(by_work, items), 1, std::max(1, options.num_threads)));
}

/// The tiled backward of one problem: three parallel steps, then the gradients of sinks.
class Backward final : public Prepared {
 public:
  Backward(const AttentionProblem& p, const Ops& ops, const PrepareOptions& options)
      : problem_(p),
        staging_(p, ops),
        schedule_(schedule_of(p, staging_, options)),
        gradients_(problem_, items_of(p, schedule_)),
        programs_(p, false, gradients_.layouts()),
        reach_(p, programs_),
        num_threads_(threads_for(options, schedule_)),
        shared_bytes_(shared_bytes(schedule_, gradients_)),
        thread_bytes_(thread_bytes(p, staging_, schedule_, programs_)),
        reach_offset_(shared_bytes_ + options.num_threads * thread_bytes_) {
    workspace_size = static_cast<size_t>(reach_offset_ + reach_.bytes());
    summary = programs_.summary();
  }

  void run(const Buffers& buffers) const override {
    Run r{buffers, ScoreTerms(problem_, buffers, programs_), shared_in(buffers.workspace), reach_};
    r.reach.set_memory(static_cast<char*>(buffers.workspace) + reach_offset_);
    if (problem_.batch == 0 && problem_.packed) clear_rows_of_no_sequence(problem_, buffers);
    row_statistics_of_all(r);
    if (!gradients_.empty()) {
      WorkQueue pieces(gradients_.pieces());
      run_threads(num_threads_, [&](int) { gradients_.clear(buffers, r.shared.sums, pieces); });
    }
    ranges_of_keys(r);
    query_gradients(r);
    if (!gradients_.empty()) {
      WorkQueue pieces(gradients_.pieces());
      run_threads(num_threads_, [&](int) { gradients_.write(buffers, r.shared.sums, pieces); });
    }
    if (problem_.has(Role::kDSink)) {
      for (int64_t head = 0; head < problem_.heads_q; ++head)
        sink_gradient(problem_, buffers, r.shared, head);
    }
  }

 private:
  /// What the steps of one run share.
  struct Run {
    const Buffers& buffers;
    ScoreTerms terms;
    Shared shared;
    KeyReach reach;
  };
  Shared shared_in(void* workspace) const {
    Scratch memory(workspace);
    return {memory, schedule_, gradients_};
  }
  ThreadScratch scratch_of(const Run& r, int thread) const {
    Scratch memory(static_cast<char*>(r.buffers.workspace) + shared_bytes_ + thread * thread_bytes_);
    return {memory, problem_, staging_, schedule_, programs_};
  }
  SeenBlocks seen_blocks(const Run& r, const ThreadScratch& t) const {
    return {problem_, r.buffers, programs_, t.pairs.seen};
  }
  Group group_at(const Run& r, int64_t index) const {
    return {problem_, r.buffers, index / problem_.heads_kv, index % problem_.heads_kv};
  }
  /// With what lies beyond its reach left out.
  Group narrowed_group_at(const Run& r, int64_t index) const {
    Group group = group_at(r, index);
    r.reach.narrow(group);
    return group;
  }
  std::optional<RowGradient> row_gradient(const Run& r) const {
    const std::optional<KeyElements>& elements = gradients_.rows();
    if (!elements) return std::nullopt;
    const int64_t bytes =
        problem_.batch * problem_.heads_q * problem_.seqlen_q * problem_.seqlen_k * size_of(elements->dtype);
    return RowGradient{*elements, static_cast<char*>(r.buffers.gradient_of(problem_.named[elements->tensor])),
                       bytes > RowGradient::kStreamedBytes};
  }
  void row_statistics_of_all(const Run& r) const;
  void ranges_of_keys(const Run& r) const;
  void range_of_keys(const Run& r, const ThreadScratch& t, SeenBlocks& blocks, RowTile& tile,
                     const ItemIndex& item) const;
  void query_gradients(const Run& r) const;

  AttentionProblem problem_;
  Staging staging_;
  Schedule schedule_;
  TensorGradients gradients_;
  PairPrograms programs_;
  KeyReach reach_;  ///< without memory
  int num_threads_;
  int64_t shared_bytes_, thread_bytes_, reach_offset_;
};

void Backward::row_statistics_of_all(const Run& r) const {
  WorkQueue panels(schedule_.groups * schedule_.panels), heads_to_reach(r.reach.items());
  run_threads(num_threads_, [&](int thread) {
    for (int64_t item; (item = heads_to_reach.next()) >= 0;)
      r.reach.find(*staging_.ops, group_at(r, item), r.terms, scratch_of(r, thread).pairs);
    for (int64_t item; (item = panels.next()) >= 0;) {
      const int64_t group_index = item / schedule_.panels, panel = item % schedule_.panels;
      const Group group = group_at(r, group_index);
      if (panel * kPanel >= group.rows()) continue;
      const int64_t stats = r.shared.stats_of(group_index, panel);
      row_statistics(staging_, group, Lanes(group, panel * kPanel), r.shared.lse2 + stats,
                     r.shared.delta + stats);
    }
  });
}

/// dK, dV, and the part of dQ of one range of keys.
void Backward::range_of_keys(const Run& r, const ThreadScratch& t, SeenBlocks& blocks, RowTile& tile,
                             const ItemIndex& item) const {
  const bool banded = problem_.window_left >= 0 || problem_.window_right >= 0;
  const bool exact_checks = banded || r.terms.any || r.terms.dropout || programs_.has_sees;
  const int64_t range = item[kItemRange],
                group_index = item[kItemBatch] * problem_.heads_kv + item[kItemHead];
  const Group group = narrowed_group_at(r, group_index);
  if (range == 0) clear_unused_rows(staging_, group);
  const int64_t begin = range * schedule_.range_keys;
  const int64_t end = std::min(begin + schedule_.range_keys, group.span.used_k);
  if (range > 0 && begin >= end) return;
  std::array<GradientTarget, kMaxTermTensors> targets;
  gradients_.targets_of(r.buffers, r.shared.sums, item, targets);
  const auto rows = row_gradient(r);
  range_backward({staging_, group, r.terms, r.shared, t, blocks, group_index, range, targets.data(),
                  rows ? &*rows : nullptr},
                 begin, end, exact_checks, tile);
}

/// All ranges. Those that chains join are done by one thread, in order.
void Backward::ranges_of_keys(const Run& r) const {
  const ItemChains chains(items_of(problem_, schedule_), gradients_);
  WorkQueue queue(chains.count());
  run_threads(num_threads_, [&](int thread) {
    const ThreadScratch t = scratch_of(r, thread);
    SeenBlocks blocks = seen_blocks(r, t);
    RowTile tile;
    for (int64_t x; (x = queue.next()) >= 0;)
      chains.visit(x, [&](const ItemIndex& item) { range_of_keys(r, t, blocks, tile, item); });
    if (gradients_.rows()) staging_.ops->end_streams();
  });
}

/// dQ: the sum of its parts.
void Backward::query_gradients(const Run& r) const {
  WorkQueue panels(schedule_.groups * schedule_.panels);
  run_threads(num_threads_, [&](int thread) {
    const ThreadScratch t = scratch_of(r, thread);
    SeenBlocks blocks = seen_blocks(r, t);
    for (int64_t item; (item = panels.next()) >= 0;) {
      const int64_t group_index = item / schedule_.panels, panel = item % schedule_.panels;
      const Group group = narrowed_group_at(r, group_index);
      if (panel * kPanel < group.rows()) {
        write_query_gradients({staging_, group, r.terms, r.shared, t, blocks, group_index, 0}, panel);
      }
    }
  });
}

}  // namespace

std::unique_ptr<const Prepared> prepare_backward(const AttentionProblem& problem, const Ops& ops,
                                                 const PrepareOptions& options) {
  return std::make_unique<Backward>(problem, ops, options);
}

}  // namespace fovea::cpu
