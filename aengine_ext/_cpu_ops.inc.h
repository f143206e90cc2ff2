/* The small operations on one token's vector. */

static void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out)
{
    vf squares[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    for (int64_t i = 0; i < n; i += 2 * VL) {
        vf a = vf_load(x + i), b = vf_load(x + i + VL);
        squares[0] = vf_fma(a, a, squares[0]);
        squares[1] = vf_fma(b, b, squares[1]);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_sum(squares[0] + squares[1]) / (float)n + eps));
    for (int64_t i = 0; i < n; i += VL)
        vf_store(out + i, vf_load(weight + i) * (vf_load(x + i) * scale));
}

static void rope(float *x, const float *cos, const float *sin, int64_t n)
{
    for (int64_t i = 0; i < n / 2; i += VL) {
        vf a = vf_load(x + i), b = vf_load(x + i + n / 2);
        vf c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(x + i, a * c - b * s);
        vf_store(x + i + n / 2, b * c + a * s);
    }
}

static void swiglu(float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i += VL) {
        vf g = vf_load(gate + i);
        vf_store(gate + i, g / (vf_exp(-g) + 1.0f) * vf_load(up + i));
    }
}

static void narrow(const float *x, int64_t n, uint16_t *out)
{
    vf most = vf_set1(65504.0f);
    for (int64_t i = 0; i < n; i += VL) {
        vf v = vf_load(x + i);
        v = vf_blend(v > most, most, v); /* NaN stays */
        v = vf_blend(v < -most, -most, v);
        vf_store_half(out + i, v);
    }
}

/* A block whose largest value is this many times the token's root mean square is fine. Outliers sit
 * in few blocks and make a step of 1/127 of them coarse for all that is beside them: with 6, a second
 * term for a twelfth of the blocks halves the loss of one for none (docs/design/cpu-kernels.md). */
static const float FINE_FROM = 6.0f;

INLINE float mean_square(const float *x, int64_t n)
{
    vf squares = vf_set1(0.0f);
    for (int64_t i = 0; i < n; i += VL) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    return vf_sum(squares) / (float)n;
}

/* The first term alone is the nearest of 255 steps, both terms together the nearest of 32,513. */
static void quantise(const float *x, int64_t n, int8_t *hi, int8_t *lo,
                     struct cpu_block_info *info)
{
    float size = sqrtf(mean_square(x, n)), limit = FINE_FROM * size;
    float good = size < INFINITY ? 1.0f : NAN;
    for (int64_t k = 0; k < n; k += CPU_BLOCK, info++) {
        vf top = vf_set1(0.0f);
        for (int i = 0; i < CPU_BLOCK; i += VL)
            top = vf_max(top, vf_abs(vf_load(x + k + i)));
        float most = vf_top(top);
        float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        /* below float32's normal range the inverse overflows: such a block is zero */
        if (!(inverse < 3.0e38f))
            inverse = 0.0f;
        int fine = most > limit;
        int32_t sums[2] = {0, 0};
        for (int half = 0; half < 2; half++) {
            vi total = vi_set1(0);
            for (int i = half * 16; i < half * 16 + 16; i += VL) {
                vf scaled = vf_load(x + k + i) * inverse;
                vi first = vf_round(scaled);
                vi_store_i8(hi + k + i, first);
                if (fine) {
                    vi second = vf_round((scaled - vf_from_int(first)) * 128.0f);
                    vi_store_i8(lo + k + i, second);
                    first = first * 128 + second;
                }
                total += first;
            }
            sums[half] = vi_sum(total);
        }
        info->fine = fine;
        info->scale = good * (inverse > 0.0f ? most / (fine ? 127.0f * 128.0f : 127.0f) : 0.0f);
        info->isum[0] = sums[0];
        info->isum[1] = sums[1];
        info->sum = info->scale * (float)(sums[0] + sums[1]);
    }
}
