// What the builders of forward and backward programs share: views of the workspace, calls of attention, exchanges of rows and keys.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "distributed/program.hpp"

namespace fovea::distributed {

inline constexpr fovea_dtype kFloat32{FOVEA_CODE_FLOAT, 32, 1};

constexpr bool same_type(const fovea_dtype& a, const fovea_dtype& b) {
  return a.code == b.code && a.bits == b.bits;
}

/// Memory of messages and of keys is used again every second stage: one is at work while the next arrives.
inline constexpr size_t kBuffers = 2;

class Builder {
 public:
  Builder(const LocalProblem& problem, const Schedule& schedule, int rank, const ProgramOptions& options);
  Program build();

 private:
  /// A rank's keys of one stage.
  struct Stage {
    Holding keys;
    int64_t rows = 0;
    std::vector<Call> calls;
    bool in_place = false;
    Operand k, v, dk, dv;
    bool direct = false;  ///< on all ranks the calls write each row of dk and dv once
  };
  /// Messages of one kind that lie in the same memory at different times.
  enum Region : size_t {
    kKeyMessages,
    kGradientMessages = kKeyMessages + kBuffers,
    kOtherMessages = kGradientMessages + kBuffers,
    kRegions
  };

  // ---- workspace ----
  int64_t take(int64_t bytes);
  Operand rows_operand(int64_t rows, int64_t heads, int64_t elements, const fovea_dtype& type);
  Operand statistic_operand(int64_t rows, int64_t heads);
  Operand callers(Place place) const;
  /// The working tensor of queries: the caller's own where the group is one rank, else memory for the rows and heads of it.
  Operand working(Place place);
  Operand working(Place place, const fovea_dtype& type);

  // ---- exchanges ----
  std::vector<Side> local_sides(const Placement& placement, int64_t heads) const;
  std::vector<Side> query_sides() const;
  std::vector<Side> key_sides(int stage) const;
  Flow flow(std::vector<Side> from, std::vector<Side> to, const Operand& mine_from, const Operand& mine_to,
            int64_t elements) const;
  /// From this rank's rows to the working memory, or back.
  Flow queries_in(Place place, const Operand& to) const;
  Flow queries_out(Place place, const Operand& from) const;
  size_t add_exchange(std::vector<Flow> flows, size_t region);
  void exchange_now(std::vector<Flow> flows);
  void start_keys(int stage, std::vector<Flow> more);
  void finish_keys(int stage);
  void make_exchanges();

  // ---- steps ----
  void add(Step step) { program_.steps.push_back(std::move(step)); }
  void fill(const Operand& operand, int64_t words, uint32_t word);
  void move(const Operand& from, const Operand& to, int64_t rows, int64_t heads, int64_t elements, bool add);
  Operand at(const Operand& operand, int64_t row) const;
  using Operands = std::array<Operand, kPlaces>;
  void attend(const Call& call, const Operands& operands);
  std::shared_ptr<fovea_plan> plan_of(const Call& call, Attend& attend);

  bool calls_own_their_keys(int stage) const;
  void make_stages();
  void forward();
  void forward_call(const Call& call, const Stage& stage);
  void finish_forward(const std::vector<Merge::Part>& parts);
  void merge_ranks();
  Merge::Part sink_part();
  void backward();
  void make_gradients();
  void backward_call(const Call& call, const Stage& stage);
  size_t start_gradients(int stage);
  void finish_gradients();
  void gradient_of_sinks();
  Operands backward_operands(const Call& call) const;

  const LocalProblem& p_;
  const Schedule& s_;
  int rank_;
  ProgramOptions options_;
  Program program_;

  bool grouped_;
  Holding queries_;
  int64_t rows_, local_q_, local_k_;
  Range heads_q_, heads_kv_;
  std::vector<Stage> stages_;
  bool direct_ = false;  ///< the calls write each row of o or dq once

  Operands work_;            ///< tensors of queries
  Operand acc_o_, acc_lse_;  ///< sums over calls where they do not write results at once
  Operand part_o_, part_lse_, acc_dq_, part_dq_, part_dk_, part_dv_, acc_dk_, acc_dv_;
  fovea_dtype part_type_{};  ///< of gradients of one call
  bool sums_keys_ = true;    ///< dk and dv are sums over stages; else those of the one stage are the result

  struct Planned {
    std::vector<Flow> flows;
    size_t region;
  };
  std::vector<Planned> planned_;
  std::vector<size_t> key_exchange_;
  std::map<std::string, Attend> plans_;
  size_t attention_workspace_ = 0;
};

}  // namespace fovea::distributed
