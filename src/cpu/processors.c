#include "processors.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "integer.h"
#include "threads.h"

int32_t threads_of_list(const char *list) {
  if (!list) return 0;
  const long first = strtol(list, NULL, 10);
  return (int32_t)smaller(larger(first, 0), MOST_THREADS);
}

/* Of one group: "max 100000" or "150000 100000", microseconds of time in each period. */
static int64_t group_limit(const char *file_name) {
  FILE *file = fopen(file_name, "re");
  if (!file) return 0;
  char line[64];
  const bool read = fgets(line, sizeof line, file);
  (void)fclose(file);
  if (!read) return 0;
  char *rest;
  const long long quota = strtoll(line, &rest, 10), period = strtoll(rest, NULL, 10);
  if (quota <= 0 || period <= 0) return 0;
  return smaller(larger(divide_up(quota, period), 1), MOST_THREADS);
}

int32_t processors_of_group(const char *membership, const char *root) {
  FILE *file = fopen(membership, "re");
  if (!file) return 0;
  char line[4096], path[sizeof line] = "";
  while (fgets(line, sizeof line, file))
    if (strncmp(line, "0::/", 4) == 0)
      snprintf(path, sizeof path, "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
  (void)fclose(file);
  /* A limit of any group above holds too, up to the root, which may be a container's. */
  int64_t least = 0;
  char *last;
  do {
    char name[sizeof path + 1024];
    snprintf(name, sizeof name, "%s%s/cpu.max", root, path);
    const int64_t limit = group_limit(name);
    if (limit && (!least || limit < least)) least = limit;
    last = strrchr(path, '/');
    if (last) *last = 0;
  } while (last);
  return (int32_t)least;
}

/* The mask of the process's first thread: the calling thread may be bound to one processor. */
static int64_t processors_of_mask(void) {
  cpu_set_t mask;
  if (sched_getaffinity(getpid(), sizeof mask, &mask) == 0) return CPU_COUNT(&mask);
  return sysconf(_SC_NPROCESSORS_ONLN);
}

static int32_t decided;

static void decide(void) {
  decided = threads_of_list(getenv("OMP_NUM_THREADS"));
  if (decided) return;
  const int64_t processors = processors_of_mask();
  const int64_t share = processors_of_group("/proc/self/cgroup", "/sys/fs/cgroup");
  decided =
      (int32_t)larger(smaller(share ? smaller(processors, share) : processors, MOST_THREADS), 1);
}

int32_t default_threads(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, decide);
  return decided;
}
