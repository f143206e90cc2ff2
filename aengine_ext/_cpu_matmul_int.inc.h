/* Matrix product of packed weights and 8-bit activations.
 *
 * The including file defines dot_block (below: its contract) and INT_TOKENS, the tokens computed
 * together from one unpacking of the weights. BYTES_SIGNED: its dot product wants weights of eight
 * bits as signed bytes; then the bias of 128 is taken off before instead of after.
 *
 * dot_block(acc, w, a, first, last, four_bits): acc + sum over j in first..last-1 of the products
 * of the four bytes of w[j] with a[4j .. 4j+3], lane by lane, without overflow.
 */

INLINE void put_rows(const struct cpu_output *o, int64_t rows, int64_t row, int64_t token, vf v)
{
    float *out = o->out + token * o->stride + row;
    if (row + VL <= rows) {
        if (o->bias)
            v += vf_load(o->bias + row);
        if (o->add)
            v = vf_load(out) + v;
        vf_store(out, v);
        return;
    }
    for (int i = 0; i < rows - row; i++) {
        float x = v[i];
        if (o->bias)
            x += o->bias[row + i];
        out[i] = o->add ? out[i] + x : x;
    }
}

INLINE void int_tile(struct kind kind, int tokens, const struct cpu_matrix *m, int64_t g,
                     const struct cpu_input *in, int64_t t0, const struct cpu_output *out)
{
    const uint8_t *group = m->data + (size_t)g * m->group_bytes;
    int flip = BYTES_SIGNED && kind.store == STORE_INT8 && !kind.has_min;
    int bias = flip ? 0 : kind_bias(kind);
    int64_t info_stride = in->stride / CPU_BLOCK;
    for (int v = 0; v < GV; v++) {
        vf acc[INT_TOKENS];
        for (int t = 0; t < tokens; t++)
            acc[t] = vf_set1(0.0f);
        for (int64_t b = 0; b < m->blocks; b++) {
            vu w[8];
            vf min = vf_set1(0.0f);
            if (v == 0 && t0 == 0)
                fetch_ahead(kind, m, group, b);
            load_bytes(kind, group + m->value_offset, b, v, w);
            if (flip)
                for (int j = 0; j < 8; j++)
                    w[j] ^= 0x80808080;
            if (kind.has_min)
                min = load_numbers(kind, group + m->min_offset, b, v);
#pragma GCC unroll 2
            for (int h = 0; h < kind.halves; h++) {
                vf scale = load_numbers(kind, group, b * kind.halves + h, v);
                int first = h * 4, last = kind.halves == 2 ? first + 4 : 8;
#pragma GCC unroll 16
                for (int t = 0; t < tokens; t++) {
                    const struct cpu_block_info *info = in->info + (t0 + t) * info_stride + b;
                    int64_t place = (t0 + t) * in->stride + b * CPU_BLOCK;
                    int32_t isum = kind.halves == 2 ? info->isum[h] : info->isum[0] + info->isum[1];
                    vi sum = dot_block(vi_set1(0), w, in->hi + place, first, last,
                                       kind.store == STORE_INT4);
                    if (__builtin_expect(info->fine, 0))
                        sum = dot_block(sum << 7, w, in->lo + place, first, last,
                                        kind.store == STORE_INT4);
                    if (bias)
                        sum -= vi_set1(bias * isum);
                    acc[t] = vf_fma(vf_from_int(sum), scale * vf_set1(info->scale), acc[t]);
                    if (kind.has_min)
                        acc[t] = vf_fma(min, vf_set1(info->sum), acc[t]);
                }
            }
        }
        for (int t = 0; t < tokens; t++)
            put_rows(out, m->rows, g * CPU_GROUP + v * VL, t0 + t, acc[t]);
    }
}

/* Tokens whose activations stay in the nearest cache while groups of weights go by. */
enum { NEAR_TOKENS = 24 };

INLINE void int_groups(struct kind kind, const struct cpu_matrix *m, int64_t first, int64_t last,
                       const struct cpu_input *in, int64_t tokens, const struct cpu_output *out)
{
    for (int64_t from = 0; from < tokens; from += NEAR_TOKENS) {
        int64_t end = from + NEAR_TOKENS < tokens ? from + NEAR_TOKENS : tokens;
        for (int64_t g = first; g < last; g++) {
            int64_t t = from;
            for (; t + INT_TOKENS <= end; t += INT_TOKENS)
                int_tile(kind, INT_TOKENS, m, g, in, t, out);
            if (INT_TOKENS > 4)
                for (; t + 4 <= end; t += 4)
                    int_tile(kind, 4, m, g, in, t, out);
            if (INT_TOKENS > 2)
                for (; t + 2 <= end; t += 2)
                    int_tile(kind, 2, m, g, in, t, out);
            for (; t < end; t++)
                int_tile(kind, 1, m, g, in, t, out);
        }
    }
}

static void matmul_int(const struct cpu_matrix *m, int64_t first, int64_t last,
                       const struct cpu_input *in, int64_t tokens, const struct cpu_output *out)
{
#define GROUPS(kind) int_groups(kind, m, first, last, in, tokens, out)
    FOR_INT_KIND(m, GROUPS);
#undef GROUPS
}
