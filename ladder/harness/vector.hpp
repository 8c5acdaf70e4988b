// The frame of rungs that use Highway: the instruction sets that it compiles them for (include this before its
// foreach_target.h), and the choice of one that this processor runs. Only Highway's headers are needed, not
// its library.
#pragma once

// Leaves out targets that bring nothing over their neighbours here.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)

namespace ladder {

#if defined(__x86_64__)
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace ladder

/// The best version of a function that this processor runs.
#if defined(__x86_64__)
#define LADDER_BEST(function)                      \
  (ladder::has_avx512() ? ladder::N_AVX3::function \
   : ladder::has_avx2() ? ladder::N_AVX2::function \
                        : HWY_STATIC_DISPATCH(function))
#else
#define LADDER_BEST(function) HWY_STATIC_DISPATCH(function)
#endif
