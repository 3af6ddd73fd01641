#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { MOST_THREADS = 256 };

struct shared {
  void (*work)(void *argument, int64_t task);
  void *argument;
  int64_t tasks;
  atomic_llong next;
};

int32_t reference_threads(void) {
  cpu_set_t mask;
  return sched_getaffinity(0, sizeof mask, &mask) ? 1 : CPU_COUNT(&mask);
}

static void *do_tasks(void *argument) {
  struct shared *shared = argument;
  for (;;) {
    const int64_t task = atomic_fetch_add(&shared->next, 1);
    if (task >= shared->tasks) return NULL;
    shared->work(shared->argument, task);
  }
}

void reference_for(int32_t threads, int64_t tasks, void (*work)(void *argument, int64_t task),
                   void *argument) {
  struct shared shared = {.work = work, .argument = argument, .tasks = tasks};
  pthread_t others[MOST_THREADS];
  int32_t started = 0;
  while (started < threads - 1 && started < tasks - 1 && started < MOST_THREADS &&
         pthread_create(&others[started], NULL, do_tasks, &shared) == 0)
    started++;
  do_tasks(&shared);
  for (int32_t t = 0; t < started; t++) pthread_join(others[t], NULL);
}
