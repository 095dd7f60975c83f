/* What Python calls to turn queries and keys. */

#include "exports.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define GRAIN 32768 /* values that are worth another thread */

typedef struct {
    const Turn *turn;
    const Kernels *kernels;
} TurnCall;

static void turn_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const TurnCall *call = data;
    (void)thread;
    call->kernels->turn(call->turn, first, last);
}

/* out [n][heads + groups][size]: q and k, turned. */
EXPORT void trencadis_turn(const Turn *p, int64_t n, int kind, int threads) {
    panels_count(ROTARIES, kind);
    TurnCall call = {p, panels_kernels(kind)};
    pool_run(turn_work, &call, n, 0, 0, pool_threads(n * (p->heads + p->groups) * p->size / GRAIN, threads));
}

#endif
