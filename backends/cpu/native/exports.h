/* Marks the functions that the library exports, for Python or any other program that loads it. */

#ifndef TRENCADIS_EXPORTS_H
#define TRENCADIS_EXPORTS_H

#include "dense.h"
#include "experts.h"
#include "panels.h"
#include "replay.h"

EXPORT int trencadis_panels_version(void);
EXPORT const char *trencadis_left_out(void);
EXPORT int64_t trencadis_layout(int number, int64_t *offsets, int64_t most);
EXPORT int trencadis_cpu_features(void);
EXPORT int trencadis_features_of(const uint32_t *found, uint64_t saved, int tiles);
EXPORT uint64_t trencadis_launches(int operation, int kind);
EXPORT void trencadis_pool_pin(const int *cpus, int count);
EXPORT int trencadis_pool_in_use(int asked);
EXPORT void trencadis_pool_tend(int everyone);
EXPORT int64_t trencadis_pool_system_id(int worker);
EXPORT void trencadis_pool_charge(int worker, int64_t time);
EXPORT int64_t trencadis_pool_late(int worker);
EXPORT void trencadis_pool_of_torch(void *parallel, void *thread);
EXPORT void trencadis_pool_on_torch(int on);
EXPORT void trencadis_pool_patient(int patient);
EXPORT void trencadis_pool_hold(int worker, int64_t time, int inside);
EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads);
EXPORT void trencadis_panels_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n,
                                  int64_t width, float eps, int type, int kind, int threads);
EXPORT void trencadis_head_norms(int op, const void *x, const void *weight, void *out, int64_t n, int64_t width,
                                 int64_t heads, int64_t stride, int64_t step, float eps, int type, int kind,
                                 int threads);
EXPORT void trencadis_gate_heads(const void *x, const void *gate, void *out, int64_t n, int64_t width, int64_t heads,
                                 int64_t stride, int64_t step, int type, int kind, int threads);
EXPORT void trencadis_gated_norm(const void *x, const void *weight, const void *gate, void *out, int64_t n,
                                 int64_t width, int64_t heads, int64_t stride, float eps, int type, int kind,
                                 int threads);
EXPORT int trencadis_panels_attend(const Attend *asked, int kind, int threads);
EXPORT int trencadis_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
                           int64_t outputs, float scale, int kind, int threads);
EXPORT void trencadis_dense_pack(const Pack *p, int64_t panels, int kind, int threads);
EXPORT int trencadis_flash(const Flash *asked, int kind, int threads);
EXPORT void trencadis_convolve(const Convolution *p, int kind, int threads);
EXPORT int trencadis_delta_rule(const Delta *asked, int kind, int threads);
EXPORT int trencadis_delta_net(const DeltaNet *p, int kind, int threads);
EXPORT int trencadis_adapters(const Adapters *asked, const void *x, int64_t x_row, void *y, int64_t y_row, int64_t n,
                              const int64_t *runs, int64_t count, int kind, int threads);
EXPORT int trencadis_experts(const Experts *p, const void *x, const void *scores, int score_type, void *out, int64_t n,
                             int kind, int threads);
EXPORT void trencadis_rotary(const Rotary *p, int64_t n, int kind, int threads);
EXPORT int trencadis_replay(const ReplayedCall *calls, int64_t count, const ReplayedLaunch *launch, int threads);

#endif
