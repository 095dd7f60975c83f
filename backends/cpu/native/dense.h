#ifndef TRENCADIS_DENSE_H
#define TRENCADIS_DENSE_H

#include <stdint.h>

#include "panels.h"

#define DENSE_ROWS 128 /* maximum rows of a product */
#define DENSE_PANEL 64 /* number of outputs of a panel */
#define DENSE_NONE ((int64_t)((uint64_t)0x80000000 << 32 | 0x7fffffff)) /* less than any output */

/* A product of n rows with a dense weight [outputs, inputs]; sizes in values. */
typedef struct {
    const void *weight; /* [panels of 64 outputs][depth][64], pairs of 16-bit values adjacent */
    const void *bias;   /* [outputs], or NULL */
    int64_t inputs, depth, outputs;
    int64_t type;  /* FLOAT32 or BFLOAT16 */
    const void *x; /* [n][inputs], `stride` from row to row */
    void *out;     /* [n][outputs]; NULL: compute the best of each row instead */
    int64_t n, stride;
    int64_t parts; /* parts of the rows, each an item of a panel; 1 if the best are computed */
    float scale;   /* multiplies the compared outputs */
    int pairs;     /* products of pairs of bfloat16 are used */
    int64_t kind;  /* kind of kernels */
} Dense;

/* Computes the items [first, last) of the panels x parts of a product.

   best [n]: per row, the largest output in the high bits, in the order of integers, and 2^31 - 1 minus its first
   index in the low bits, so that the larger number is the better. */
void dense_items(const Dense *p, int64_t first, int64_t last, int64_t *best);

/* Rows that become panels; depth is a multiple of 16 values of 32 bits, or of 32 of 16. */
typedef struct {
    const void *const *rows; /* [panels x 64]: address of each row; NULL: zeros */
    void *out;               /* [panels][depth][64], at a multiple of 64 bytes */
    int64_t inputs, depth;   /* values of a row, without and with padding zeros */
    int64_t from, to;        /* types; `to` is FLOAT32 or BFLOAT16 */
    int64_t kind;            /* kind of kernels */
} Pack;

void dense_pack(const Pack *p, int64_t first, int64_t last); /* panels */

typedef struct {
    void (*multiply)(const Dense *, int64_t first, int64_t last, int64_t *best); /* panels, of all rows */
    void (*pack)(const Pack *, int64_t first, int64_t last);
} DenseKernels;

extern const DenseKernels dense_avx2, dense_avx512, dense_avx512_bf16;

#endif
