/* The threads that calls of the CPU engine run on: the caller's own, and helpers that the process
 * keeps for all its calls. */
#ifndef FA3_CPU_THREADS_H
#define FA3_CPU_THREADS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { MOST_THREADS = 1024 }; /* more than any call can use, few enough to be started */

/* Work on one task of many; threads that work at the same time have different seats, from 0. */
typedef void task_work(void *argument, int64_t task, int32_t seat);

/* Calls `work` once for each task of [0, tasks), on at most `threads` threads; returns when all is
 * done. Tasks are started in their order, and seats are below `threads`. The calling thread works
 * too, so that it goes on with any number of helpers: those that are busy with other calls, can't
 * be created or wake up too late leave their share to the others. */
void threads_for(int32_t threads, int64_t tasks, task_work *work, void *argument);

/* Whether other threads want the processors too. Short calls are then done by their callers alone.
 */
bool threads_crowded(void);

/* Waits until another task, started before this one, has set the value. */
void threads_wait(const atomic_llong *value, long long wanted);

#endif
