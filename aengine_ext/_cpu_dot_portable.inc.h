INLINE vi dot_block(vi acc, const vu w[8], const int8_t *a, int first, int last, int four_bits)
{
    (void)four_bits;
    for (int j = first; j < last; j++)
        for (int b = 0; b < 4; b++)
            acc += (vi)((w[j] >> (8 * b)) & 0xff) * (int32_t)a[4 * j + b];
    return acc;
}
