// One attention problem over several ranks: the C++20 face of fovea_distributed.h, header-only over the C ABI.
//
// Ranks that are threads of this process, each with the rows that its pieces name:
//
//   const std::vector<fovea::Piece> pieces = fovea::zigzag_pieces(seqlen, 4);
//   fovea::ThreadRanks ranks(4);
//   ranks.run([&](const fovea::Transport& transport) {
//     const fovea::DistributedPlan plan(transport, {.local = {.q = q, .k = k, .v = v, .o = o, .causal = true},
//                                                   .queries = pieces});
//     fovea::Workspace workspace(plan.workspace_size(), plan.device());
//     plan.run({.q = q_data, .k = k_data, .v = v_data, .o = o_data}, workspace);
//   });
//
// Ranks that are processes do the same with a transport of fovea/mpi.hpp, or with one of their own.
//
// Whatever fails throws fovea::Error, on all ranks, and then outputs are not to be read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fovea/fovea.hpp"
#include "fovea/fovea_distributed.h"

namespace fovea {
inline namespace v0 {

// ---- which rows lie where ----

/// Rows [begin, end) of an axis lie on a rank, behind those of the rank's pieces that stand before this one.
using Piece = fovea_piece;

namespace detail {
inline void check_cut(int64_t rows, int ranks) {
  if (rows < 0) {
    throw Error(FOVEA_INVALID_ARGUMENT, "rows",
                "rows: got " + std::to_string(rows) + ", expected 0 or more; say how many rows the axis has");
  }
  if (ranks < 1) {
    throw Error(FOVEA_INVALID_ARGUMENT, "ranks",
                "ranks: got " + std::to_string(ranks) + ", expected 1 or more; say how many ranks there are");
  }
}
/// Where chunk `index` of `chunks` begins. Chunks differ by a row at most, the longer ones come first.
inline int64_t chunk_begin(int64_t rows, int64_t chunks, int64_t index) {
  return rows / chunks * index + std::min(index, rows % chunks);
}
}  // namespace detail

/// Rank r has one piece, the r-th; pieces differ by a row at most, and need not divide the rows.
inline std::vector<Piece> contiguous_pieces(int64_t rows, int ranks) {
  detail::check_cut(rows, ranks);
  std::vector<Piece> pieces;
  for (int32_t r = 0; r < ranks; ++r)
    pieces.push_back({r, detail::chunk_begin(rows, ranks, r), detail::chunk_begin(rows, ranks, r + 1)});
  return pieces;
}

/// Of twice as many chunks as ranks, rank r has the r-th from the front and the r-th from the back: under a causal mask
/// all ranks have as much to compute.
inline std::vector<Piece> zigzag_pieces(int64_t rows, int ranks) {
  detail::check_cut(rows, ranks);
  const int64_t chunks = 2 * int64_t{ranks};
  std::vector<Piece> pieces;
  for (int64_t c = 0; c < chunks; ++c) {
    pieces.push_back({static_cast<int32_t>(std::min(c, chunks - 1 - c)), detail::chunk_begin(rows, chunks, c),
                      detail::chunk_begin(rows, chunks, c + 1)});
  }
  return pieces;
}

/// How many rows a rank has.
inline int64_t rows_of_rank(std::span<const Piece> pieces, int rank) {
  int64_t rows = 0;
  for (const Piece& piece : pieces) {
    if (piece.rank == rank) rows += piece.end - piece.begin;
  }
  return rows;
}

// ---- transports ----

/// A view of what carries messages between ranks. The one who made it keeps it alive.
class Transport {
 public:
  explicit Transport(const fovea_transport& transport) : c_(transport) {}

  int rank() const noexcept { return c_.rank; }
  int size() const noexcept { return c_.size; }
  fovea_device device() const noexcept { return c_.device; }

  /// One step of messages to other ranks and from them, as fovea_transport describes it. Arrives before it returns on the CPU; on
  /// a GPU before what is put on `stream` next.
  void exchange(std::span<const fovea_message> sends, std::span<const fovea_message> receives,
                void* stream = nullptr) const {
    check(c_.start(c_.context, sends.data(), static_cast<int32_t>(sends.size()), receives.data(),
                   static_cast<int32_t>(receives.size()), stream));
    check(c_.finish(c_.context, stream));
  }
  /// This rank gives up: the other ranks' calls fail with `reason`.
  void stop(const std::string& reason) const noexcept { c_.stop(c_.context, reason.c_str()); }

  const fovea_transport* c_transport() const noexcept { return &c_; }

 private:
  void check(fovea_status status) const {
    if (status == FOVEA_OK) return;
    throw Error(status, "transport",
                "transport: rank " + std::to_string(c_.rank) + ": " + c_.error(c_.context));
  }

  fovea_transport c_;
};

/// What a rank sends.
struct Sent {
  int64_t messages = 0, bytes = 0;
};

struct ThreadRanksOptions {
  int64_t deadline_ms = 0;              ///< how long a rank waits for another; 0: 60,000
  std::vector<fovea_device> devices{};  ///< that of each rank; empty: the CPU for all
  int64_t delay_us = 0;                 ///< for tests: ranks sleep up to this long before each message
  uint64_t seed = 0;                    ///< of the delays
  int32_t peer_copies = 0;              ///< as fovea_thread_options has it
};

/// Ranks that are threads of this process.
class ThreadRanks {
 public:
  explicit ThreadRanks(int size, const ThreadRanksOptions& options = {}) : size_(size) {
    if (!options.devices.empty() && options.devices.size() != static_cast<size_t>(std::max(size, 0))) {
      throw Error(FOVEA_INVALID_ARGUMENT, "devices",
                  "devices: got " + std::to_string(options.devices.size()) + " of them, expected " +
                      std::to_string(size) + ", one for each rank; leave them out for the CPU");
    }
    fovea_thread_options c{};
    c.struct_size = sizeof c;
    c.deadline_ms = options.deadline_ms;
    c.delay_us = options.delay_us;
    c.seed = options.seed;
    c.peer_copies = options.peer_copies;
    fovea_thread_group* group = nullptr;
    detail::check(fovea_thread_group_create(size, options.devices.empty() ? nullptr : options.devices.data(),
                                            &c, &group));
    group_.reset(group);
  }

  int size() const noexcept { return size_; }
  /// Valid as long as this object.
  Transport transport(int rank) const {
    fovea_transport transport{};
    detail::check(fovea_thread_transport(group_.get(), rank, &transport));
    return Transport(transport);
  }

  /// What a rank has sent so far.
  Sent sent(int rank) const {
    Sent sent;
    detail::check(fovea_thread_sent(group_.get(), rank, &sent.messages, &sent.bytes));
    return sent;
  }

  /// Calls work(transport) on a thread for each rank and waits for all. Where one throws, the others are stopped, and the exception
  /// that came first leaves this call.
  void run(const std::function<void(const Transport&)>& work) const {
    std::mutex mutex;
    std::exception_ptr first;
    const auto rank = [&](int number) {
      const Transport own = transport(number);
      std::string reason = "an exception of unknown type";
      try {
        work(own);
        return;
      } catch (const std::exception& error) {
        reason = error.what();
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
      own.stop("rank " + std::to_string(number) + ": " + reason);
    };
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < size_; ++i) threads.emplace_back(rank, i);
    }
    if (first) std::rethrow_exception(first);
  }

 private:
  struct Destroy {
    void operator()(fovea_thread_group* group) const noexcept { fovea_thread_group_destroy(group); }
  };
  std::unique_ptr<fovea_thread_group, Destroy> group_;
  int size_;
};

// ---- the problem ----

/// One problem, the same on all ranks but for the rows in `local`; fovea_distributed_problem documents the fields. Tensors of terms
/// (sinks, ALiBi, bias, masks, named tensors) are whole, and the same on all ranks.
struct DistributedProblem {
  Problem local{};
  std::vector<Piece> queries{};  ///< empty beside keys: every rank has all queries and gets the whole result
  std::vector<Piece> keys{};     ///< empty: as the queries
  /// Of packed sequences: where each starts on the whole axis, and the end. Empty: one sequence, for each of the batch.
  std::vector<int32_t> cu_seqlens_q{}, cu_seqlens_k{};
};

/// How to do it. Zeros choose.
struct DistributedOptions {
  Options attention{};  ///< of the calls on each rank
  int heads_ranks = 0;  ///< ranks in a row that exchange rows for heads; divides their number
  int stages = 0;       ///< steps in which keys come
  int ranks_per_host = 0;
  int64_t memory_limit = 0;  ///< bytes of a rank's workspace that choices keep to
  double flops_per_second = 0, link_bytes_per_second = 0, host_link_bytes_per_second = 0;
};

namespace detail {

/// A problem and options over ranks as the C ABI has them, as long as what they were made from.
class CDistributed {
 public:
  CDistributed(const DistributedProblem& problem, const DistributedOptions& options)
      : local_(problem.local), attention_(c_options(options.attention)) {
    problem_.struct_size = sizeof problem_;
    problem_.local = local_.get();
    problem_.queries = problem.queries.empty() ? nullptr : problem.queries.data();
    problem_.num_queries = static_cast<int64_t>(problem.queries.size());
    problem_.keys = problem.keys.empty() ? nullptr : problem.keys.data();
    problem_.num_keys = static_cast<int64_t>(problem.keys.size());
    set_sequences(problem);
    options_.struct_size = sizeof options_;
    options_.attention = &attention_;
    options_.heads_ranks = options.heads_ranks;
    options_.stages = options.stages;
    options_.ranks_per_host = options.ranks_per_host;
    options_.memory_limit = options.memory_limit;
    options_.flops_per_second = options.flops_per_second;
    options_.link_bytes_per_second = options.link_bytes_per_second;
    options_.host_link_bytes_per_second = options.host_link_bytes_per_second;
  }
  CDistributed(const CDistributed&) = delete;
  CDistributed& operator=(const CDistributed&) = delete;

  const fovea_distributed_problem* problem() const noexcept { return &problem_; }
  const fovea_distributed_options* options() const noexcept { return &options_; }

 private:
  void set_sequences(const DistributedProblem& problem) {
    const auto &starts_q = problem.cu_seqlens_q, &starts_k = problem.cu_seqlens_k;
    if (starts_q.empty() && starts_k.empty()) return;
    if (starts_q.empty() || (!starts_k.empty() && starts_k.size() != starts_q.size())) {
      throw Error(FOVEA_INVALID_ARGUMENT, "cu_seqlens_k",
                  "cu_seqlens_k: got " + std::to_string(starts_k.size()) + " numbers, expected " +
                      std::to_string(starts_q.size()) +
                      ", as many as cu_seqlens_q; leave cu_seqlens_k out where both are the same");
    }
    problem_.num_sequences = static_cast<int64_t>(starts_q.size()) - 1;
    problem_.cu_seqlens_q = starts_q.data();
    problem_.cu_seqlens_k = starts_k.empty() ? nullptr : starts_k.data();
  }

  CProblem local_;
  fovea_options attention_;
  fovea_distributed_problem problem_{};
  fovea_distributed_options options_{};
};

}  // namespace detail

/// Every method for `ranks` ranks on devices of the kind of the problem's tensors, of which none has to be there: one line each, the
/// fastest first (fovea_distributed_on_paper).
inline std::string distributed_on_paper(int ranks, const DistributedProblem& problem,
                                        const DistributedOptions& options = {}) {
  const detail::CDistributed c(problem, options);
  const char* text = "";
  detail::check(fovea_distributed_on_paper(ranks, c.problem(), c.options(), &text));
  return text;
}

/// A problem that all ranks have planned together. One run at a time.
class DistributedPlan {
 public:
  /// With all ranks. The transport is used as long as this object lives; data pointers of tensors are not kept.
  DistributedPlan(const Transport& transport, const DistributedProblem& problem,
                  const DistributedOptions& options = {})
      : device_(transport.device()) {
    const detail::CDistributed c(problem, options);
    fovea_distributed_plan* plan = nullptr;
    detail::check(fovea_distributed_plan_create(transport.c_transport(), c.problem(), c.options(), &plan));
    plan_.reset(plan);
  }

  /// Bytes that each run of this rank needs.
  size_t workspace_size() const noexcept { return fovea_distributed_plan_workspace_size(plan_.get()); }
  /// Where tensors and workspace of this rank lie.
  fovea_device device() const noexcept { return device_; }
  /// The methods that were weighed, one a line, the chosen one first, and what this rank does.
  std::string_view reason() const noexcept { return fovea_distributed_plan_reason(plan_.get()); }
  /// What a run of this rank sends.
  Sent sends() const noexcept {
    Sent sends;
    fovea_distributed_plan_sends(plan_.get(), &sends.messages, &sends.bytes);
    return sends;
  }

  /// With all ranks, on this rank's rows.
  void run(const Buffers& buffers, Workspace& workspace) const {
    run(buffers, workspace.data(), workspace.size());
  }
  /// With workspace memory of the caller's, aligned to 256.
  void run(const Buffers& b, void* workspace, size_t workspace_size) const {
    fovea_buffers c = FOVEA_BUFFERS_INIT;
#define FOVEA_SET_POINTER(field, Name, forward, backward, meaning) c.field = b.field;
    FOVEA_TENSORS(FOVEA_SET_POINTER)
#undef FOVEA_SET_POINTER
    for (size_t i = 0; i < b.named.size(); ++i) {
      c.named[i] = b.named[i];
      c.named_gradients[i] = b.named_gradients[i];
    }
    c.seed = b.seed;
    c.offset = b.offset;
    c.workspace = workspace;
    c.workspace_size = workspace_size;
    c.stream = b.stream;
    detail::check(fovea_distributed_run(plan_.get(), &c));
  }

 private:
  struct Destroy {
    void operator()(fovea_distributed_plan* plan) const noexcept { fovea_distributed_plan_destroy(plan); }
  };
  std::unique_ptr<fovea_distributed_plan, Destroy> plan_;
  fovea_device device_;
};

}  // namespace v0
}  // namespace fovea
