/* Experts of a layer for few rows: routing, the products of chosen experts, the activation, and the sum. */

#ifndef TRENCADIS_EXPERTS_H
#define TRENCADIS_EXPERTS_H

#include <stdint.h>

typedef struct {
    const void *const *gate_up, *const *down; /* [count]: the PanelWeight of each expert if `coded`, else its Dense */
    int64_t count, top;     /* experts, and those of a row */
    int64_t hidden, inner;  /* inputs of gate_up and outputs of down; inputs of down */
    int64_t type, coded;    /* type: FLOAT32 or BFLOAT16, of the rows */
    int64_t act, normalise; /* act: SILU_MUL or CLAMPED_SWIGLU; normalise: a row's shares add up to 1 */
} Experts;

#endif
