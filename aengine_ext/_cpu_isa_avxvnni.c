/* AVX2 with the VEX-coded byte dot product (Alder Lake, Zen 5 and later). */
#include "_cpu_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))

#include <cpuid.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#include <immintrin.h>

#include "_cpu_avx2_macros.inc.h"
#define BYTES_SIGNED 0
#define ISA_DOT_BLOCK "_cpu_dot_avxvnni.inc.h"
#include "_cpu_template.inc.h"

const struct cpu_kernels *cpu_kernels_avxvnni(void)
{
    static const struct cpu_kernels table = KERNEL_TABLE("avxvnni");
    unsigned a = 0, b, c, d;
    /* not every compiler knows this feature's name: leaf 7, sub-leaf 1, EAX bit 4 */
    int vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    return vnni && cpu_kernels_avx2() ? &table : NULL;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
const struct cpu_kernels *cpu_kernels_avxvnni(void) { return NULL; }
#endif
