// What the builders of forward and backward programs share: views of the workspace, calls of attention, exchanges of rows and keys.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distributed/program.hpp"
#include "distributed/terms.hpp"

namespace fovea::distributed {

constexpr bool same_type(const fovea_dtype& a, const fovea_dtype& b) {
  return a.code == b.code && a.bits == b.bits;
}

class Builder {
 public:
  Builder(const LocalProblem& problem, const Schedule& schedule, int rank, const ProgramOptions& options);
  Program build();

 private:
  /// All but the exchanges.
  void make_steps();
  using Operands = std::array<Operand, kPlaces>;
  /// What a rank computes while the next stage arrives: some of the keys for all its heads, or all keys for some of its heads.
  struct Stage {
    Holding keys;
    int64_t rows = 0;  ///< of keys
    Range heads_q, heads_kv;
    std::vector<Call> calls;
    bool in_place = false;
    Operands work;  ///< tensors of queries
    Operand k, v, dk, dv;
    bool direct = false;  ///< on all ranks the calls write each row of dk and dv once
    Lane lane = Lane::kCompute;
  };
  /// Messages of one kind that lie in the same memory at different times.
  enum class Kind : uint8_t { kArriving, kLeaving, kOther };
  struct Region {
    Kind kind;
    size_t buffer;
    auto operator<=>(const Region&) const = default;
  };
  static constexpr size_t kNothing = ~size_t{0};  ///< no exchange

  // ---- workspace ----
  int64_t take(int64_t bytes);
  Operand rows_operand(int64_t rows, int64_t heads, int64_t elements, const fovea_dtype& type);
  Operand statistic_operand(int64_t rows, int64_t heads);
  /// The same memory as rows, or statistics, of other sizes side by side.
  static Operand compact(Operand operand, int64_t rows, int64_t heads, int64_t elements);
  static Operand compact_statistic(Operand operand, int64_t rows, int64_t heads);
  Operand callers(Place place) const;
  /// The working tensor of queries: the caller's own where queries do not travel, else memory for the rank's rows and `heads`.
  Operand working(Place place, int64_t heads);

  // ---- exchanges ----
  std::vector<Side> local_sides(const Placement& placement, int64_t heads) const;
  std::vector<Side> query_sides(int stage) const;
  std::vector<Side> key_sides(int stage) const;
  Flow flow(std::vector<Side> from, std::vector<Side> to, const Operand& mine_from, const Operand& mine_to,
            int64_t elements) const;
  /// From this rank's rows to the working memory of a stage, or back.
  Flow queries_in(Place place, int stage) const;
  Flow queries_out(Place place, int stage) const;
  /// `alone`: nothing is computed meanwhile.
  size_t add_exchange(std::vector<Flow> flows, Region region, bool alone);
  void exchange_now(std::vector<Flow> flows);
  /// Begins the messages that bring a stage: its keys, and where they are not there yet the tensors of queries.
  size_t start_arriving(int i, std::span<const Place> of_queries);
  /// Computes stage by stage, while the next arrives and what the one before leaves for other ranks is on its way:
  /// compute(i), behind the last of them finish(), and leave(i), which begins messages or says kNothing.
  template <class Compute, class Finishes, class Leave>
  void pipeline(std::span<const Place> of_queries, Compute&& compute, Finishes&& finish, Leave&& leave) {
    size_t arriving = start_arriving(0, of_queries), leaving = kNothing;
    if (arriving != kNothing) add(Finish{arriving});
    const bool on_compute = buffers_ >= static_cast<size_t>(s_.stages()), beside = make_lanes();
    if (beside) add(Order{Lane::kCompute, Lane::kBeside});
    for (int i = 0; i < s_.stages(); ++i) {
      arriving = i + 1 < s_.stages() ? start_arriving(i + 1, of_queries) : kNothing;
      compute(i);
      if (leaving != kNothing) add(Finish{leaving, false});
      if (arriving != kNothing)
        add(Finish{arriving, true, on_compute, !over_all_keys_.empty(), stage_at(i + 1).lane});
      if (i + 1 == s_.stages()) {
        if (beside) add(Order{Lane::kBeside, Lane::kCompute});
        finish();
      }
      leaving = leave(i);
    }
    if (leaving != kNothing) {
      add(Finish{leaving});
    } else if (p_.by_copies && !planned_.empty()) {
      add(Order{Lane::kLink, Lane::kCompute});  // the caller's keys are no longer copied from
    }
  }
  void make_exchanges();
  void make_copies();
  void know_what_is_open();
  /// Where in the workspace what comes in each exchange lands, by copies.
  std::vector<int64_t> make_landings();
  /// Where the memory of each kind of message begins, from what each exchange needs.
  template <class SizeOf>
  std::map<Region, int64_t> make_regions(SizeOf&& size_of);
  /// Rows that stay, of exchanges beside which something is computed: moved where nothing is.
  void keep_rows_together();

  // ---- steps ----
  void add(Step step) { program_.steps.push_back(std::move(step)); }
  void fill(const Operand& operand, int64_t words, uint32_t word);
  void move(const Operand& from, const Operand& to, int64_t rows, int64_t heads, int64_t elements, bool add);
  Operand at(const Operand& operand, int64_t row) const;
  /// Without `part` the terms of the problem do not count.
  void attend(const Call& call, const Stage& stage, const Operands& operands,
              const std::optional<PartOfProblem>& part);
  Attend step_of(const Call& call, const Stage& stage, const Operands& operands,
                 const std::optional<PartOfProblem>& part);
  /// Without a plan where keys arrive and no backend waits for them.
  Attend plan_of(const Call& call, const Stage& stage, const Operands& operands,
                 const std::optional<PartOfProblem>& part);

  // ---- terms ----
  /// Nothing where the problem has no terms that depend on positions.
  std::optional<PartOfProblem> part_of(const Call& call, const Stage& stage) const;
  void add_terms(const PartOfProblem& part, Operands& operands) const;
  void make_term_gradients();
  void sum_term_gradients(const PartOfProblem& part);
  void finish_term_gradients();

  bool calls_own_their_keys(int stage) const;
  void make_stages();
  /// Whether stages are computed on two lanes in turn, so that one begins on SMs that the one before leaves idle at its end.
  bool make_lanes();
  /// Begins messages of what a stage has computed.
  void start_leaving(size_t exchange, int stage);
  void make_working_memory(std::span<const Place> of_queries);
  const Stage& stage_at(int i) const { return stages_[static_cast<size_t>(i)]; }
  void forward();
  /// The operands of a call that writes results.
  Operands result_operands(const Call& call, const Stage& stage) const;

  // ---- keys that arrive while calls run ----
  /// Whether that is how the other rank's keys come: the same on both ranks.
  bool keys_arrive_in_calls() const;
  int arrival_parts() const;
  void join_arriving_keys();
  Attend call_with_arriving(const Call& call, const Call& other);
  Attend over_copies(const Call& call, const Attend& given, std::vector<PlannedMove>& copies);
  void forward_call(const Call& call, const Stage& stage);
  void make_sums();
  Merge::Part sum_of(const Range& rows) const;
  Merge::Part part_of_rows(const Range& rows) const;
  void merge(std::vector<Merge::Part> parts, const Merge::Part& into, const Range& rows);
  void add_pending();
  void finish_sums();
  void finish_forward(std::vector<Merge::Part> parts, const Range& rows);
  size_t start_results(int i);
  void merge_ranks();
  Merge::Part sink_part();
  void backward();
  void make_gradients();
  void backward_call(const Call& call, const Stage& stage);
  size_t start_gradients(int stage);
  void make_stage_gradients();
  void gradient_of_sinks();
  void add_sink_gradients(const Operand& into);
  Operands backward_operands(const Call& call, const Stage& stage) const;

  const LocalProblem& p_;
  const Schedule& s_;
  int rank_;
  ProgramOptions options_;
  Program program_;

  /// Memory of messages and of keys is used again every second stage: one is at work while the next arrives. Where ranks copy and stages
  /// are heads, all have their own, which one part of all heads would need as well.
  size_t buffers_;
  size_t buffer_of(int stage) const { return static_cast<size_t>(stage) % buffers_; }

  bool queries_travel_;
  Holding queries_;
  int64_t rows_, local_q_, local_k_;
  std::vector<Stage> stages_;
  bool direct_ = false;                ///< the calls write each row of o or dq once
  std::vector<Attend> over_all_keys_;  ///< in place of the calls of both stages, where keys arrive in calls

  Operand acc_o_, acc_lse_;  ///< sums over calls where they do not write results at once
  Rows written_;             ///< of acc_o_ and acc_lse_
  Rows pending_;             ///< of part_o_ and part_lse_, not added yet
  Operand part_o_, part_lse_, acc_dq_, part_dq_, part_dk_, part_dv_, acc_dk_, acc_dv_;
  bool sums_keys_ = true;  ///< dk and dv are sums over stages; else those of the one stage are the result

  /// The gradient of a tensor of terms: what one call gives, and the sum over all.
  struct TermGradient {
    const TermTensor* tensor = nullptr;
    int64_t elements = 0;
    Operand part, sum;
  };
  std::vector<TermGradient> term_gradients_;

  struct Planned {
    std::vector<Flow> flows;
    Region region;
    bool alone;      ///< nothing is computed meanwhile
    bool in_unused;  ///< nothing in the run has used the memory in which it arrives
    int parts = 0;   ///< of Exchange::copy_in_parts; 0: it is not called
  };
  std::vector<Planned> planned_;
  std::map<std::string, Attend> plans_;
  size_t attention_workspace_ = 0;
};

}  // namespace fovea::distributed
