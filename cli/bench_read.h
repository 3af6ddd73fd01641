/* A plain read of memory: what a decode call, which reads its cache once, is measured against. */
#ifndef FA3_CLI_BENCH_READ_H
#define FA3_CLI_BENCH_READ_H

#include <stddef.h>
#include <stdint.h>

struct memory {
  const void *data;
  size_t size;
};

/* Seconds that `threads` threads take to read both once, in the mean of `passes`; negative without
 * memory or threads. */
double bench_read(const struct memory memory[2], int64_t passes, int32_t threads);

#endif
