/* The decoder's forward: what a model is made of here, and one step of it. */
#ifndef AENGINE_CPU_FORWARD_H
#define AENGINE_CPU_FORWARD_H

#include "_cpu_kernels.h"
#include "_cpu_pool.h"

enum { W_Q, W_K, W_V, W_O, W_GATE, W_UP, W_DOWN, W_PER_LAYER };
enum { V_ATTENTION_NORM, V_MLP_NORM, V_Q_BIAS, V_K_BIAS, V_V_BIAS, V_PER_LAYER };

struct cpu_model {
    int64_t layers, hidden, inner, heads, kv_heads, dim, vocab;
    float eps;
    float *inv_freq;              /* [dim / 2] */
    struct cpu_matrix *matrices;  /* W_PER_LAYER a layer, then embedding and head */
    float **vectors;              /* V_PER_LAYER a layer, then the last norm */
    const struct cpu_kernels *kernels;
    struct cpu_pool *pool;
    /* working memory of a step, grown when a larger one comes */
    void *memory;
    size_t memory_bytes;
    int busy;
};

/* One step. Shapes as in aengine.model.batch: T tokens, R rows, S logit rows, B blocks a table. */
struct cpu_step {
    int64_t tokens, rows, logits, table_width, block_size;
    const int64_t *token_ids, *positions, *slots, *logit_index;
    const int32_t *query_start, *tables;
    void *const *keys, *const *values; /* [layers] */
    int kv_half;                       /* they are float16, else float32 */
    float *out;                        /* [S, vocab] */
};

/* 0, or -1: out of memory. */
int cpu_forward(struct cpu_model *m, const struct cpu_step *s);

#endif
