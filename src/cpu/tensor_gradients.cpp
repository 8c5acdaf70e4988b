// The order in which gradients of named tensors are summed.
#include "cpu/tensor_gradients.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/scratch.hpp"
#include "expr/differentiate.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {
namespace {

// Of all copies of one tensor. The copies of dQ may take 1 GiB, and these are sums of many fewer terms as a rule.
constexpr int64_t kMostBytes = int64_t{256} << 20;
constexpr int64_t kPieceElements = 4096;

/// Whether every element that the score reads of the tensor has this name alone in the same dimension.
bool covers(const expr::Graph& graph, const std::vector<expr::ElementDerivative>& elements,
            const TensorDesc& gradient, std::initializer_list<expr::Variable> names) {
  for (size_t d = 0; d < static_cast<size_t>(gradient.ndim); ++d) {
    if (gradient.stride[d] == 0) continue;
    const bool all = std::all_of(elements.begin(), elements.end(), [&](const expr::ElementDerivative& e) {
      const auto name = expr::index_name(graph, graph[e.element], d);
      return name && std::find(names.begin(), names.end(), *name) != names.end();
    });
    if (all) return true;
  }
  return false;
}

/// Whether every query and key of the tensors takes part.
bool uses_whole_sequences(const AttentionProblem& p) {
  return !p.packed && !p.has(Role::kSeqUsedQ) && !p.has(Role::kSeqUsedK) && !p.has(Role::kLeftPadK);
}

/// Element `offset` of the gradient of a tensor.
void store_element(const Buffers& buffers, const NamedTensor& named, int64_t offset, float value) {
  void* output = buffers.gradient_of(named);
  switch (named.gradient.dtype) {
    case DType::kF16:
      static_cast<F16*>(output)[offset] = from_float<F16>(value);
      break;
    case DType::kBF16:
      static_cast<Bf16*>(output)[offset] = from_float<Bf16>(value);
      break;
    default:
      static_cast<float*>(output)[offset] = value;
  }
}

}  // namespace

TensorGradients::TensorGradients(const AttentionProblem& problem, const ItemIndex& items,
                                 expr::Variable ranged)
    : p_(problem), items_(items) {
  expr::Expression score;
  if (problem.expressions && problem.expressions->score) score = *problem.expressions->score;
  for (size_t i = 0; i < problem.named.size(); ++i) {
    const TensorDesc& t = problem.named[i].gradient;
    if (!t.present) continue;
    if (ranged == expr::Variable::kK && uses_whole_sequences(problem) && score.root != expr::kNoNode &&
        !rows_) {
      if ((rows_ = form_of_gradient(problem, score, i))) continue;
    }
    Gradient g{i, {}};
    g.size = 1;
    GradientLayout layout{i, t};
    for (size_t d = static_cast<size_t>(t.ndim); d-- > 0;) {
      g.extent[d] = t.stride[d] == 0 ? 1 : t.shape[d];
      layout.layout.stride[d] = t.stride[d] == 0 ? 0 : g.size;
      g.size *= g.extent[d];
    }
    std::vector<expr::ElementDerivative> elements;
    if (score.root != expr::kNoNode) elements = expr::differentiate_by_elements(score, i);
    using expr::Variable;
    g.covered = {
        covers(score.graph, elements, t, {Variable::kB}),
        covers(score.graph, elements, t, {Variable::kH}) || covers(score.graph, elements, t, {Variable::kHk}),
        covers(score.graph, elements, t, {ranged})};
    for (size_t name = 0; name < kItemNames; ++name) {
      if (!g.covered[name]) g.copies *= std::max<int64_t>(1, items[name]);
    }
    const bool by_pairs =
        covers(score.graph, elements, t, {Variable::kQ}) && covers(score.graph, elements, t, {Variable::kK});
    // What has as many elements as pairs takes few terms each: float32 is enough, and memory is what counts.
    // Those of 16 bits are rounded once, so each of them has to be that of one pair and head.
    const bool alone =
        elements.size() == 1 && (problem.heads_q == 1 || covers(score.graph, elements, t, {Variable::kH}));
    g.direct = elements.empty() || (by_pairs && g.copies == 1 && (t.dtype == DType::kF32 || alone));
    if (g.direct) {
      layout.layout = t;
      g.copies = 0;
    } else if (g.copies * g.size * 8 > kMostBytes) {
      g.copies = 1;
      for (size_t name = 0; name < kItemNames; ++name) chained_[name] = chained_[name] || !g.covered[name];
    }
    g.first = sums_;
    sums_ += round_up(g.copies * g.size, 8);
    gradients_.push_back(g);
    layouts_.push_back(layout);
  }
}

int64_t TensorGradients::pieces() const {
  int64_t count = 0;
  for (const Gradient& g : gradients_) count += ceil_div(g.size, kPieceElements);
  return count;
}

/// Calls visit(element, count, offset in the output, stride there) for the rows of the last dimension in one piece.
template <class Visit>
void TensorGradients::for_piece(const Gradient& g, int64_t piece, Visit&& visit) const {
  const TensorDesc& t = p_.named[g.tensor].gradient;
  const int64_t end = std::min(g.size, (piece + 1) * kPieceElements);
  const auto last = static_cast<size_t>(std::max(0, t.ndim - 1));
  for (int64_t element = piece * kPieceElements; element < end;) {
    int64_t rest = element, offset = 0;
    for (size_t d = static_cast<size_t>(t.ndim); d-- > 0;) {
      offset += rest % g.extent[d] * t.stride[d];
      rest /= g.extent[d];
    }
    // The rest of a row of the last dimension.
    const int64_t size = t.ndim == 0 ? 1 : g.extent[last], stride = t.ndim == 0 ? 0 : t.stride[last];
    const int64_t row_end = std::min(end, element - element % size + size);
    visit(element, row_end - element, offset, stride);
    element = row_end;
  }
}

void TensorGradients::clear(const Buffers& buffers, double* sums, WorkQueue& pieces) const {
  for (int64_t item; (item = pieces.next()) >= 0;) {
    for (const Gradient& g : gradients_) {
      const int64_t count = ceil_div(g.size, kPieceElements);
      if (item >= count) {
        item -= count;
        continue;
      }
      const NamedTensor& named = p_.named[g.tensor];
      for_piece(g, item, [&](int64_t element, int64_t n, int64_t offset, int64_t stride) {
        for (int64_t copy = 0; copy < g.copies; ++copy)
          std::fill_n(sums + g.first + copy * g.size + element, n, 0.0);
        if (stride == 1) {
          const int64_t bytes = size_of(named.gradient.dtype);
          std::memset(static_cast<char*>(buffers.gradient_of(named)) + offset * bytes, 0,
                      static_cast<size_t>(n * bytes));
        } else {
          for (int64_t i = 0; i < n; ++i) store_element(buffers, named, offset + i * stride, 0);
        }
      });
      break;
    }
  }
}

void TensorGradients::targets_of(const Buffers& buffers, double* sums, const ItemIndex& item,
                                 std::array<GradientTarget, kMaxTermTensors>& targets) const {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const Gradient& g = gradients_[i];
    if (g.direct) {
      targets[i] = {nullptr, buffers.gradient_of(p_.named[g.tensor]), p_.named[g.tensor].gradient.dtype};
      continue;
    }
    int64_t copy = 0;
    for (size_t name = 0; name < kItemNames && g.copies > 1; ++name) {
      if (!g.covered[name]) copy = copy * items_[name] + item[name];
    }
    targets[i] = {sums + g.first + copy * g.size, nullptr};
  }
}

void TensorGradients::write(const Buffers& buffers, const double* sums, WorkQueue& pieces) const {
  for (int64_t item; (item = pieces.next()) >= 0;) {
    for (const Gradient& g : gradients_) {
      const int64_t count = ceil_div(g.size, kPieceElements);
      if (item >= count) {
        item -= count;
        continue;
      }
      if (g.direct) break;
      for_piece(g, item, [&](int64_t element, int64_t n, int64_t offset, int64_t stride) {
        for (int64_t i = 0; i < n; ++i) {
          double sum = 0;
          for (int64_t copy = 0; copy < g.copies; ++copy) sum += sums[g.first + copy * g.size + element + i];
          store_element(buffers, p_.named[g.tensor], offset + i * stride, static_cast<float>(sum));
        }
      });
      break;
    }
  }
}

}  // namespace fovea::cpu
