#ifndef TRENCADIS_ADAPTERS_H
#define TRENCADIS_ADAPTERS_H

#include <stdint.h>

#define ADAPTER_BLOCK 64 /* outputs of a block of B */
#define ADAPTER_GROUP 4  /* rows of A that are multiplied together; `rank` is a multiple of it */

/* Rows of which each adds its product with A and B of an adapter; of `type`, strides in values. */
typedef struct {
    const void *a; /* [slots][parts][rank][inputs] */
    const void *b; /* [slots][blocks][rank][ADAPTER_BLOCK]; a block has outputs of one part */
    const int64_t *places; /* [blocks][3]: part, first output in a row of y, number of outputs */
    int64_t parts, rank, inputs, blocks, type;
    const void *x;       /* [n][inputs] */
    void *y;             /* [n][outputs], to which the products are added */
    const int64_t *runs; /* [count][3]: the rows [first, end) have the adapter of a slot, numbered from 0 */
    int64_t x_row, y_row, n, count;
    float *shrunk; /* [n][parts][rank]: set by the library */
} Adapters;

static inline int64_t adapter_groups(const Adapters *p) { return p->parts * p->rank / ADAPTER_GROUP; }

#endif
