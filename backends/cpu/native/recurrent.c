/* The exported recurrent ops: a causal convolution and the gated delta rule. */

#include "exports.h"

#include <math.h>
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

/* Writes what a token's state is multiplied by, as a logarithm, and the share of its change, for each head. */
static void write_factors(const DeltaNet *p, int64_t token) {
    const int64_t heads = p->heads, at = token * p->gates_row + heads * p->dv;
    float *g = p->factors + token * 2 * heads, *beta = g + heads;
    for (int64_t head = 0; head < heads; head++) {
        const float a = value_at(p->gates, at + heads + head, p->type) + p->shift[head];
        g[head] = p->decay[head] * (a > 20 ? a : log1pf(expf(a)));
        beta[head] = 1 / (1 + expf(-value_at(p->gates, at + head, p->type)));
    }
}

/* Writes p->out for the tokens of the rows, which are all tokens, and the rows' states; type: FLOAT32 or BFLOAT16.
   Returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_delta_net(const DeltaNet *p, int kind, int threads) {
    const int64_t bytes = p->type == FLOAT32 ? 4 : 2, keys = p->groups * p->dk, values = p->heads * p->dv;
    const int64_t channels = 2 * keys + values;
    const Convolution convolution = {p->x, p->weight, NULL, p->last, p->mixed, p->rows, channels, p->taps,
                                     p->x_row, p->type, 1};
    trencadis_convolve(&convolution, kind, threads);
    for (int64_t token = 0; token < p->tokens; token++) write_factors(p, token);
    const char *q = p->mixed, *k = q + keys * bytes, *v = k + keys * bytes;
    const Delta delta = {q, k, v, p->factors, p->factors + p->heads, p->state, p->y, p->rows, channels, channels,
                         channels, 2 * p->heads, 2 * p->heads, p->heads, p->groups, p->dk, p->dv, p->type, 0, NULL, 0};
    if (trencadis_delta_rule(&delta, kind, threads)) return 1;
    trencadis_gated_norm(p->y, p->norm, p->gates, p->out, p->tokens * p->heads, p->dv, p->heads, p->gates_row, p->eps,
                         (int)p->type, kind, threads);
    return 0;
}

#endif
