/* What the library exports: what Python, or any program that loads it, calls. */

#ifndef TRENCADIS_EXPORTS_H
#define TRENCADIS_EXPORTS_H

#include "dense.h"
#include "panels.h"

EXPORT int trencadis_panels_version(void);
EXPORT const char *trencadis_left_out(void);
EXPORT int64_t trencadis_layout(int number, int64_t *offsets, int64_t most);
EXPORT int trencadis_cpu_features(void);
EXPORT uint64_t trencadis_launches(int operation, int kind);
EXPORT void trencadis_panels_threads(void *p, void *num, void *count, void *wait);
EXPORT void trencadis_pin(int *cpus, int count);
EXPORT int trencadis_panels_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int kind,
                                   int threads);
EXPORT void trencadis_panels_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n,
                                  int64_t width, float eps, int type, int kind, int threads);
EXPORT int trencadis_panels_attend(const Attend *asked, int kind, int threads);
EXPORT void trencadis_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
                            int64_t outputs, float scale, int kind, int threads);
EXPORT void trencadis_dense_pack(const Pack *p, int64_t panels, int kind, int threads);
EXPORT int trencadis_flash(const Flash *asked, int kind, int threads);
EXPORT void trencadis_turn(const Turn *p, int64_t n, int kind, int threads);

#endif
