/* Random calls of the library, for builds with sanitizers: every kernel, every kind that this CPU runs.

   fuzz CASES SEED [NAME]: of one case alone with NAME, as fuzz_dense

   Shapes are odd, buffers end where their last value does, rows are views, values are extreme or no numbers, and
   threads are 1 to 8. Beside what a sanitizer finds, a call must give the bits that it gives on one thread and for each
   row alone, also if it is made as a recorded one; the best output must be that of the product, and packed values must
   lie in their places. */

#include "fuzz.h"

#include <stdio.h>

static void fuzz_linear(void) {
    const int64_t type = between(0, 2), rows = between(1, draw(4) ? 70 : draw(4) ? 600 : 2400), size = size_of(type);
    const int64_t inputs = between(1, 8 * between(1, draw(4) ? 20 : 100)), n = between(1, draw(3) ? 9 : 40);
    PanelWeight w;
    some_codes(&w, rows, inputs, type, !draw(3));
    char *x = some(n * inputs, type, 1), *out = room(n * rows * size, 0), *one = room(n * rows * size, 0);
    if (call_linear(&w, x, out, n, (int)type, team())) fail("no memory for a product");
    for (int64_t r = 0; r < n; r++)
        trencadis_panels_linear(&w, x + r * inputs * size, one + r * rows * size, 1, (int)type, kind, 1);
    equal(out, one, n * rows * size, "a row of a product with codes depends on others");
    if (kind < AMX || !vnni) return;
    trencadis_panels_linear(&w, x, one, n, (int)type, vnni, 1);
    equal(out, one, n * rows * size, "a product by tiles is another than with VNNI");
}

/* Compares the norms of heads that lie apart in wider rows with those of a copy. */
static void fuzz_heads(int op, const char *weight, int64_t n, int64_t width, int64_t type) {
    const int64_t heads = between(1, 4), step = width + draw(2) * draw((uint32_t)width), stride = heads * step + draw(9);
    const int64_t size = size_of(type), own = width * size, all = n * heads * own;
    char *x = some(n * stride, type, 1), *copy = room(all, 0), *out = room(all, 0), *want = room(all, 0);
    for (int64_t r = 0; r < n * heads; r++)
        memcpy(copy + r * own, x + (r / heads * stride + r % heads * step) * size, (size_t)own);
    call_head_norms(op, x, weight, out, n * heads, width, heads, stride, step, (int)type, team());
    trencadis_panels_rows(op, copy, NULL, weight, want, n * heads, width, 1e-6f, (int)type, kind, 1);
    equal(out, want, all, "norms of heads that lie apart are others");
}

static void fuzz_rows(void) {
    const int64_t type = between(0, 2), width = between(1, draw(5) ? 90 : 3000), n = between(1, draw(5) ? 7 : 60);
    const int op = draw(5) ? (int)draw(4) : CLAMPED_SWIGLU, wide = op == SILU_MUL || op == CLAMPED_SWIGLU ? 2 : 1;
    const int norm = op == RMS_NORM || op == WIDE_NORM;
    const int64_t size = size_of(type), out_row = op == BEST ? 8 : width * size;
    char *x = some(n * width * wide, type, 1), *again = room(n * width * wide * size, 0);
    char *residual = norm && draw(2) ? some(n * width, type, 1) : NULL;
    char *weight = some(width, op == WIDE_NORM ? FLOAT32 : type, 1);
    char *out = room(n * out_row, 0), *one = room(n * out_row, 0);
    memcpy(again, x, (size_t)(n * width * wide * size));
    call_rows(op, x, residual, weight, out, n, width, (int)type, team());
    for (int64_t r = 0; r < n; r++)
        trencadis_panels_rows(op, again + r * width * wide * size, residual ? residual + r * width * size : NULL,
                              weight, one + r * out_row, 1, width, 1e-6f, (int)type, kind, 1);
    equal(out, one, n * out_row, "a row between products depends on others");
    equal(x, again, n * width * wide * size, "a sum with a residual depends on others");
    for (int64_t r = 0; op == BEST && type != FLOAT16 && r < n; r++) {
        int64_t best = 0;
        for (int64_t i = 0; i < width; i++) {
            const int64_t at = r * width + i, top = r * width + best;
            const float y = value_at(x, at, type), most = value_at(x, top, type);
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
    p.sinks = draw(2) ? some(heads, FLOAT32, !draw(4)) : NULL;
    if (call_attend(&p, team())) fail("no memory for attention");
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
    p.sinks = draw(2) ? some(heads, FLOAT32, !draw(4)) : NULL;
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
    call_rotary(&p, n, team());
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

/* The rows from `row` on are one row. */
static StateRows only(StateRows rows, int64_t row) {
    return (StateRows){rows.slot + row, rows.source + row, rows.begins + row, rows.start + row, rows.count + row, 1};
}

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
    Delta p = {.heads = heads, .groups = groups, .dk = dk, .dv = dv, .type = type, .plain = !draw(3)};
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
    const int64_t n = between(1, 20), step = width + draw((uint32_t)width), stride = heads * step + draw(9);
    const int64_t size = size_of(type), bytes = width * size;
    char *x = some(n * heads * width, type, 1), *wide = some(n * stride, type, 1);
    char *out = room(n * heads * bytes, 0), *one = room(n * heads * bytes, 0);
    call_gate_heads(x, wide, out, n * heads, width, heads, stride, step, (int)type, team());
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
    if (call_adapters(&p, x, x_row, mine, y_row, n, runs, count, team())) fail("no memory for adapters");
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
    if (call_dense(&p, x, out, NULL, n, stride, outputs, team())) fail("no memory for a dense product");
    for (int64_t r = 0; r < n; r++)
        trencadis_dense(&p, x + r * stride * size, one + r * outputs * size, NULL, 1, stride, outputs, 1, kind, 1);
    equal(out, one, n * outputs * size, "a row of a product depends on others");
    if (p.bias) return;
    int64_t *best = room(n * 8, 0);
    const int64_t real = between(1, outputs);
    if (call_dense(&p, x, NULL, best, n, stride, real, team())) fail("no memory for the best outputs");
    for (int64_t r = 0; r < n; r++) {
        int64_t top = 0;
        float most = 0;
        for (int64_t o = 0; o < real; o++) {
            const int64_t place = r * outputs + o;
            const float y = value_at(out, place, type);
            if (!o || (most == most && (y != y || y > most))) top = o, most = y;
        }
        if (0x7fffffff - (best[r] & 0xffffffff) != top) fail("the best output is not that of the product");
    }
}

#define CASE(name) {#name, name, 0}
#define TILED(name) {#name, name, 1} /* uses tiles, so that the emulated ones have it, too */
static const struct {
    const char *name;
    void (*run)(void);
    int tiled;
} cases[] = {TILED(fuzz_linear), CASE(fuzz_rows),     CASE(fuzz_attend),     CASE(fuzz_flash),       CASE(fuzz_rotary),
             TILED(fuzz_dense),  CASE(fuzz_convolve), CASE(fuzz_delta),      CASE(fuzz_adapters),    CASE(fuzz_gated_norm),
             TILED(fuzz_experts), CASE(fuzz_delta_net), CASE(fuzz_gated_heads), CASE(fuzz_replay)};

int main(int words, char **word) {
    const int count = words > 1 ? atoi(word[1]) : 100, has = trencadis_cpu_features();
    const char *only_case = words > 3 ? word[3] : NULL;
    const int runs[KINDS] = {0, has >> HAS_AVX2 & 1, has >> HAS_AVX_VNNI & 1, has >> HAS_AVX512 & 1,
                             has >> HAS_AVX512_VNNI & 1, has >> HAS_AMX & 1, has >> HAS_AVX2 & 1};
    vnni = runs[AVX512_VNNI] ? AVX512_VNNI : runs[AVX_VNNI] ? AVX_VNNI : 0;
    for (kind = AVX2; kind < KINDS; kind++) {
        if (!runs[kind]) continue;
        bfloat16_pairs = kind >= AVX512 && kind != AMX_EMULATED && (has >> HAS_AVX512_BF16 & 1);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            if (kind == AMX_EMULATED && !cases[i].tiled) continue;
            if (only_case && strcmp(only_case, cases[i].name)) continue;
            seed(words > 2 ? strtoull(word[2], NULL, 10) : 0);
            for (int one = 0; one < count; one++) cases[i].run(), drop();
            printf("kind %d, %s: %d cases\n", kind, cases[i].name, count);
            fflush(stdout);
        }
    }
    return 0;
}
