/* Calls of kernels for the fuzz: each is made directly or, as often, as one that was recorded (replay.h). */

#include "fuzz.h"

#define EPS 1e-6f
#define AT(pointer) ((int64_t)(intptr_t)(pointer))
#define RECORDED(number, ...) ((ReplayedCall){.function = number, .arguments = {__VA_ARGS__}, .real = EPS})

static int replay(ReplayedCall call, int threads) {
    static const ReplayedLaunch none;
    return trencadis_replay(&call, 1, &none, threads);
}

int call_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int threads) {
    if (draw(2)) return trencadis_panels_linear(w, x, out, n, type, kind, threads);
    return replay(RECORDED(CALL_LINEAR, AT(w), AT(x), AT(out), n, type, kind), threads);
}

void call_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n, int64_t width,
               int type, int threads) {
    if (draw(2))
        trencadis_panels_rows(op, x, residual, weight, out, n, width, EPS, type, kind, threads);
    else
        replay(RECORDED(CALL_ROWS, op, AT(x), AT(residual), AT(weight), AT(out), n, width, type, kind), threads);
}

/* What differs from launch to launch is another's in the recorded structure. */
int call_attend(const Attend *p, int threads) {
    if (draw(2)) return trencadis_panels_attend(p, kind, threads);
    Attend recorded = *p;
    recorded.blocks = recorded.token = recorded.row = recorded.first = recorded.length = NULL;
    recorded.n = recorded.width = 1 << 20;
    const AttendRows rows[2] = {{0}, {p->blocks, p->token, p->row, p->first, p->length, p->n, p->width}};
    const ReplayedLaunch launch = {.rows = rows};
    ReplayedCall call = RECORDED(CALL_ATTEND, AT(&recorded), kind);
    call.rows = 1;
    return trencadis_replay(&call, 1, &launch, threads);
}

int call_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
               int64_t outputs, int threads) {
    if (draw(2)) return trencadis_dense(weight, x, out, best, n, stride, outputs, 1, kind, threads);
    ReplayedCall call = RECORDED(CALL_DENSE, AT(weight), AT(x), AT(out), AT(best), n, stride, outputs, kind);
    call.real = 1;
    return replay(call, threads);
}

void call_head_norms(int op, const void *x, const void *weight, void *out, int64_t n, int64_t width, int64_t heads,
                     int64_t stride, int64_t step, int type, int threads) {
    if (draw(2))
        trencadis_head_norms(op, x, weight, out, n, width, heads, stride, step, EPS, type, kind, threads);
    else
        replay(RECORDED(CALL_HEADS, op, AT(x), AT(weight), AT(out), n, width, heads, stride, step, type, kind),
               threads);
}

void call_gate_heads(const void *x, const void *gate, void *out, int64_t n, int64_t width, int64_t heads,
                     int64_t stride, int64_t step, int type, int threads) {
    if (draw(2))
        trencadis_gate_heads(x, gate, out, n, width, heads, stride, step, type, kind, threads);
    else
        replay(RECORDED(CALL_GATE, AT(x), AT(gate), AT(out), n, width, heads, stride, step, type, kind), threads);
}

void call_rotary(const Rotary *p, int64_t n, int threads) {
    if (draw(2))
        trencadis_rotary(p, n, kind, threads);
    else
        replay(RECORDED(CALL_ROTARY, AT(p), n, kind), threads);
}

int call_adapters(const Adapters *p, const void *x, int64_t x_row, void *y, int64_t y_row, int64_t n,
                  const int64_t *runs, int64_t count, int threads) {
    if (draw(2)) return trencadis_adapters(p, x, x_row, y, y_row, n, runs, count, kind, threads);
    const ReplayedLaunch launch = {.runs = runs, .count = count};
    const ReplayedCall call = RECORDED(CALL_ADAPTERS, AT(p), AT(x), x_row, AT(y), y_row, n, 0, -1, kind);
    return trencadis_replay(&call, 1, &launch, threads);
}

int call_experts(const Experts *p, const void *x, const void *scores, int score_type, void *out, int64_t n,
                 int threads) {
    if (draw(2)) return trencadis_experts(p, x, scores, score_type, out, n, kind, threads);
    return replay(RECORDED(CALL_EXPERTS, AT(p), AT(x), AT(scores), score_type, AT(out), n, kind), threads);
}

int call_delta_net(const DeltaNet *p, int threads) {
    if (draw(2)) return trencadis_delta_net(p, kind, threads);
    return replay(RECORDED(CALL_DELTA_NET, AT(p), kind), threads);
}

/* Several calls that depend on each other are made in order, and none after one that is unknown. */
void fuzz_replay(void) {
    const int64_t type = between(0, 2), width = between(1, 60), n = between(1, 8), size = size_of(type);
    const int64_t bytes = n * width * size, count = between(1, 6);
    ReplayedCall *calls = room((count + 2) * (int64_t)sizeof *calls, 0);
    char *weight = some(width, type, 1), *x = some(n * width, type, 1), *mine = room(bytes * (count + 1), 0);
    char *want = room(bytes * (count + 1), 0);
    memset(mine, 1, (size_t)(bytes * (count + 1))), memset(want, 1, (size_t)(bytes * (count + 1)));
    for (int64_t i = 0; i <= count; i++) {
        char *from = i ? mine + (i - 1) * bytes : x;
        calls[i < count ? i : count + 1] =
            RECORDED(CALL_ROWS, RMS_NORM, AT(from), 0, AT(weight), AT(mine + i * bytes), n, width, type, kind);
        if (i < count)
            trencadis_panels_rows(RMS_NORM, i ? want + (i - 1) * bytes : x, NULL, weight, want + i * bytes, n, width,
                                  EPS, (int)type, kind, 1);
    }
    calls[count] = RECORDED(CALL_EXPERTS + 1 + (int64_t)draw(1000), 0);
    const ReplayedLaunch none = {0};
    if (trencadis_replay(calls, count + 2, &none, team()) != 1) fail("an unknown call is made again");
    equal(mine, want, bytes * (count + 1), "recorded calls are made in another order");
}
