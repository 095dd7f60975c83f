/* The exported functions: CPU features, and products on the threads of thread_pool.c. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif

#include "exports.h"
#include "tiles.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of weight times rows that are worth another thread. */
#define GRAIN 16384
/* Panels that tiles take at most, and panels of a thread from which on it gets whole tiles. */
#define WIDEST_TILE 4
#define MANY 32
/* Rounded activations up to this size are on the stack, and are computed before the threads begin. */
#define FEW 65536

static uint64_t launches[OPERATIONS][KINDS];

EXPORT int trencadis_panels_version(void) { return PANELS_VERSION; }

void panels_count(int operation, int kind) {
    if (kind > LIBRARY && kind < KINDS) __atomic_fetch_add(&launches[operation][kind], 1, __ATOMIC_RELAXED);
}

/* Returns how many launches of an operation each kind of kernels has done since the library was loaded. */
EXPORT uint64_t trencadis_launches(int operation, int kind) {
    return __atomic_load_n(&launches[operation][kind], __ATOMIC_RELAXED);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

static uint64_t xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Requests AMX tiles, which need 8 KiB per thread and which Linux grants to processes on request. */
static int request_tiles(void) {
#if defined(__linux__)
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
    return 0;
#endif
}

/* Returns the HAS_... bits of a CPU.

   found: what CPUID says: register c of leaf 1; a, b, c and d of leaf 7, and a of its part 1. saved: the registers that
   the system saves (XCR0). tiles: the system lets the process use tiles. */
EXPORT int trencadis_features_of(const uint32_t *found, uint64_t saved, int tiles) {
    const uint32_t c = found[0], wide = found[2], narrow = found[3], more = found[4], last = found[5];
    const unsigned fma = c >> 12 & 1, xsave = c >> 27 & 1, half = c >> 29 & 1;
    if (!xsave || !fma || !half || !(wide >> 5 & 1) || (saved & 0x06) != 0x06) return 0;
    int bits = 1 << HAS_AVX2;
    bits |= (int)(last >> 4 & 1) << HAS_AVX_VNNI;
    /* F, DQ, BW, VL */
    const unsigned avx512 = (wide >> 16 & 1) & (wide >> 17 & 1) & (wide >> 30 & 1) & (wide >> 31 & 1);
    if (!avx512 || (saved & 0xe6) != 0xe6) return bits;
    bits |= 1 << HAS_AVX512 | (int)(narrow >> 11 & 1) << HAS_AVX512_VNNI | (int)(last >> 5 & 1) << HAS_AVX512_BF16;
    const unsigned amx = (more >> 22 & 1) & (more >> 24 & 1) & (more >> 25 & 1); /* BF16, TILE, INT8 */
    if (amx && (saved & 0x60000) == 0x60000 && tiles) bits |= 1 << HAS_AMX;
    return bits;
}

/* Returns the HAS_... bits of this CPU, as far as the system allows its features. */
EXPORT int trencadis_cpu_features(void) {
    unsigned a, b, c, d;
    uint32_t found[6] = {0};
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    found[0] = c;
    if (!(c >> 27 & 1) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned parts = a;
    found[1] = a, found[2] = b, found[3] = c, found[4] = d;
    if (parts && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found[5] = a;
    const uint64_t saved = xgetbv();
    const int amx = (found[4] >> 24 & 1) && (saved & 0x60000) == 0x60000;
    return trencadis_features_of(found, saved, amx && request_tiles());
}

/* Returns the kernels of a kind without tiles. */
const Kernels *panels_kernels(int kind) {
#ifndef WITHOUT_PANELS_AVX512_VNNI
    if (kind == AVX512_VNNI || kind == AMX) return &panels_avx512_vnni;
#endif
#ifndef WITHOUT_PANELS_AVX512
    if (kind == AVX512) return &panels_avx512;
#endif
#ifndef WITHOUT_PANELS_AVX_VNNI
    if (kind == AVX_VNNI) return &panels_avx_vnni;
#endif
    (void)kind;
#ifndef WITHOUT_PANELS_AVX2
    return &panels_avx2;
#else
    return NULL; /* never selected */
#endif
}

typedef struct {
    const Product *product;
    const Kernels *kernels;
    const TileKernels *tiles; /* NULL: not by tiles */
    TileProduct tiled;
    int64_t each; /* panels of an item, if not by tiles */
} Call;

static void round_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const Call *call = data;
    const Product *p = call->product;
    float *row = p->row + thread * p->weight->columns;
    if (!call->tiles) {
        call->kernels->round(p, first, last, row);
        return;
    }
    for (int64_t r = first; r < last; r++) { /* a row is arranged while it is in the cache */
        call->tiles->round(p, r, r + 1, row);
        call->tiles->arrange(&call->tiled, r, r + 1);
    }
}

static void multiply_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const Call *call = data;
    const int64_t panels = panels_of(call->product->weight), stop = last * call->each;
    if (call->tiles)
        call->tiles->multiply(&call->tiled, first, last, thread, NULL);
    else
        call->kernels->multiply(call->product, first * call->each, stop < panels ? stop : panels);
}

/* Returns `bytes` bytes at a multiple of 64: `few`, of FEW, if they suffice; else from malloc, and *big is to be freed;
   NULL if memory is lacking. */
static char *take_memory(int64_t bytes, char *few, void **big) {
    *big = NULL;
    if (bytes <= FEW) return few;
    *big = malloc((size_t)bytes + 64);
    return *big ? (char *)(((uintptr_t)*big + 63) & ~(uintptr_t)63) : NULL;
}

/* Returns how many items a thread takes at a time: with many rows several quads, which share the rows' steps. */
static int64_t tile_grain(const TileProduct *t, int64_t threads) {
    const int64_t each = t->quads * t->parts / (4 * threads);
    return t->blocks == 1 ? 0 : each < 1 ? 1 : each < AT_ONCE ? each : AT_ONCE;
}

/* Computes out [n, rows] = x [n, inputs] times the weight, by kernels of this kind; returns 0, or 1 if memory is
   lacking. */
EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads) {
    panels_count(CODED_PRODUCTS, kind);
    if (n < 1) return 0;
    const int64_t most = pool_threads(w->rows * w->inputs / 8 * w->bits / GRAIN * (n < 8 ? 1 : n / 4), threads);
    Product p = {w, x, out, n, type, {0}, 0};
    Call call = {&p, panels_kernels(kind), tiles_of(kind), {.codes = &p}, 1};
    if (call.tiles && n <= call.tiles->few) call.tiles = NULL;
    if (panels_of(w) >= MANY * most) call.each = WIDEST_TILE; /* else the panels left over would be multiplied one by one */
    const int64_t codes = aligned(n * w->columns), sums = n * groups_of(w) * 4, steps = n * 4;
    const int64_t row = w->gather ? most * w->columns * 4 : 0, rounded = codes + aligned(sums + steps + row);
    const int64_t tiles = call.tiles ? tiles_plan(&call.tiled, n, most) : 0;
    const int64_t bytes = rounded + tiles + (call.tiles ? most * call.tiled.room : 0);
    _Alignas(64) char few[FEW];
    void *big;
    char *held = take_memory(bytes, few, &big);
    if (!held) return 1;
    p.rounded.codes = (int8_t *)held;
    p.rounded.sums = (int32_t *)(void *)(held + codes);
    p.rounded.step = (float *)(p.rounded.sums + n * groups_of(w));
    p.row = p.rounded.step + n;
    call.tiled.rows = held + rounded, call.tiled.work = held + rounded + tiles;
    pool_run(round_work, &call, n, 0, 0, rounded + tiles > FEW ? most : 1);
    if (call.tiles)
        pool_run(multiply_work, &call, call.tiled.quads * call.tiled.parts, tile_grain(&call.tiled, most), 0, most);
    else
        pool_run(multiply_work, &call, (panels_of(w) + call.each - 1) / call.each, 0, 0, most);
    free(big);
    return 0;
}

typedef struct {
    const Rows *rows;
    const Kernels *kernels;
} RowCall;

static void row_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const RowCall *call = data;
    (void)thread;
    call->kernels->rows(call->rows, first, last);
}

/* Runs an operation on n rows of `width` values each; with a residual, x is overwritten by the sum. */
EXPORT void trencadis_panels_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n,
                                  int64_t width, float eps, int type, int kind, int threads) {
    panels_count(ROWS_OPS, kind);
    const Rows rows = {op, x, residual, weight, out, width, eps, type, NULL, 1, 0, 0};
    RowCall call = {&rows, panels_kernels(kind)};
    pool_run(row_work, &call, n, 0, 0, pool_threads(n * width / GRAIN, threads));
}

/* Writes the norms of n rows of `width` values to out [n][width]: x [n / heads][heads][width], `stride` values from token
   to token and `step` from head to head; op: RMS_NORM or WIDE_NORM. */
EXPORT void trencadis_head_norms(int op, const void *x, const void *weight, void *out, int64_t n, int64_t width,
                                 int64_t heads, int64_t stride, int64_t step, float eps, int type, int kind,
                                 int threads) {
    panels_count(ROWS_OPS, kind);
    const Rows rows = {op, (void *)(uintptr_t)x, NULL, weight, out, width, eps, type, NULL, heads, stride, step};
    RowCall call = {&rows, panels_kernels(kind)};
    pool_run(row_work, &call, n, 0, 0, pool_threads(n * width / GRAIN, threads));
}

/* Writes the norms of n rows of `width` values, times silu of their gates: gate [n / heads][heads][width], `stride`
   values from token to token. */
EXPORT void trencadis_gated_norm(const void *x, const void *weight, const void *gate, void *out, int64_t n,
                                 int64_t width, int64_t heads, int64_t stride, float eps, int type, int kind,
                                 int threads) {
    panels_count(ROWS_OPS, kind);
    const Rows rows = {GATED_NORM, (void *)(uintptr_t)x, NULL, weight, out, width, eps, type, gate, heads, stride, width};
    RowCall call = {&rows, panels_kernels(kind)};
    pool_run(row_work, &call, n, 0, 0, pool_threads(n * width / GRAIN, threads));
}

/* Writes x [n][width] times the sigmoid of gate [n / heads][heads][width], which lies as x does in head_norms. */
EXPORT void trencadis_gate_heads(const void *x, const void *gate, void *out, int64_t n, int64_t width, int64_t heads,
                                 int64_t stride, int64_t step, int type, int kind, int threads) {
    panels_count(ROWS_OPS, kind);
    const Rows rows = {GATE, (void *)(uintptr_t)x, NULL, NULL, out, width, 0, type, gate, heads, stride, step};
    RowCall call = {&rows, panels_kernels(kind)};
    pool_run(row_work, &call, n, 0, 0, pool_threads(n * width / GRAIN, threads));
}

typedef struct {
    const Attend *attend;
    const Kernels *kernels;
    void (*attend_items)(const Attend *, int64_t first, int64_t last);
} AttendCall;

static void attend_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const AttendCall *call = data;
    (void)thread;
    call->attend_items(call->attend, first, last);
}

static void join_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const AttendCall *call = data;
    (void)thread;
    call->kernels->join(call->attend, first, last);
}

/* Writes p->out for the rows that it names; returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_panels_attend(const Attend *asked, int kind, int threads) {
    panels_count(DECODE_ATTENTION, kind);
    Attend p = *asked;
    int64_t few[65], keys = 0, several = 0;
    p.starts = p.n < 65 ? few : malloc((size_t)(p.n + 1) * 8);
    if (!p.starts) return 1;
    p.starts[0] = 0;
    for (int64_t i = 0; i < p.n; i++) {
        const int64_t seen = p.length[i] - p.first[i], chunks = seen > CHUNK ? (seen + CHUNK - 1) / CHUNK : 1;
        keys += seen > 0 ? seen : 0, several |= chunks > 1;
        p.starts[i + 1] = p.starts[i] + chunks * p.groups;
    }
    p.part = NULL;
    if (several) {
        const int64_t each = p.heads / p.groups;
        p.part = malloc((size_t)(p.starts[p.n] * each * (p.size + 2)) * 4);
    }
    const int64_t most = pool_threads(keys * p.heads * p.size / GRAIN / 8, threads);
    const int failed = several && !p.part;
    AttendCall call = {&p, panels_kernels(kind), panels_kernels(kind)->attend};
#ifndef WITHOUT_PANELS_AVX512_BF16
    if (p.bfloat16_pairs && p.type == BFLOAT16 && kind >= AVX512) call.attend_items = attend_avx512_bf16;
#endif
    if (!failed) pool_run(attend_work, &call, p.starts[p.n], 0, 0, most);
    if (p.part) pool_run(join_work, &call, p.n * p.groups, 0, 0, most);
    free(p.part);
    if (p.starts != few) free(p.starts);
    return failed;
}

#define TEAM 64 /* maximum threads of a product whose best outputs are computed */

typedef struct {
    const Dense *dense;
    int64_t (*best)[DENSE_ROWS];
    const TileKernels *tiles; /* NULL: not by tiles */
    TileProduct tiled;
} DenseCall;

static void arrange_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const DenseCall *call = data;
    (void)thread;
    call->tiles->arrange(&call->tiled, first, last);
}

static void dense_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const DenseCall *call = data;
    int64_t found[DENSE_ROWS];
    if (call->tiles)
        call->tiles->multiply(&call->tiled, first, last, thread, call->best ? found : NULL);
    else
        dense_items(call->dense, first, last, call->best ? found : NULL);
    for (int64_t r = 0; call->best && r < call->dense->n; r++)
        if (found[r] > call->best[thread][r]) call->best[thread][r] = found[r];
}

/* Computes a product by tiles; returns 0, or 1 if memory is lacking. */
static int multiply_tiles(DenseCall *call, int64_t threads) {
    TileProduct *t = &call->tiled;
    const Dense *p = call->dense;
    t->dense = p;
    const int64_t rows = tiles_plan(t, p->n, threads);
    _Alignas(64) char few[FEW];
    void *big;
    t->rows = take_memory(rows + threads * t->room, few, &big);
    if (!t->rows) return 1;
    t->work = t->rows + rows;
    pool_run(arrange_work, call, p->n, 0, 0, rows > FEW ? threads : 1);
    pool_run(dense_work, call, t->quads * t->parts, tile_grain(t, threads), 0, threads);
    free(big);
    return 0;
}

/* Computes one product of at most DENSE_ROWS rows; by tiles, of any number. out: [n, outputs]; NULL: best [n] is
   written instead, of at most DENSE_ROWS rows. Returns 0, or 1 if memory is lacking. */
EXPORT int trencadis_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
                           int64_t outputs, float scale, int kind, int threads) {
    panels_count(PRODUCTS, kind);
    if (n < 1) return 0;
    Dense p = *weight;
    p.x = x, p.out = out, p.n = n, p.stride = stride, p.outputs = outputs, p.scale = scale, p.parts = 1;
    p.kind = kind;
    const int64_t panels = (outputs + DENSE_PANEL - 1) / DENSE_PANEL;
    int64_t most = pool_threads(n * panels * DENSE_PANEL * p.inputs / GRAIN / 32, threads);
    if (!out && most > TEAM) most = TEAM;
    while (out && panels * p.parts < 2 * most && n / (2 * p.parts) >= 4) p.parts *= 2;
    int64_t found[TEAM][DENSE_ROWS];
    for (int64_t one = 0; !out && one < most; one++)
        for (int64_t r = 0; r < n; r++) found[one][r] = DENSE_NONE; /* a thread may get no items */
    DenseCall call = {&p, out ? NULL : found, p.type == BFLOAT16 ? tiles_of(kind) : NULL, {0}};
    if (!call.tiles)
        pool_run(dense_work, &call, panels * p.parts, 0, 0, most);
    else if (multiply_tiles(&call, most))
        return 1;
    for (int64_t r = 0; !out && r < n; r++) {
        best[r] = found[0][r];
        for (int64_t one = 1; one < most; one++)
            if (found[one][r] > best[r]) best[r] = found[one][r];
    }
    return 0;
}

static void pack_work(void *data, int64_t first, int64_t last, int64_t thread) {
    (void)thread;
    dense_pack(*(const Pack *const *)data, first, last);
}

/* Packs on the threads that will multiply: panels are divided among threads in the same way. */
EXPORT void trencadis_dense_pack(const Pack *p, int64_t panels, int kind, int threads) {
    panels_count(PACKS, kind);
    Pack own = *p;
    const Pack *call = &own;
    own.kind = kind;
    pool_run(pack_work, &call, panels, 0, 0, threads);
}

#else

EXPORT int trencadis_panels_attend(const Attend *asked, int kind, int threads) {
    (void)asked, (void)kind, (void)threads;
    return 1;
}

EXPORT int trencadis_cpu_features(void) { return 0; }

EXPORT int trencadis_features_of(const uint32_t *found, uint64_t saved, int tiles) {
    (void)found, (void)saved, (void)tiles;
    return 0;
}

EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads) {
    (void)w, (void)x, (void)out, (void)n, (void)type, (void)kind, (void)threads;
    return 1;
}

#endif
