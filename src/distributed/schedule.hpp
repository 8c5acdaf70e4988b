// Who computes what, for a problem whose rows lie on several ranks. Two numbers say how: `heads_ranks` ranks in a row form a group,
// which exchanges rows for heads (each member has all queries of the group for its share of the heads), and keys and values of
// the groups come to each other in `stages` steps.
//
//   heads_ranks = ranks, stages = 1    all-to-all over heads (Ulysses): each rank computes whole sequences
//   heads_ranks = ranks, stages = n    the same, a part of its heads at a time, while the next is on its way
//   heads_ranks = 1,     stages = 1    all-gather of keys and values
//   heads_ranks = 1,     stages = n    the same in pieces, each computed while the next is on its way; with as many stages as
//                                      groups each rank holds the keys of two others at most (ring attention)
//   between                            all-to-all inside a host, keys across
//
// Every rank computes the schedule of all others, so no sizes are exchanged.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/cut.hpp"
#include "distributed/rows.hpp"

namespace fovea::distributed {

/// What all ranks know of the problem.
struct Shape {
  int ranks = 1;
  int64_t batch = 1, heads_q = 1, heads_kv = 1, head_dim = 1, head_dim_v = 1;
  Window window;
  std::vector<Sequence> sequences;  ///< in the order of both axes, which they fill
  Placement queries, keys;
  bool queries_everywhere = false;  ///< every rank has all queries and computes over its own keys: decoding
  /// Calls begin multiples of it behind the first rows of a sequence: what dropout decides together is not divided.
  int64_t row_multiple = 1;
  /// Whether nothing but the window depends on positions: rows that lie side by side may share a call then, wherever in the sequence
  /// they are.
  bool joins = true;

  int64_t group() const { return heads_q / heads_kv; }
};

struct Method {
  int heads_ranks = 1, stages = 1;
  constexpr bool operator==(const Method&) const = default;
};

/// Attention of some rows of the working queries and some of the keys of a stage: one plain call.
struct Call {
  int64_t q_at = 0, q_rows = 0, k_at = 0, k_rows = 0;
  Window window;
  /// Where each of several whole sequences starts, from 0, and the end; empty for one.
  std::vector<int32_t> starts_q, starts_k;
  int64_t longest_q = 0, longest_k = 0;
  int64_t sequence = 0;              ///< the first; others follow in their order, none left out
  int64_t first_q = 0, first_k = 0;  ///< positions of the first rows within the sequence
  int64_t whole_q = 0, whole_k = 0;  ///< its lengths
  int64_t arriving = 0;  ///< of the keys the first so many, which lie with those of the next stage

  Rows queries() const { return {{q_at, q_at + q_rows}}; }
  int64_t sequences() const { return starts_q.empty() ? 1 : static_cast<int64_t>(starts_q.size()) - 1; }
  /// Whether the call has some rows of one sequence: positions and lengths in the call are not those in the sequence.
  bool is_cut() const { return starts_q.empty() && (q_rows != whole_q || k_rows != whole_k); }
};

class Schedule {
 public:
  Schedule(const Shape& shape, Method method);

  const Shape& shape() const { return shape_; }
  Method method() const { return method_; }
  int groups() const { return shape_.ranks / method_.heads_ranks; }
  int stages() const;
  /// Whether stages are parts of a rank's heads, as all ranks are one group; else they are keys of groups.
  bool stages_are_heads() const { return groups() == 1 && shape_.ranks > 1 && !shape_.queries_everywhere; }

  /// The heads that a rank computes in a stage.
  Range heads_kv(int rank, int stage) const;
  Range heads_q(int rank, int stage) const {
    return {heads_kv(rank, stage).begin * group(), heads_kv(rank, stage).end * group()};
  }
  /// The queries that a rank computes, in the order of its working memory. Where they do not travel, they are its own rows as they
  /// lie.
  Holding queries(int rank) const;
  bool queries_travel() const { return method_.heads_ranks > 1 || !queries_lie_; }
  /// The keys that come to a rank in a stage: those that one of its queries sees, or all where stages are heads. In order, but for a
  /// stage of a rank's own keys.
  Holding keys(int rank, int stage) const;
  /// Whether the keys of the stage are the rank's own rows, all of them, as they lie.
  bool in_place(int rank, int stage) const;
  /// The calls of a rank in a stage, in order.
  std::vector<Call> calls(int rank, int stage) const;
  /// Pairs of one query head and batch that the calls of a rank compute in a stage.
  double pairs(int rank, int stage) const;

 private:
  int64_t group() const { return shape_.group(); }
  int group_of(int rank) const { return rank / method_.heads_ranks; }
  /// Whether a stage has the rank's own keys alone, as they are computed.
  bool is_own(int stage) const;
  /// The keys that some query of the group sees.
  Rows seen(int rank) const;

  Shape shape_;
  Method method_;
  Placement queries_, keys_;     ///< where rows are computed: near where they lie
  bool queries_lie_, keys_lie_;  ///< whether there
};

/// The placement with each border of a piece within a sequence moved to the nearest multiple of `multiple` behind the first row of the
/// sequence. `axis` says which rows a sequence has.
Placement with_borders_at(const Placement& placement, const std::vector<Sequence>& sequences,
                          Range Sequence::*axis, int64_t multiple);

/// Fewer calls for the same pairs: those of rows side by side in memory whose keys are together the first ones up to a diagonal, as a
/// causal mask has it, or all. So a rank's own rows are one causal problem, early and late ones together.
std::vector<Call> joined(const std::vector<Call>& calls);

/// The calls that together cover all pairs of these queries and keys that the window keeps. Whole sequences that lie side by side
/// share a call. Calls begin multiples of `multiple` behind the first rows of a sequence, where pieces of rows do.
std::vector<Call> calls_of(const std::vector<Sequence>& sequences, const Window& window,
                           const Holding& queries, const Holding& keys, int64_t multiple = 1);

/// Whether the calls write each of `rows` rows once; `at` and `size` name the members that say which rows a call has.
bool covers_once(const std::vector<Call>& calls, int64_t Call::*at, int64_t Call::*size, int64_t rows);

/// Pairs of a plain call that its window keeps.
double pairs_of(const Call& call);

}  // namespace fovea::distributed
