/* Products of 8- and 4-bit weights that are stored in panels of 16 output rows.

   A panel is [columns / 4][16][4] bytes of codes: one step of a product takes 4 columns of 16 rows. Codes are
   unsigned, so that the activations are the signed side. With 4 bits a byte holds two codes, those of the step 2 i
   in the low bits and those of 2 i + 1 in the high ones; such codes are values, or places in a table of them.

   A row of activations is rounded to 8 bits with one step of its own. All sums of integers are exact, and sums of
   groups run in the order of the groups, so a row has the same bits whatever other rows there are. */

#ifndef TRENCADIS_PANELS_H
#define TRENCADIS_PANELS_H

#include "adapters.h"
#include "flash.h"
#include "recurrent.h"
#include "thread_pool.h"

#include <stdint.h>
#include <string.h>

#define PANELS_VERSION 19
#define PANEL 16
#define STEP 8 /* columns must be a multiple of this */
#define CHUNK 256  /* keys of a row that one thread attends to at a time */
#define WIDEST 512 /* maximum values of a head */

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 }; /* FLOAT8: 4 bits of exponent, without infinities */
/* WIDE_NORM: RMS_NORM with a weight in float32. */
enum { SILU_MUL, RMS_NORM, BEST, WIDE_NORM, GATED_NORM, GATE, CLAMPED_SWIGLU, WEIGHTED_SUM };
/* Kinds of kernels. AMX has products of bfloat16 and of codes by tiles, and uses the kernels of AVX512_VNNI for all
   else. AMX_EMULATED is for tests: tiles in plain C, and the kernels of AVX2 for all else. */
enum { LIBRARY, AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AMX, AMX_EMULATED, KINDS };
/* Features of the CPU that the system allows, one bit each. */
enum { HAS_AVX2, HAS_AVX_VNNI, HAS_AVX512, HAS_AVX512_VNNI, HAS_AVX512_BF16, HAS_AMX };
/* Launches are counted for each of these and each kind. */
enum {
    PRODUCTS, CODED_PRODUCTS, PACKS, ROWS_OPS, ROTARIES, DECODE_ATTENTION, ATTENTION, CONVOLUTIONS, DELTA_RULES,
    ADAPTERS, OPERATIONS
};

typedef struct {
    const uint8_t *codes;  /* [panels][columns * bits / 8 * 16] */
    const void *scale;     /* [panels][groups][16]: float16, or with `values` exponents of powers of two, in bytes, plus
                              127, where 0 is a scale of zero; NULL: one group, whose scale is the factor */
    const uint8_t *zero;   /* [panels][groups][16]; NULL: the middle code */
    const float *factor;   /* [panels][16] */
    const int32_t *gather; /* [columns]: the input's column, or -1 for a zero; NULL: in order, then zeros */
    const void *bias;      /* [rows] of the activations' type, or NULL */
    const uint8_t *values; /* [16]: the value of each code of 4 bits, up to 31; NULL: the code itself */
    int64_t rows, inputs, columns, group;
    int64_t bits, middle; /* middle: the value that stands for zero where there are no zero points */
} PanelWeight;

enum { LOOKED = 5 }; /* stands for 4 bits whose values are in a table, which have a scale for each group */

/* Activations of one call after rounding. */
typedef struct {
    int8_t *codes; /* [n][columns] */
    int32_t *sums; /* [n][groups]: minus the sum of the codes, times the middle value if there are no zero points */
    float *step;   /* [n] */
} Rounded;

typedef struct {
    const PanelWeight *weight;
    const void *x;
    void *out;
    int64_t n;
    int64_t type; /* type of x, out and the bias */
    Rounded rounded;
    float *row; /* [threads][columns]: memory for a gathered row */
} Product;

/* An operation on rows of `width` values of one type. */
typedef struct {
    int op;
    void *x;
    const void *residual, *weight;
    void *out;
    int64_t width;
    float eps;
    int type;
    const void *gate;            /* of GATED_NORM: a norm, times silu of the gate; of GATE: x, times its sigmoid */
    int64_t heads, stride, step; /* of WEIGHTED_SUM: x [n][heads][width], and the float32 weight [n][heads]; else
                                     in the gate, or else in x: `heads` rows of a token are `step` values apart, tokens
                                    `stride` values; stride 0: rows lie one after another */
} Rows;

/* Attention of n rows of one token each; sizes in values. */
typedef struct {
    const void *q;               /* [tokens][heads][size], `stride` from token to token */
    void *out;                   /* [tokens][heads][size] */
    const void *k, *v;           /* [slots][groups][size] of `type`, or of codes */
    const uint16_t *k_scale, *v_scale; /* float16 [slots][groups]: scales of codes */
    const void *kept;            /* [slots][groups][kept_count]: values of keys that are stored without codes */
    const int32_t *pairs;        /* [groups][kept_count]: positions of those values in a head */
    const int32_t *blocks;       /* [rows][width]; a block below 0 holds no keys */
    const int32_t *token, *row;  /* [n]: index in q and out, and in blocks */
    const int32_t *first, *length; /* [n]: keys [first, length) of the row are visible */
    const float *sinks;          /* [heads]: scores that count in the sum of weights and have no value; NULL: none */
    int64_t n, heads, groups, size, block, width, stride, kept_count;
    float scale;
    int type, codes, kept_type; /* codes: INT8 or FLOAT8; 0: none */
    int bfloat16_pairs;         /* products of pairs of 16-bit values are used */
    int64_t *starts; /* [n + 1]: number of items of the rows before each; an item is a chunk of keys of one KV head */
    float *part;     /* [items][heads / groups][size + 2]: sum of values, sum of weights, largest score */
} Attend;

/* Rotary of n rows; sizes and strides in values. */
typedef struct {
    const void *q, *k, *v;  /* [n][heads][size], and [n][groups][size] twice */
    const float *cos, *sin; /* [n][size], whose second half equals the first */
    void *out;              /* [n][heads + groups][size] */
    void *keys, *values;    /* [slots][groups][size] */
    const int64_t *slot;    /* [n]: slots in which k, rotated, and v are stored; NULL: not stored */
    int64_t q_row, q_head, k_row, k_head, v_row; /* heads of v are contiguous */
    int64_t heads, groups, size, type;
} Rotary;

typedef struct {
    void (*round)(const Product *, int64_t first, int64_t last, float *row);
    void (*multiply)(const Product *, int64_t first, int64_t last); /* panels */
    void (*rows)(const Rows *, int64_t first, int64_t last);
    void (*attend)(const Attend *, int64_t first, int64_t last); /* items */
    void (*join)(const Attend *, int64_t first, int64_t last);   /* (row, KV head) pairs */
    void (*rotate)(const Rotary *, int64_t first, int64_t last);     /* rows */
    void (*flash)(Flash *, float *work);                         /* takes items until none is left */
    void (*flash_pairs)(Flash *, float *work);                   /* with pairs of bfloat16; NULL: not supported */
    void (*convolve)(const Convolution *, int64_t first, int64_t last);  /* blocks of channels */
    void (*delta)(const Delta *, int64_t first, int64_t last, float *work); /* (row, head) pairs */
    void (*adapt)(const Adapters *, int64_t first, int64_t last, int expands); /* groups of A or blocks of B, of runs */
} Kernels;

extern const Kernels panels_avx2, panels_avx_vnni, panels_avx512, panels_avx512_vnni;
void flash_avx512_bf16(Flash *, float *work);
void attend_avx512_bf16(const Attend *, int64_t first, int64_t last);

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Defined in panels.c: kernels by their number, and a counter of their launches. */
const Kernels *panels_kernels(int kind);
void panels_count(int operation, int kind);

/* Returns value i of an array of FLOAT32 or BFLOAT16. */
static inline float value_at(const void *x, int64_t i, int64_t type) {
    if (type == FLOAT32) return ((const float *)x)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Returns `bytes`, or the next multiple of 64. */
static inline int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

static inline int64_t panels_of(const PanelWeight *w) { return (w->rows + PANEL - 1) / PANEL; }
static inline int64_t groups_of(const PanelWeight *w) { return (w->columns + w->group - 1) / w->group; }

#endif
