/* What threads work in: parts of the workspace that begin at cache lines. */
#ifndef FA3_CPU_SCRATCH_H
#define FA3_CPU_SCRATCH_H

#include "integer.h"

enum { CACHE_LINE = 64 };

/* Where the workspace begins; it has a line more than is needed. */
static inline char *first_line(void *workspace) {
  return (char *)(((uintptr_t)workspace + CACHE_LINE - 1) & -(uintptr_t)CACHE_LINE);
}

struct scratch_array {
  float **array;
  int64_t words;
};

/* Lays arrays out at `base` (null to measure only); returns their size in bytes. */
static inline size_t lay_out(const struct scratch_array *arrays, size_t count, char *base) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; i++) {
    *arrays[i].array = base ? (float *)(void *)(base + bytes) : NULL;
    bytes += (size_t)round_up(arrays[i].words * (int64_t)sizeof(float), CACHE_LINE);
  }
  return bytes;
}

#endif
