/* One cell of a benchmark: a shape, its random tensors, its times. */
#ifndef FA3_CLI_BENCH_CELL_H
#define FA3_CLI_BENCH_CELL_H

#include <stdbool.h>

#include "fa3.h"
#include "progress.h"

struct bench_cell {
  fa3_device device;
  fa3_dtype dtype;       /* of the query and the output; without keys of all */
  fa3_dtype cache_dtype; /* of key and value */
  int64_t batch;
  int64_t seqlen;
  int64_t heads;
  int64_t heads_k;
  int64_t head_dim;
  bool causal;
  bool backward;
  bool deterministic;
  int32_t num_threads;
  int64_t keys;      /* of a cache that each sequence's queries read; 0: seqlen */
  int64_t page_size; /* of the cache; 0: it is dense */
};

/* Of one call, in seconds. A run is several calls on a GPU and with a cache, else one. */
struct bench_times {
  int64_t calls;
  double min, lower, median, upper, max; /* lower and upper quartile */
  /* Of a cache on the CPU: a plain read of it, and the median of read over call. */
  double read, read_ratio;
};

/* 4 * batch * heads * seqlen^2 * head_dim, half of it if causal; the backward pass has five
 * products of matrices for the forward pass's two. */
double bench_flops(const struct bench_cell *cell);

/* Keys and values of all sequences. */
double bench_cache_bytes(const struct bench_cell *cell);

/* Whether the device takes the cell; nothing is allocated. */
fa3_status bench_supported(const struct bench_cell *cell);

/* Fails if its tensors are larger than memory can be. */
int bench_check_size(const struct bench_cell *cell);

/* Warms up, checks some rows of the output or the gradients, then times `repeat` runs. */
int bench_run(const struct bench_cell *cell, int64_t repeat, struct progress *progress,
              struct bench_times *times);

#endif
