// Random numbers that are the same on every machine.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fovea::verify {

/// The same numbers on every platform (the distributions of <random> are not).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  /// SplitMix64 (Steele, Lea, Flood 2014).
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }
  /// Nearly normal, of variance 1: the sum of four uniform numbers.
  double normal() {
    const uint64_t x = bits();
    const uint64_t sum = (x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48);
    return (static_cast<double>(sum) * 0x1p-16 - 2.0) * 1.7320508075688772;
  }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  uint64_t state_;
};

}  // namespace fovea::verify
