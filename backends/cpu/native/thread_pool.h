/* The threads of the kernels.

   A launch's items are cut into as many shares as it has threads. A thread takes pieces of its own share first, from
   the front, and then of the others', from the back. The caller waits for pieces that were taken and never for a
   thread that took none, so a thread that the system has put aside costs at most the piece that it holds.

   Why not torch's pool: the end of an OpenMP region waits for each thread of the team, so that one descheduled thread
   delays every launch by what the scheduler gives to others (3 to 4 ms, with some hundred launches a token). Where
   oneDNN multiplies between the launches, as in prompts, they do run on torch's threads: threads of two pools that take
   turns on the same CPUs within microseconds wait for each other until the scheduler's next tick. */

#ifndef TRENCADIS_THREAD_POOL_H
#define TRENCADIS_THREAD_POOL_H

#include <stdint.h>

#define MOST_THREADS 256 /* of a launch, the caller's among them */

/* Works on the items [first, last); `thread` is less than the launch's threads, and 0 the caller's. */
typedef void (*Work)(void *data, int64_t first, int64_t last, int64_t thread);

/* Runs `work` on all items, on at most `threads` threads; at once where another launch of the process is running.

   grain: items that a thread may take at a time at most; 0: a sixteenth of its share.
   pieces: how many parts of like size the launch has, where that is not items by grain; 0: it is. A thread that is late
   by the time of several is left out. */
void pool_run(Work work, void *data, int64_t items, int64_t grain, int64_t pieces, int64_t threads);

/* Threads that a launch gets whose work is worth `units` + 1 of them: launches are dearer on some systems. */
int64_t pool_threads(int64_t units, int64_t threads);

#endif
