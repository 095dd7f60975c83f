/* The exported product of rows with LoRA adapters: two launches, of all runs of rows with one adapter each. */

#include "exports.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define ADAPTER_GRAIN 16384 /* values of A or B, times rows, that are worth another thread */
#define ON_STACK 4096       /* values between the launches that need no other memory */

typedef struct {
    const Adapters *p;
    const Kernels *kernels;
    int expands;
} AdapterCall;

static void adapt_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const AdapterCall *call = data;
    (void)thread;
    call->kernels->adapt(call->p, first, last, call->expands);
}

/* Adds to p->y the products of the rows that its runs name; returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_adapters(const Adapters *asked, const void *x, int64_t x_row, void *y, int64_t y_row, int64_t n,
                              const int64_t *runs, int64_t count, int kind, int threads) {
    panels_count(ADAPTERS, kind);
    Adapters p = *asked;
    p.x = x, p.x_row = x_row, p.y = y, p.y_row = y_row, p.n = n, p.runs = runs, p.count = count;
    float few[ON_STACK];
    const int64_t ranks = p.parts * p.rank, width = p.blocks * ADAPTER_BLOCK;
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) rows += runs[3 * i + 1] - runs[3 * i];
    p.shrunk = n * ranks <= ON_STACK ? few : malloc((size_t)(n * ranks) * 4);
    if (!p.shrunk) return 1;
    AdapterCall call = {&p, panels_kernels(kind), 0};
    pool_run(adapt_work, &call, count * adapter_groups(&p), 0, 0,
             pool_threads(rows * ranks * p.inputs / ADAPTER_GRAIN, threads));
    call.expands = 1;
    pool_run(adapt_work, &call, count * p.blocks, 0, 0, pool_threads(rows * p.rank * width / ADAPTER_GRAIN, threads));
    if (p.shrunk != few) free(p.shrunk);
    return 0;
}

#endif
