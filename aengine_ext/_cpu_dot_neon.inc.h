INLINE vi dot_block(vi acc, const vu w[8], const int8_t *a, int first, int last, int four_bits)
{
    (void)four_bits;
#pragma GCC unroll 8
    for (int j = first; j < last; j++) {
        int32_t four;
        memcpy(&four, a + 4 * j, 4);
        acc = (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w[j], vreinterpretq_s8_s32(vdupq_n_s32(four)));
    }
    return acc;
}
