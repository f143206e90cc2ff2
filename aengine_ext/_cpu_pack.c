/* From ggml's block formats to the layout of _cpu_matrix.h, without passing through float32.
 *
 * Source of the block formats: the GGUF specification and ggml's quantisation documentation.
 */
#include "_cpu_matrix.h"

#include <stdlib.h>
#include <string.h>

float cpu_half_to_float(uint16_t h)
{
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* moves the exponent's bias; right for subnormals too */
    if ((h & 0x7c00) == 0x7c00) { /* infinities and NaN */
        bits |= 0x7f800000;
        memcpy(&value, &bits, 4);
    }
    return h & 0x8000 ? -value : value;
}

static uint16_t read16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Where one row's numbers go inside its group. */
struct row_out {
    struct cpu_matrix *m;
    uint8_t *group;
    int lane;
};

static uint8_t *value_at(const struct row_out *o, int64_t block, int column)
{
    size_t size = o->m->store == STORE_INT4 ? 256 : 512;
    return o->group + o->m->value_offset + (size_t)block * size + (size_t)(column / 4) * 64 +
           (size_t)o->lane * 4 + (size_t)(column % 4);
}

static void put_number(const struct row_out *o, size_t offset, int64_t index, uint16_t half,
                       float wide)
{
    size_t place = (size_t)index * CPU_GROUP + (size_t)o->lane;
    if (o->m->wide)
        memcpy(o->group + offset + place * 4, &wide, 4);
    else
        memcpy(o->group + offset + place * 2, &half, 2);
}

static void put_scale(const struct row_out *o, int64_t index, uint16_t half, float wide)
{
    put_number(o, 0, index, half, wide);
}

static void put_min(const struct row_out *o, int64_t block, uint16_t half, float wide)
{
    put_number(o, o->m->min_offset, block, half, wide);
}

static void pack_q4(const struct row_out *o, const uint8_t *raw)
{
    int header = o->m->has_min ? 4 : 2;
    for (int64_t b = 0; b < o->m->blocks; b++, raw += header + 16) {
        put_scale(o, b, read16(raw), 0);
        if (o->m->has_min)
            put_min(o, b, read16(raw + 2), 0);
        for (int i = 0; i < 16; i += 4) /* ggml pairs column i with i + 16, and so does the layout */
            memcpy(value_at(o, b, i), raw + header + i, 4);
    }
}

static void pack_q8_0(const struct row_out *o, const uint8_t *raw)
{
    for (int64_t b = 0; b < o->m->blocks; b++, raw += 34) {
        put_scale(o, b, read16(raw), 0);
        for (int i = 0; i < 32; i += 4) {
            uint32_t four;
            memcpy(&four, raw + 2 + i, 4);
            four ^= 0x80808080;
            memcpy(value_at(o, b, i), &four, 4);
        }
    }
}

static void pack_q5(const struct row_out *o, const uint8_t *raw, int has_min)
{
    int header = has_min ? 4 : 2;
    for (int64_t b = 0; b < o->m->blocks; b++, raw += header + 20) {
        uint16_t d = read16(raw);
        float scale = cpu_half_to_float(d);
        const uint8_t *high = raw + header, *low = high + 4;
        put_scale(o, b, d, scale);
        /* the symmetric form is scale * (q - 16): a minimum that is exact in either width */
        put_min(o, b, 0, has_min ? cpu_half_to_float(read16(raw + 2)) : -16.0f * scale);
        for (int i = 0; i < 32; i++) {
            int nibble = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
            *value_at(o, b, i) = (uint8_t)(nibble | (high[i / 8] >> (i % 8) & 1) << 4);
        }
    }
}

/* The 6-bit scale and minimum of sub-block i, from 12 packed bytes. */
static void k_scale(const uint8_t *packed, int i, int *scale, int *min)
{
    if (i < 4) {
        *scale = packed[i] & 63;
        *min = packed[i + 4] & 63;
    } else {
        *scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
        *min = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    }
}

static void pack_q45_k(const struct row_out *o, const uint8_t *raw, int five)
{
    for (int64_t super = 0; super < o->m->blocks / 8; super++, raw += five ? 176 : 144) {
        float d = cpu_half_to_float(read16(raw)), dmin = cpu_half_to_float(read16(raw + 2));
        const uint8_t *high = raw + 16, *low = raw + (five ? 48 : 16);
        for (int s = 0; s < 8; s++) {
            int64_t b = super * 8 + s;
            int scale, min, column[32];
            k_scale(raw + 4, s, &scale, &min);
            put_scale(o, b, 0, d * (float)scale);
            put_min(o, b, 0, -dmin * (float)min);
            for (int i = 0; i < 32; i++) {
                uint8_t pair = low[(s / 2) * 32 + i];
                column[i] = s % 2 ? pair >> 4 : pair & 15;
                if (five)
                    column[i] |= (high[i] >> s & 1) << 4;
            }
            if (five)
                for (int i = 0; i < 32; i++)
                    *value_at(o, b, i) = (uint8_t)column[i];
            else
                for (int i = 0; i < 16; i++)
                    *value_at(o, b, i) = (uint8_t)(column[i] | column[i + 16] << 4);
        }
    }
}

static void pack_q6_k(const struct row_out *o, const uint8_t *raw)
{
    for (int64_t super = 0; super < o->m->blocks / 8; super++, raw += 210) {
        float d = cpu_half_to_float(read16(raw + 208));
        for (int i = 0; i < 256; i++) {
            int half = i / 128, part = i % 128 / 32, l = i % 32;
            uint8_t low = raw[half * 64 + (part & 1) * 32 + l];
            uint8_t high = raw[128 + half * 32 + l];
            int value = (part < 2 ? low & 15 : low >> 4) | (high >> (2 * part) & 3) << 4;
            *value_at(o, super * 8 + i / 32, i % 32) = (uint8_t)(value - 32 + 128);
            if (i % 16 == 0)
                put_scale(o, super * 16 + i / 16, 0, d * (float)(int8_t)raw[192 + i / 16]);
        }
    }
}

static void pack_floats(const struct row_out *o, const uint8_t *raw, size_t size)
{
    uint8_t *out = o->group + o->m->value_offset + (size_t)o->lane * size;
    for (int64_t k = 0; k < o->m->cols; k++)
        memcpy(out + (size_t)k * CPU_GROUP * size, raw + (size_t)k * size, size);
}

size_t cpu_raw_row_bytes(int type, int64_t cols)
{
    if (cols <= 0 || cols % CPU_BLOCK)
        return 0;
    size_t blocks = (size_t)cols / CPU_BLOCK, supers = cols % 256 ? 0 : (size_t)cols / 256;
    switch (type) {
    case GGML_F32: return (size_t)cols * 4;
    case GGML_F16:
    case GGML_BF16: return (size_t)cols * 2;
    case GGML_Q4_0: return blocks * 18;
    case GGML_Q4_1: return blocks * 20;
    case GGML_Q5_0: return blocks * 22;
    case GGML_Q5_1: return blocks * 24;
    case GGML_Q8_0: return blocks * 34;
    case GGML_Q4_K: return supers * 144;
    case GGML_Q5_K: return supers * 176;
    case GGML_Q6_K: return supers * 210;
    default: return 0;
    }
}

static void choose_layout(struct cpu_matrix *m, int type)
{
    switch (type) {
    case GGML_F32: m->store = STORE_F32; break;
    case GGML_F16: m->store = STORE_F16; break;
    case GGML_BF16: m->store = STORE_BF16; break;
    case GGML_Q4_0:
    case GGML_Q4_1:
    case GGML_Q4_K: m->store = STORE_INT4; break;
    default: m->store = STORE_INT8;
    }
    /* a product of two numbers does not fit float16 exactly, so those scales are float32 */
    m->wide = type == GGML_Q4_K || type == GGML_Q5_K || type == GGML_Q6_K || type == GGML_Q5_0 ||
              type == GGML_Q5_1;
    m->halves = type == GGML_Q6_K ? 2 : 1;
    m->has_min = type == GGML_Q4_1 || type == GGML_Q4_K || type == GGML_Q5_0 ||
                 type == GGML_Q5_1 || type == GGML_Q5_K;

    size_t number = (size_t)m->blocks * CPU_GROUP * (m->wide ? 4 : 2);
    size_t scales = cpu_is_int(m) ? number * (size_t)m->halves : 0;
    static const int value_bytes[] = {256, 512, 1024, 1024, 2048};
    m->min_offset = (scales + 63) & ~(size_t)63;
    m->value_offset = (m->min_offset + (m->has_min ? number : 0) + 63) & ~(size_t)63;
    m->group_bytes = m->value_offset + (size_t)m->blocks * (size_t)value_bytes[m->store];
}

int cpu_matrix_pack(struct cpu_matrix *m, int type, int64_t rows, int64_t cols,
                    const uint8_t *raw)
{
    memset(m, 0, sizeof *m);
    m->rows = rows;
    m->cols = cols;
    m->groups = (rows + CPU_GROUP - 1) / CPU_GROUP;
    m->blocks = cols / CPU_BLOCK;
    choose_layout(m, type);
    m->data = aligned_alloc(64, (size_t)m->groups * m->group_bytes);
    if (!m->data)
        return -1;
    if (rows % CPU_GROUP) /* rows that pad the last group are zero */
        memset(m->data + (size_t)(m->groups - 1) * m->group_bytes, 0, m->group_bytes);
    size_t row_bytes = cpu_raw_row_bytes(type, cols);
    for (int64_t r = 0; r < rows; r++, raw += row_bytes) {
        struct row_out o = {m, m->data + (size_t)(r / CPU_GROUP) * m->group_bytes,
                            (int)(r % CPU_GROUP)};
        switch (type) {
        case GGML_F32: pack_floats(&o, raw, 4); break;
        case GGML_F16:
        case GGML_BF16: pack_floats(&o, raw, 2); break;
        case GGML_Q4_0:
        case GGML_Q4_1: pack_q4(&o, raw); break;
        case GGML_Q5_0: pack_q5(&o, raw, 0); break;
        case GGML_Q5_1: pack_q5(&o, raw, 1); break;
        case GGML_Q8_0: pack_q8_0(&o, raw); break;
        case GGML_Q4_K: pack_q45_k(&o, raw, 0); break;
        case GGML_Q5_K: pack_q45_k(&o, raw, 1); break;
        case GGML_Q6_K: pack_q6_k(&o, raw); break;
        }
    }
    return 0;
}

void cpu_matrix_free(struct cpu_matrix *m)
{
    free(m->data);
    m->data = NULL;
}

size_t cpu_matrix_bytes(const struct cpu_matrix *m)
{
    return m->data ? (size_t)m->groups * m->group_bytes : 0;
}

static float read_number(const struct cpu_matrix *m, const uint8_t *part, int64_t index, int lane)
{
    size_t place = (size_t)index * CPU_GROUP + (size_t)lane;
    float wide;
    uint16_t half;
    if (m->wide) {
        memcpy(&wide, part + place * 4, 4);
        return wide;
    }
    memcpy(&half, part + place * 2, 2);
    return cpu_half_to_float(half);
}

static float read_float(const struct cpu_matrix *m, const uint8_t *values, size_t place)
{
    float wide;
    uint32_t bits;
    uint16_t half;
    if (m->store == STORE_F32) {
        memcpy(&wide, values + place * 4, 4);
        return wide;
    }
    memcpy(&half, values + place * 2, 2);
    if (m->store == STORE_F16)
        return cpu_half_to_float(half);
    bits = (uint32_t)half << 16;
    memcpy(&wide, &bits, 4);
    return wide;
}

void cpu_matrix_row(const struct cpu_matrix *m, int64_t row, float *out)
{
    uint8_t *group = m->data + (size_t)(row / CPU_GROUP) * m->group_bytes;
    int lane = (int)(row % CPU_GROUP);
    if (!cpu_is_int(m)) {
        for (int64_t k = 0; k < m->cols; k++)
            out[k] = read_float(m, group + m->value_offset, (size_t)k * CPU_GROUP + (size_t)lane);
        return;
    }
    struct row_out o = {(struct cpu_matrix *)m, group, lane};
    float bias = m->has_min ? 0.0f : m->store == STORE_INT4 ? 8.0f : 128.0f;
    for (int64_t b = 0; b < m->blocks; b++) {
        float min = m->has_min ? read_number(m, group + m->min_offset, b, lane) : 0.0f;
        float scale = read_number(m, group, b * m->halves, lane);
        for (int i = 0; i < 32; i++) {
            if (m->halves == 2 && i == 16)
                scale = read_number(m, group, b * 2 + 1, lane);
            int value = m->store == STORE_INT8 ? *value_at(&o, b, i)
                        : i < 16               ? *value_at(&o, b, i) & 15
                                               : *value_at(&o, b, i - 16) >> 4;
            *out++ = scale * ((float)value - bias) + min;
        }
    }
}
