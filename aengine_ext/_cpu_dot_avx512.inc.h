INLINE vi dot_block(vi acc, const vu w[8], const int8_t *a, int first, int last, int four_bits)
{
    (void)four_bits;
#pragma GCC unroll 8
    for (int j = first; j < last; j++) {
        int32_t four;
        memcpy(&four, a + 4 * j, 4);
        acc = (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w[j], _mm512_set1_epi32(four));
    }
    return acc;
}

/* out[i * 16 + p] = rows[p][d + i]: three rounds of interleaving and one of 128-bit lanes. */
INLINE void transpose_tile(int half, const void *const rows[16], int d, float *out)
{
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = (__m512)kv_load(half, rows[i], d);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    /* a[4g + c]: column c of every 128-bit lane, of the rows 4g .. 4g+3 */
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512d x = (__m512d)b[4 * g + h], y = (__m512d)b[4 * g + 2 + h];
            a[4 * g + 2 * h] = (__m512)_mm512_unpacklo_pd(x, y);
            a[4 * g + 2 * h + 1] = (__m512)_mm512_unpackhi_pd(x, y);
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 even01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        __m512 odd01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        __m512 even23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        __m512 odd23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_ps(out + c * 16, _mm512_shuffle_f32x4(even01, even23, 0x88));
        _mm512_storeu_ps(out + (8 + c) * 16, _mm512_shuffle_f32x4(even01, even23, 0xdd));
        _mm512_storeu_ps(out + (4 + c) * 16, _mm512_shuffle_f32x4(odd01, odd23, 0x88));
        _mm512_storeu_ps(out + (12 + c) * 16, _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
    }
}
#define transpose_tile transpose_tile
