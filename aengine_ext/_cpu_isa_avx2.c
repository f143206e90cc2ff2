/* AVX2 with FMA and F16C (Haswell, Zen and later). */
#include "_cpu_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#include "_cpu_avx2_macros.inc.h"
#define BYTES_SIGNED 1
#define ISA_DOT_BLOCK "_cpu_dot_avx2.inc.h"
#include "_cpu_template.inc.h"

const struct cpu_kernels *cpu_kernels_avx2(void)
{
    static const struct cpu_kernels table = KERNEL_TABLE("avx2");
    int there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    return there ? &table : NULL;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
const struct cpu_kernels *cpu_kernels_avx2(void) { return NULL; }
#endif
