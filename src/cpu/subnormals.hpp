// Results that are subnormal take a hundred times as long as others, and steep terms of the score make many.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fovea::cpu {

/// While it lives, results below 2^-126 are 0, where the processor can be asked for that.
class WithoutSubnormals {
 public:
#if defined(__x86_64__)
  WithoutSubnormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | kFlushToZero);
  }
  ~WithoutSubnormals() {
    _mm_setcsr(before_);
  }
#else
  WithoutSubnormals() {}
  ~WithoutSubnormals() {}
#endif
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  unsigned before_;
#endif
};

}  // namespace fovea::cpu
