/* How a call runs on a GPU: a function of the problem and of a few facts of the GPU, which no plan
 * touches. */
#ifndef FA3_SRC_CUDA_PLAN_H
#define FA3_SRC_CUDA_PLAN_H

#include "cuda/backward_plan.h"
#include "cuda/decode_plan.h"
#include "cuda/forward_plan.h"
#include "cuda/quantize_plan.h"
#include "cuda/staging.h"

struct cuda_facts {
  const char *architecture;
  int multiprocessors;      /* that the call may use */
  int most_multiprocessors; /* those that it leaves free included */
  int bandwidth;            /* of the memory, by its clock and width, in GB/s */
};

/* What stays in the L2 cache until a call is done, if it reads no more than that: a part of
 * Hopper's 50 MB. */
enum { KEPT_BYTES = 32 << 20 };

/* What reading so many bytes takes, in seconds. */
static inline double reading_seconds(const struct cuda_facts *facts, double bytes) {
  return bytes / (0.9e9 * facts->bandwidth);
}

struct cuda_plan {
  size_t workspace_size;
  struct staging staging;
  const struct kernel *helper; /* of a phase that has one kernel */
  bool decodes;
  union { /* by the problem's phase; of a forward call that decodes, decode */
    struct forward_plan forward;
    struct decode_plan decode;
    struct backward_plan backward;
    struct quantize_plan quantize;
  };
};

#endif
