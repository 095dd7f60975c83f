/* The exported routing of rows to experts, and the product of few rows with the experts that they take. */

#include "exports.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define ON_STACK 65536 /* bytes between the products that need no other memory */

/* Writes the `top` largest of `count` scores to chosen, in descending order and by index where they are equal, and
   their shares of the softmax over all, which add up to 1 if `normalise`. A NaN makes all shares NaN. */
static void route_row(const void *scores, int64_t first, int64_t count, int64_t top, int normalise, int type,
                      float *shares, int64_t *chosen) {
    float largest = -INFINITY, total = 0, taken = 0;
    for (int64_t i = 0; i < count; i++) {
        const float score = value_at(scores, first + i, type);
        largest = score > largest ? score : largest;
    }
    for (int64_t i = 0; i < count; i++) total += expf(value_at(scores, first + i, type) - largest);
    for (int64_t k = 0; k < top; k++) {
        int64_t best = -1;
        float held = 0;
        for (int64_t i = 0; i < count; i++) {
            const float score = value_at(scores, first + i, type);
            if (best >= 0 && !(score > held)) continue;
            int64_t before = 0;
            while (before < k && chosen[before] != i) before++;
            if (before == k) best = i, held = score;
        }
        chosen[k] = best;
        shares[k] = expf(held - largest) / total;
        taken += shares[k];
    }
    for (int64_t k = 0; normalise && k < top; k++) shares[k] /= taken;
}

static int multiply(const Experts *p, const void *weight, const void *x, void *out, int64_t n, int64_t inputs,
                    int64_t outputs, int kind, int threads) {
    if (p->coded) return trencadis_panels_linear(weight, x, out, n, (int)p->type, kind, threads);
    return trencadis_dense(weight, x, out, NULL, n, inputs, outputs, 1, kind, threads);
}

/* Memory between the products; sizes in values. */
typedef struct {
    char *rows;  /* [n][hidden]: rows of one expert, then its outputs */
    char *wide;  /* [n][2 inner] */
    char *inner; /* [n][inner] */
    char *made;  /* [n][top][hidden]: each row's outputs of its experts, the best one first */
} Between;

/* Writes to made what expert number `expert` gives the rows that chose it; returns 0, or 1 if memory is lacking. */
static int run_expert(const Experts *p, const Between *b, int64_t expert, const char *x, const int64_t *chosen,
                      int64_t n, int kind, int threads) {
    const int64_t size = p->type == FLOAT32 ? 4 : 2, row = p->hidden * size;
    int64_t some = 0, place = 0;
    for (int64_t i = 0; i < n * p->top; i++)
        if (chosen[i] == expert) memcpy(b->rows + some++ * row, x + i / p->top * row, (size_t)row), place = i;
    if (!some) return 0;
    char *out = some == 1 ? b->made + place * row : b->rows;
    if (multiply(p, p->gate_up[expert], b->rows, b->wide, some, p->hidden, 2 * p->inner, kind, threads)) return 1;
    trencadis_panels_rows((int)p->act, b->wide, NULL, NULL, b->inner, some, p->inner, 0, (int)p->type, kind, threads);
    if (multiply(p, p->down[expert], b->inner, out, some, p->inner, p->hidden, kind, threads)) return 1;
    for (int64_t i = 0, next = 0; some > 1 && i < n * p->top; i++)
        if (chosen[i] == expert) memcpy(b->made + i * row, b->rows + next++ * row, (size_t)row);
    return 0;
}

/* Writes out [n][hidden]: the sum of the outputs of each row's experts for x [n][hidden], times their shares, from the
   best to the least; scores [n][count]. Returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_experts(const Experts *p, const void *x, const void *scores, int score_type, void *out, int64_t n,
                             int kind, int threads) {
    const int64_t size = p->type == FLOAT32 ? 4 : 2, each = n * p->top;
    const int64_t ids = aligned(each * 8), weights = aligned(each * 4), rows = aligned(n * p->hidden * size);
    const int64_t wide = aligned(2 * n * p->inner * size), inner = aligned(n * p->inner * size);
    const int64_t bytes = ids + weights + rows + wide + inner + each * p->hidden * size;
    _Alignas(64) char few[ON_STACK];
    char *held = bytes <= ON_STACK ? few : malloc((size_t)bytes);
    if (!held) return 1;
    int64_t *chosen = (int64_t *)(void *)held;
    float *shares = (float *)(void *)(held + ids);
    Between b = {.rows = held + ids + weights};
    b.wide = b.rows + rows, b.inner = b.wide + wide, b.made = b.inner + inner;
    for (int64_t r = 0; r < n; r++) {
        const int64_t first = r * p->top;
        route_row(scores, r * p->count, p->count, p->top, (int)p->normalise, score_type, shares + first, chosen + first);
    }
    int failed = 0;
    for (int64_t expert = 0; expert < p->count && !failed; expert++)
        failed = run_expert(p, &b, expert, x, chosen, n, kind, threads);
    const Rows sum = {WEIGHTED_SUM, b.made, NULL, shares, out, p->hidden, 0, (int)p->type, NULL, p->top, 0, 0};
    if (!failed) panels_kernels(kind)->rows(&sum, 0, n);
    if (held != few) free(held);
    return failed;
}

#endif
