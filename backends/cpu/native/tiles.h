/* Products by tiles of activations and weights, as the instructions of AMX multiply them.

   A tile has up to 16 rows of 64 bytes. Weights are read where they lie: a panel of dense weights is four tiles of
   bfloat16 side by side, and a panel of 8-bit codes is a column of tiles; codes of 4 bits are unpacked to tiles, once
   for all rows. Activations are first arranged in tiles, [blocks of 16 rows][steps][height][64 bytes], each step with
   zeros behind its own columns. Sums run over the steps in order, so a row has the same bits whatever other rows there
   are. */

#ifndef TRENCADIS_TILES_H
#define TRENCADIS_TILES_H

#include "dense.h"
#include "panels.h"

#define TILE_ROWS 16
#define TILE_BYTES 64 /* bytes of a tile's row */
#define TILE_SIZE (TILE_ROWS * TILE_BYTES)
#define QUAD 4        /* panels of codes that are multiplied together: as many outputs as a panel of dense weights */
#define SPAN 16       /* maximum steps of weights that all rows are multiplied by before the next ones */
#define AT_ONCE 4     /* maximum quads that share a span of activations from the L2 cache */
#define UNPACKED (2 * SPAN * TILE_SIZE) /* bytes of the weights of a span that are copied or unpacked */

/* A product of either kind of weights; items are quads x parts of the rows. */
typedef struct {
    const Product *codes; /* weights of 8 and 4 bits; NULL: dense ones */
    const Dense *dense;   /* weights in bfloat16 */
    char *rows;           /* activations in tiles */
    char *work;           /* [threads][room]: sums, and unpacked weights */
    int64_t room;
    int64_t n, blocks;   /* rows, and blocks of 16 rows */
    int64_t height;      /* rows of a tile of activations: fewer than 16 if there are fewer rows */
    int64_t quads, parts;
    int64_t width;       /* bytes of a step's columns, up to TILE_BYTES */
    int64_t steps;       /* steps of all groups */
    int64_t group_steps; /* steps of a group; of the last one there may be fewer */
} TileProduct;

typedef struct {
    int64_t few; /* number of rows up to which codes are multiplied without tiles */
    void (*round)(const Product *, int64_t first, int64_t last, float *row);    /* as that of `Kernels`; to 8 bits */
    void (*arrange)(const TileProduct *, int64_t first, int64_t last);          /* rows */
    /* items; best [n]: as that of dense_items */
    void (*multiply)(const TileProduct *, int64_t first, int64_t last, int64_t thread, int64_t *best);
} TileKernels;

extern const TileKernels tiles_amx, tiles_amx_emulated;

/* Returns the kernels with tiles of a kind; NULL: it has none. */
const TileKernels *tiles_of(int64_t kind);

/* Sets the sizes of a product from its weight and its rows, for up to `threads` threads; returns the bytes of
   `rows`. */
int64_t tiles_plan(TileProduct *t, int64_t n, int64_t threads);

static inline int64_t tile_bytes(const TileProduct *t) { return t->height * TILE_BYTES; }
static inline int64_t block_bytes(const TileProduct *t) { return t->steps * tile_bytes(t); }

#endif
