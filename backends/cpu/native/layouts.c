/* Describes the build of the library: sources that a compiler rejected, and the field offsets of its structures. */

#include "exports.h"

#include <stddef.h>

#ifndef LEFT_OUT
#define LEFT_OUT ""
#endif

/* Returns the names of source files that were left out, separated by spaces. */
EXPORT const char *trencadis_left_out(void) { return LEFT_OUT; }

#define AT(type, field) (int64_t)offsetof(type, field)

#define W(field) AT(PanelWeight, field)
static const int64_t panel_weight[] = {W(codes), W(scale),  W(zero),    W(factor), W(gather), W(bias),
                                       W(values), W(rows), W(inputs), W(columns), W(group), W(bits), W(middle)};

#define D(field) AT(Dense, field)
static const int64_t dense[] = {D(weight), D(bias), D(inputs), D(depth), D(outputs), D(type),  D(x),
                                D(out),    D(n),    D(stride), D(parts), D(scale),   D(pairs), D(kind)};

#define P(field) AT(Pack, field)
static const int64_t pack[] = {P(rows), P(out), P(inputs), P(depth), P(from), P(to), P(kind)};

#define A(field) AT(Attend, field)
static const int64_t attend[] = {A(q),              A(out),            A(k),              A(v),
                                 A(k_scale),        A(v_scale),        A(kept),           A(pairs),
                                 A(blocks),         A(token),          A(row),            A(first),
                                 A(length),         A(sinks),          A(n),              A(heads),
                                 A(groups),         A(size),           A(block),          A(width),
                                 A(stride),         A(kept_count),     A(scale),          A(type),
                                 A(codes),          A(kept_type),      A(bfloat16_pairs), A(starts),
                                 A(part)};

#define T(field) AT(Rotary, field)
static const int64_t rotate[] = {T(q),      T(k),      T(v),      T(cos),    T(sin),    T(out),    T(keys),
                                 T(values), T(slot),   T(q_row),  T(q_head), T(k_row),  T(k_head), T(v_row),
                                 T(heads),  T(groups), T(size),   T(type)};

#define F(field) AT(Flash, field)
static const int64_t flash[] = {F(q),      F(k),      F(v),      F(out),    F(sinks),  F(q_row),  F(q_head), F(k_row),
                                F(k_head), F(v_row),  F(v_head), F(heads),  F(groups), F(size),   F(window), F(spans),
                                F(n),      F(type),   F(scale),  F(pairs),  F(starts), F(tokens), F(next),   F(team)};

#define S(field) AT(Span, field)
static const int64_t span[] = {S(first), S(count), S(query_at), S(slot), S(keys),
                               S(slots), S(place), S(own),      S(upto), S(whole)};

#define C(field) AT(Convolution, field)
static const int64_t convolution[] = {C(x),           C(weight),      C(bias),       C(state),      C(out),
                                      C(rows.slot),   C(rows.source), C(rows.begins), C(rows.start), C(rows.count),
                                      C(rows.n),      C(channels),    C(taps),       C(stride),     C(type),
                                      C(silu)};

#define E(field) AT(Delta, field)
static const int64_t delta[] = {E(q),           E(k),           E(v),           E(g),           E(beta),
                                E(state),       E(out),         E(rows.slot),   E(rows.source), E(rows.begins),
                                E(rows.start),  E(rows.count),  E(rows.n),      E(q_row),       E(k_row),
                                E(v_row),       E(gate_row),    E(beta_row),    E(heads),       E(groups),
                                E(dk),          E(dv),          E(type),        E(plain),       E(work),
                                E(room)};

#define N(field) AT(DeltaNet, field)
static const int64_t delta_net[] = {N(x),           N(gates),      N(weight),      N(last),       N(decay),
                                    N(shift),       N(norm),       N(state),       N(mixed),      N(y),
                                    N(factors),     N(out),        N(rows.slot),   N(rows.source), N(rows.begins),
                                    N(rows.start),  N(rows.count), N(rows.n),      N(tokens),     N(x_row),
                                    N(gates_row),   N(taps),       N(heads),       N(groups),     N(dk),
                                    N(dv),          N(type),       N(eps)};

#define L(field) AT(Adapters, field)
static const int64_t adapters[] = {L(a),    L(b), L(places), L(parts), L(rank),  L(inputs), L(blocks), L(type),
                                   L(x),    L(y), L(runs),   L(x_row), L(y_row), L(n),      L(count),  L(shrunk)};

#define R(field) AT(ReplayedCall, field)
static const int64_t replayed_call[] = {R(function), R(arguments), R(rows), R(real), R(unused)};

#define O(field) AT(AttendRows, field)
static const int64_t attend_rows[] = {O(blocks), O(token), O(row), O(first), O(length), O(n), O(width)};

#define B(field) AT(ReplayedLaunch, field)
static const int64_t replayed_launch[] = {B(rows), B(runs), B(count)};

#define X(field) AT(Experts, field)
static const int64_t experts[] = {X(gate_up), X(down),  X(count), X(top), X(hidden),
                                  X(inner),   X(type),  X(coded), X(act), X(normalise)};

#define STRUCTURE(type, name) {name, sizeof name / sizeof *name, sizeof(type)}
static const struct {
    const int64_t *offsets;
    size_t fields, size;
} structures[] = {STRUCTURE(PanelWeight, panel_weight), STRUCTURE(Dense, dense), STRUCTURE(Pack, pack),
                  STRUCTURE(Attend, attend),            STRUCTURE(Rotary, rotate),   STRUCTURE(Flash, flash),
                  STRUCTURE(Span, span),              STRUCTURE(Convolution, convolution), STRUCTURE(Delta, delta),
                  STRUCTURE(DeltaNet, delta_net),
                  STRUCTURE(Adapters, adapters),        STRUCTURE(ReplayedCall, replayed_call),
                  STRUCTURE(AttendRows, attend_rows),   STRUCTURE(ReplayedLaunch, replayed_launch),
                  STRUCTURE(Experts, experts)};

/* Returns the bytes of structure `number`, and writes its field offsets to offsets [most]; -1 if it has another
   number of fields, or does not exist. */
EXPORT int64_t trencadis_layout(int number, int64_t *offsets, int64_t most) {
    if (number < 0 || (size_t)number >= sizeof structures / sizeof *structures) return -1;
    if (structures[number].fields != (size_t)most) return -1;
    for (int64_t i = 0; i < most; i++) offsets[i] = structures[number].offsets[i];
    return (int64_t)structures[number].size;
}
