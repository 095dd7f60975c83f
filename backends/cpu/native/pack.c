/* Writes dense weights as oneDNN's panels of 64 outputs, straight from the rows of a mapped file: one pass reads,
   converts, joins and packs, on all threads, into memory that the thread touches first which multiplies it. */

#include "dense.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define V static inline TARGET __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 16

typedef __m512i VI;

V __mmask16 first_of(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1 << count) - 1); }

/* 16 values of a row from `at` on as float32, zeros from `inputs` on. */
V __m512 values(const char *row, int64_t at, int64_t inputs, const int from) {
    const __mmask16 have = first_of(inputs - at);
    if (from == FLOAT32) return _mm512_maskz_loadu_ps(have, (const float *)row + at);
    const __m256i bits = _mm256_maskz_loadu_epi16(have, (const uint16_t *)row + at);
    if (from == FLOAT16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

V __m256i halved(__m512 a) {
    const VI bits = _mm512_castps_si512(a);
    const VI odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    VI y = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(y);
}

/* 16 words of a row from word `at` on: float32 values, or pairs of 16 bits. */
V VI words(const char *row, int64_t at, int64_t inputs, const int from, const int to) {
    if (!row) return _mm512_setzero_si512();
    if (to == FLOAT32) return _mm512_castps_si512(values(row, at, inputs, from));
    if (from == BFLOAT16) {
        const __mmask32 have = _mm512_cmplt_epi16_mask(
            _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9,
                             8, 7, 6, 5, 4, 3, 2, 1, 0),
            _mm512_set1_epi16((short)(inputs - 2 * at > 32 ? 32 : inputs - 2 * at < 0 ? 0 : inputs - 2 * at)));
        return _mm512_maskz_loadu_epi16(have, (const uint16_t *)row + 2 * at);
    }
    const __m256i low = halved(values(row, 2 * at, inputs, from));
    const __m256i high = halved(values(row, 2 * at + LANES, inputs, from));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Rows become columns. */
V void turned(VI *x) {
    VI y[LANES];
    UNROLL for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

V void pack_typed(const Pack *p, int64_t first, int64_t last, const int from, const int to) {
    const int64_t steps = to == FLOAT32 ? p->depth : p->depth / 2;
    for (int64_t panel = first; panel < last; panel++) {
        char *out = (char *)p->out + panel * steps * 256;
        const char *const *rows = (const char *const *)p->rows + panel * DENSE_PANEL;
        for (int q = 0; q < DENSE_PANEL / LANES; q++)
            for (int64_t s = 0; s < steps; s += LANES) { /* 16 rows are as many as are fetched ahead of their reading */
                VI x[LANES];
                UNROLL for (int i = 0; i < LANES; i++) x[i] = words(rows[q * LANES + i], s, p->inputs, from, to);
                turned(x);
                /* Past the caches: a line is written whole, and need not be read before. */
                UNROLL for (int i = 0; i < LANES; i++) _mm512_stream_si512((VI *)(out + (s + i) * 256 + q * 64), x[i]);
            }
    }
    _mm_sfence();
}

TARGET void dense_pack(const Pack *p, int64_t first, int64_t last) {
    if (p->to == FLOAT32) {
        if (p->from == FLOAT32)
            pack_typed(p, first, last, FLOAT32, FLOAT32);
        else if (p->from == BFLOAT16)
            pack_typed(p, first, last, BFLOAT16, FLOAT32);
        else
            pack_typed(p, first, last, FLOAT16, FLOAT32);
    } else if (p->from == FLOAT32)
        pack_typed(p, first, last, FLOAT32, BFLOAT16);
    else if (p->from == BFLOAT16)
        pack_typed(p, first, last, BFLOAT16, BFLOAT16);
    else
        pack_typed(p, first, last, FLOAT16, BFLOAT16);
}

#endif
