/* Products of few rows with dense weights in oneDNN's panels of 64 outputs, and the best output of each row.

   A panel is [inputs / 2][64][2] values of 16 bits, or [inputs][64] of 32: oneDNN's own layout, so that prompts are
   multiplied by it, and few rows here. oneDNN reads a panel, then multiplies, and waits for memory in between. Here the
   next block of weights comes while all rows are multiplied by this one.

   A sum runs over the inputs in their order, whatever stands beside it, so a row's bits depend on the row alone. */

#include "dense.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")))
#define V static inline TARGET __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define LANES 16
#define WIDTH 64          /* outputs of a panel */
#define VECTORS (WIDTH / LANES)
#define MOST 6            /* rows of a tile, whose sums stay in registers */
#define BYTES 256          /* bytes of a step of a panel */
#define BLOCK 64          /* steps that all rows are multiplied by before the next: they stay in the first cache */
#define FEW 5             /* rows that wait for memory in each step, */
#define NEAR 1024         /* and ask for bytes so far ahead: those of a whole block ahead are late, or gone again */

typedef __m512 VF;
typedef __m512i VI;

/* Not the intrinsics: compilers would copy sums from register to register at the end of each step. */
V void v_pair(VF *sum, VF w, VF x) { __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x)); }
V void v_one(VF *sum, VF w, VF x) { __asm__("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x)); }

/* sums[R][64] += x[R] times `steps` of a panel; `lines` lines from `ahead` on are asked for in each step. */
V void tile(const char *w, const char *x, int64_t stride, int64_t steps, float *sums, const char *ahead, const int R,
            const int lines, const int type) {
    VF held[MOST][VECTORS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) held[r][v] = _mm512_loadu_ps(sums + r * WIDTH + v * LANES);
    for (int64_t s = 0; s < steps; s++) {
        UNROLL for (int i = 0; i < lines; i++) _mm_prefetch(ahead + (s * lines + i) * 64, _MM_HINT_T1);
        VF weight[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weight[v] = _mm512_loadu_ps(w + s * BYTES + v * 4 * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const VF at = _mm512_set1_ps(*(const float *)(x + r * stride + 4 * s));
            UNROLL for (int v = 0; v < VECTORS; v++)
                if (type == BFLOAT16)
                    v_pair(&held[r][v], weight[v], at);
                else
                    v_one(&held[r][v], weight[v], at);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(sums + r * WIDTH + v * LANES, held[r][v]);
}

#define ROWS_OF(R)                                                                                                    \
    case R:                                                                                                           \
        if (lines == 4)                                                                                               \
            tile(w, x, stride, steps, sums, ahead, R, 4, type);                                                       \
        else if (lines == 2)                                                                                          \
            tile(w, x, stride, steps, sums, ahead, R, 2, type);                                                       \
        else if (lines == 1)                                                                                          \
            tile(w, x, stride, steps, sums, ahead, R, 1, type);                                                       \
        else                                                                                                          \
            tile(w, x, stride, steps, sums, ahead, R, 0, type);                                                       \
        break;

V void tile_of(int64_t rows, int lines, const char *w, const char *x, int64_t stride, int64_t steps, float *sums,
               const char *ahead, const int type) {
    switch (rows) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6) }
}

/* sums[n][64] of one panel. All rows pass each block of it, and ask for the next one between them. */
V void panel(const Dense *p, int64_t number, float *sums, const int type) {
    const int64_t size = type == BFLOAT16 ? 2 : 4, steps = p->inputs * size / 4, stride = p->stride * size;
    const int64_t tiles = (p->n + MOST - 1) / MOST, each = p->n / tiles, more = p->n % tiles;
    const int per = tiles >= 4 ? 1 : tiles >= 2 ? 2 : 4;
    const char *w = (const char *)p->weight + number * p->depth * WIDTH * size;
    memset(sums, 0, (size_t)p->n * WIDTH * 4);
    for (int64_t s = 0; s < steps; s += BLOCK) {
        const int64_t some = steps - s < BLOCK ? steps - s : BLOCK;
        const char *block = w + s * BYTES, *ahead = block + (p->n <= FEW ? NEAR : some * BYTES);
        int64_t row = 0;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t rows = each + (t < more);
            const int lines = t * per < 4 ? per : 0;
            tile_of(rows, lines, block, (const char *)p->x + row * stride + 4 * s, stride, some, sums + row * WIDTH,
                    ahead + t * some * per * 64, type);
            row += rows;
        }
    }
}

V VF widened(const uint16_t *x, __mmask16 have) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(have, x)), 16));
}

/* The 16 bits of each value, rounded to the nearest even one; no number stays none. */
V __m256i rounded(VF a) {
    const VI bits = _mm512_castps_si512(a);
    const VI odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    VI y = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(y);
}

V VF as_held(VF a, const int type) {
    if (type != BFLOAT16) return a;
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(a)), 16));
}

V void put(const Dense *p, int64_t number, const float *sums, const int type) {
    for (int64_t v = 0; v < VECTORS; v++) {
        const int64_t first = number * WIDTH + v * LANES, left = p->outputs - first;
        if (left <= 0) return;
        const __mmask16 have = left >= LANES ? 0xffff : (__mmask16)((1 << left) - 1);
        VF bias = _mm512_setzero_ps();
        if (p->bias)
            bias = type == BFLOAT16 ? widened((const uint16_t *)p->bias + first, have)
                                    : _mm512_maskz_loadu_ps(have, (const float *)p->bias + first);
        for (int64_t r = 0; r < p->n; r++) {
            VF y = _mm512_loadu_ps(sums + r * WIDTH + v * LANES);
            if (p->bias) y = _mm512_add_ps(y, bias);
            const int64_t at = r * p->outputs + first;
            if (type == BFLOAT16)
                _mm256_mask_storeu_epi16((uint16_t *)p->out + at, have, rounded(y));
            else
                _mm512_mask_storeu_ps((float *)p->out + at, have, y);
        }
    }
}

/* Integers in the order of the values: both zeros are equal, and what is no number is larger than all. */
V VI order(VF a) {
    const VI bits = _mm512_castps_si512(_mm512_add_ps(a, _mm512_setzero_ps()));
    const VI low = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff));
    return _mm512_mask_mov_epi32(_mm512_xor_si512(bits, low), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7fffffff));
}

typedef struct {
    int32_t key[LANES], place[LANES];
} Found; /* the largest of the outputs of each lane so far, and the first place that has it */

V void take(const Dense *p, int64_t number, const float *sums, Found *found, const int type) {
    for (int64_t r = 0; r < p->n; r++) {
        VI key = _mm512_loadu_si512(found[r].key), place = _mm512_loadu_si512(found[r].place);
        for (int64_t v = 0; v < VECTORS; v++) {
            const int64_t first = number * WIDTH + v * LANES, left = p->outputs - first;
            if (left <= 0) break;
            const __mmask16 have = left >= LANES ? 0xffff : (__mmask16)((1 << left) - 1);
            VF y = as_held(_mm512_loadu_ps(sums + r * WIDTH + v * LANES), type);
            if (p->scale != 1) y = as_held(_mm512_mul_ps(y, _mm512_set1_ps(p->scale)), type);
            const VI here = order(y);
            const __mmask16 more = _mm512_mask_cmpgt_epi32_mask(have, here, key);
            key = _mm512_mask_mov_epi32(key, more, here);
            place = _mm512_mask_add_epi32(place, more, _mm512_set1_epi32((int32_t)first),
                                          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        }
        _mm512_storeu_si512(found[r].key, key);
        _mm512_storeu_si512(found[r].place, place);
    }
}

V void panels(const Dense *p, int64_t first, int64_t last, float *sums, Found *found, const int type) {
    for (int64_t number = first; number < last; number++) {
        panel(p, number, sums, type);
        if (found)
            take(p, number, sums, found, type);
        else
            put(p, number, sums, type);
    }
}

/* The largest of a row's lanes and its first place as one number, of which the larger one is the better. */
static int64_t joined(const Found *found) {
    int64_t best = DENSE_NONE;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t one = (int64_t)((uint64_t)(uint32_t)found->key[lane] << 32) | (0x7fffffff - found->place[lane]);
        if (found->place[lane] >= 0 && one > best) best = one;
    }
    return best;
}

/* [first, last) of the panels, for all rows. */
static TARGET void some(const Dense *p, int64_t first, int64_t last, int64_t *best) {
    _Alignas(64) float sums[DENSE_ROWS * WIDTH];
    Found found[DENSE_ROWS];
    if (!p->out)
        for (int64_t r = 0; r < p->n; r++)
            for (int lane = 0; lane < LANES; lane++) found[r].key[lane] = INT32_MIN, found[r].place[lane] = -1;
    if (p->type == BFLOAT16)
        panels(p, first, last, sums, p->out ? NULL : found, BFLOAT16);
    else
        panels(p, first, last, sums, p->out ? NULL : found, FLOAT32);
    if (!p->out)
        for (int64_t r = 0; r < p->n; r++) best[r] = joined(found + r);
}

void dense_items(const Dense *p, int64_t first, int64_t last, int64_t *best) {
    if (p->parts == 1) {
        some(p, first, last, best);
        return;
    }
    const int64_t size = p->type == BFLOAT16 ? 2 : 4;
    for (int64_t item = first; item < last; item++) {
        const int64_t panel = item / p->parts, part = item % p->parts;
        const int64_t start = p->n * part / p->parts, stop = p->n * (part + 1) / p->parts;
        Dense own = *p;
        own.x = (const char *)p->x + start * p->stride * size;
        own.out = (char *)p->out + start * p->outputs * size;
        own.n = stop - start;
        some(&own, panel, panel + 1, NULL);
    }
}

#endif
