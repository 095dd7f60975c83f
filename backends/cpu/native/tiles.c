/* Sizes of products by tiles, and the choice of their kernels. */

#include "tiles.h"

#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)

const TileKernels *tiles_of(int64_t kind) {
#ifndef WITHOUT_PANELS_AMX
    if (kind == AMX) return &tiles_amx;
#endif
#ifndef WITHOUT_PANELS_AMX_EMULATED
    if (kind == AMX_EMULATED) return &tiles_amx_emulated;
#endif
    (void)kind;
    return NULL;
}

/* Returns the bytes of a step's columns: groups are cut into equal steps, of whole bytes of 4-bit codes. */
static int64_t width_of(int64_t group) {
    const int64_t steps = (group + TILE_BYTES - 1) / TILE_BYTES;
    return ((group + steps - 1) / steps + STEP - 1) / STEP * STEP;
}

int64_t tiles_plan(TileProduct *t, int64_t n, int64_t threads) {
    t->n = n, t->blocks = (n + TILE_ROWS - 1) / TILE_ROWS;
    t->height = n < TILE_ROWS ? n : TILE_ROWS;
    int64_t copies = 1;
    if (t->codes) {
        const PanelWeight *w = t->codes->weight;
        const int64_t groups = groups_of(w), last = w->columns - (groups - 1) * w->group;
        t->width = width_of(w->group < w->columns ? w->group : w->columns);
        t->group_steps = ((groups > 1 ? w->group : last) + t->width - 1) / t->width;
        t->steps = (groups - 1) * t->group_steps + (last + t->width - 1) / t->width;
        t->quads = (panels_of(w) + QUAD - 1) / QUAD;
        copies = w->scale ? 2 : 1; /* sums of a group, and of all */
    } else {
        t->width = TILE_BYTES;
        t->steps = t->group_steps = (t->dense->inputs * 2 + TILE_BYTES - 1) / TILE_BYTES;
        t->quads = (t->dense->outputs + DENSE_PANEL - 1) / DENSE_PANEL;
    }
    t->parts = 1;
    while ((t->codes || t->dense->out) && t->quads * t->parts < 2 * threads && t->blocks / (2 * t->parts) >= 2)
        t->parts *= 2;
    const int64_t most = (t->blocks + t->parts - 1) / t->parts;
    t->room = copies * (most > 1 ? AT_ONCE : 1) * most * TILE_ROWS * DENSE_PANEL * 4 + (t->codes ? UNPACKED : 0);
    return t->blocks * block_bytes(t);
}

#endif
