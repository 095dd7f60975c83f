/* The exported functions: CPU features, and products on the threads of thread_pool.c. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif

#include "exports.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of weight times rows that are worth another thread. */
#define GRAIN 16384
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
static int tiles_allowed(void) {
#if defined(__linux__)
    return (xgetbv() & 0x60000) == 0x60000 && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
    return 0;
#endif
}

/* Returns the HAS_... bits of the CPU, if the system saves the registers. */
EXPORT int trencadis_cpu_features(void) {
    unsigned a, b, c, d, a1 = 0, b1, c1, d1, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned fma = c >> 12 & 1, xsave = c >> 27 & 1, half = c >> 29 & 1;
    if (!xsave || !fma || !half || (xgetbv() & 0x06) != 0x06) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 5 & 1)) return 0;
    found |= 1 << HAS_AVX2;
    if (a < 1 || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) a1 = 0;
    found |= (a1 >> 4 & 1) << HAS_AVX_VNNI;
    const unsigned wide = (b >> 16 & 1) & (b >> 17 & 1) & (b >> 30 & 1) & (b >> 31 & 1); /* F, DQ, BW, VL */
    if (!wide || (xgetbv() & 0xe6) != 0xe6) return (int)found;
    found |= 1 << HAS_AVX512 | (c >> 11 & 1) << HAS_AVX512_VNNI | (a1 >> 5 & 1) << HAS_AVX512_BF16;
    if ((d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && tiles_allowed()) found |= 1 << HAS_AMX;
    return (int)found;
}

/* Returns the kernels of a kind. AMX: operations without tiles use those of VNNI. */
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
} Call;

static void round_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const Call *call = data;
    const Product *p = call->product;
    call->kernels->round(p, first, last, p->row + thread * p->weight->columns);
}

static void multiply_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const Call *call = data;
    (void)thread;
    call->kernels->multiply(call->product, first, last);
}

/* Computes out [n, rows] = x [n, inputs] times the weight, by kernels of this kind; returns 0, or 1 if memory is
   lacking. */
EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads) {
    panels_count(CODED_PRODUCTS, kind);
    const int64_t groups = groups_of(w);
    const int64_t codes = n * w->columns, sums = n * groups * 4, steps = n * 4;
    const int64_t most = pool_threads(w->rows * w->inputs / 8 * w->bits / GRAIN * (n < 8 ? 1 : n / 4), threads);
    const int64_t row = w->gather ? most * w->columns * 4 : 0;
    const int64_t bytes = codes + sums + steps + row + 256;
    _Alignas(64) uint8_t few[FEW];
    uint8_t *held = few;
    void *big = NULL;
    if (bytes > FEW) {
        big = malloc((size_t)bytes);
        if (!big) return 1;
        held = (uint8_t *)(((uintptr_t)big + 63) & ~(uintptr_t)63);
    }
    Product p = {w, x, out, n, type, {0}, 0};
    p.rounded.codes = (int8_t *)held;
    p.rounded.sums = (int32_t *)(held + ((codes + 63) & ~(int64_t)63));
    p.rounded.step = (float *)(p.rounded.sums + n * groups);
    p.row = p.rounded.step + n;
    const Kernels *kernels = panels_kernels(kind);
    Call call = {&p, kernels};
    pool_run(round_work, &call, n, 0, 0, bytes > FEW ? most : 1);
    pool_run(multiply_work, &call, panels_of(w), 0, 0, most);
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
    const Rows rows = {op, x, residual, weight, out, width, eps, type};
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
} DenseCall;

static void dense_work(void *data, int64_t first, int64_t last, int64_t thread) {
    const DenseCall *call = data;
    if (!call->best) {
        dense_items(call->dense, first, last, NULL);
        return;
    }
    int64_t found[DENSE_ROWS], *best = call->best[thread];
    dense_items(call->dense, first, last, found);
    for (int64_t r = 0; r < call->dense->n; r++)
        if (found[r] > best[r]) best[r] = found[r];
}

/* Computes one product of at most DENSE_ROWS rows. out: [n, outputs]; NULL: best [n] is written instead. */
EXPORT void trencadis_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
                            int64_t outputs, float scale, int kind, int threads) {
    panels_count(PRODUCTS, kind);
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
    DenseCall call = {&p, out ? NULL : found};
    pool_run(dense_work, &call, panels * p.parts, 0, 0, most);
    if (out) return;
    for (int64_t r = 0; r < n; r++) {
        best[r] = found[0][r];
        for (int64_t one = 1; one < most; one++)
            if (found[one][r] > best[r]) best[r] = found[one][r];
    }
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

EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads) {
    (void)w, (void)x, (void)out, (void)n, (void)type, (void)kind, (void)threads;
    return 1;
}

#endif
