// Hands out 64-byte aligned pieces of a workspace. With a null base it only adds up their sizes, so the same
// code computes the size of a workspace and its layout.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::cpu {

inline constexpr int64_t kAlignment = 64;  // a cache line, and a full AVX-512 register

constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t x, int64_t y) {
  return (x + y - 1) / y;
}

class Scratch {
 public:
  explicit Scratch(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace fovea::cpu
