/* Cases of the calls that make a whole layer: experts, and gated DeltaNet. */

#include "fuzz.h"

#include <math.h>

#define MOST 12 /* experts of a layer */

/* Rounds to nearest even, as kernels do between the steps of a sum. */
static float rounded(float value, int64_t type) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == FLOAT32) return value;
    if (value != value) return NAN;
    return widened((uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

static void *some_expert_weight(int64_t outputs, int64_t inputs, int64_t type, int coded, int looked, int wild) {
    if (coded) {
        PanelWeight *w = room((int64_t)sizeof *w, 0);
        some_codes(w, outputs, inputs, type, looked);
        return w;
    }
    Dense *w = room((int64_t)sizeof *w, 0);
    some_dense(w, outputs, inputs, type, wild);
    return w;
}

/* Writes the best experts of a row, of equal ones the first, and their shares. */
static void route(const Experts *p, const void *scores, int64_t row, int64_t type, float *shares, int64_t *chosen) {
    float values[MOST], largest = -INFINITY, total = 0, taken = 0;
    int used[MOST] = {0};
    for (int64_t i = 0; i < p->count; i++) {
        values[i] = value_at(scores, row * p->count + i, type);
        if (values[i] > largest) largest = values[i];
    }
    for (int64_t i = 0; i < p->count; i++) total += expf(values[i] - largest);
    for (int64_t k = 0; k < p->top; k++) {
        int64_t best = -1;
        for (int64_t i = 0; i < p->count; i++)
            if (!used[i] && (best < 0 || values[i] > values[best])) best = i;
        used[best] = 1, chosen[k] = best, shares[k] = expf(values[best] - largest) / total, taken += shares[k];
    }
    for (int64_t k = 0; p->normalise && k < p->top; k++) shares[k] /= taken;
}

static void multiply(const Experts *p, const void *w, const void *x, void *out, int64_t inputs, int64_t outputs) {
    if (p->coded)
        trencadis_panels_linear(w, x, out, 1, (int)p->type, kind, 1);
    else
        trencadis_dense(w, x, out, NULL, 1, inputs, outputs, 1, kind, 1);
}

/* Compares one row with its experts' exported products one by one; NaN has no bits of its own. */
static void check_row(const Experts *p, const char *x, const void *scores, int64_t row, int64_t score_type,
                      const void *out, uint8_t *taken) {
    const int64_t size = size_of(p->type);
    float shares[MOST];
    int64_t chosen[MOST];
    char *wide = room(2 * p->inner * size, 0), *inner = room(p->inner * size, 0), *made = room(p->hidden * size, 0);
    float *sum = room(p->hidden * 4, 0);
    route(p, scores, row, score_type, shares, chosen);
    for (int64_t k = 0; k < p->top; k++) {
        taken[chosen[k]] = 1;
        multiply(p, p->gate_up[chosen[k]], x + row * p->hidden * size, wide, p->hidden, 2 * p->inner);
        trencadis_panels_rows((int)p->act, wide, NULL, NULL, inner, 1, p->inner, 0, (int)p->type, kind, 1);
        multiply(p, p->down[chosen[k]], inner, made, p->inner, p->hidden);
        for (int64_t i = 0; i < p->hidden; i++) {
            const float one = rounded(value_at(made, i, p->type) * rounded(shares[k], p->type), p->type);
            sum[i] = k ? rounded(sum[i] + one, p->type) : one;
        }
    }
    for (int64_t i = 0; i < p->hidden; i++) {
        const float found = value_at(out, row * p->hidden + i, p->type);
        if (found != sum[i] && (found == found || sum[i] == sum[i])) fail("a row is not the sum of its best experts");
    }
}

/* Scores have ties, and ends of their type. Experts that no row takes have no weights at all. */
void fuzz_experts(void) {
    const int64_t type = draw(2), score_type = draw(2), count = between(1, MOST), n = between(1, 16);
    const int64_t hidden = 2 * between(1, draw(4) ? 30 : 150), inner = 2 * between(1, draw(4) ? 30 : 150);
    const int coded = draw(3) > 0, looked = !draw(2), wild = !draw(3);
    const void **gate_up = room(count * 8, 0), **down = room(count * 8, 0);
    for (int64_t i = 0; i < count; i++) {
        gate_up[i] = some_expert_weight(2 * inner, hidden, type, coded, looked, wild);
        down[i] = some_expert_weight(hidden, inner, type, coded, looked, wild);
    }
    const Experts p = {gate_up, down, count, between(1, count), hidden, inner, type, coded,
                       draw(2) ? SILU_MUL : CLAMPED_SWIGLU, draw(2)};
    const int64_t size = size_of(type), line = hidden * size;
    char *x = some(n * hidden, type, wild), *scores = some(n * count, score_type, !draw(3));
    for (int64_t i = 0; i < n * count; i++) {
        const int64_t bytes = size_of(score_type), from = i / count * count + draw((uint32_t)count);
        if (!draw(3)) memcpy(scores + i * bytes, scores + from * bytes, (size_t)bytes);
    }
    char *out = room(n * line, 0), *one = room(n * line, 0);
    uint8_t taken[MOST] = {0};
    if (call_experts(&p, x, scores, (int)score_type, out, n, team())) fail("no memory for experts");
    for (int64_t r = 0; r < n; r++) check_row(&p, x, scores, r, score_type, out, taken);
    for (int64_t i = 0; i < count; i++)
        if (!taken[i]) gate_up[i] = down[i] = NULL;
    for (int64_t r = 0; r < n; r++)
        trencadis_experts(&p, x + r * line, scores + r * count * size_of(score_type), (int)score_type, one + r * line,
                          1, kind, 1);
    equal(out, one, n * line, "a row of experts depends on others");
}

/* Rows of a launch with their states: in the order of the slots, then padding. Returns the number of tokens. */
int64_t some_rows(StateRows *rows, int64_t slots, int64_t most) {
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

/* Makes the calls of gated DeltaNet one by one, on one thread. */
static void run_parts(const DeltaNet *p) {
    const int64_t keys = p->groups * p->dk, channels = 2 * keys + p->heads * p->dv, size = size_of(p->type);
    const int type = (int)p->type;
    char *mixed = room(p->tokens * channels * size, 0), *y = room(p->tokens * p->heads * p->dv * size, 0);
    float *g = room(p->tokens * p->heads * 4, 0), *beta = room(p->tokens * p->heads * 4, 0);
    const Convolution c = {p->x, p->weight, NULL, p->last, mixed, p->rows, channels, p->taps, p->x_row, type, 1};
    trencadis_convolve(&c, kind, 1);
    for (int64_t i = 0; i < p->tokens * p->heads; i++) {
        const int64_t head = i % p->heads, at = i / p->heads * p->gates_row + p->heads * p->dv + head;
        const float a = value_at(p->gates, at + p->heads, type) + p->shift[head];
        g[i] = p->decay[head] * (a > 20 ? a : log1pf(expf(a)));
        beta[i] = 1 / (1 + expf(-value_at(p->gates, at, type)));
    }
    const Delta d = {.q = mixed, .k = mixed + keys * size, .v = mixed + 2 * keys * size, .g = g, .beta = beta,
                     .state = p->state, .out = y, .rows = p->rows, .q_row = channels, .k_row = channels,
                     .v_row = channels, .gate_row = p->heads, .beta_row = p->heads, .heads = p->heads,
                     .groups = p->groups, .dk = p->dk, .dv = p->dv, .type = type};
    trencadis_delta_rule(&d, kind, 1);
    trencadis_gated_norm(y, p->norm, p->gates, p->out, p->tokens * p->heads, p->dv, p->heads, p->gates_row, p->eps,
                         type, kind, 1);
}

void fuzz_delta_net(void) {
    const int64_t type = draw(2), groups = between(1, 2), heads = groups * between(1, 3), slots = 8;
    const int64_t dk = 16 * between(1, 3), dv = 16 * between(1, draw(4) ? 3 : 8), taps = between(2, TAPS);
    const int64_t channels = 2 * groups * dk + heads * dv, size = size_of(type);
    const int wild = !draw(4);
    DeltaNet p = {.taps = taps, .heads = heads, .groups = groups, .dk = dk, .dv = dv, .type = type, .eps = 1e-6f};
    p.tokens = some_rows(&p.rows, slots, draw(3) ? 20 : 90);
    p.x_row = channels + draw(9), p.gates_row = heads * dv + 2 * heads + draw(9);
    p.x = some(p.tokens * p.x_row, type, wild), p.gates = some(p.tokens * p.gates_row, type, wild);
    p.weight = some(channels * taps, type, 0), p.norm = some(dv, type, 0), p.shift = some(heads, FLOAT32, wild);
    float *decay = some(heads, FLOAT32, 0);
    for (int64_t i = 0; i < heads; i++) decay[i] = -fabsf(decay[i]);
    p.decay = decay;
    const int64_t inputs = slots * (taps - 1) * channels, states = slots * heads * dk * dv;
    const int64_t bytes = p.tokens * heads * dv * size;
    char *last = some(inputs, type, wild), *other_last = copied(last, inputs * size);
    char *held = some(states, FLOAT32, wild), *other = copied(held, states * 4);
    char *out = room(bytes, 0), *parts = room(bytes, 0);
    p.mixed = room(p.tokens * channels * size, 0), p.y = room(bytes, 0), p.factors = room(p.tokens * 2 * heads * 4, 0);
    p.last = last, p.state = (float *)(void *)held, p.out = out;
    if (call_delta_net(&p, team())) fail("no memory for gated DeltaNet");
    p.last = other_last, p.state = (float *)(void *)other, p.out = parts;
    run_parts(&p);
    equal(out, parts, bytes, "gated DeltaNet is not its parts, one after another");
    equal(last, other_last, inputs * size, "the inputs that gated DeltaNet keeps are not those of its convolution");
    equal(held, other, states * 4, "a state of gated DeltaNet is not that of its delta rule");
}
