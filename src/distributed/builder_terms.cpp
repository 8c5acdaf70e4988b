// The part of Builder for terms that depend on positions: which part of the problem a call has, and gradients of their tensors.
//
// Each call gives the gradient of its part of a tensor, which is added to a whole one of the rank's. Each rank sums a share of the
// elements of all ranks, in a fixed order, and all get the sums.
#include <algorithm>

#include "distributed/builder.hpp"

namespace fovea::distributed {
namespace {

constexpr int64_t kBytes = sizeof(float);

/// Elements of float32 side by side, as rows of one element.
Operand elements_at(int64_t offset) {
  return {{-1, offset, 0, kBytes, kBytes}, kFloat32, true};
}

/// Sizes or strides of a tensor as those of four dimensions.
std::array<int64_t, kMaxRank> four(const std::array<int64_t, kMaxRank>& given, int ndim, int64_t in_front) {
  std::array<int64_t, kMaxRank> made;
  made.fill(in_front);
  std::copy_n(given.begin(), ndim, made.end() - ndim);
  return made;
}

/// Elements of a tensor in memory.
struct Array {
  View base;
  std::array<int64_t, kMaxRank> strides{};  ///< in elements
  fovea_dtype type{};

  bool is_contiguous() const { return strides[kMaxRank - 1] == 1; }
  /// Its dimensions from `first` on as those of a box.
  View view(size_t first, int64_t index) const {
    const int64_t bytes = type.bits / 8;
    View view = base;
    if (first > 0) view.offset += index * strides[0] * bytes;
    view.stride_batch = strides[first] * bytes;
    view.stride_row = strides[first + 1] * bytes;
    view.stride_head = strides[first + 2] * bytes;
    return view;
  }
};

/// Moves a tensor of these sizes, in one box where elements lie side by side on both sides.
MoveBoxes move_of(const TensorPart& sizes, const Array& from, const Array& to, bool add) {
  MoveBoxes step{{{from.type, to.type, add}, -1, {}}};
  if (sizes.elements() == 0) return step;
  const auto size = four(sizes.shape, sizes.ndim, 1);
  if (size[3] == 1 || (from.is_contiguous() && to.is_contiguous())) {
    step.move.boxes.push_back({from.view(0, 0), to.view(0, 0), size[0], size[1], size[2], size[3]});
    return step;
  }
  for (int64_t i = 0; i < size[0]; ++i)
    step.move.boxes.push_back({from.view(1, i), to.view(1, i), size[1], size[2], size[3], 1});
  return step;
}

}  // namespace

std::optional<PartOfProblem> Builder::part_of(const Call& call, const Stage& stage) const {
  if (!p_.terms) return std::nullopt;
  PartOfProblem part;
  part.batch = p_.shape.sequences.size() > 1 ? Range{call.sequence, call.sequence + call.sequences()}
                                             : Range{0, p_.shape.batch};
  part.heads_q = stage.heads_q;
  part.heads_kv = stage.heads_kv;
  part.queries = {call.first_q, call.first_q + call.longest_q};
  part.keys = {call.first_k, call.first_k + call.longest_k};
  part.is_cut = call.is_cut();
  part.whole_q = call.whole_q;
  part.whole_k = call.whole_k;
  return part;
}

void Builder::add_terms(const PartOfProblem& part, Operands& operands) const {
  for (const TermTensor& tensor : p_.terms->of(part).tensors) {
    const TensorPart made = tensor.part(part);
    View view;
    view.place = tensor.callers;
    view.offset = made.offset;
    operands[tensor.calls] = {view, made.type, true};
  }
  for (const TermGradient& gradient : term_gradients_) operands[gradient.tensor->calls] = gradient.part;
}

void Builder::make_term_gradients() {
  if (!p_.terms) return;
  for (const TermTensor& tensor : p_.terms->gradients) {
    TermGradient made;
    made.tensor = &tensor;
    int64_t largest = 0;
    for (const Stage& stage : stages_) {
      for (const Call& call : stage.calls)
        largest = std::max(largest, tensor.part(*part_of(call, stage)).elements());
    }
    made.part = elements_at(take(largest * kBytes));
    made.elements = tensor.all().elements();
    made.sum = elements_at(take(made.elements * kBytes));
    fill(made.sum, made.elements, 0);
    term_gradients_.push_back(made);
  }
}

/// Adds what a call has given to the sums of the rank.
void Builder::sum_term_gradients(const PartOfProblem& of) {
  if (p_.shape.batch == 0 || of.heads_kv.empty()) return;
  for (const TermGradient& gradient : term_gradients_) {
    const TensorPart part = gradient.tensor->compact().part(of);
    View to = gradient.sum.view;
    to.offset += part.offset;
    const Array given{gradient.part.view, four(part.compact_strides(), part.ndim, 0), kFloat32};
    MoveBoxes step = move_of(part, given, {to, four(part.strides, part.ndim, 0), kFloat32}, true);
    if (!step.move.boxes.empty()) add(std::move(step));
  }
}

/// The sums of all ranks, as the caller has the tensors.
void Builder::finish_term_gradients() {
  const int64_t ranks = p_.shape.ranks;
  std::vector<Flow> to_shares, from_shares;
  for (const TermGradient& gradient : term_gradients_) {
    if (ranks == 1) break;
    std::vector<Side> everywhere, shares;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      everywhere.push_back({{{{0, gradient.elements}, 0}}, {0, 1}});
      shares.push_back(
          {{{{gradient.elements * rank / ranks, gradient.elements * (rank + 1) / ranks}, 0}}, {0, 1}});
    }
    const int64_t own = count(shares[static_cast<size_t>(rank_)].rows);
    const Operand share = elements_at(take(own * kBytes));
    fill(share, own, 0);
    to_shares.push_back(flow(everywhere, shares, gradient.sum, share, 1));
    to_shares.back().arrival.add = true;
    from_shares.push_back(flow(shares, everywhere, share, gradient.sum, 1));
    to_shares.back().batch = from_shares.back().batch = 1;
  }
  if (!to_shares.empty()) {
    exchange_now(std::move(to_shares));
    exchange_now(std::move(from_shares));
  }
  for (const TermGradient& gradient : term_gradients_) {
    const TermTensor& tensor = *gradient.tensor;
    const TensorPart whole = tensor.all();
    View to;
    to.place = tensor.callers;
    const Array sum{gradient.sum.view, four(whole.compact_strides(), whole.ndim, 0), kFloat32};
    MoveBoxes step = move_of(whole, sum, {to, four(whole.strides, whole.ndim, 0), whole.type}, false);
    if (!step.move.boxes.empty()) add(std::move(step));
  }
}

}  // namespace fovea::distributed
