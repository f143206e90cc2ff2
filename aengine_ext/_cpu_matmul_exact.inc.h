/* Matrix product of packed weights and float32 activations.
 *
 * A few groups of rows are turned into floats (they stay in the cache nearest to the core) and
 * multiplied with all tokens. Each output is one chain of fused multiply-adds in column order,
 * whatever the tile. The including file defines EXACT_GROUPS x EXACT_TOKENS, the tile for many
 * tokens, and FEW_GROUPS, groups side by side for up to four tokens, whose chains hide each
 * other's latency.
 */

INLINE void exact_tile(int groups, int tokens, const struct cpu_matrix *m, int64_t g,
                       const float *const w[], const struct cpu_input *in, int64_t t0,
                       const struct cpu_output *out)
{
    vf acc[EXACT_TOKENS > 4 ? EXACT_TOKENS : 4][FEW_GROUPS * GV];
    const float *x = in->x + t0 * in->stride;
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < groups * GV; i++)
            acc[t][i] = vf_set1(0.0f);
    for (int64_t k = 0; k < m->cols; k++) {
        vf column[FEW_GROUPS * GV];
#pragma GCC unroll 32
        for (int i = 0; i < groups * GV; i++)
            column[i] = vf_load(w[i / GV] + k * CPU_GROUP + i % GV * VL);
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) {
            vf value = vf_set1(x[t * in->stride + k]);
#pragma GCC unroll 32
            for (int i = 0; i < groups * GV; i++)
                acc[t][i] = vf_fma(column[i], value, acc[t][i]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < groups * GV; i++)
            put_rows(out, m->rows, (g + i / GV) * CPU_GROUP + i % GV * VL, t0 + t, acc[t][i]);
}

INLINE void exact_tokens(int groups, int most, const struct cpu_matrix *m, int64_t g,
                         const float *const w[], const struct cpu_input *in, int64_t tokens,
                         const struct cpu_output *out)
{
    int64_t t = 0;
    for (; t + most <= tokens; t += most)
        exact_tile(groups, most, m, g, w, in, t, out);
    if (most > 4)
        for (; t + 4 <= tokens; t += 4)
            exact_tile(groups, 4, m, g, w, in, t, out);
    if (most > 2)
        for (; t + 2 <= tokens; t += 2)
            exact_tile(groups, 2, m, g, w, in, t, out);
    for (; t < tokens; t++)
        exact_tile(groups, 1, m, g, w, in, t, out);
}

INLINE void dequantise_group(struct kind kind, const struct cpu_matrix *m, const uint8_t *group,
                             float *out)
{
    for (int64_t b = 0; b < m->blocks; b++) {
        fetch_ahead(kind, m, group, b);
        dequantise_block(kind, m, group, b, out + b * CPU_BLOCK * CPU_GROUP);
    }
}

INLINE void widen_group(const struct cpu_matrix *m, const uint8_t *values, float *out)
{
    for (int64_t i = 0; i < m->cols * CPU_GROUP; i += VL)
        vf_store(out + i, m->store == STORE_F16 ? vf_half(values + i * 2)
                                                : vf_bfloat(values + i * 2));
}

/* The group as floats [cols, 16]: in place if it is stored so, else in `scratch`. */
static const float *group_floats(const struct cpu_matrix *m, int64_t g, float *scratch)
{
    const uint8_t *group = m->data + (size_t)g * m->group_bytes;
#define DEQUANTISE(kind) dequantise_group(kind, m, group, scratch)
    if (m->store == STORE_F32)
        return (const float *)(group + m->value_offset);
    if (cpu_is_int(m))
        FOR_INT_KIND(m, DEQUANTISE);
    else
        widen_group(m, group + m->value_offset, scratch);
#undef DEQUANTISE
    return scratch;
}

static void matmul_exact(const struct cpu_matrix *m, int64_t first, int64_t last,
                         const struct cpu_input *in, int64_t tokens,
                         const struct cpu_output *out, float *scratch)
{
    int side = tokens <= 4 ? FEW_GROUPS : EXACT_GROUPS;
    for (int64_t g = first; g < last;) {
        const float *w[4];
        int count = last - g < side ? 1 : side;
        for (int i = 0; i < count; i++)
            w[i] = group_floats(m, g + i, scratch + i * m->cols * CPU_GROUP);
        if (count == 1)
            exact_tokens(1, EXACT_TOKENS, m, g, w, in, tokens, out);
        else if (tokens <= 4)
            exact_tokens(FEW_GROUPS, 4, m, g, w, in, tokens, out);
        else
            exact_tokens(EXACT_GROUPS, EXACT_TOKENS, m, g, w, in, tokens, out);
        g += count;
    }
}

static void matmul(const struct cpu_matrix *m, int64_t first, int64_t last,
                   const struct cpu_input *in, int64_t tokens, const struct cpu_output *out,
                   float *scratch)
{
    if (m->int8)
        matmul_int(m, first, last, in, tokens, out);
    else
        matmul_exact(m, first, last, in, tokens, out, scratch);
}
