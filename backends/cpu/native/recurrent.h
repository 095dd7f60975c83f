#ifndef TRENCADIS_RECURRENT_H
#define TRENCADIS_RECURRENT_H

#include <stdint.h>

#define DELTA_CHUNK 64 /* tokens of a row that are computed together */
#define TAPS 8         /* maximum taps of a convolution */

/* Rows of tokens of a launch; a row without tokens is padding. */
typedef struct {
    const int64_t *slot, *source; /* [n]: states are written at slot and read at source */
    const int32_t *begins;        /* [n] 1: the state counts as zero */
    const int32_t *start, *count; /* [n]: the row has the tokens [start, start + count) */
    int64_t n;
} StateRows;

/* A depthwise causal convolution along the tokens of each row. */
typedef struct {
    const void *x;      /* [tokens][channels], `stride` from token to token, of `type` as all below */
    const void *weight; /* [channels][taps] */
    const void *bias;   /* [channels], or NULL */
    void *state;        /* [slots][taps - 1][channels]: the last inputs of each slot, oldest first */
    void *out;          /* [tokens][channels] */
    StateRows rows;
    int64_t channels, taps, stride, type, silu;
} Convolution;

/* The gated delta rule, or a state space (`plain`): keys and queries stay as they are, and what the state already holds
   is not subtracted. Sizes and strides in values, and the values of a head lie together. */
typedef struct {
    const void *q, *k, *v;  /* [tokens][groups][dk] twice, [tokens][heads][dv]; of `type` */
    const float *g, *beta;  /* [tokens][heads], `gate_row` from token to token */
    float *state;           /* [slots][heads][dk][dv] */
    void *out;              /* [tokens][heads][dv] of `type` */
    StateRows rows;
    int64_t q_row, k_row, v_row, gate_row, beta_row; /* heads of q, k and v lie one after the other */
    int64_t heads, groups, dk, dv, type, plain;
    float *work; /* set by the library: memory of each thread, `room` values */
    int64_t room;
} Delta;

/* A layer of gated DeltaNet between its projections: the convolution of queries, keys and values with silu, the delta
   rule, and the norm of each head times silu of its gate. Values are of `type` where nothing else is said. */
typedef struct {
    const void *x;             /* [tokens][channels], `x_row` from token to token: queries, keys and values */
    const void *gates;         /* [tokens], `gates_row` from token to token: [heads][dv] of the norm, then beta, decay */
    const void *weight;        /* [channels][taps] */
    void *last;                /* [slots][taps - 1][channels] */
    const float *decay, *shift; /* [heads] */
    const void *norm;          /* [dv] */
    float *state;              /* [slots][heads][dk][dv] */
    void *mixed, *y;           /* memory for [tokens][channels], and for [tokens][heads][dv] */
    float *factors;            /* memory for [tokens][2][heads] */
    void *out;                 /* [tokens][heads * dv] */
    StateRows rows;
    int64_t tokens, x_row, gates_row, taps, heads, groups, dk, dv, type;
    float eps;
} DeltaNet;

/* Values of a thread's memory: q, k and k transposed of a chunk, two squares, values, results and factors. */
static inline int64_t delta_room(int64_t dk, int64_t dv, int single) {
    if (single) return 2 * dk + 2 * dv;
    return DELTA_CHUNK * (3 * dk + 2 * dv + 2 * DELTA_CHUNK + 2) + 2 * dk + 2 * dv;
}

#endif
