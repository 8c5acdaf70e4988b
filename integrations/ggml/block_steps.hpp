// A step of keys of one head, and lines of the next step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block_rows.hpp"

namespace fovea_ggml {

/// Keys of a step: K and V of 8 heads of 128 are 140 KB of Q8_0, and twice that with the next step's, in a second-level cache.
inline constexpr int64_t kStep = 64;
inline constexpr int64_t kMostBlocks = kMostBlockSize / kBlockElements;

/// Lines of the next step, in the order of memory, so many at each point.
class Ahead {
 public:
  /// `points` of a step that is as long as the next one.
  Ahead(const BlockAttention& a, int64_t points) : keys_of_all_(a.keys), points_(points) {
    for (const BlockRows* rows : {&a.k, &a.v}) {
      Part& part = parts_[rows == &a.v];
      part.row = rows->data;
      part.stride = rows->key_stride;
      part.bytes = (a.heads - 1) * rows->head_stride + rows->size / kBlockElements * block_bytes(rows->type);
      lines_ += part.bytes / kLine + 1;
    }
  }
  /// The step behind `key`, if there is one.
  void begin(int64_t key) {
    keys_ = std::min(kStep, keys_of_all_ - key);
    of_point_ = keys_ > 0 ? lines_ * keys_ / points_ + 1 : 0;
    part_ = 0;
    row_ = key;
    end_row_ = key + keys_;
    look();
  }
  __attribute__((always_inline)) void point() {
    for (int64_t i = 0; i < of_point_; ++i) {
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
      if (at_ >= end_) next();
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Part {
    const char* row;
    int64_t stride, bytes;
  };

  void next() {
    if (++row_ == end_row_) {
      row_ -= keys_;
      if (++part_ == 2) of_point_ = 0;
    }
    look();
  }
  void look() {
    if (of_point_ == 0) return;
    const Part& part = parts_[part_];
    const char* row = part.row + row_ * part.stride;
    at_ = row - reinterpret_cast<uintptr_t>(row) % kLine;
    end_ = row + part.bytes;
  }

  Part parts_[2];
  int64_t keys_of_all_, points_, lines_ = 0, keys_ = 0, row_ = 0, end_row_ = 0, of_point_ = 0;
  int part_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

/// What a head has of a step of n keys.
struct Step {
  const uint8_t* k;
  const uint8_t* v;
  int64_t n;
  /// Of K, then of V; zeros behind the last key. Leasts only where the format has them.
  alignas(64) float scales[kMostBlocks][kStep];
  alignas(64) float leasts[kMostBlocks][kStep];
  alignas(64) float scores[kMostBlockRows][kStep];
  float alpha[kMostBlockRows];
};

}  // namespace fovea_ggml
