// Rows that will be read soon, fetched into the second-level cache a few lines at a time beside whatever is computed meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fovea::cpu {

/// Rows of `bytes`, more than none, that lie evenly, `stride` bytes apart: kGroupRows neighbours, or what is left of them.
struct RowGroup {
  const char* first;
  int64_t stride, bytes;

  const char* row(int64_t r) const { return first + r * stride; }
};
inline constexpr int64_t kGroupRows = 16;

inline constexpr int64_t kLineBytes = 64;  ///< bytes of a line of a cache

/// What will be read soon: `rows` rows of each `step`-th of groups [0, end_group), one of each in turn; and how far it has been fetched: in row
/// `row` of group `group` up to `at`. A last group that is not whole is fetched as if it were.
struct RowsAhead {
  const RowGroup* groups = nullptr;
  int64_t end_group = 0, step = 1, rows = 0;
  int64_t row = 0, group = 0;
  const char *at = nullptr, *end = nullptr;  ///< the same: at the beginning of that row
  int64_t lines = 0;  ///< that row_dots() and row_sums() fetch; tiles have a pace of their own
  int64_t due = 0;    ///< what they owe of the next line, in FetchShare's units
};

/// Fetches what is ahead, a line or two beside each row that is computed with: where many come at once they wait for the buffers that loads
/// need, too. A row of each group in turn: where rows of a head are side by side, groups lie in pages of their own, whose look-ups overlap then.
/// All of it is inlined at once: GCC drops calls of a function that only prefetches.
#define FOVEA_FETCH __attribute__((always_inline)) inline
class RowFetch {
 public:
  FOVEA_FETCH explicit RowFetch(RowsAhead& ahead)
      : ahead_(ahead), row_(ahead.row), group_(ahead.group), at_(ahead.at), end_(ahead.end) {
    if (at_ == end_) look();
  }
  FOVEA_FETCH ~RowFetch() {
    ahead_.row = row_;
    ahead_.group = group_;
    ahead_.at = at_;
    ahead_.end = end_;
  }
  RowFetch(const RowFetch&) = delete;
  RowFetch& operator=(const RowFetch&) = delete;

  FOVEA_FETCH bool more() const { return row_ < ahead_.rows; }
  /// The next lines of a row that has a multiple of so many.
  template <int64_t kLines>
  FOVEA_FETCH void lines() {
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(at_ + line * kLineBytes, 0, 2);
    at_ += kLines * kLineBytes;
    if (at_ >= end_) next_row();
  }
  /// The next `count` lines.
  FOVEA_FETCH void lines(int64_t count) {
    for (; count >= 4 && at_ + 4 * kLineBytes <= end_; count -= 4) lines<4>();
    for (; count >= 2 && at_ + 2 * kLineBytes <= end_; count -= 2) lines<2>();
    for (; count > 0; --count) lines<1>();
  }
  FOVEA_FETCH void rest() {
    while (more()) lines<1>();
  }

 private:
  FOVEA_FETCH void next_row() {
    if ((group_ += ahead_.step) >= ahead_.end_group) {
      group_ = 0;
      ++row_;
    }
    look();
  }
  FOVEA_FETCH void look() {
    // Behind the last row the same line comes again and again.
    at_ = reinterpret_cast<const char*>(&ahead_);
    end_ = at_ + kLineBytes;
    if (!more()) return;
    const RowGroup& group = ahead_.groups[group_];
    at_ = group.row(row_);
    end_ = at_ + group.bytes;
  }

  RowsAhead& ahead_;
  int64_t row_, group_;
  const char *at_, *end_;
};

/// A part of the lines that an operation is to fetch (RowsAhead::lines).
struct FetchShare {
  static constexpr int kFraction = 16;  // bits of a line behind the point

  RowsAhead& ahead;
  int64_t lines;  ///< in units of 2^-kFraction

  static FetchShare all(RowsAhead& ahead) { return {ahead, ahead.lines << kFraction}; }
  FetchShare part(int64_t parts) const { return {ahead, lines / std::max<int64_t>(parts, 1)}; }
};

/// Fetches a share of lines at each point. A loop that has points has one of its own, so that it stays in registers.
class PacedFetch {
 public:
  FOVEA_FETCH explicit PacedFetch(const FetchShare& of_point)
      : ahead_(of_point.ahead), fetch_(of_point.ahead), of_point_(of_point.lines), due_(of_point.ahead.due) {}
  FOVEA_FETCH ~PacedFetch() { ahead_.due = due_; }
  PacedFetch(const PacedFetch&) = delete;
  PacedFetch& operator=(const PacedFetch&) = delete;

  FOVEA_FETCH void point() {
    due_ += of_point_;
    fetch_.lines(due_ >> FetchShare::kFraction);
    due_ &= (int64_t{1} << FetchShare::kFraction) - 1;
  }

 private:
  RowsAhead& ahead_;
  RowFetch fetch_;
  int64_t of_point_, due_;
};
#undef FOVEA_FETCH

}  // namespace fovea::cpu
