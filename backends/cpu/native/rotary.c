/* The exported rotation of queries and keys. */

#include "exports.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define GRAIN 32768 /* number of values that are worth another thread */

typedef struct {
    const Rotary *rotate;
    const Kernels *kernels;
} RotaryCall;

static void rotary_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const RotaryCall *call = data;
    (void)thread;
    call->kernels->rotate(call->rotate, first, last);
}

/* Writes q and k, rotated, to out [n][heads + groups][size]. */
EXPORT void trencadis_rotary(const Rotary *p, int64_t n, int kind, int threads) {
    panels_count(ROTARIES, kind);
    RotaryCall call = {p, panels_kernels(kind)};
    pool_run(rotary_work, &call, n, 0, 0, pool_threads(n * (p->heads + p->groups) * p->size / GRAIN, threads));
}

#endif
