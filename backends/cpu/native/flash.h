#ifndef TRENCADIS_FLASH_H
#define TRENCADIS_FLASH_H

#include <stdint.h>

#define KEYS 64 /* keys of a tile; tiles begin at positions that are multiples of it */

/* Queries that attend to the same keys, each up to its visible end; rows and slots are those of the tensors of
   `Flash`. */
typedef struct {
    int64_t first, count;    /* the queries are the rows first + i, or query_at[i] */
    const int64_t *query_at;
    int64_t slot, keys;      /* the keys are the slots slot + j, or slots[j] */
    const int64_t *slots;
    int64_t place, own;      /* position of the first key, and of the first query; the others follow */
    const int32_t *upto;     /* [count]: the last position that each query sees; NULL: its own */
    int64_t whole;           /* every query sees every key */
} Span;

/* Attention of spans; sizes and strides in values. Heads lie [size] together, and out is [rows][heads][size]. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    const float *sinks; /* [heads]: scores that count in the sum of weights and have no value; NULL: none */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    int64_t heads, groups, size;
    int64_t window; /* keys that a query sees, including its own position; 0: all */
    const Span *spans;
    int64_t n, type;
    float scale;
    int pairs; /* products of pairs of 16-bit values are used */
    /* fields that the library sets */
    int64_t *starts; /* [n + 1]: number of items of the spans before each; an item is `tokens` queries of one KV head */
    int64_t tokens, next, team; /* threads */
} Flash;

#endif
