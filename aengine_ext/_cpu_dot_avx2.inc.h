/* vpmaddubsw adds pairs of products in 16 bits. Eight of them with four-bit weights stay below
 * 8 * 2 * 15 * 127 = 30480; with signed bytes one does (2 * 128 * 127 = 32512), the sign of the
 * weight moved to the activation. */
INLINE vi dot_block(vi acc, const vu w[8], const int8_t *a, int first, int last, int four_bits)
{
    __m256i ones = _mm256_set1_epi16(1), sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = first; j < last; j++) {
        int32_t four;
        memcpy(&four, a + 4 * j, 4);
        __m256i x = _mm256_set1_epi32(four), weights = (__m256i)w[j];
        if (four_bits) {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
        } else {
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights),
                                                 _mm256_sign_epi8(x, weights));
            acc += (vi)_mm256_madd_epi16(pairs, ones);
        }
    }
    return four_bits ? acc + (vi)_mm256_madd_epi16(sum, ones) : acc;
}
