/* Softmax attention of a few queries over one chunk of a paged context, and the merge of chunks.
 *
 * The context is always cut at the same positions (multiples of CPU_KV_CHUNK) and its parts are
 * merged in order, so that one query's result does not depend on who computed which part. (The
 * online softmax of Milakov and Gimelshein, split as in flash-decoding.)
 */

/* Keys of 16 positions, transposed: out[d * 16 + position]. `out` has room for as much again. */
INLINE void transpose_keys(int half, const void *const rows[16], int head_dim, float *out)
{
#ifdef transpose_tile
    for (int d = 0; d < head_dim; d += CPU_GROUP)
        transpose_tile(half, rows, d, out + d * CPU_GROUP);
#else
    float *wide = out + head_dim * CPU_GROUP;
    for (int p = 0; half && p < CPU_GROUP; p++)
        for (int d = 0; d < head_dim; d += VL)
            vf_store(wide + p * head_dim + d, kv_load(half, rows[p], d));
    for (int d = 0; d < head_dim; d++)
        for (int p = 0; p < CPU_GROUP; p++)
            out[d * CPU_GROUP + p] =
                half ? wide[p * head_dim + d] : ((const float *)rows[p])[d];
#endif
}

INLINE void score_tile(int queries, const float *const *q, const float *keys, int head_dim,
                       float scale, float *scores)
{
    vf acc[SCORE_QUERIES][GV];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < GV; v++)
            acc[i][v] = vf_set1(0.0f);
    for (int d = 0; d < head_dim; d++) {
#pragma GCC unroll 16
        for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
            for (int v = 0; v < GV; v++)
                acc[i][v] = vf_fma(vf_load(keys + d * CPU_GROUP + v * VL), vf_set1(q[i][d]),
                                   acc[i][v]);
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < GV; v++)
            vf_store(scores + i * CPU_KV_CHUNK + v * VL, acc[i][v] * scale);
}

/* Scores become weights e^(score - max); what lies beyond `seen` weighs nothing. */
INLINE void weigh(float *scores, int64_t seen, float *max_out, float *sum_out)
{
    int64_t padded = (seen + VL - 1) / VL * VL;
    for (int64_t p = seen; p < padded; p++)
        scores[p] = -INFINITY;
    vf top = vf_load(scores);
    for (int64_t p = VL; p < padded; p += VL)
        top = vf_max(top, vf_load(scores + p));
    float max = vf_top(top);
    vf total = vf_set1(0.0f);
    for (int64_t p = 0; p < padded; p += VL) {
        vf weight = vf_exp(vf_load(scores + p) - max);
        vf_store(scores + p, weight);
        total += weight;
    }
    for (int64_t p = padded; p < CPU_KV_CHUNK; p++)
        scores[p] = 0.0f;
    *max_out = max;
    *sum_out = vf_sum(total);
}

/* acc[i][0 .. VALUE_VECTORS*VL) = sum over positions of weight * value */
INLINE void value_tile(int half, int queries, int vectors, const float *const *weights,
                       int64_t count, const void *const *rows, int d, float *const *acc)
{
    vf sum[VALUE_QUERIES][VALUE_VECTORS];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++)
            sum[i][v] = vf_set1(0.0f);
    for (int64_t p = 0; p < count; p++) {
        vf value[VALUE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            value[v] = kv_load(half, rows[p], d + v * VL);
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sum[i][v] = vf_fma(value[v], vf_set1(weights[i][p]), sum[i][v]);
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++)
            vf_store(acc[i] + d + v * VL, sum[i][v]);
}

INLINE void value_queries(int half, int queries, const float *const *weights, int64_t count,
                          const void *const *rows, int head_dim, float *const *acc)
{
    int d = 0;
    for (; d + VALUE_VECTORS * VL <= head_dim; d += VALUE_VECTORS * VL)
        value_tile(half, queries, VALUE_VECTORS, weights, count, rows, d, acc);
    for (; d < head_dim; d += VL)
        value_tile(half, queries, 1, weights, count, rows, d, acc);
}

INLINE void fetch_row(const void *row, int bytes)
{
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)row + i, 0, 1);
}

INLINE void chunk_scores(int half, const float *const *queries, int active,
                         const void *const *rows, const void *const *v_rows, int64_t count,
                         int head_dim, float scale, float *scores, float *keys)
{
    for (int64_t p = 0; p < count; p += CPU_GROUP) {
        /* the values of a tile of positions, while its keys are worked on */
        for (int i = 0; i < CPU_GROUP; i++)
            fetch_row(v_rows[p + i], head_dim * (half ? 2 : 4));
        transpose_keys(half, rows + p, head_dim, keys);
        int i = 0;
        for (; i + SCORE_QUERIES <= active; i += SCORE_QUERIES)
            score_tile(SCORE_QUERIES, queries + i, keys, head_dim, scale,
                       scores + i * CPU_KV_CHUNK + p);
        if (i + 3 <= active) {
            score_tile(3, queries + i, keys, head_dim, scale, scores + i * CPU_KV_CHUNK + p);
            i += 3;
        }
        for (; i < active; i++)
            score_tile(1, queries + i, keys, head_dim, scale, scores + i * CPU_KV_CHUNK + p);
    }
}

INLINE void attend(int half, const struct cpu_queries *q, const struct cpu_kv *kv, int64_t first,
                   float scale, const struct cpu_softmax *part, float *scratch)
{
    float *scores = scratch, *keys = scratch + CPU_MAX_QUERIES * CPU_KV_CHUNK;
    const void *k_rows[CPU_KV_CHUNK], *v_rows[CPU_KV_CHUNK];
    const float *queries[CPU_MAX_QUERIES], *weights[CPU_MAX_QUERIES];
    int64_t size = half ? 2 : 4;
    float *acc[CPU_MAX_QUERIES];
    int64_t seen[CPU_MAX_QUERIES], count = 0;
    int active = 0;
    for (int i = 0; i < q->count; i++) {
        if (q->limit[i] <= first)
            continue;
        seen[active] = q->limit[i] - first < CPU_KV_CHUNK ? q->limit[i] - first : CPU_KV_CHUNK;
        count = seen[active] > count ? seen[active] : count;
        queries[active] = q->q[i];
        weights[active] = scores + active * CPU_KV_CHUNK;
        acc[active++] = part->acc + (int64_t)i * kv->head_dim;
    }
    for (int64_t p = 0; p < CPU_KV_CHUNK; p++) {
        /* the last tile of 16 is filled up with a position that is there; its scores are unused */
        int64_t at = first + (p < count ? p : count - 1);
        int64_t slot = kv->table[at / kv->block_size] * kv->block_size + at % kv->block_size;
        int64_t place = (slot * kv->position_stride + kv->head_offset) * size;
        k_rows[p] = (const char *)kv->k + place;
        /* Positions lie apart by all heads: too far for the processor to foresee. */
        fetch_row(k_rows[p], kv->head_dim * (int)size);
        v_rows[p] = (const char *)kv->v + place;
    }
    chunk_scores(half, queries, active, k_rows, v_rows, count, kv->head_dim, scale, scores, keys);
    for (int i = 0, a = 0; i < q->count; i++) {
        if (q->limit[i] <= first)
            continue;
        weigh(scores + a * CPU_KV_CHUNK, seen[a], part->max + i, part->sum + i);
        a++;
    }
    int i = 0;
    for (; i + VALUE_QUERIES <= active; i += VALUE_QUERIES)
        value_queries(half, VALUE_QUERIES, weights + i, count, v_rows, kv->head_dim, acc + i);
    if (VALUE_QUERIES > 3 && i + 3 <= active) {
        value_queries(half, 3, weights + i, count, v_rows, kv->head_dim, acc + i);
        i += 3;
    }
    for (; i < active; i++)
        value_queries(half, 1, weights + i, count, v_rows, kv->head_dim, acc + i);
}

static void attend_chunk(const struct cpu_queries *q, const struct cpu_kv *kv, int64_t first,
                         float scale, const struct cpu_softmax *part, float *scratch)
{
    if (kv->half)
        attend(1, q, kv, first, scale, part, scratch);
    else
        attend(0, q, kv, first, scale, part, scratch);
}

static void merge(const struct cpu_softmax *into, const struct cpu_softmax *part, int i,
                  int head_dim)
{
    float max = into->max[i] > part->max[i] ? into->max[i] : part->max[i];
    vf keep = vf_exp(vf_set1(into->max[i] - max)), take = vf_exp(vf_set1(part->max[i] - max));
    float *acc = into->acc + (int64_t)i * head_dim;
    const float *more = part->acc + (int64_t)i * head_dim;
    for (int d = 0; d < head_dim; d += VL)
        vf_store(acc + d, vf_fma(vf_load(acc + d), keep, vf_load(more + d) * take));
    into->sum[i] = into->sum[i] * keep[0] + part->sum[i] * take[0];
    into->max[i] = max;
}
