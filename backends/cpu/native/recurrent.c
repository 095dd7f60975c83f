/* The exported recurrent ops: a causal convolution and the gated delta rule. */

#include "exports.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define BLOCK 128          /* CHANNELS of recurrent.inc */
#define CONV_GRAIN 16384   /* number of values that are worth another thread */
#define DELTA_GRAIN 131072 /* values of states, times tokens, that are worth another thread */

typedef struct {
    const void *p;
    const Kernels *kernels;
} RecurrentCall;

static void convolve_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const RecurrentCall *call = data;
    (void)thread;
    call->kernels->convolve(call->p, first, last);
}

static void delta_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const RecurrentCall *call = data;
    const Delta *p = call->p;
    call->kernels->delta(p, first, last, p->work + thread * p->room);
}

static int64_t tokens_of(const StateRows *rows) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < rows->n; row++) tokens += rows->count[row];
    return tokens;
}

/* Writes p->out for the tokens of the rows, and the rows' states. */
EXPORT void trencadis_convolve(const Convolution *p, int kind, int threads) {
    panels_count(CONVOLUTIONS, kind);
    RecurrentCall call = {p, panels_kernels(kind)};
    const int64_t blocks = (p->channels + BLOCK - 1) / BLOCK;
    pool_run(convolve_work, &call, blocks, 0, 0, pool_threads(tokens_of(&p->rows) * p->channels / CONV_GRAIN, threads));
}

/* Writes p->out for the tokens of the rows, and the rows' states; returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_delta_rule(const Delta *asked, int kind, int threads) {
    panels_count(DELTA_RULES, kind);
    Delta p = *asked;
    int64_t longest = 0;
    for (int64_t row = 0; row < p.rows.n; row++)
        if (p.rows.count[row] > longest) longest = p.rows.count[row];
    const int64_t items = p.rows.n * p.heads;
    int64_t most = pool_threads(tokens_of(&p.rows) * p.heads * p.dk * p.dv / DELTA_GRAIN, threads);
    if (most > items) most = items;
    if (!longest || most < 1) return 0;
    p.room = (delta_room(p.dk, p.dv, longest == 1) + 15) / 16 * 16;
    float *held = malloc((size_t)(most * p.room + 16) * 4);
    if (!held) return 1;
    p.work = (float *)(((uintptr_t)held + 63) & ~(uintptr_t)63);
    RecurrentCall call = {&p, panels_kernels(kind)};
    pool_run(delta_work, &call, items, longest > 1, 0, most);
    free(held);
    return 0;
}

#endif
