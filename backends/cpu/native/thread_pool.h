/* The threads of the kernels.

   A launch's items are cut into as many shares as it has threads. A thread takes pieces of its own share first, from
   the front, and then of the others', from the back. The caller waits for pieces that were taken and never for a
   thread that took none, so a thread that the system has suspended costs at most the time of the piece that it
   holds.

   torch's pool is not used, because the end of an OpenMP region waits for each thread of the team, so that one
   descheduled thread delays every launch by the scheduler's time slice of other threads (3 to 4 ms, with some
   hundred launches per token). If oneDNN multiplies between the launches, as in prompts, they do run on torch's
   threads: threads of two pools that alternate on the same CPUs within microseconds wait for each other until the
   scheduler's next tick. */

#ifndef TRENCADIS_THREAD_POOL_H
#define TRENCADIS_THREAD_POOL_H

#include <stdint.h>

#define MOST_THREADS 256 /* threads of a launch, including the caller */

/* Works on the items [first, last); `thread` is below the launch's number of threads, and 0 for the caller. */
typedef void (*Work)(void *data, int64_t first, int64_t last, int64_t thread);

/* Runs `work` on all items, on at most `threads` threads; on the caller alone if another launch of the process is
   running.

   grain: maximum number of items that a thread takes at a time; 0: a sixteenth of its share. pieces: number of parts
   of similar duration in the launch; 0: items divided by grain. A thread that is late by the time of several parts
   is left out. */
void pool_run(Work work, void *data, int64_t items, int64_t grain, int64_t pieces, int64_t threads);

/* Returns how many threads a launch gets if its work is worth `units` + 1 of them: launches take longer on some
   systems. */
int64_t pool_threads(int64_t units, int64_t threads);

#endif
