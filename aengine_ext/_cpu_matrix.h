/* A weight matrix as the kernels read it: quantised values stay quantised, 16 output rows side by
 * side.
 *
 * Rows are taken in groups of 16, columns in blocks of 32. A group holds first the scales of all
 * its blocks, then (if the format has them) the minima, then the values, each part on a 64-byte
 * boundary. Within a block, the unit of the values is a 64-byte vector of 16 rows x 4 columns, the
 * operand shape of 8-bit dot-product instructions:
 *
 *   8 bits   8 vectors; vector j holds columns 4j .. 4j+3, as unsigned bytes
 *   4 bits   4 vectors; low nibbles hold columns 4j .. 4j+3, high nibbles the same plus 16
 *   floats   32 vectors of 16 rows each, one a column
 *
 * A value is worth scale * (byte - bias) or, with minima, scale * byte + min.
 */
#ifndef AENGINE_CPU_MATRIX_H
#define AENGINE_CPU_MATRIX_H

#include <stddef.h>
#include <stdint.h>

enum { CPU_GROUP = 16, CPU_BLOCK = 32 };

/* The numbers of ggml's type enumeration (the GGUF specification fixes them). */
enum cpu_ggml_type {
    GGML_F32 = 0,
    GGML_F16 = 1,
    GGML_Q4_0 = 2,
    GGML_Q4_1 = 3,
    GGML_Q5_0 = 6,
    GGML_Q5_1 = 7,
    GGML_Q8_0 = 8,
    GGML_Q4_K = 12,
    GGML_Q5_K = 13,
    GGML_Q6_K = 14,
    GGML_BF16 = 30,
};

enum cpu_store { STORE_INT4, STORE_INT8, STORE_F16, STORE_BF16, STORE_F32 };

struct cpu_matrix {
    uint8_t *data; /* 64-byte aligned; NULL: no such matrix */
    int64_t rows, cols;
    int64_t groups, blocks;
    enum cpu_store store;
    int wide;   /* scales and minima are float32, else float16 */
    int halves; /* 2: a scale for each 16 columns; 1: for each 32 */
    int has_min;
    int int8;   /* multiplied with 8-bit activations, else with float32 ones */
    size_t min_offset, value_offset, group_bytes; /* offsets within a group */
};

static inline int cpu_is_int(const struct cpu_matrix *m) { return m->store <= STORE_INT8; }

/* Bytes of one row in the file, or 0 for a type or width that cannot be packed. */
size_t cpu_raw_row_bytes(int ggml_type, int64_t cols);

/* Pack `raw` (rows of ggml blocks). Returns 0, or -1: out of memory. The caller has checked the
 * size of `raw` with cpu_raw_row_bytes. */
int cpu_matrix_pack(struct cpu_matrix *m, int ggml_type, int64_t rows, int64_t cols,
                    const uint8_t *raw);
void cpu_matrix_free(struct cpu_matrix *m);
size_t cpu_matrix_bytes(const struct cpu_matrix *m);

/* One row as float32: the embedding lookup. */
void cpu_matrix_row(const struct cpu_matrix *m, int64_t row, float *out);

float cpu_half_to_float(uint16_t h);

#endif
