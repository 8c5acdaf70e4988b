// Blocks of pairs, and the smallest and largest elements of tensors over them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/pair_programs.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {
namespace {

using expr::IntRange, expr::Range;

// A block of 192 queries or 128 keys has no more of a tensor that one of them indexes. Of a tensor of pairs each element
// counts for one pair, and finding its smallest costs what evaluating the pairs does.
constexpr int64_t kMostElements = 1024;

template <class T>
void widen(Range& range, T x) {
  range.integer = {std::min<int64_t>(range.integer.lowest, x), std::max<int64_t>(range.integer.highest, x)};
}
void widen(Range& range, float x) {
  if (std::isnan(x)) {
    range.number.nan = true;
    return;
  }
  range.number.lowest = std::min<double>(range.number.lowest, x);
  range.number.highest = std::max<double>(range.number.highest, x);
}
void widen(Range& range, F16 x) {
  widen(range, to_float(x));
}
void widen(Range& range, Bf16 x) {
  widen(range, to_float(x));
}

/// `count` elements side by side: a loop that compilers turn into vectors.
template <class T>
void widen_all(Range& range, const T* data, int64_t count) {
  if constexpr (std::is_integral_v<T>) {
    T lowest = data[0], highest = data[0];
    for (int64_t i = 1; i < count; ++i) {
      lowest = std::min(lowest, data[i]);
      highest = std::max(highest, data[i]);
    }
    widen(range, lowest);
    widen(range, highest);
  } else {
    for (int64_t i = 0; i < count; ++i) widen(range, data[i]);
  }
}

/// Elements at `data`, dimension after dimension.
template <class T>
void scan(const T* data, const TensorDesc& t, std::span<const IntRange> index, Range& range) {
  if (index.empty()) return widen(range, *data);
  const size_t d = static_cast<size_t>(t.ndim) - index.size();
  const int64_t last = t.stride[d] == 0 ? index[0].lowest : index[0].highest;
  if (index.size() == 1 && t.stride[d] == 1)
    return widen_all(range, data + index[0].lowest, last - index[0].lowest + 1);
  if (index.size() == 1) {
    for (int64_t i = index[0].lowest; i <= last; ++i) widen(range, data[i * t.stride[d]]);
    return;
  }
  for (int64_t i = index[0].lowest; i <= last; ++i) scan(data + i * t.stride[d], t, index.subspan(1), range);
}

void scan(const void* data, const TensorDesc& t, std::span<const IntRange> index, Range& range) {
  switch (t.dtype) {
    case DType::kF32:
      return scan(static_cast<const float*>(data), t, index, range);
    case DType::kF16:
      return scan(static_cast<const F16*>(data), t, index, range);
    case DType::kBF16:
      return scan(static_cast<const Bf16*>(data), t, index, range);
    case DType::kI32:
      return scan(static_cast<const int32_t*>(data), t, index, range);
    case DType::kU8:
    case DType::kBool:
      return scan(static_cast<const uint8_t*>(data), t, index, range);
    case DType::kF64:
    case DType::kI64:
    case DType::kE4M3:
      break;  // refused by validation
  }
}

Range any_element(DType type) {
  Range any;
  any.invalid = false;
  if (type == DType::kU8 || type == DType::kBool) any.integer = {0, 255};
  if (type == DType::kI32) {
    any.integer = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  }
  return any;
}

}  // namespace

std::optional<Range> SeenBlocks::Tensors::range(size_t tensor, std::span<const IntRange> index) const {
  const NamedTensor& named = problem_.named[tensor];
  const TensorDesc& t = named.tensor;
  std::array<IntRange, expr::kMaxRank> inside;
  bool outside = false;
  int64_t count = 1;
  for (size_t d = 0; d < index.size(); ++d) {
    inside[d] = {std::max<int64_t>(index[d].lowest, 0), std::min(index[d].highest, t.shape[d] - 1)};
    outside = outside || inside[d].lowest != index[d].lowest || inside[d].highest != index[d].highest;
    const int64_t size = t.stride[d] == 0 ? 1 : inside[d].highest - inside[d].lowest + 1;
    count = inside[d].empty() ? 0 : count > kMostElements ? count : count * std::min(size, kMostElements + 1);
  }
  Range range = any_element(t.dtype);
  range.invalid = outside;
  if (count > kMostElements) return range;
  constexpr double kHighest = std::numeric_limits<double>::infinity();
  range.integer = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  range.number = {kHighest, -kHighest, false};
  if (count > 0) scan(buffers_.of(named), t, {inside.data(), index.size()}, range);
  return range;
}

namespace {

/// A block in one number, 0 where it takes more.
uint64_t packed(const expr::Block& block) {
  const int64_t queries = block.q1 - block.q0, keys = block.k1 - block.k0;
  constexpr int64_t kMostStart = int64_t{1} << 23, kMostSize = 1 << 8;
  if (block.q0 >= kMostStart || block.k0 >= kMostStart || queries > kMostSize || keys > kMostSize) return 0;
  return static_cast<uint64_t>((block.q0 << 41 | block.k0 << 18 | (queries - 1) << 10 | (keys - 1) << 2) + 1);
}

}  // namespace

SeenBlocks::SeenBlocks(const AttentionProblem& problem, const Buffers& buffers, const PairPrograms& programs,
                       const Memory& memory)
    : group_(problem.group()), by_head_(programs.sees_by_head), tensors_(problem, buffers) {
  if (!problem.expressions || !problem.expressions->sees) return;
  analysis_.emplace(*problem.expressions->sees, &tensors_, memory.ranges);
  if (!by_head_ && !programs.sees_by_key_head) known_ = memory.known;
}

int64_t SeenBlocks::Memory::ranges_of(const AttentionProblem& problem) {
  if (!problem.expressions || !problem.expressions->sees) return 0;
  return static_cast<int64_t>(problem.expressions->sees->graph.size());
}

Seen SeenBlocks::computed(expr::Block block) {
  block.h = block.hk * group_;
  const Seen first = analysis_->seen(block);
  if (!by_head_ || first == Seen::kSome) return first;
  for (int64_t head = 1; head < group_; ++head) {
    ++block.h;
    if (analysis_->seen(block) != first) return Seen::kSome;
  }
  return first;
}

Seen SeenBlocks::of(const expr::Block& block) {
  if (!analysis_) return Seen::kAll;
  const uint64_t name = packed(block);
  if (known_.empty() || name == 0 || block.q0 >= block.q1 || block.k0 >= block.k1) return computed(block);
  if (block.b != batch_) {
    std::fill(known_.begin(), known_.end(), Known{});
    batch_ = block.b;
  }
  Known& known = known_[static_cast<size_t>(name * 0x9e3779b97f4a7c15u >> (64 - kKnownBits))];
  if (known.block != name) known = {name, computed(block)};
  return known.seen;
}

}  // namespace fovea::cpu
