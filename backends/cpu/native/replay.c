/* Makes recorded calls again: the layers of a launch of few rows in one call, instead of a dozen for each layer. */

#include "exports.h"

#include "replay.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define AT(i) ((void *)(intptr_t)a[i])

static int attend(const ReplayedCall *call, const ReplayedLaunch *launch, int threads) {
    const int64_t *a = call->arguments;
    const AttendRows *now = launch->rows + call->rows;
    Attend p = *(const Attend *)AT(0);
    p.blocks = now->blocks, p.token = now->token, p.row = now->row, p.first = now->first, p.length = now->length;
    p.n = now->n, p.width = now->width;
    return trencadis_panels_attend(&p, (int)a[1], threads);
}

/* Makes `count` calls in order for the rows and adapters of a launch. Returns 0, or 1 if memory is lacking or a call is
   unknown; later calls are not made then. */
EXPORT int trencadis_replay(const ReplayedCall *calls, int64_t count, const ReplayedLaunch *launch, int threads) {
    for (const ReplayedCall *call = calls; call < calls + count; call++) {
        const int64_t *a = call->arguments;
        int failed = 0;
        switch (call->function) {
        case CALL_LINEAR:
            failed = trencadis_panels_linear(AT(0), AT(1), AT(2), a[3], (int)a[4], (int)a[5], threads);
            break;
        case CALL_ROWS:
            trencadis_panels_rows((int)a[0], AT(1), AT(2), AT(3), AT(4), a[5], a[6], call->real, (int)a[7], (int)a[8],
                                  threads);
            break;
        case CALL_ROTARY:
            trencadis_rotary(AT(0), a[1], (int)a[2], threads);
            break;
        case CALL_ATTEND:
            failed = attend(call, launch, threads);
            break;
        case CALL_DENSE:
            failed = trencadis_dense(AT(0), AT(1), AT(2), AT(3), a[4], a[5], a[6], call->real, (int)a[7], threads);
            break;
        case CALL_HEADS:
            trencadis_head_norms((int)a[0], AT(1), AT(2), AT(3), a[4], a[5], a[6], a[7], a[8], call->real, (int)a[9],
                                 (int)a[10], threads);
            break;
        case CALL_GATE:
            trencadis_gate_heads(AT(0), AT(1), AT(2), a[3], a[4], a[5], a[6], a[7], (int)a[8], (int)a[9], threads);
            break;
        case CALL_ADAPTERS:
            failed = trencadis_adapters(AT(0), AT(1), a[2], AT(3), a[4], a[5], launch->runs, launch->count, (int)a[8],
                                        threads);
            break;
        case CALL_EXPERTS:
            failed = trencadis_experts(AT(0), AT(1), AT(2), (int)a[3], AT(4), a[5], (int)a[6], threads);
            break;
        case CALL_DELTA_NET:
            failed = trencadis_delta_net(AT(0), (int)a[1], threads);
            break;
        default:
            failed = 1;
        }
        if (failed) return 1;
    }
    return 0;
}

#endif
