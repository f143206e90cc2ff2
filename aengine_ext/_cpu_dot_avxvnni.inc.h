INLINE vi dot_block(vi acc, const vu w[8], const int8_t *a, int first, int last, int four_bits)
{
    (void)four_bits;
#pragma GCC unroll 8
    for (int j = first; j < last; j++) {
        int32_t four;
        memcpy(&four, a + 4 * j, 4);
        acc = (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w[j], _mm256_set1_epi32(four));
    }
    return acc;
}
