// The window by its ends, `sees` by interval arithmetic over the values that a block reads.
#include "plan/seen_blocks.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "core/status.hpp"
#include "cpu/expression.hpp"
#include "cpu/sequence.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::plan {
namespace {

using expr::Seen;

/// Data pointers of the problem that the host can read.
Buffers data_on_the_host(const AttentionProblem& p) {
  Buffers known;
  for (size_t i = 0; i < kPlaceCount; ++i) {
    if (p.at(i).present && p.at(i).device == DeviceType::kCpu) known.data[i] = p.at(i).data;
  }
  return known;
}

/// Least and greatest values of boxes of elements, which it reads one by one.
class ValueRanges final : public expr::TensorRanges {
 public:
  ValueRanges(const AttentionProblem& p, const Buffers& known)
      : problem_(p), known_(known), elements_(p, known) {}

  std::optional<expr::Range> range(size_t tensor, std::span<const expr::IntRange> box) const override {
    if (known_.of(problem_.named[tensor]) == nullptr) return std::nullopt;
    const TensorDesc& t = problem_.named[tensor].tensor;
    Found found;
    std::array<int64_t, expr::kMaxRank> first{}, last{}, index{};
    for (size_t d = 0; d < box.size(); ++d) {
      first[d] = std::max<int64_t>(box[d].lowest, 0);
      last[d] = std::min(box[d].highest, t.shape[d] - 1);
      found.outside = found.outside || first[d] != box[d].lowest || last[d] != box[d].highest;
      if (t.stride[d] == 0) last[d] = std::min(last[d], first[d]);  // all of them are one element
    }
    read(tensor, box.size(), 0, first, last, index, found);
    const bool is_float = expr::is_float(t.dtype);
    expr::Range range =
        is_float ? expr::Range::of_float(found.lowest, found.highest, found.nan) : expr::Range::of_int(0, -1);
    if (!is_float && found.lowest <= found.highest)
      range.integer = {static_cast<int64_t>(found.lowest), static_cast<int64_t>(found.highest)};
    range.invalid = found.outside;
    return range;
  }

 private:
  struct Found {
    double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
    bool nan = false, outside = false;
  };
  using Index = std::array<int64_t, expr::kMaxRank>;

  void read(size_t tensor, size_t rank, size_t dimension, const Index& first, const Index& last, Index& index,
            Found& found) const {
    if (dimension == rank) {
      const auto value = elements_.read(tensor, {index.data(), rank});
      if (!value) return;
      found.nan = found.nan || std::isnan(*value);
      found.lowest = std::fmin(found.lowest, *value);
      found.highest = std::fmax(found.highest, *value);
      return;
    }
    for (int64_t i = first[dimension]; i <= last[dimension]; ++i) {
      index[dimension] = i;
      read(tensor, rank, dimension + 1, first, last, index, found);
    }
  }

  const AttentionProblem& problem_;
  const Buffers& known_;
  cpu::NamedElements elements_;
};

Seen seen_in_window(const tile::Window& w, const expr::Block& block) {
  const tile::Range any = w.keys_of_any(block.q0, block.q1), all = w.keys_of_all(block.q0, block.q1);
  if (std::max(any.begin, block.k0) >= std::min(any.end, block.k1)) return Seen::kNone;
  return all.begin <= block.k0 && block.k1 <= all.end ? Seen::kAll : Seen::kSome;
}

Seen both(Seen a, Seen b) {
  if (a == Seen::kNone || b == Seen::kNone) return Seen::kNone;
  return a == Seen::kAll && b == Seen::kAll ? Seen::kAll : Seen::kSome;
}

void check_index(const char* name, int64_t index, int64_t count, const char* what) {
  if (index >= 0 && index < count) return;
  throw_invalid(name, std::to_string(index), "0 to " + std::to_string(count - 1),
                "the problem has " + std::to_string(count) + " " + what);
}

void check_grid(const AttentionProblem& p, const BlockGrid& grid, size_t size) {
  check_index("batch", grid.batch, p.batch, "sequences");
  check_index("head", grid.head, p.heads_q, "query heads");
  for (const auto& [name, value] : {std::pair{"block_q", grid.block_q}, std::pair{"block_k", grid.block_k}}) {
    if (value < 1) throw_invalid(name, std::to_string(value), "1 or more", "128 is usual");
  }
  const int64_t blocks = grid.rows(p) * grid.columns(p);
  if (static_cast<int64_t>(size) == blocks) return;
  throw_invalid("size", std::to_string(size),
                std::to_string(grid.rows(p)) + " rows of " + std::to_string(grid.columns(p)) + " blocks, " +
                    std::to_string(blocks),
                "allocate as many bytes");
}

}  // namespace

void find_seen_blocks(const AttentionProblem& p, const BlockGrid& grid, std::span<Seen> seen) {
  check_grid(p, grid, seen.size());
  const Buffers known = data_on_the_host(p);
  if ((p.packed && !known.get<void>(Role::kCuSeqlensQ)) ||
      (p.packed_k && !known.get<void>(Role::kCuSeqlensK))) {
    throw_invalid("cu_seqlens_q", "no data on the CPU", "where the sequences start",
                  "give cu_seqlens_q and cu_seqlens_k with data");
  }
  const tile::Window window = cpu::window_of(p, cpu::sequence_span(p, known, grid.batch));
  const ValueRanges values(p, known);
  std::optional<expr::BlockAnalysis> analysis;
  if (p.expressions && p.expressions->sees) analysis.emplace(*p.expressions->sees, &values);
  expr::Block block{.b = grid.batch,
                    .h = grid.head,
                    .hk = grid.head / p.group(),
                    .nq = window.seqlen_q,
                    .nk = window.seqlen_k};
  auto out = seen.begin();
  for (int64_t row = 0; row < grid.rows(p); ++row) {
    block.q0 = row * grid.block_q;
    block.q1 = std::min(block.q0 + grid.block_q, window.seqlen_q);
    for (int64_t column = 0; column < grid.columns(p); ++column, ++out) {
      block.k0 = column * grid.block_k;
      block.k1 = std::min(block.k0 + grid.block_k, window.seqlen_k);
      *out = Seen::kNone;
      if (block.q0 >= block.q1 || block.k0 >= block.k1) continue;
      *out = seen_in_window(window, block);
      if (analysis && *out != Seen::kNone) *out = both(*out, analysis->seen(block));
    }
  }
}

}  // namespace fovea::plan
