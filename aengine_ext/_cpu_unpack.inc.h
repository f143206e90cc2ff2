/* From packed blocks to registers: bytes for integer dot products, floats for exact products. */

enum { GV = CPU_GROUP / VL }; /* vectors in a group of rows */

/* What of a matrix is known when a kernel is compiled. */
struct kind {
    int store, has_min, wide, halves;
};

#define Q4_0_KIND ((struct kind){STORE_INT4, 0, 0, 1})
#define Q4_1_KIND ((struct kind){STORE_INT4, 1, 0, 1})
#define Q4_K_KIND ((struct kind){STORE_INT4, 1, 1, 1})
#define Q8_0_KIND ((struct kind){STORE_INT8, 0, 0, 1})
#define Q5_KIND ((struct kind){STORE_INT8, 1, 1, 1})
#define Q6_K_KIND ((struct kind){STORE_INT8, 0, 1, 2})
#define F32_KIND ((struct kind){STORE_F32, 0, 0, 1})
#define F16_KIND ((struct kind){STORE_F16, 0, 0, 1})
#define BF16_KIND ((struct kind){STORE_BF16, 0, 0, 1})

/* The matrix's kind as a constant in each branch. */
#define FOR_INT_KIND(m, CALL)                                                                      \
    do {                                                                                           \
        if ((m)->store == STORE_INT4) {                                                            \
            if (!(m)->has_min) CALL(Q4_0_KIND);                                                    \
            else if (!(m)->wide) CALL(Q4_1_KIND);                                                  \
            else CALL(Q4_K_KIND);                                                                  \
        } else {                                                                                   \
            if ((m)->halves == 2) CALL(Q6_K_KIND);                                                 \
            else if ((m)->has_min) CALL(Q5_KIND);                                                  \
            else CALL(Q8_0_KIND);                                                                  \
        }                                                                                          \
    } while (0)

/* Scales or minima number `index` of a part of the group, for the rows of vector v. */
INLINE vf load_numbers(struct kind kind, const uint8_t *part, int64_t index, int v)
{
    const uint8_t *p = part + (size_t)(index * CPU_GROUP + v * VL) * (kind.wide ? 4 : 2);
    return kind.wide ? vf_load((const float *)p) : vf_half(p);
}

INLINE int kind_bias(struct kind kind)
{
    return kind.has_min ? 0 : kind.store == STORE_INT4 ? 8 : 128;
}

/* The 32 columns of a block as bytes, four columns a vector. */
INLINE void load_bytes(struct kind kind, const uint8_t *values, int64_t block, int v, vu w[8])
{
    if (kind.store == STORE_INT4) {
        const uint8_t *p = values + block * 256 + v * VL * 4;
        for (int j = 0; j < 4; j++) {
            vu pair = vu_load(p + j * 64);
            w[j] = pair & 0x0f0f0f0f;
            w[j + 4] = (pair >> 4) & 0x0f0f0f0f;
        }
    } else {
        const uint8_t *p = values + block * 512 + v * VL * 4;
        for (int j = 0; j < 8; j++)
            w[j] = vu_load(p + j * 64);
    }
}

/* Ask for the weights that come FETCH_AHEAD bytes later, and for the next group's numbers, when block
 * `b` is read. The processor's own prefetching ends with each page of memory. Into the second cache:
 * it has room for more lines on their way than the first. Addresses past the end are harmless. */
enum { FETCH_AHEAD = 8192 };

INLINE void fetch_ahead(struct kind kind, const struct cpu_matrix *m, const uint8_t *group,
                        int64_t b)
{
    int64_t bytes = kind.store == STORE_INT4 ? 256 : 512;
    int64_t numbers = b * kind.halves * CPU_GROUP * (kind.wide ? 4 : 2);
    const uint8_t *values = group + m->value_offset + b * bytes + FETCH_AHEAD;
    const uint8_t *next = group + m->group_bytes + numbers;
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(values + i, 0, 1);
    __builtin_prefetch(next, 0, 1);
    if (kind.has_min)
        __builtin_prefetch(next + m->min_offset, 0, 1);
}

/* A block of a group as floats: 32 columns of 16 rows, out[column * 16 + row]. */
INLINE void dequantise_block(struct kind kind, const struct cpu_matrix *m, const uint8_t *group,
                             int64_t block, float *out)
{
    for (int v = 0; v < GV; v++) {
        vu w[8];
        load_bytes(kind, group + m->value_offset, block, v, w);
        vf bias = vf_set1((float)kind_bias(kind));
        vf min = kind.has_min ? load_numbers(kind, group + m->min_offset, block, v) : vf_set1(0);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            int64_t index = kind.halves == 2 ? block * 2 + j / 4 : block;
            vf scale = load_numbers(kind, group, index, v);
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) {
                vf q = vf_from_int((vi)((w[j] >> (8 * b)) & 0xff));
                vf value = kind.has_min ? vf_fma(q, scale, min) : (q - bias) * scale;
                vf_store(out + (4 * j + b) * CPU_GROUP + v * VL, value);
            }
        }
    }
}
