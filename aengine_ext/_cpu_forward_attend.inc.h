/* Attention of a step, as pieces of work for the pool. Part of _cpu_forward.c.
 *
 * An item is a few queries of one row that share a KV head, with all of their context.
 */

/* The queries of an item and the keys that they look at; the positions that the furthest sees. */
static int64_t open_item(const struct run *r, int64_t item, struct cpu_queries *q,
                         struct cpu_kv *kv)
{
    const struct cpu_model *m = r->m;
    const struct cpu_step *s = r->s;
    const int32_t *it = r->b.items + 3 * item;
    int64_t row = it[0], kv_head = it[1], t = it[2], group = m->heads / m->kv_heads;
    int64_t end = t + CPU_MAX_QUERIES / group, limit = 0;
    if (end > s->query_start[row + 1])
        end = s->query_start[row + 1];
    q->count = 0;
    for (int64_t u = t; u < end; u++)
        for (int64_t g = 0; g < group; g++) {
            q->q[q->count] = r->b.q + (u * m->heads + kv_head * group + g) * m->dim;
            q->limit[q->count++] = s->positions[u] + 1;
            limit = s->positions[u] + 1 > limit ? s->positions[u] + 1 : limit;
        }
    *kv = (struct cpu_kv){s->keys[r->layer], s->values[r->layer], s->kv_half,
                          s->tables + row * s->table_width, s->block_size, m->kv_heads * m->dim,
                          kv_head * m->dim, (int)m->dim};
    return limit;
}

static void add_part(const struct run *r, const struct cpu_queries *q, int64_t first,
                     const struct cpu_softmax *all, const struct cpu_softmax *part)
{
    for (int i = 0; i < q->count; i++)
        if (q->limit[i] > first)
            r->m->kernels->merge(all, part, i, (int)r->m->dim);
}

static void close_item(const struct run *r, const struct cpu_queries *q,
                       const struct cpu_softmax *all)
{
    int64_t dim = r->m->dim;
    for (int i = 0; i < q->count; i++) {
        float *out = r->b.attended + (q->q[i] - r->b.q), inverse = 1.0f / all->sum[i];
        for (int64_t d = 0; d < dim; d++)
            out[d] = all->acc[i * dim + d] * inverse;
    }
}

static void attend_item(void *context, int64_t item, int worker)
{
    struct run *r = context;
    struct cpu_model *m = r->m;
    struct cpu_queries q;
    struct cpu_kv kv;
    int64_t limit = open_item(r, item, &q, &kv);
    float *scratch = r->b.scratch + worker * r->b.scratch_floats;
    float *rest = scratch + cpu_attention_scratch_floats((int)m->dim);
    struct cpu_softmax all = {rest, rest + 64, rest + 128};
    rest += 128 + CPU_MAX_QUERIES * m->dim;
    struct cpu_softmax part = {rest, rest + 64, rest + 128};
    float scale = 1.0f / sqrtf((float)m->dim);
    m->kernels->attend_chunk(&q, &kv, 0, scale, &all, scratch);
    for (int64_t first = CPU_KV_CHUNK; first < limit; first += CPU_KV_CHUNK) {
        m->kernels->attend_chunk(&q, &kv, first, scale, &part, scratch);
        add_part(r, &q, first, &all, &part);
    }
    close_item(r, &q, &all);
}

/* A few decoding rows do not make enough items for the threads: then each chunk of an item's
 * context is a piece of work of its own, and the parts are merged in the same order as above, so
 * that the result has the same bits. */

static struct cpu_softmax part_at(const struct run *r, int64_t index)
{
    int64_t group = r->m->heads / r->m->kv_heads;
    float *at = r->b.parts + index * r->part_floats;
    return (struct cpu_softmax){at, at + group, at + 2 * group};
}

static void attend_part(void *context, int64_t index, int worker)
{
    struct run *r = context;
    struct cpu_queries q;
    struct cpu_kv kv;
    int64_t first = index % r->chunks * CPU_KV_CHUNK;
    if (open_item(r, index / r->chunks, &q, &kv) <= first)
        return;
    struct cpu_softmax part = part_at(r, index);
    r->m->kernels->attend_chunk(&q, &kv, first, 1.0f / sqrtf((float)r->m->dim), &part,
                                r->b.scratch + worker * r->b.scratch_floats);
}

static void join_parts(void *context, int64_t item, int worker)
{
    struct run *r = context;
    struct cpu_queries q;
    struct cpu_kv kv;
    (void)worker;
    int64_t limit = open_item(r, item, &q, &kv), index = item * r->chunks;
    struct cpu_softmax all = part_at(r, index);
    for (int64_t first = CPU_KV_CHUNK; first < limit; first += CPU_KV_CHUNK) {
        struct cpu_softmax part = part_at(r, ++index);
        add_part(r, &q, first, &all, &part);
    }
    close_item(r, &q, &all);
}

static void attend(struct run *r, int64_t items)
{
    if (r->chunks == 1) {
        cpu_pool_run(r->m->pool, items, attend_item, r);
        return;
    }
    cpu_pool_run(r->m->pool, items * r->chunks, attend_part, r);
    cpu_pool_run(r->m->pool, items, join_parts, r);
}

/* Into how many chunks the step's attention items are split; 1: not at all. */
static int64_t count_chunks(const struct run *r)
{
    const struct cpu_step *s = r->s;
    int64_t threads = cpu_pool_threads(r->m->pool), last = 0;
    if (threads == 1 || s->tokens != s->rows || s->rows * r->m->kv_heads >= 8 * threads)
        return 1;
    for (int64_t t = 0; t < s->tokens; t++)
        last = s->positions[t] > last ? s->positions[t] : last;
    return last / CPU_KV_CHUNK + 1;
}
