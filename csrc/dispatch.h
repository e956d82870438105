// Run-time choice of the instruction set: kernels.inc is compiled once for each level of Isa, so that one binary serves
// every CPU.
#pragma once

#if defined(__x86_64__)
#define TPGRPO_X86 1
#include <immintrin.h>
#endif

#define TPGRPO_INLINE inline __attribute__((always_inline))

// TPGRPO_TARGET_BEGIN(features) ... TPGRPO_TARGET_END: functions in between may use these CPU features.
#define TPGRPO_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TPGRPO_TARGET_BEGIN(features) \
  TPGRPO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TPGRPO_TARGET_END _Pragma("clang attribute pop")
#else
#define TPGRPO_TARGET_BEGIN(features) _Pragma("GCC push_options") TPGRPO_PRAGMA(GCC target(features))
#define TPGRPO_TARGET_END _Pragma("GCC pop_options")
#endif

namespace tpgrpo {

// Each level includes the ones before it.
enum Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

inline Isa best_isa() {
#if defined(TPGRPO_X86)
  __builtin_cpu_init();
  // Every CPU with AVX2 has F16C, which older compilers cannot ask for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return kAvx512;
  if (avx2) return kAvx2;
#endif
  return kBaseline;
}

}  // namespace tpgrpo
