/* The table of kernels that each instruction set fills in (_cpu_isa_*.c), and what they work on.
 *
 * Every kernel computes an output element in an order of operations that depends on the shapes of
 * the model and not on the batch: a row gives the same bits alone, in any batch and as part of a
 * prompt.
 */
#ifndef AENGINE_CPU_KERNELS_H
#define AENGINE_CPU_KERNELS_H

#include "_cpu_matrix.h"

/* Per token and block of 32 columns: what the dot products of 8-bit activations need beside them.
 * An activation is worth scale * hi or, in a fine block, scale * (128 hi + lo); other blocks have
 * no lo. */
struct cpu_block_info {
    int32_t fine;
    float scale;
    float sum;      /* of the activations as quantised, the scale applied */
    int32_t isum[2]; /* of the integers, one for each half of the block */
};

/* [tokens, cols] activations; the quantised form is filled for integer matrices only. */
struct cpu_input {
    const float *x;
    int64_t stride; /* in elements, between tokens, of x and hi and lo */
    const int8_t *hi, *lo;
    const struct cpu_block_info *info; /* [tokens, stride / 32] */
};

struct cpu_output {
    float *out;
    int64_t stride;
    const float *bias; /* [rows] or NULL */
    int add;           /* add to what is there */
};

/* One row's keys and values of one layer, reached through its block table. */
struct cpu_kv {
    const void *k, *v; /* [num_blocks, block_size, kv_heads, head_dim] */
    int half;          /* they are float16, else float32 */
    const int32_t *table;
    int64_t block_size;
    int64_t position_stride; /* kv_heads * head_dim */
    int64_t head_offset;     /* kv_head * head_dim */
    int head_dim;
};

enum { CPU_KV_CHUNK = 128, CPU_MAX_QUERIES = 48 };

/* Queries that share a KV head. Query i sees positions 0 .. limit[i]-1. */
struct cpu_queries {
    int count;
    const float *q[CPU_MAX_QUERIES];
    int64_t limit[CPU_MAX_QUERIES];
};

/* Softmax attention so far: per query the largest score, the sum of weights and the weighted sum
 * of values [count, head_dim]. */
struct cpu_softmax {
    float *max, *sum, *acc;
};

struct cpu_kernels {
    const char *name;
    /* Output rows 16*first .. 16*last-1 of out = x W^T. `scratch`: cpu_scratch_floats(m). */
    void (*matmul)(const struct cpu_matrix *m, int64_t first, int64_t last,
                   const struct cpu_input *in, int64_t tokens, const struct cpu_output *out,
                   float *scratch);
    /* out = x / rms(x) * weight */
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t n, float *out);
    /* rotate the pairs (i, i + n/2) by angles given as cosines and sines [n/2] */
    void (*rope)(float *x, const float *cos, const float *sin, int64_t n);
    /* gate = silu(gate) * up */
    void (*swiglu)(float *gate, const float *up, int64_t n);
    /* n is a multiple of 32; values that are no numbers make all scales NaN */
    void (*quantise)(const float *x, int64_t n, int8_t *hi, int8_t *lo,
                     struct cpu_block_info *info);
    /* To float16, to the nearest; what is too large becomes the largest. n is a multiple of 32. */
    void (*narrow)(const float *x, int64_t n, uint16_t *out);
    /* Attention over the positions first .. min(first + CPU_KV_CHUNK, limit) - 1, for queries with
     * limit > first. `scratch`: cpu_attention_scratch_floats. */
    void (*attend_chunk)(const struct cpu_queries *q, const struct cpu_kv *kv, int64_t first,
                         float scale, const struct cpu_softmax *part, float *scratch);
    /* into += part, for query i of both */
    void (*merge)(const struct cpu_softmax *into, const struct cpu_softmax *part, int i,
                  int head_dim);
};

static inline int64_t cpu_scratch_floats(int64_t max_cols) { return max_cols * CPU_GROUP * 4; }

static inline int64_t cpu_attention_scratch_floats(int head_dim)
{
    return CPU_MAX_QUERIES * CPU_KV_CHUNK + 2 * (int64_t)head_dim * CPU_GROUP;
}

/* NULL when the compiler or this processor does not have the instruction set. */
const struct cpu_kernels *cpu_kernels_portable(void);
const struct cpu_kernels *cpu_kernels_avx2(void);
const struct cpu_kernels *cpu_kernels_avxvnni(void);
const struct cpu_kernels *cpu_kernels_avx512(void);
const struct cpu_kernels *cpu_kernels_neon(void);

#endif
