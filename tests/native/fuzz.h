/* Random calls of the library: values, memory and comparisons that all cases share, and the cases of other files. */

#ifndef TRENCADIS_FUZZ_H
#define TRENCADIS_FUZZ_H

#include "exports.h"

#include <stdlib.h>
#include <string.h>

/* bfloat16_pairs: this kind multiplies pairs of them; vnni: a kind with exact sums of 8 by 8 bits, or 0. */
extern int kind, bfloat16_pairs, vnni;

void seed(uint64_t number);
uint32_t draw(uint32_t below);
int64_t between(int64_t low, int64_t high); /* both inclusive */
int team(void);                             /* threads of a launch */

int64_t size_of(int64_t type);
float widened(uint16_t bits);

void *room(int64_t bytes, int lines);
void drop(void);
void *some(int64_t count, int64_t type, int wild);
void *copied(const void *from, int64_t bytes);

void fail(const char *what);
void equal(const void *a, const void *b, int64_t bytes, const char *what);

/* Weights. */
void some_codes(PanelWeight *w, int64_t rows, int64_t inputs, int64_t type, int looked);
void some_dense(Dense *p, int64_t outputs, int64_t inputs, int64_t type, int wild);
int64_t some_rows(StateRows *rows, int64_t slots, int64_t most);

/* Calls, made at once or as recorded ones. */
int call_linear(const PanelWeight *w, const void *x, void *out, int64_t n, int type, int threads);
void call_rows(int op, void *x, const void *residual, const void *weight, void *out, int64_t n, int64_t width,
               int type, int threads);
int call_attend(const Attend *p, int threads);
int call_dense(const Dense *weight, const void *x, void *out, int64_t *best, int64_t n, int64_t stride,
               int64_t outputs, int threads);
void call_head_norms(int op, const void *x, const void *weight, void *out, int64_t n, int64_t width, int64_t heads,
                     int64_t stride, int64_t step, int type, int threads);
void call_gate_heads(const void *x, const void *gate, void *out, int64_t n, int64_t width, int64_t heads,
                     int64_t stride, int64_t step, int type, int threads);
void call_rotary(const Rotary *p, int64_t n, int threads);
int call_adapters(const Adapters *p, const void *x, int64_t x_row, void *y, int64_t y_row, int64_t n,
                  const int64_t *runs, int64_t count, int threads);
int call_experts(const Experts *p, const void *x, const void *scores, int score_type, void *out, int64_t n,
                 int threads);
int call_delta_net(const DeltaNet *p, int threads);

/* Cases of other files than fuzz.c. */
void fuzz_replay(void);
void fuzz_experts(void);
void fuzz_delta_net(void);

#endif
