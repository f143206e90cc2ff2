/* AArch64 with the dot-product extension (Cortex-A76, Neoverse N1, Apple M1 and later). */
#include "_cpu_kernels.h"

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define VL 4
#define INT_TOKENS 4
#define BYTES_SIGNED 1
#define EXACT_GROUPS 1
#define EXACT_TOKENS 6
#define FEW_GROUPS 2
#define SCORE_QUERIES 4
#define VALUE_QUERIES 4
#define VALUE_VECTORS 4
#define vf_fma(a, b, c) ((vf)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define vf_max(a, b) ((vf)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define vf_half(p)                                                                                 \
    ((vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(const void *)(p)))))
#define vf_store_half(p, v)                                                                        \
    vst1_u16((p), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(v))))
#define ISA_DOT_BLOCK "_cpu_dot_neon.inc.h"
#include "_cpu_template.inc.h"

const struct cpu_kernels *cpu_kernels_neon(void)
{
    static const struct cpu_kernels table = KERNEL_TABLE("neon");
    return getauxval(AT_HWCAP) & (1ul << 20) ? &table : NULL; /* HWCAP_ASIMDDP */
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
const struct cpu_kernels *cpu_kernels_neon(void) { return NULL; }
#endif
