// How far queries look where scores fall with the distance (ALiBi): what lies beyond has no weight in float32 whatever the products are, so it is
// left out like what a window leaves out. Which distances these are follows from the norms of q and k, as on GPUs (tile/alibi_reach.hpp), for
// any function of the distance that is added to scores (score_form.hpp).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "cpu/panel.hpp"

namespace fovea::cpu {

/// Of all key heads of a run. Threads find it first, each head once.
class KeyReach {
 public:
  KeyReach() = default;
  KeyReach(const AttentionProblem& p, const PairPrograms& programs);

  int64_t bytes() const;
  /// Before threads start.
  void set_memory(void* memory);
  int64_t items() const { return groups_; }
  void find(const Ops& ops, const Group& group, const ScoreTerms& terms, const PairScratch& scratch) const;
  /// Narrows the window of the group. Waits for the thread that finds out.
  void narrow(Group& group) const;

 private:
  /// Keys before and behind the position of a query that it looks at; -1: all.
  struct Sides {
    int64_t left, right;
    int64_t known;  ///< 1: the others are
  };

  int64_t groups_ = 0;
  Sides* sides_ = nullptr;
};

}  // namespace fovea::cpu
