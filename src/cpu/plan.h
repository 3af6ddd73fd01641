/* How a call runs on the CPU. */
#ifndef FA3_CPU_PLAN_H
#define FA3_CPU_PLAN_H

#include <stddef.h>
#include <stdint.h>

struct cpu_plan {
  size_t workspace_size;
  int64_t tile_q;
  int64_t tile_k;
  int32_t num_threads;
};

#endif
