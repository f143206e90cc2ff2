/* Vectors of VL lanes on top of the compiler's vector extension.
 *
 * The including file defines VL, and may define as macros what its instruction set does better:
 * vf_fma, vf_max, vf_half (16-bit floats to a vector), vf_store_half, vf_top, vi_sum, vi_store_i8.
 * Where it does not, the plain forms below apply. Contraction is off (-ffp-contract=off in pyproject.toml), so a fused multiply-add is used
 * exactly where vf_fma is written.
 */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vu vu_load(const void *p)
{
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vf vf_set1(float x) { return x - (vf){0}; }
INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
INLINE vf vf_from_int(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf vf_blend(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

#ifndef vf_fma
#define vf_fma(a, b, c) ((a) * (b) + (c))
#endif
#ifndef vf_max
INLINE vf vf_max(vf a, vf b) { return vf_blend(a > b, a, b); }
#endif

INLINE vf vf_abs(vf v) { return (vf)((vi)v & 0x7fffffff); }

/* To the nearest integer, for |v| < 2^22: adding 1.5 * 2^23 leaves it in the low mantissa bits. */
INLINE vi vf_round(vf v) { return (vi)(v + 12582912.0f) - 0x4b400000; }

#ifndef vi_store_i8
INLINE void vi_store_i8(int8_t *p, vi v)
{
    for (int i = 0; i < VL; i++)
        p[i] = (int8_t)v[i];
}
#endif

#ifndef vf_half
INLINE vf vf_half(const void *p)
{
    uint16_t h[VL];
    vu wide;
    memcpy(h, p, sizeof h);
    for (int i = 0; i < VL; i++)
        wide[i] = h[i];
    vu bits = (wide & 0x7fff) << 13;
    vf magnitude = (vf)bits * 0x1p112f; /* as cpu_half_to_float */
    magnitude = vf_blend((wide & 0x7c00) == 0x7c00, (vf)(bits | 0x7f800000), magnitude);
    return (vf)((vu)magnitude | (wide & 0x8000) << 16);
}
#endif

/* |v| <= 65504 or NaN */
#ifndef vf_store_half
INLINE void vf_store_half(uint16_t *p, vf v)
{
    vf size = vf_abs(v);
    vi bits = (vi)size;
    /* to the nearest even of the 10 bits that stay, and the exponent's bias moved */
    vi normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    /* below 2^-14 the last place is worth 2^-24, as in a float of [0.5, 1) */
    vi small = (vi)(size + 0.5f) - 0x3f000000;
    vi half = (vi)vf_blend(size < 0x1p-14f, (vf)small, (vf)normal);
    half = (vi)vf_blend(size != size, (vf)vi_set1(0x7e00), (vf)half) | ((vi)v >> 16 & 0x8000);
    for (int i = 0; i < VL; i++)
        p[i] = (uint16_t)half[i];
}
#endif

INLINE vf vf_bfloat(const void *p)
{
    uint16_t h[VL];
    vu wide = {0};
    memcpy(h, p, sizeof h);
    for (int i = 0; i < VL; i++)
        wide[i] = h[i];
    return (vf)(wide << 16);
}

INLINE float vf_sum(vf v)
{
    float lane[VL];
    memcpy(lane, &v, sizeof lane);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

#ifndef vi_sum
INLINE int32_t vi_sum(vi v)
{
    int32_t sum = 0;
    for (int i = 0; i < VL; i++)
        sum += v[i];
    return sum;
}
#endif

#ifndef vf_top
INLINE float vf_top(vf v)
{
    float lane[VL];
    memcpy(lane, &v, sizeof lane);
    for (int i = 1; i < VL; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}
#endif

/* e^x to about 1e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients).
 * Below -87 the result is 0, above 88 it is about 1.6e38. */
INLINE vf vf_exp(vf x)
{
    vi tiny = x < vf_set1(-87.0f);
    x = vf_blend(x > vf_set1(88.0f), vf_set1(88.0f), x);
    x = vf_blend(tiny, vf_set1(0.0f), x);
    vi n = vf_round(x * 1.44269504088896341f);
    vf nf = vf_from_int(n);
    vf r = vf_fma(nf, vf_set1(-0.693359375f), x);
    r = vf_fma(nf, vf_set1(2.12194440e-4f), r);
    vf y = vf_set1(1.9875691500e-4f);
    y = vf_fma(y, r, vf_set1(1.3981999507e-3f));
    y = vf_fma(y, r, vf_set1(8.3334519073e-3f));
    y = vf_fma(y, r, vf_set1(4.1665795894e-2f));
    y = vf_fma(y, r, vf_set1(1.6666665459e-1f));
    y = vf_fma(y, r, vf_set1(5.0000001201e-1f));
    y = vf_fma(y, r * r, r + 1.0f);
    y = (vf)((vi)y + (n << 23));
    return vf_blend(tiny, vf_set1(0.0f), y);
}
