// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/dtype.hpp"
#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::wgmma_commit();
}
template <int kPending>
inline void wgmma_wait() {
  emulation::wgmma_wait(kPending);
}
template <int kRegs>
inline void wgmma_done(float (&)[kRegs]) {}

enum class WgmmaStart : bool { kZero, kAccumulate };
enum class WgmmaMajor : int { kK = 0, kMN = 1 };

template <class T>
constexpr emulation::WgmmaElement element_of() {
  if constexpr (std::is_same_v<T, E4M3>) {
    return emulation::WgmmaElement::kE4M3;
  } else {
    return std::is_same_v<T, __half> ? emulation::WgmmaElement::kF16 : emulation::WgmmaElement::kBF16;
  }
}

template <int kN>
struct Wgmma {
  template <class T, WgmmaStart kStart, WgmmaMajor kMajorB>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b) {
    emulation::wgmma({d, nullptr, a, b, kN, kStart == WgmmaStart::kAccumulate, kMajorB == WgmmaMajor::kMN,
                      element_of<T>()});
  }
  template <class T, WgmmaStart kStart, WgmmaMajor kMajorB>
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
    emulation::wgmma(
        {d, a, 0, b, kN, kStart == WgmmaStart::kAccumulate, kMajorB == WgmmaMajor::kMN, element_of<T>()});
  }
};

}  // namespace fovea::cuda::ptx
