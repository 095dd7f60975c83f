/* Random calls of the library, for builds with sanitizers: every kernel, every kind that this CPU runs.

   fuzz CASES SEED

   Shapes are odd, buffers end where their last value does, rows are views, values are extreme or no numbers, and
   threads are 1 to 8. Beside what a sanitizer finds, a call must give the bits that it gives on one thread and for each
   row alone, the best output must be that of the product, and packed values must lie in their places. */

#define _POSIX_C_SOURCE 200112L

#include "exports.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;
static int kind, bfloat16_pairs, vnni; /* vnni: a kind with exact sums of 8 by 8 bits; 0: this CPU has none */

static uint32_t draw(uint32_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 16) % below);
}

static int64_t between(int64_t low, int64_t high) { return low + draw((uint32_t)(high - low + 1)); }
static int64_t size_of(int64_t type) { return type == FLOAT32 ? 4 : type == INT8 ? 1 : 2; }

static void fail(const char *what) {
    fprintf(stderr, "fuzz: kernels of kind %d: %s\n", kind, what);
    exit(1);
}

#define TEAM 8 /* most threads of a launch */

/* ---- values ---- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float widened(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

static float some_float(int wild) {
    if (!wild || draw(40)) return ((float)draw(20001) - 10000) / 4096;
    switch (draw(8)) {
        case 0: return from_bits(0x7fc00000);
        case 1: return from_bits(0x7f800000);
        case 2: return from_bits(0xff800000);
        case 3: return from_bits(0x80000000);
        case 4: return from_bits(draw(0x7fffff));
        case 5: return 3.0e38f;
        case 6: return -3.0e38f;
        default: return from_bits(draw(0xffffffff));
    }
}

/* Memory of exactly so many bytes, at a multiple of 64 where `lines`; freed by `drop`. */
static void *held[64];
static int holding;
static void *room(int64_t bytes, int lines) {
    void *made = NULL;
    if (lines ? posix_memalign(&made, 64, (size_t)bytes) : !(made = malloc((size_t)(bytes ? bytes : 1))))
        fail("no memory");
    return held[holding++] = made;
}
static void drop(void) {
    while (holding) free(held[--holding]);
}

static void *some(int64_t count, int64_t type, int wild) {
    void *made = room(count * size_of(type), 0);
    for (int64_t i = 0; i < count; i++) {
        const float value = some_float(wild);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (type == FLOAT32)
            ((float *)made)[i] = value;
        else if (type == BFLOAT16)
            ((uint16_t *)made)[i] = (uint16_t)(bits >> 16);
        else if (type == FLOAT16)
            ((uint16_t *)made)[i] =
                (uint16_t)(wild && !draw(40) ? draw(65536) : 0x3000 + draw(0xc00) + (draw(2) << 15));
        else
            ((int8_t *)made)[i] = (int8_t)((int)draw(256) - 128);
    }
    return made;
}

static void equal(const void *a, const void *b, int64_t bytes, const char *what) {
    if (memcmp(a, b, (size_t)bytes)) fail(what);
}

static int team(void) { return (int)between(1, TEAM); }

/* ---- kernels ---- */

static void fuzz_linear(void) {
    const int64_t bits = draw(2) ? 8 : 4, type = between(0, 2), rows = between(1, draw(4) ? 70 : 600);
    const int64_t columns = 8 * between(1, draw(4) ? 20 : 100), panels = (rows + PANEL - 1) / PANEL;
    PanelWeight w = {.rows = rows, .columns = columns, .bits = bits,
                     .group = draw(2) ? columns : 8 * between(1, columns / 8)};
    const int64_t groups = groups_of(&w), n = between(1, draw(3) ? 9 : 40);
    w.inputs = between(columns - 7, columns);
    uint8_t *codes = room(panels * columns * PANEL * bits / 8, 0), *zero = room(panels * groups * PANEL, 0);
    for (int64_t i = 0; i < panels * columns * PANEL * bits / 8; i++) codes[i] = (uint8_t)draw(256);
    for (int64_t i = 0; i < panels * groups * PANEL; i++) zero[i] = (uint8_t)draw(bits == 8 ? 256 : 16);
    w.codes = codes, w.factor = some(panels * PANEL, FLOAT32, 0);
    w.scale = groups > 1 || draw(2) ? some(panels * groups * PANEL, FLOAT16, 0) : NULL;
    w.middle = bits == 8 ? 128 : draw(16);
    if (bits == 4 && w.scale && draw(2)) {
        uint8_t *values = room(16, 0);
        for (int i = 0; i < 16; i++) values[i] = (uint8_t)draw(32);
        w.values = values;
    }
    w.zero = draw(2) ? zero : NULL, w.bias = draw(2) ? some(rows, type, 1) : NULL;
    if (draw(3) == 0) {
        int32_t *gather = room(columns * 4, 0);
        for (int64_t i = 0; i < columns; i++) gather[i] = (int32_t)draw((uint32_t)w.inputs + 1) - 1;
        w.gather = gather;
    }
    const int64_t size = size_of(type);
    char *x = some(n * w.inputs, type, 1), *out = room(n * rows * size, 0), *one = room(n * rows * size, 0);
    if (trencadis_panels_linear(&w, x, out, n, (int)type, kind, team())) fail("no memory for a product");
    for (int64_t r = 0; r < n; r++)
        trencadis_panels_linear(&w, x + r * w.inputs * size, one + r * rows * size, 1, (int)type, kind, 1);
    equal(out, one, n * rows * size, "a row of a product with codes depends on others");
    if (kind < AMX || !vnni) return;
    trencadis_panels_linear(&w, x, one, n, (int)type, vnni, 1);
    equal(out, one, n * rows * size, "a product by tiles is another than with VNNI");
}

/* Compares the norms of heads that lie apart in wider rows with those of a copy. */
static void fuzz_heads(int op, const char *weight, int64_t n, int64_t width, int64_t type) {
    const int64_t heads = between(1, 4), step = width + draw(2) * draw(width), stride = heads * step + draw(9);
    const int64_t size = size_of(type), own = width * size, all = n * heads * own;
    char *x = some(n * stride, type, 1), *copy = room(all, 0), *out = room(all, 0), *want = room(all, 0);
    for (int64_t r = 0; r < n * heads; r++)
        memcpy(copy + r * own, x + (r / heads * stride + r % heads * step) * size, (size_t)own);
    trencadis_head_norms(op, x, weight, out, n * heads, width, heads, stride, step, 1e-6f, (int)type, kind, team());
    trencadis_panels_rows(op, copy, NULL, weight, want, n * heads, width, 1e-6f, (int)type, kind, 1);
    equal(out, want, all, "norms of heads that lie apart are others");
}

static void fuzz_rows(void) {
    const int64_t type = between(0, 2), width = between(1, draw(5) ? 90 : 3000), n = between(1, draw(5) ? 7 : 60);
    const int op = (int)draw(4), wide = op == SILU_MUL ? 2 : 1, norm = op == RMS_NORM || op == WIDE_NORM;
    const int64_t size = size_of(type), out_row = op == BEST ? 8 : width * size;
    char *x = some(n * width * wide, type, 1), *again = room(n * width * wide * size, 0);
    char *residual = norm && draw(2) ? some(n * width, type, 1) : NULL;
    char *weight = some(width, op == WIDE_NORM ? FLOAT32 : type, 1);
    char *out = room(n * out_row, 0), *one = room(n * out_row, 0);
    memcpy(again, x, (size_t)(n * width * wide * size));
    trencadis_panels_rows(op, x, residual, weight, out, n, width, 1e-6f, (int)type, kind, team());
    for (int64_t r = 0; r < n; r++)
        trencadis_panels_rows(op, again + r * width * wide * size, residual ? residual + r * width * size : NULL,
                              weight, one + r * out_row, 1, width, 1e-6f, (int)type, kind, 1);
    equal(out, one, n * out_row, "a row between products depends on others");
    equal(x, again, n * width * wide * size, "a sum with a residual depends on others");
    for (int64_t r = 0; op == BEST && type != FLOAT16 && r < n; r++) {
        int64_t best = 0;
        for (int64_t i = 0; i < width; i++) {
            const int64_t at = r * width + i, top = r * width + best;
            const float y = type == FLOAT32 ? ((float *)x)[at] : widened(((uint16_t *)x)[at]);
            const float most = type == FLOAT32 ? ((float *)x)[top] : widened(((uint16_t *)x)[top]);
            if (most == most && (y != y || y > most)) best = i;
        }
        if (((int64_t *)out)[r] != best) fail("the best of a row is another one");
    }
    if (norm) fuzz_heads(op, weight, n, width, type);
}

static void fuzz_attend(void) {
    const int64_t type = between(0, 2), groups = between(1, 3), each = between(1, 9);
    const int64_t size = 16 * between(1, draw(5) ? 8 : 32);
    const int64_t block = draw(2) ? 16 : 128, n = between(1, 5), width = between(1, draw(4) ? 3 : 6);
    const int64_t blocks = between(1, 12);
    const int64_t heads = groups * each, slots = blocks * block, keys = width * block;
    Attend p = {.n = n, .heads = heads, .groups = groups, .size = size, .block = block, .width = width};
    p.type = (int)type, p.codes = draw(3) ? 0 : draw(2) ? INT8 : FLOAT8;
    p.scale = 0.2f, p.stride = heads * size + 16 * draw(3);
    p.bfloat16_pairs = bfloat16_pairs && draw(3);
    const int64_t held_type = p.codes ? INT8 : type;
    p.q = some(n * p.stride, type, !draw(4)), p.k = some(slots * groups * size, held_type, !draw(4));
    p.v = some(slots * groups * size, held_type, !draw(4));
    if (p.codes) {
        p.k_scale = some(slots * groups, FLOAT16, 0), p.v_scale = some(slots * groups, FLOAT16, 0);
        p.kept_count = draw(2) ? between(1, 3) : 0, p.kept_type = (int)type;
        int32_t *pairs = room(groups * p.kept_count * 4, 0);
        for (int64_t i = 0; i < groups * p.kept_count; i++) pairs[i] = (int32_t)draw((uint32_t)size);
        p.kept = some(slots * groups * p.kept_count, type, 0), p.pairs = pairs;
    }
    int32_t *numbers = room((n * width + 4 * n) * 4, 0), *token = numbers + n * width, *row = token + n;
    int32_t *first = row + n;
    int32_t *length = first + n;
    for (int64_t i = 0; i < n * width; i++) numbers[i] = draw(30) ? (int32_t)draw((uint32_t)blocks) : -1;
    for (int64_t i = 0; i < n; i++) {
        token[i] = (int32_t)(n - 1 - i), row[i] = (int32_t)draw((uint32_t)n);
        first[i] = draw(3) ? 0 : (int32_t)draw((uint32_t)keys);
        length[i] = draw(6) ? (int32_t)between(first[i], keys) : first[i];
    }
    p.blocks = numbers, p.token = token, p.row = row, p.first = first, p.length = length;
    const int64_t line = heads * size * size_of(type);
    char *out = room(n * line, 0), *one = room(n * line, 0);
    p.out = out;
    if (trencadis_panels_attend(&p, kind, team())) fail("no memory for attention");
    p.out = one, p.n = 1;
    for (int64_t i = 0; i < n; i++, p.token++, p.row++, p.first++, p.length++) trencadis_panels_attend(&p, kind, 1);
    equal(out, one, n * line, "attention of a row depends on others");
    for (int64_t i = 0; i < n; i++)
        for (int64_t at = 0; length[i] <= first[i] && at < line; at++)
            if (out[token[i] * line + at]) fail("a row that sees no key is not zero");
}

static void fuzz_flash(void) {
    const int64_t type = between(0, 2), groups = between(1, 3), each = between(1, 4);
    const int64_t size = between(1, draw(5) ? 80 : 512);
    const int64_t heads = groups * each, keys = between(0, draw(4) ? 90 : 400), n = between(1, 3), tail = 8 * draw(2);
    const int64_t slots = keys + 5, count = between(0, draw(4) ? 12 : 80), tokens = n * count;
    Flash p = {.heads = heads, .groups = groups, .size = size, .type = type, .n = n, .scale = 0.2f};
    p.q_head = p.k_head = p.v_head = size, p.q_row = heads * size + tail, p.k_row = p.v_row = groups * size + tail;
    p.q = some(tokens * p.q_row, type, !draw(4)), p.k = some(slots * p.k_row, type, !draw(4));
    p.v = some(slots * p.v_row, type, 0); /* a weight of zero times no number is none, within a span */
    p.pairs = type == BFLOAT16 && bfloat16_pairs && draw(3);
    p.window = draw(3) ? 0 : between(1, 70);
    Span *spans = room(n * (int64_t)sizeof *spans, 0);
    int64_t *at = room(keys * 8, 0);
    for (int64_t i = 0; i < keys; i++) at[i] = draw((uint32_t)slots);
    for (int64_t i = 0; i < n; i++) {
        spans[i] = (Span){.first = i * count, .count = count, .slot = draw(5), .keys = keys};
        spans[i].slots = draw(2) ? at : NULL, spans[i].whole = !p.window && draw(2);
        spans[i].place = between(0, 3) * draw(50), spans[i].own = spans[i].place + draw((uint32_t)keys + 1);
        if (draw(3) == 0) {
            int32_t *upto = room(count * 4, 0);
            for (int64_t t = 0; t < count; t++) upto[t] = (int32_t)(spans[i].place + draw((uint32_t)keys + 2) - 1);
            spans[i].upto = upto;
        }
    }
    p.spans = spans;
    const int64_t line = heads * size * size_of(type);
    char *out = room(tokens * line, 0), *one = room(tokens * line, 0);
    memset(out, 1, (size_t)(tokens * line)), memset(one, 1, (size_t)(tokens * line));
    p.out = out;
    if (trencadis_flash(&p, kind, team())) fail("no memory for attention of many queries");
    p.out = one, p.n = 1;
    for (int64_t i = 0; i < n; i++, p.spans++) trencadis_flash(&p, kind, 1);
    equal(out, one, tokens * line, "attention of a span depends on others");
}

static void fuzz_rotary(void) {
    const int64_t type = between(0, 2), groups = between(1, 3), heads = between(1, 6);
    const int64_t size = 2 * between(16, draw(4) ? 40 : 128);
    const int64_t n = between(1, draw(4) ? 6 : 40), slots = between(1, 50);
    const int64_t line = (heads + groups) * size * size_of(type);
    Rotary p = {.heads = heads, .groups = groups, .size = size, .type = type};
    p.q_head = p.k_head = size, p.q_row = heads * size + 8 * draw(2), p.k_row = p.v_row = groups * size + 8 * draw(2);
    p.q = some(n * p.q_row, type, 1), p.k = some(n * p.k_row, type, 1), p.v = some(n * p.v_row, type, 1);
    p.cos = some(n * size, FLOAT32, 0), p.sin = some(n * size, FLOAT32, 0);
    const int64_t cache = slots * groups * size * size_of(type);
    char *out = room(n * line, 0), *one = room(n * line, 0), *keys = room(cache, 0);
    int64_t *slot = room(n * 8, 0);
    for (int64_t i = 0; i < n; i++) slot[i] = i < slots && draw(5) ? i : -1;
    memset(keys, 1, (size_t)cache);
    p.keys = keys, p.values = room(cache, 0), p.slot = draw(2) ? slot : NULL, p.out = out;
    trencadis_rotary(&p, n, kind, team());
    const Rotary all = p;
    for (int64_t i = 0; i < n; i++) {
        const int64_t bytes = size_of(type);
        p = all, p.slot = NULL, p.out = one + i * line;
        p.q = (const char *)all.q + i * p.q_row * bytes, p.k = (const char *)all.k + i * p.k_row * bytes;
        p.cos = all.cos + i * size, p.sin = all.sin + i * size;
        trencadis_rotary(&p, 1, kind, 1);
        if (all.slot && slot[i] >= 0)
            equal(keys + slot[i] * groups * size * bytes, one + i * line + heads * size * bytes, groups * size * bytes,
                  "a key is stored elsewhere");
    }
    equal(out, one, n * line, "a row that is transposed depends on others");
}

/* Rows of a launch with their states: in the order of the slots, then padding. Returns the number of tokens. */
static int64_t some_rows(StateRows *rows, int64_t slots, int64_t most) {
    const int64_t n = between(1, 4), all = n + 1;
    int64_t *slot = room(2 * all * 8, 0), *source = slot + all, tokens = 0;
    int32_t *begins = room(3 * all * 4, 0), *start = begins + all, *count = start + all;
    for (int64_t i = 0; i < all; i++) {
        slot[i] = i < n ? 1 + i : 0, source[i] = i < n ? (draw(4) ? 1 + i : between(n + 1, slots - 1)) : 0;
        begins[i] = i == n || !draw(3), start[i] = (int32_t)tokens;
        count[i] = i == n ? 0 : draw(2) ? 1 : (int32_t)between(0, most);
        tokens += count[i];
    }
    *rows = (StateRows){slot, source, begins, start, count, all};
    return tokens;
}

/* The rows from `row` on are one row. */
static StateRows only(StateRows rows, int64_t row) {
    return (StateRows){rows.slot + row, rows.source + row, rows.begins + row, rows.start + row, rows.count + row, 1};
}

static void *copied(const void *from, int64_t bytes) { return memcpy(room(bytes, 0), from, (size_t)bytes); }

static void fuzz_convolve(void) {
    const int64_t type = between(0, 2), channels = between(1, draw(4) ? 60 : 700), taps = between(2, TAPS), slots = 8;
    Convolution p = {.channels = channels, .taps = taps, .type = type, .silu = draw(2)};
    const int64_t tokens = some_rows(&p.rows, slots, 40), line = channels * size_of(type);
    const int64_t states = slots * (taps - 1) * line;
    p.stride = channels + draw(3);
    p.x = some(tokens * p.stride, type, 1), p.weight = some(channels * taps, type, 0);
    p.bias = draw(2) ? some(channels, type, 1) : NULL;
    char *mine = some(slots * (taps - 1) * channels, type, 1), *other = copied(mine, states);
    char *out = room(tokens * line, 0), *one = room(tokens * line, 0);
    p.state = mine, p.out = out;
    trencadis_convolve(&p, kind, team());
    const StateRows rows = p.rows;
    p.state = other, p.out = one;
    for (int64_t i = 0; i < rows.n; i++) {
        p.rows = only(rows, i);
        trencadis_convolve(&p, kind, 1);
    }
    equal(out, one, tokens * line, "a row of a convolution depends on others");
    equal(mine, other, states, "the inputs that a convolution keeps depend on others");
}

static void fuzz_delta(void) {
    const int64_t type = between(0, 2), groups = between(1, 2), heads = groups * between(1, 3), slots = 8;
    const int64_t dk = 16 * between(1, draw(4) ? 3 : 8), dv = 16 * between(1, draw(4) ? 3 : 8);
    Delta p = {.heads = heads, .groups = groups, .dk = dk, .dv = dv, .type = type};
    const int64_t tokens = some_rows(&p.rows, slots, draw(3) ? 80 : 200), line = heads * dv * size_of(type);
    const int64_t states = slots * heads * dk * dv * 4, wild = !draw(4);
    p.q_row = groups * dk + draw(9), p.k_row = groups * dk + draw(9), p.v_row = heads * dv + draw(9);
    p.gate_row = heads + draw(2), p.beta_row = heads + draw(2);
    p.q = some(tokens * p.q_row, type, (int)wild), p.k = some(tokens * p.k_row, type, (int)wild);
    p.v = some(tokens * p.v_row, type, (int)wild);
    float *g = some(tokens * p.gate_row, FLOAT32, (int)wild), *beta = some(tokens * p.beta_row, FLOAT32, (int)wild);
    for (int64_t i = 0; !wild && i < tokens * p.gate_row; i++) g[i] = g[i] > 0 ? -g[i] : g[i];
    p.g = g, p.beta = beta;
    char *mine = some(slots * heads * dk * dv, FLOAT32, (int)wild), *other = copied(mine, states);
    char *out = room(tokens * line, 0), *one = room(tokens * line, 0);
    p.state = (float *)mine, p.out = out;
    if (trencadis_delta_rule(&p, kind, team())) fail("no memory for the delta rule");
    const StateRows rows = p.rows;
    p.state = (float *)other, p.out = one;
    for (int64_t i = 0; i < rows.n; i++) {
        p.rows = only(rows, i);
        trencadis_delta_rule(&p, kind, 1);
    }
    equal(out, one, tokens * line, "a row of the delta rule depends on others");
    equal(mine, other, states, "a state of the delta rule depends on others");
}

static void fuzz_gated_norm(void) {
    const int64_t type = between(0, 2), width = between(1, draw(5) ? 90 : 600), heads = between(1, 4);
    const int64_t n = between(1, 20);
    const int64_t size = size_of(type), stride = heads * width + draw(9), bytes = width * size;
    char *x = some(n * heads * width, type, 1), *weight = some(width, type, 1), *gate = some(n * stride, type, 1);
    char *out = room(n * heads * bytes, 0), *one = room(n * heads * bytes, 0);
    trencadis_gated_norm(x, weight, gate, out, n * heads, width, heads, stride, 1e-6f, (int)type, kind, team());
    for (int64_t r = 0; r < n * heads; r++)
        trencadis_gated_norm(x + r * bytes, weight, gate + r / heads * stride * size + r % heads * bytes,
                             one + r * bytes, 1, width, 1, width, 1e-6f, (int)type, kind, 1);
    equal(out, one, n * heads * bytes, "a norm with a gate depends on others");
}

/* Gates lie `step` values apart. */
static void fuzz_gated_heads(void) {
    const int64_t type = between(0, 2), width = between(1, draw(5) ? 90 : 600), heads = between(1, 4);
    const int64_t n = between(1, 20), step = width + draw(width), stride = heads * step + draw(9);
    const int64_t size = size_of(type), bytes = width * size;
    char *x = some(n * heads * width, type, 1), *wide = some(n * stride, type, 1);
    char *out = room(n * heads * bytes, 0), *one = room(n * heads * bytes, 0);
    trencadis_gate_heads(x, wide, out, n * heads, width, heads, stride, step, (int)type, kind, team());
    for (int64_t r = 0; r < n * heads; r++)
        trencadis_gate_heads(x + r * bytes, wide + (r / heads * stride + r % heads * step) * size, one + r * bytes, 1,
                             width, 1, width, width, (int)type, kind, 1);
    equal(out, one, n * heads * bytes, "a gated head depends on others");
}

static void fuzz_adapters(void) {
    const int64_t type = between(0, 2), slots = between(1, 3), parts = between(1, 3);
    const int64_t rank = 4 * between(1, draw(3) ? 4 : 16);
    const int64_t inputs = between(1, draw(4) ? 60 : 400), n = between(1, draw(3) ? 9 : 40), size = size_of(type);
    int64_t *places = room(3 * 3 * parts * 8, 0), *runs = room(3 * n * 8, 0), blocks = 0, outputs = 0, count = 0;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t width = between(1, 3 * ADAPTER_BLOCK);
        for (int64_t at = 0; at < width; at += ADAPTER_BLOCK, blocks++) {
            places[3 * blocks] = part, places[3 * blocks + 1] = outputs + at;
            places[3 * blocks + 2] = width - at < ADAPTER_BLOCK ? width - at : ADAPTER_BLOCK;
        }
        outputs += width;
    }
    for (int64_t row = between(0, 1), end; row < n; row = end + draw(2)) {
        end = between(row + 1, n);
        runs[3 * count] = row, runs[3 * count + 1] = end, runs[3 * count++ + 2] = between(0, slots - 1);
    }
    Adapters p = {.places = places, .parts = parts, .rank = rank, .inputs = inputs, .blocks = blocks, .type = type};
    p.a = some(slots * parts * rank * inputs, type, !draw(3));
    p.b = some(slots * blocks * rank * ADAPTER_BLOCK, type, !draw(3));
    const int64_t x_row = inputs + draw(3), y_row = outputs + draw(3);
    const char *x = some(n * x_row, type, 1);
    char *mine = some(n * y_row, type, 1), *other = copied(mine, n * y_row * size);
    if (trencadis_adapters(&p, x, x_row, mine, y_row, n, runs, count, kind, team())) fail("no memory for adapters");
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = runs[3 * i]; row < runs[3 * i + 1]; row++) {
            const int64_t alone[3] = {0, 1, runs[3 * i + 2]};
            trencadis_adapters(&p, x + row * x_row * size, x_row, other + row * y_row * size, y_row, 1, alone,
                               1, kind, 1);
        }
    equal(mine, other, n * y_row * size, "a row with an adapter depends on others");
}

static void fuzz_dense(void) {
    const int64_t type = draw(2), unit = type == FLOAT32 ? 16 : 32, outputs = between(1, draw(4) ? 150 : 900);
    const int64_t inputs = 2 * between(1, draw(4) ? 60 : 300), depth = (inputs + unit - 1) / unit * unit;
    const int64_t n = between(1, draw(3) ? 14 : DENSE_ROWS), panels = (outputs + DENSE_PANEL - 1) / DENSE_PANEL;
    const int64_t from = between(0, 2), size = size_of(type), wild = !draw(3);
    char *rows = some(outputs * inputs, from, (int)wild), *packed = room(panels * DENSE_PANEL * depth * size, 1);
    const void **at = room(panels * DENSE_PANEL * 8, 0);
    for (int64_t o = 0; o < panels * DENSE_PANEL; o++) at[o] = o < outputs ? rows + o * inputs * size_of(from) : NULL;
    const Pack pack = {.rows = at, .out = packed, .inputs = inputs, .depth = depth, .from = from, .to = type};
    trencadis_dense_pack(&pack, panels, kind, team());
    for (int64_t o = 0; from == type && o < outputs; o++)
        for (int64_t i = 0; i < inputs; i++) {
            const int64_t step = type == FLOAT32 ? i * DENSE_PANEL + o % DENSE_PANEL
                                                 : (i / 2 * DENSE_PANEL + o % DENSE_PANEL) * 2 + i % 2;
            equal(packed + (o / DENSE_PANEL * DENSE_PANEL * depth + step) * size, rows + (o * inputs + i) * size, size,
                  "a packed value lies elsewhere");
        }
    Dense p = {.weight = packed, .inputs = inputs, .depth = depth, .outputs = outputs, .type = type};
    p.pairs = bfloat16_pairs && draw(3), p.bias = draw(2) ? some(outputs, type, (int)wild) : NULL;
    const int64_t stride = inputs + draw(2) * draw(5);
    char *x = some(n * stride, type, (int)wild), *out = room(n * outputs * size, 0), *one = room(n * outputs * size, 0);
    trencadis_dense(&p, x, out, NULL, n, stride, outputs, 1, kind, team());
    for (int64_t r = 0; r < n; r++)
        trencadis_dense(&p, x + r * stride * size, one + r * outputs * size, NULL, 1, stride, outputs, 1, kind, 1);
    equal(out, one, n * outputs * size, "a row of a product depends on others");
    if (p.bias) return;
    int64_t *best = room(n * 8, 0);
    const int64_t real = between(1, outputs);
    trencadis_dense(&p, x, NULL, best, n, stride, real, 1, kind, team());
    for (int64_t r = 0; r < n; r++) {
        int64_t top = 0;
        float most = 0;
        for (int64_t o = 0; o < real; o++) {
            const int64_t place = r * outputs + o;
            const float y = type == FLOAT32 ? ((float *)out)[place] : widened(((uint16_t *)out)[place]);
            if (!o || (most == most && (y != y || y > most))) top = o, most = y;
        }
        if (0x7fffffff - (best[r] & 0xffffffff) != top) fail("the best output is not that of the product");
    }
}

int main(int count, char **words) {
    static void (*const kernels[])(void) = {fuzz_linear, fuzz_rows,     fuzz_attend, fuzz_flash,    fuzz_rotary,
                                            fuzz_dense,  fuzz_convolve, fuzz_delta,  fuzz_adapters, fuzz_gated_norm,
                                            fuzz_gated_heads};
    const int cases = count > 1 ? atoi(words[1]) : 100;
    const int has = trencadis_cpu_features();
    const int runs[KINDS] = {0, has >> HAS_AVX2 & 1, has >> HAS_AVX_VNNI & 1, has >> HAS_AVX512 & 1,
                             has >> HAS_AVX512_VNNI & 1, has >> HAS_AMX & 1, has >> HAS_AVX2 & 1};
    vnni = runs[AVX512_VNNI] ? AVX512_VNNI : runs[AVX_VNNI] ? AVX_VNNI : 0;
    for (kind = AVX2; kind < KINDS; kind++) {
        if (!runs[kind]) continue;
        bfloat16_pairs = kind >= AVX512 && kind != AMX_EMULATED && (has >> HAS_AVX512_BF16 & 1);
        for (size_t kernel = 0; kernel < sizeof kernels / sizeof *kernels; kernel++) {
            if (kind == AMX_EMULATED && kernels[kernel] != fuzz_linear && kernels[kernel] != fuzz_dense) continue;
            state = 88172645463325252u + (count > 2 ? strtoull(words[2], NULL, 10) : 0);
            for (int i = 0; i < cases; i++) kernels[kernel](), drop();
        }
        printf("kind %d: %d cases of each kernel\n", kind, cases);
    }
    return 0;
}
