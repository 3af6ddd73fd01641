#ifndef FA3_TESTS_CUDA_FACTS_H
#define FA3_TESTS_CUDA_FACTS_H

#include "cuda/plan.h"

/* What plans know of an H100. */
static const struct cuda_facts facts = {.architecture = "sm_90a",
                                        .multiprocessors = 132,
                                        .most_multiprocessors = 132,
                                        .bandwidth = 3352};

#endif
