/* Selects the kernels that multiply dense weights and pack them. */

#include "dense.h"

#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)

static const DenseKernels *kernels_of(int64_t kind, int64_t pairs) {
    const int wide = kind >= AVX512 && kind != AMX_EMULATED;
#ifndef WITHOUT_PANELS_AVX512_BF16
    if (wide && pairs) return &dense_avx512_bf16;
#endif
    (void)pairs, (void)wide;
#ifndef WITHOUT_DENSE_AVX512
    if (wide) return &dense_avx512;
#endif
#ifndef WITHOUT_DENSE_AVX2
    return &dense_avx2;
#else
    return NULL; /* never selected */
#endif
}

void dense_items(const Dense *p, int64_t first, int64_t last, int64_t *best) {
    const DenseKernels *kernels = kernels_of(p->kind, p->pairs);
    if (p->parts == 1) {
        kernels->multiply(p, first, last, best);
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
        kernels->multiply(&own, panel, panel + 1, NULL);
    }
}

void dense_pack(const Pack *p, int64_t first, int64_t last) { kernels_of(p->kind, 0)->pack(p, first, last); }

#endif
