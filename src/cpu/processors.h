/* How many threads a call runs on if nobody says. */
#ifndef FA3_CPU_PROCESSORS_H
#define FA3_CPU_PROCESSORS_H

#include <stdint.h>

/* OMP_NUM_THREADS, which programs of every thread runtime are told by, or else the processors that
 * the process may use: its affinity mask, and its control group's share of time. Decided once. */
int32_t default_threads(void);

/* The first number of a list as in OMP_NUM_THREADS; 0 if there is none above 0. */
int32_t threads_of_list(const char *list);

/* The share of processor time, in whole processors, that control groups (version 2) allow to the
 * process that `membership` (/proc/self/cgroup) is about, from the files below `root`
 * (/sys/fs/cgroup); 0 without a limit. */
int32_t processors_of_group(const char *membership, const char *root);

#endif
