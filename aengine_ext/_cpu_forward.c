/* One step of a decoder in one call: every loop is cut into chunks for the pool, and no result
 * depends on how it was cut. */
#include "_cpu_forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct buffers {
    float *x, *h, *q, *k, *v, *attended, *gate, *up, *cos, *sin;
    int8_t *hi, *lo;
    struct cpu_block_info *info;
    float *scratch; /* per worker */
    float *parts;   /* attention of each item's chunks, where they are computed apart */
    int64_t scratch_floats;
    int32_t *items; /* attention work: row, kv head, first token, in threes */
    int64_t wide;   /* columns that hi, lo and info have room for */
};

struct product {
    const struct cpu_matrix *matrix;
    struct cpu_output out;
};

struct run {
    struct cpu_model *m;
    const struct cpu_step *s;
    struct buffers b;
    int64_t layer;
    int64_t chunks, part_floats;
    /* the loop in progress */
    void (*each_token)(struct run *, int64_t);
    int64_t loop_tokens, tokens_a_chunk;
    const float *from;
    const float *norm;
    int64_t cols, count, groups_a_chunk;
    int int8; /* a product in line wants the quantised form */
    struct cpu_input in;
    struct product products[3];
    int num_products;
};

static float *vector_of(const struct run *r, int which)
{
    return r->m->vectors[r->layer * V_PER_LAYER + which];
}

static struct cpu_matrix *matrix_of(const struct run *r, int which)
{
    return &r->m->matrices[r->layer * W_PER_LAYER + which];
}

/* -- loops over tokens: a few chunks for each thread, since taking one costs a tenth of a microsecond */

static void token_chunk(void *context, int64_t chunk, int worker)
{
    struct run *r = context;
    int64_t end = (chunk + 1) * r->tokens_a_chunk;
    if (end > r->loop_tokens)
        end = r->loop_tokens;
    for (int64_t t = chunk * r->tokens_a_chunk; t < end; t++)
        r->each_token(r, t);
    (void)worker;
}

static void for_tokens(struct run *r, int64_t count, void (*each)(struct run *, int64_t))
{
    int64_t chunks = 8 * (int64_t)cpu_pool_threads(r->m->pool);
    r->each_token = each;
    r->loop_tokens = count;
    r->tokens_a_chunk = count / chunks + 1;
    cpu_pool_run(r->m->pool, (count + r->tokens_a_chunk - 1) / r->tokens_a_chunk, token_chunk, r);
}

/* -- inputs of matrix products: normalise (if asked), then quantise (if a matrix wants it) -------- */

static void prepare_token(struct run *r, int64_t t)
{
    const float *x = r->from + t * r->cols;
    if (r->norm) {
        float *h = r->b.h + t * r->cols;
        r->m->kernels->rms_norm(x, r->norm, r->m->eps, r->cols, h);
        x = h;
    }
    if (r->int8)
        r->m->kernels->quantise(x, r->cols, r->b.hi + t * r->cols, r->b.lo + t * r->cols,
                                r->b.info + t * (r->cols / CPU_BLOCK));
}

/* -- matrix products that share an input ---------------------------------------------------------- */

static void product_chunk(void *context, int64_t chunk, int worker)
{
    struct run *r = context;
    float *scratch = r->b.scratch + worker * r->b.scratch_floats;
    int64_t first = chunk * r->groups_a_chunk, last = first + r->groups_a_chunk;
    for (int i = 0; i < r->num_products; i++) {
        const struct cpu_matrix *w = r->products[i].matrix;
        int64_t from = first < 0 ? 0 : first, to = last < w->groups ? last : w->groups;
        if (from < to)
            r->m->kernels->matmul(w, from, to, &r->in, r->count, &r->products[i].out, scratch);
        first -= w->groups;
        last -= w->groups;
    }
}

/* Multiply `count` rows of `cols` values with the matrices in line; `norm`: normalise them first. */
static void multiply(struct run *r, const float *from, const float *norm, int64_t cols,
                     int64_t count)
{
    int64_t groups = 0;
    r->from = from;
    r->norm = norm;
    r->cols = cols;
    r->count = count;
    r->int8 = 0;
    for (int i = 0; i < r->num_products; i++)
        r->int8 |= r->products[i].matrix->int8;
    if (norm || r->int8)
        for_tokens(r, count, prepare_token);
    r->in = (struct cpu_input){norm ? r->b.h : from, cols, r->b.hi, r->b.lo, r->b.info};
    for (int i = 0; i < r->num_products; i++)
        groups += r->products[i].matrix->groups;
    int64_t chunks = 8 * (int64_t)cpu_pool_threads(r->m->pool);
    r->groups_a_chunk = groups / chunks + 1;
    cpu_pool_run(r->m->pool, (groups + r->groups_a_chunk - 1) / r->groups_a_chunk, product_chunk,
                 r);
    r->num_products = 0;
}

static void add_product(struct run *r, const struct cpu_matrix *w, float *out, int64_t stride,
                        const float *bias, int add)
{
    r->products[r->num_products++] =
        (struct product){w, {out, stride, bias, add}};
}

/* -- attention ------------------------------------------------------------------------------------ */

static void put_kv(const struct run *r, void *cache, int64_t slot, const float *from, int64_t width)
{
    if (r->s->kv_half)
        r->m->kernels->narrow(from, width, (uint16_t *)cache + slot * width);
    else
        memcpy((float *)cache + slot * width, from, (size_t)width * sizeof(float));
}

static void turn_token(struct run *r, int64_t t)
{
    struct cpu_model *m = r->m;
    int64_t half = m->dim / 2, width = m->kv_heads * m->dim;
    const float *cos = r->b.cos + t * half, *sin = r->b.sin + t * half;
    for (int64_t i = 0; i < m->heads; i++)
        m->kernels->rope(r->b.q + (t * m->heads + i) * m->dim, cos, sin, m->dim);
    for (int64_t i = 0; i < m->kv_heads; i++)
        m->kernels->rope(r->b.k + (t * m->kv_heads + i) * m->dim, cos, sin, m->dim);
    put_kv(r, r->s->keys[r->layer], r->s->slots[t], r->b.k + t * width, width);
    put_kv(r, r->s->values[r->layer], r->s->slots[t], r->b.v + t * width, width);
}

#include "_cpu_forward_attend.inc.h"

static int64_t list_items(struct run *r)
{
    struct cpu_model *m = r->m;
    int64_t count = 0, tile = CPU_MAX_QUERIES / (m->heads / m->kv_heads);
    for (int64_t row = 0; row < r->s->rows; row++)
        for (int64_t t = r->s->query_start[row]; t < r->s->query_start[row + 1]; t += tile)
            for (int64_t head = 0; head < m->kv_heads; head++, count++) {
                r->b.items[3 * count] = (int32_t)row;
                r->b.items[3 * count + 1] = (int32_t)head;
                r->b.items[3 * count + 2] = (int32_t)t;
            }
    return count;
}

/* -- layers --------------------------------------------------------------------------------------- */

static void angles_token(struct run *r, int64_t t)
{
    int64_t half = r->m->dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)r->s->positions[t] * r->m->inv_freq[i];
        r->b.cos[t * half + i] = cosf(angle);
        r->b.sin[t * half + i] = sinf(angle);
    }
}

static void swiglu_token(struct run *r, int64_t t)
{
    r->m->kernels->swiglu(r->b.gate + t * r->m->inner, r->b.up + t * r->m->inner, r->m->inner);
}

static void run_layer(struct run *r, int64_t items)
{
    struct cpu_model *m = r->m;
    int64_t tokens = r->s->tokens, kv_width = m->kv_heads * m->dim, q_width = m->heads * m->dim;
    add_product(r, matrix_of(r, W_Q), r->b.q, q_width, vector_of(r, V_Q_BIAS), 0);
    add_product(r, matrix_of(r, W_K), r->b.k, kv_width, vector_of(r, V_K_BIAS), 0);
    add_product(r, matrix_of(r, W_V), r->b.v, kv_width, vector_of(r, V_V_BIAS), 0);
    multiply(r, r->b.x, vector_of(r, V_ATTENTION_NORM), m->hidden, tokens);
    for_tokens(r, tokens, turn_token);
    attend(r, items);
    add_product(r, matrix_of(r, W_O), r->b.x, m->hidden, NULL, 1);
    multiply(r, r->b.attended, NULL, q_width, tokens);
    add_product(r, matrix_of(r, W_GATE), r->b.gate, m->inner, NULL, 0);
    add_product(r, matrix_of(r, W_UP), r->b.up, m->inner, NULL, 0);
    multiply(r, r->b.x, vector_of(r, V_MLP_NORM), m->hidden, tokens);
    for_tokens(r, tokens, swiglu_token);
    add_product(r, matrix_of(r, W_DOWN), r->b.x, m->hidden, NULL, 1);
    multiply(r, r->b.gate, NULL, m->inner, tokens);
}

static void run_head(struct run *r)
{
    struct cpu_model *m = r->m;
    int64_t count = r->s->logits;
    struct cpu_matrix *head = &m->matrices[m->layers * W_PER_LAYER + 1];
    if (!head->data)
        head--; /* tied to the embedding */
    float *chosen = r->b.attended; /* free by now, and at least as wide where it has to be */
    for (int64_t i = 0; i < count; i++)
        memcpy(chosen + i * m->hidden, r->b.x + r->s->logit_index[i] * m->hidden,
               (size_t)m->hidden * sizeof(float));
    add_product(r, head, r->s->out, m->vocab, NULL, 0);
    multiply(r, chosen, m->vectors[m->layers * V_PER_LAYER], m->hidden, count);
}

/* -- memory --------------------------------------------------------------------------------------- */

static void *take(char **at, size_t bytes)
{
    void *found = *at;
    *at += (bytes + 63) / 64 * 64;
    return found;
}

/* Lay the buffers out from `base`; the bytes that they need. */
static size_t lay_out(struct run *r, char *base)
{
    struct cpu_model *m = r->m;
    struct buffers *b = &r->b;
    int64_t q_width = m->heads * m->dim, kv_width = m->kv_heads * m->dim;
    size_t n = (size_t)(r->s->tokens > r->s->logits ? r->s->tokens : r->s->logits);
    int64_t wide = m->inner > q_width ? m->inner : q_width;
    b->wide = wide = wide > m->hidden ? wide : m->hidden;
    int64_t most = q_width > m->hidden ? q_width : m->hidden;
    int64_t attention = cpu_attention_scratch_floats((int)m->dim) +
                        2 * (128 + CPU_MAX_QUERIES * m->dim);
    b->scratch_floats = cpu_scratch_floats(wide);
    if (b->scratch_floats < attention)
        b->scratch_floats = attention;
    b->scratch_floats = (b->scratch_floats + 15) / 16 * 16;
    char *at = base;
    b->x = take(&at, n * (size_t)m->hidden * 4);
    b->h = take(&at, n * (size_t)wide * 4);
    b->q = take(&at, n * (size_t)q_width * 4);
    b->k = take(&at, n * (size_t)kv_width * 4);
    b->v = take(&at, n * (size_t)kv_width * 4);
    b->attended = take(&at, n * (size_t)most * 4);
    b->gate = take(&at, n * (size_t)m->inner * 4);
    b->up = take(&at, n * (size_t)m->inner * 4);
    b->cos = take(&at, n * (size_t)m->dim * 2);
    b->sin = take(&at, n * (size_t)m->dim * 2);
    b->hi = take(&at, n * (size_t)wide);
    b->lo = take(&at, n * (size_t)wide);
    b->info = take(&at, n * (size_t)(wide / CPU_BLOCK) * sizeof(struct cpu_block_info));
    b->scratch = take(&at, (size_t)cpu_pool_threads(m->pool) * (size_t)b->scratch_floats * 4);
    b->items = take(&at, (n + (size_t)r->s->rows) * (size_t)m->kv_heads * 3 * 4);
    r->part_floats = (m->heads / m->kv_heads * (m->dim + 2) + 15) / 16 * 16;
    if (r->chunks > 1)
        b->parts = take(&at, (size_t)(r->s->rows * m->kv_heads * r->chunks * r->part_floats) * 4);
    return (size_t)(at - base);
}

int cpu_forward(struct cpu_model *m, const struct cpu_step *s)
{
    struct run r = {.m = m, .s = s};
    r.chunks = count_chunks(&r);
    size_t bytes = lay_out(&r, NULL);
    if (bytes > m->memory_bytes) {
        free(m->memory);
        m->memory_bytes = 0;
        m->memory = aligned_alloc(64, bytes);
        if (!m->memory)
            return -1;
        m->memory_bytes = bytes;
    }
    lay_out(&r, m->memory);
    cpu_pool_enter(m->pool);
    const struct cpu_matrix *embedding = &m->matrices[m->layers * W_PER_LAYER];
    for (int64_t t = 0; t < s->tokens; t++)
        cpu_matrix_row(embedding, s->token_ids[t], r.b.x + t * m->hidden);
    for_tokens(&r, s->tokens, angles_token);
    int64_t items = list_items(&r);
    for (r.layer = 0; r.layer < m->layers; r.layer++)
        run_layer(&r, items);
    if (s->logits)
        run_head(&r);
    return 0;
}
