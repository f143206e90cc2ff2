/* What the two AVX2 variants share: 8 lanes, 16 registers. */
#define VL 8
#define INT_TOKENS 4
#define EXACT_GROUPS 1
#define EXACT_TOKENS 6
#define FEW_GROUPS 2
#define SCORE_QUERIES 4
#define VALUE_QUERIES 3
#define VALUE_VECTORS 4
#define vf_fma(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define vf_max(a, b) ((vf)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define vf_half(p) ((vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define vf_store_half(p, v)                                                                        \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((__m256)(v), _MM_FROUND_TO_NEAREST_INT))
#define vf_top(v) top_of((__m256)(v))
#define vi_sum(v) sum_of((__m256i)(v))
#define vi_store_i8(p, v) store_i8((p), (__m256i)(v))

static inline float top_of(__m256 v)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

static inline int sum_of(__m256i v)
{
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_unpackhi_epi64(a, a));
    return _mm_cvtsi128_si32(a) + _mm_extract_epi32(a, 1);
}

static inline void store_i8(signed char *p, __m256i v)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
