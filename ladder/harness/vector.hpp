// What rungs with vectors need around Highway: which instruction sets it compiles them for (to be included
// before its foreach_target.h), and which of these this processor runs. Highway's headers suffice so, its
// library is not linked.
#pragma once

// Targets that add nothing here over their neighbours are left out.
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
