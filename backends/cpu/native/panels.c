/* What Python calls: which kernels the CPU has, and a product on the threads that torch uses.

   The functions of OpenMP are given by address, those that torch itself calls, so that there is one pool of threads.
   The library therefore links no OpenMP runtime, and serves any torch. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
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
/* Rounded activations up to this size live on the stack, and are made before the threads begin. */
#define FEW 65536

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

static Parallel parallel;
static int (*thread_num)(void);
static int (*num_threads)(void);
static void (*barrier)(void);

static uint64_t launches[OPERATIONS][KINDS];

EXPORT int trencadis_panels_version(void) { return PANELS_VERSION; }

void panels_count(int operation, int kind) {
    if (kind > LIBRARY && kind < KINDS) __atomic_fetch_add(&launches[operation][kind], 1, __ATOMIC_RELAXED);
}

/* How many launches of an operation each kind of kernels has served, since the library was loaded. */
EXPORT uint64_t trencadis_launches(int operation, int kind) {
    return __atomic_load_n(&launches[operation][kind], __ATOMIC_RELAXED);
}

EXPORT void trencadis_panels_threads(void *p, void *num, void *count, void *wait) {
    parallel = (Parallel)p;
    thread_num = (int (*)(void))num;
    num_threads = (int (*)(void))count;
    barrier = (void (*)(void))wait;
}

#ifdef __linux__
static void pin_work(void *data) {
    const int *cpus = data;
    const int me = thread_num();
    cpu_set_t one;
    if (!me) return; /* the first is the caller's, whose later threads would all be kept to its CPU */
    CPU_ZERO(&one);
    CPU_SET((size_t)cpus[me], &one);
    sched_setaffinity(0, sizeof one, &one);
}
#endif

/* Keeps each thread of products but the first to its CPU. */
EXPORT void trencadis_pin(int *cpus, int count) {
#ifdef __linux__
    if (parallel && count > 1) parallel(pin_work, cpus, (unsigned)count, 0);
#else
    (void)cpus, (void)count;
#endif
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

static uint64_t xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Tiles hold 8 KiB a thread, which Linux gives to processes that ask. */
static int tiles_allowed(void) {
#if defined(__linux__)
    return (xgetbv() & 0x60000) == 0x60000 && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
    return 0;
#endif
}

/* HAS_... of the CPU, as far as the system keeps the registers. */
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

/* Kernels by their number. AMX: what its tiles do not do is done as on any CPU with VNNI. */
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
    return NULL; /* the library does not say that it serves */
#endif
}

int64_t panels_thread(void) { return parallel ? thread_num() : 0; }

void panels_run(void (*work)(void *), void *data, int64_t threads) {
    if (parallel && threads > 1)
        parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

typedef struct {
    const Product *product;
    const Kernels *kernels;
    int round_first;
} Call;

static void share(int64_t whole, int64_t part, int64_t parts, int64_t *first, int64_t *last) {
    const int64_t each = whole / parts, more = whole % parts;
    *first = part * each + (part < more ? part : more);
    *last = *first + each + (part < more);
}

void panels_share(int64_t whole, int64_t *first, int64_t *last) {
    if (parallel)
        share(whole, thread_num(), num_threads(), first, last);
    else
        *first = 0, *last = whole;
}

/* One thread's share: of the rows to round, then of the panels. */
static void work(void *data) {
    const Call *call = data;
    const Product *p = call->product;
    const int64_t me = thread_num(), all = num_threads();
    int64_t first, last;
    if (call->round_first) {
        share(p->n, me, all, &first, &last);
        call->kernels->round(p, first, last, p->row + me * p->weight->columns);
        barrier();
    }
    share(panels_of(p->weight), me, all, &first, &last);
    call->kernels->multiply(p, first, last);
}

/* out [n, rows] = x [n, inputs] times the weight, by kernels of this kind; 0, or 1 without memory. */
EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads) {
    panels_count(CODED_PRODUCTS, kind);
    const int64_t groups = groups_of(w);
    const int64_t codes = n * w->columns, sums = n * groups * 4, steps = n * 4;
    int64_t most = w->rows * w->inputs / 8 * w->bits / GRAIN * (n < 8 ? 1 : n / 4) + 1;
    if (most > threads) most = threads;
    if (!parallel) most = 1;
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
    Call call = {&p, kernels, most > 1 && bytes > FEW};
    if (!call.round_first) kernels->round(&p, 0, n, p.row);
    if (most > 1)
        parallel(work, &call, (unsigned)most, 0);
    else
        kernels->multiply(&p, 0, panels_of(w));
    free(big);
    return 0;
}

typedef struct {
    const Rows *rows;
    const Kernels *kernels;
    int64_t n;
} RowCall;

static void row_work(void *data) {
    const RowCall *call = data;
    int64_t first, last;
    share(call->n, thread_num(), num_threads(), &first, &last);
    call->kernels->rows(call->rows, first, last);
}

/* n rows of `width` values each; x is written to where there is a residual. */
EXPORT void trencadis_panels_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n,
                                  int64_t width, float eps, int type, int kind, int threads) {
    panels_count(ROWS_OPS, kind);
    const Rows rows = {op, x, residual, weight, out, width, eps, type};
    RowCall call = {&rows, panels_kernels(kind), n};
    int64_t most = n * width / GRAIN + 1;
    if (most > threads) most = threads;
    if (most > n) most = n;
    if (parallel && most > 1)
        parallel(row_work, &call, (unsigned)most, 0);
    else
        call.kernels->rows(&rows, 0, n);
}

typedef struct {
    const Attend *attend;
    const Kernels *kernels;
} AttendCall;

static void attend_work(void *data) {
    const AttendCall *call = data;
    const Attend *p = call->attend;
    const int64_t me = thread_num(), all = num_threads();
    int64_t first, last;
    share(p->starts[p->n], me, all, &first, &last);
    if (first < last) call->kernels->attend(p, first, last);
    if (!p->part) return;
    barrier();
    share(p->n * p->groups, me, all, &first, &last);
    call->kernels->join(p, first, last);
}

/* Writes p->out of the rows that it names; 0, or 1 without memory. */
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
    int64_t most = keys * p.heads * p.size / GRAIN / 8 + 1;
    if (most > threads) most = threads;
    if (most > p.starts[p.n]) most = p.starts[p.n];
    const int failed = several && !p.part;
    AttendCall call = {&p, panels_kernels(kind)};
    if (!failed && parallel && most > 1)
        parallel(attend_work, &call, (unsigned)most, 0);
    else if (!failed) {
        call.kernels->attend(&p, 0, p.starts[p.n]);
        if (several) call.kernels->join(&p, 0, p.n * p.groups);
    }
    free(p.part);
    if (p.starts != few) free(p.starts);
    return failed;
}

#define TEAM 64 /* most threads of a product whose best outputs are wanted */

typedef struct {
    const Dense *dense;
    int64_t items;
    int64_t (*best)[DENSE_ROWS];
} DenseCall;

static void dense_work(void *data) {
    const DenseCall *call = data;
    const int64_t me = thread_num();
    int64_t first, last;
    share(call->items, me, num_threads(), &first, &last);
    dense_items(call->dense, first, last, call->best ? call->best[me] : NULL);
}

/* One product of at most DENSE_ROWS rows. out: [n, outputs]; NULL: best [n] is written. */
EXPORT void trencadis_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
                            int64_t outputs, float scale, int kind, int threads) {
    panels_count(PRODUCTS, kind);
    Dense p = *weight;
    p.x = x, p.out = out, p.n = n, p.stride = stride, p.outputs = outputs, p.scale = scale, p.parts = 1;
    p.kind = kind;
    const int64_t panels = (outputs + DENSE_PANEL - 1) / DENSE_PANEL;
    int64_t most = n * panels * DENSE_PANEL * p.inputs / GRAIN / 32 + 1;
    if (most > threads) most = threads;
    if (!out && most > TEAM) most = TEAM;
    if (!parallel) most = 1;
    while (out && panels * p.parts < 2 * most && n / (2 * p.parts) >= 4) p.parts *= 2;
    int64_t found[TEAM][DENSE_ROWS];
    for (int64_t one = 0; !out && one < most; one++)
        for (int64_t r = 0; r < n; r++) found[one][r] = DENSE_NONE; /* there may be fewer threads than asked for */
    DenseCall call = {&p, panels * p.parts, out ? NULL : found};
    if (most > 1)
        parallel(dense_work, &call, (unsigned)most, 0);
    else
        dense_items(&p, 0, call.items, found[0]);
    if (out) return;
    for (int64_t r = 0; r < n; r++) {
        best[r] = found[0][r];
        for (int64_t one = 1; one < most; one++)
            if (found[one][r] > best[r]) best[r] = found[one][r];
    }
}

typedef struct {
    const Pack *pack;
    int64_t panels;
} PackCall;

static void pack_work(void *data) {
    const PackCall *call = data;
    int64_t first, last;
    share(call->panels, thread_num(), num_threads(), &first, &last);
    dense_pack(call->pack, first, last);
}

/* Panels lie with the threads that multiply them: both are shared out alike. */
EXPORT void trencadis_dense_pack(const Pack *p, int64_t panels, int kind, int threads) {
    panels_count(PACKS, kind);
    Pack own = *p;
    own.kind = kind;
    PackCall call = {&own, panels};
    if (parallel && threads > 1 && panels > 1)
        parallel(pack_work, &call, (unsigned)threads, 0);
    else
        dense_pack(&own, 0, panels);
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
