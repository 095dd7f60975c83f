/* The exported attention of many queries: threads take items of queries one by one. */

#include "exports.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define QUERIES 512  /* maximum queries of an item, counting query heads of a KV head separately */
#define WIDTHS 40960 /* maximum of their values: with their sums they stay in the L2 cache */
#define LEAST 64     /* queries of an item if there would be few items */
#define ITEMS 4      /* items per thread, so that no thread waits long for another */
#define GRAIN 131072 /* products of a query and a key, value by value, that are worth another thread */

typedef struct {
    Flash *flash;
    const Kernels *kernels;
    float *work;
    int64_t room;
} FlashCall;

/* Takes items of the attention until none is left, so that a late thread finds none. */
static void flash_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const FlashCall *call = data;
    float *work = call->work + thread * call->room;
    (void)first, (void)last;
    (call->flash->pairs ? call->kernels->flash_pairs : call->kernels->flash)(call->flash, work);
}

/* Writes p->out for the queries of the spans; returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_flash(const Flash *asked, int kind, int threads) {
    panels_count(ATTENTION, kind);
    Flash p = *asked;
    const Kernels *kernels = panels_kernels(kind);
    const int64_t each = p.heads / p.groups, wide = (p.size + 15) / 16 * 16;
    int64_t work = 0;
    p.pairs = p.pairs && kernels->flash_pairs;
    p.next = 0;
    p.starts = malloc((size_t)(p.n + 1) * 8);
    if (!p.starts) return 1;
    for (int64_t i = 0; i < p.n; i++) work += p.spans[i].count * p.spans[i].keys;
    int64_t rows = WIDTHS / wide < QUERIES ? WIDTHS / wide : QUERIES;
    do {
        p.tokens = rows / each > 1 ? rows / each : 1;
        p.starts[0] = 0;
        for (int64_t i = 0; i < p.n; i++)
            p.starts[i + 1] = p.starts[i] + (p.spans[i].count + p.tokens - 1) / p.tokens * p.groups;
        rows /= 2;
    } while (rows >= LEAST && p.starts[p.n] < ITEMS * threads);
    int64_t most = pool_threads(work * p.heads * p.size / GRAIN, threads);
    if (most > p.starts[p.n]) most = p.starts[p.n];
    const int64_t queries = p.tokens * each * (2 * wide + 17) + 4 * p.tokens;
    const int64_t room = (queries + (2 * wide + 6) * KEYS + 256) / 16 * 16; /* size of `Held` in flash.inc */
    p.team = most;
    float *held = malloc((size_t)(most * room + 16) * 4);
    if (held) {
        float *first = (float *)(((uintptr_t)held + 63) & ~(uintptr_t)63);
        FlashCall call = {&p, kernels, first, room};
        pool_run(flash_work, &call, most, 1, p.starts[p.n], most);
    }
    free(held);
    free(p.starts);
    return !held;
}

#endif
