// The keys of one query's list: those that its band leaves, a block at a time, and their rows side by side.
#pragma once

#include <algorithm>

#include "cpu/panel.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {

/// Whether the rows of one query take dot products along the head size: they are few, and their scores are products that
/// expressions alone change. A panel has room for 48 rows; dot products of a dozen take as long as it, unless they are of
/// bfloat16 pairs. A program has registers for four rows.
inline bool takes_rows(const AttentionProblem& p, const Staging& s) {
  constexpr int64_t kFewRows = 4, kSomeRows = 12;
  const bool scales = p.expressions && p.expressions->score;
  const int64_t most = p.expressions || s.ops->word_elements > 1 ? kFewRows : kSomeRows;
  return p.group() <= most && (p.scale > 0 || scales) && p.dropout == 0;
}

/// Hands out the entries of a list that a query sees, in their order.
class ListReader {
 public:
  ListReader(const Group& group, int64_t query) : seen_(group.window.keys_of(query)) {
    const AttentionProblem& p = *group.problem;
    const auto* lists = group.buffers->get<const int32_t>(Role::kKeys);
    if (lists == nullptr) return;  // lists without entries have no memory
    const auto& stride = p[Role::kKeys].stride;
    next_ =
        lists + group.batch * stride[0] + group.head_kv * stride[1] + (group.span.row_q + query) * stride[2];
    end_ = next_ + p.list_size;
  }

  /// Writes up to `most` positions, and returns how many: 0 behind the last.
  int64_t read(int32_t* positions, int64_t most) {
    int64_t n = 0;
    for (; next_ != end_ && n < most; ++next_) {
      positions[n] = *next_;
      n += static_cast<int64_t>(seen_.contains(*next_));
    }
    return n;
  }

 private:
  tile::Range seen_;
  const int32_t *next_ = nullptr, *end_ = nullptr;
};

/// Copies rows of `size` elements from the positions given to `to`, side by side, as elements of `row_type`.
inline MatrixView gather_rows(const Staging& s, const KeyRows& rows, int64_t size, const int32_t* positions,
                              int64_t n, char* to) {
  // Rows of a list lie anywhere, so that no hardware prefetcher finds them.
  constexpr int64_t kAhead = 8, kLine = 64;
  const int64_t bytes = size * size_of(s.row_type), row_bytes = size * size_of(rows.type());
  const auto fetch = [&](int64_t j) {
    const char* row = rows.row(positions[j]);
    for (int64_t byte = 0; byte < row_bytes; byte += kLine) __builtin_prefetch(row + byte);
  };
  for (int64_t j = 0; j < std::min(kAhead, n); ++j) fetch(j);
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) fetch(j + kAhead);
    s.copy_row(rows.row(positions[j]), rows.type(), size, to + j * bytes);
  }
  return {to, size};
}

}  // namespace fovea::cpu
