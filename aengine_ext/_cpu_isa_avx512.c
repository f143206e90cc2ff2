/* AVX-512 with VNNI (Ice Lake, Zen 4 and later): 16 lanes, byte dot products in one instruction. */
#include "_cpu_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c"))),             \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif
#include <immintrin.h>

#define VL 16
#define INT_TOKENS 8
#define BYTES_SIGNED 0
#define EXACT_GROUPS 2
#define EXACT_TOKENS 12
#define FEW_GROUPS 4
#define SCORE_QUERIES 8
#define VALUE_QUERIES 6
#define VALUE_VECTORS 4
#define vf_fma(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define vf_max(a, b) ((vf)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define vf_half(p) ((vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define vf_store_half(p, v)                                                                        \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT))
#define vf_top(v) _mm512_reduce_max_ps((__m512)(v))
#define vi_sum(v) _mm512_reduce_add_epi32((__m512i)(v))
#define vi_store_i8(p, v) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8((__m512i)(v)))
#define ISA_DOT_BLOCK "_cpu_dot_avx512.inc.h"
#include "_cpu_template.inc.h"

const struct cpu_kernels *cpu_kernels_avx512(void)
{
    static const struct cpu_kernels table = KERNEL_TABLE("avx512");
    int there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512vnni");
    return there ? &table : NULL;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
const struct cpu_kernels *cpu_kernels_avx512(void) { return NULL; }
#endif
