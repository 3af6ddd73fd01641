/* Rows of gradients against the float64 reference, within the bounds that reference.h derives. */
#ifndef FA3_CLI_GRADIENT_COMPARISON_H
#define FA3_CLI_GRADIENT_COMPARISON_H

#include "comparison.h"
#include "tensors.h"

struct gradient_comparison {
  const fa3_backward_args *args; /* a gradient that is absent is not compared */
  struct error_statistics statistics[TENSORS];
};

/* Compares `count` rows of query's gradient and of key's and value's, or
 * all, spread as comparison_sample's, and all of the sink's. */
void gradient_comparison_sample(struct gradient_comparison *comparison, int64_t count,
                                uint64_t seed, const char *label);

#endif
