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
