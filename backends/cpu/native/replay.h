/* Calls of this library that were recorded once and are made again in one call. */

#ifndef TRENCADIS_REPLAY_H
#define TRENCADIS_REPLAY_H

#include "panels.h"

/* Functions that are recorded. */
enum {
    CALL_LINEAR, CALL_ROWS, CALL_ROTARY, CALL_ATTEND, CALL_DENSE, CALL_ADAPTERS, CALL_HEADS, CALL_DELTA_NET, CALL_GATE,
    CALL_EXPERTS
};

/* A call: the function's arguments in its own order, without floats and without the number of threads. */
typedef struct {
    int64_t function;
    int64_t arguments[11];
    int64_t rows; /* of CALL_ATTEND: number of the AttendRows that it reads */
    float real;   /* the function's float, if it has one */
    int32_t unused;
} ReplayedCall;

/* The fields of Attend that differ from launch to launch. */
typedef struct {
    const int32_t *blocks, *token, *row, *first, *length;
    int64_t n, width;
} AttendRows;

/* What differs from launch to launch beside the contents of tensors. */
typedef struct {
    const AttendRows *rows; /* by the numbers in the calls */
    const int64_t *runs;    /* [count][3]: rows with one adapter each, as in adapters.h */
    int64_t count;
} ReplayedLaunch;

#endif
