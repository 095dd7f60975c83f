/* What Python calls to turn queries and keys. */

#include "exports.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define GRAIN 32768 /* values that are worth another thread */

typedef struct {
    const Turn *turn;
    const Kernels *kernels;
    int64_t n;
} TurnCall;

static void turn_work(void *data) {
    const TurnCall *call = data;
    int64_t first, last;
    panels_share(call->n, &first, &last);
    call->kernels->turn(call->turn, first, last);
}

/* out [n][heads + groups][size]: q and k, turned. */
EXPORT void trencadis_turn(const Turn *p, int64_t n, int kind, int threads) {
    panels_count(ROTARIES, kind);
    int64_t most = n * (p->heads + p->groups) * p->size / GRAIN + 1;
    if (most > threads) most = threads;
    TurnCall call = {p, panels_kernels(kind), n};
    panels_run(turn_work, &call, most);
}

#endif
