// Gradients of named tensors: which work items may add to the same element, and how their sums keep one order.
//
// A work item is a batch, a key head and a range of keys (of queries, where these have lists of keys). Where a tensor is indexed by one of the names b, h or hk, and k
// alone, items that differ in it add to different elements. What remains differs in nothing but the other names; each of
// those items has a copy of the tensor, and the copies are summed in their order. A tensor that all three index needs no
// copy. Where copies would be too large, items that would share an element form a chain, which one thread goes through.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "cpu/pair_programs.hpp"
#include "cpu/parallel.hpp"
#include "expr/operation.hpp"

namespace fovea::cpu {

/// How many values of each name the work items have.
enum ItemName : uint8_t { kItemBatch, kItemHead, kItemRange, kItemNames };
using ItemIndex = std::array<int64_t, kItemNames>;

class TensorGradients {
 public:
  /// `ranged`: what the items divide into ranges, k or q.
  TensorGradients(const AttentionProblem& problem, const ItemIndex& items,
                  expr::Variable ranged = expr::Variable::kK);

  bool empty() const { return gradients_.empty(); }
  /// Of a tensor with an element for each pair, which nobody adds to: it is written, and no other member knows of it.
  const std::optional<KeyElements>& rows() const { return rows_; }
  /// Where programs add; by the payload of kAddTo.
  const std::vector<GradientLayout>& layouts() const { return layouts_; }
  /// Names whose items one thread goes through in order.
  bool chains(ItemName name) const { return chained_[name]; }
  int64_t sums() const { return sums_; }  ///< float64 numbers of all copies

  /// Sets copies and outputs to 0. `thread` of `threads` does its share.
  void clear(const Buffers& buffers, double* sums, WorkQueue& pieces) const;
  int64_t pieces() const;
  void targets_of(const Buffers& buffers, double* sums, const ItemIndex& item,
                  std::array<GradientTarget, kMaxTermTensors>& targets) const;
  /// Writes the sums of the copies.
  void write(const Buffers& buffers, const double* sums, WorkQueue& pieces) const;

 private:
  struct Gradient {
    size_t tensor;
    std::array<bool, kItemNames> covered;
    bool direct = false;  ///< items add to the output itself
    int64_t copies = 1, size = 0, first = 0;
    std::array<int64_t, kMaxRank> extent{};
  };
  template <class Visit>
  void for_piece(const Gradient& gradient, int64_t piece, Visit&& visit) const;

  const AttentionProblem& p_;
  ItemIndex items_;
  std::vector<Gradient> gradients_;
  std::vector<GradientLayout> layouts_;
  std::optional<KeyElements> rows_;
  std::array<bool, kItemNames> chained_{};
  int64_t sums_ = 0;
};

/// The work items as a queue hands them out: those of a chain together.
class ItemChains {
 public:
  ItemChains(const ItemIndex& items, const TensorGradients& gradients) : queued_(items) {
    for (const ItemName name : {kItemBatch, kItemHead, kItemRange}) {
      if (gradients.chains(name)) std::swap(queued_[name], chained_[name]);
    }
  }

  int64_t count() const { return queued_[0] * queued_[1] * queued_[2]; }
  /// Calls run(item) for the items of chain x, in order. Early ranges come first: under a causal mask most queries see
  /// early keys.
  template <class Visit>
  void visit(int64_t x, const Visit& run) const {
    const int64_t groups = queued_[kItemBatch] * queued_[kItemHead];
    const ItemIndex first = {x % groups / queued_[kItemHead], x % queued_[kItemHead], x / groups};
    for (int64_t b = first[0]; b < first[0] + chained_[0]; ++b) {
      for (int64_t h = first[1]; h < first[1] + chained_[1]; ++h) {
        for (int64_t range = first[2]; range < first[2] + chained_[2]; ++range) run(ItemIndex{b, h, range});
      }
    }
  }

 private:
  ItemIndex queued_, chained_ = {1, 1, 1};
};

}  // namespace fovea::cpu
