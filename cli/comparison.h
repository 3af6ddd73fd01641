/* Rows of outputs and gradients against the float64 reference, within the bound that reference.h
 * derives. */
#ifndef FA3_CLI_COMPARISON_H
#define FA3_CLI_COMPARISON_H

#include <stdbool.h>

#include "tensors.h"

/* No engine takes more. */
enum { COMPARISON_MAX_HEAD_DIM = 256 };

/* Of one tensor. Values count by error/bound. */
struct error_statistics {
  int64_t count;
  int64_t outside;   /* further off than the bound, or not finite where the reference is */
  int64_t nan;       /* NaN where the reference is: no error */
  int64_t unbounded; /* no bound could be derived, as of gradients of enormous scores */
  bool finite;       /* set before: all inputs are, so that what is not has overflown */
  double max_error;
  double sum_squares;
  double worst_ratio;
  /* The first value outside, if there is one; else the one with the worst ratio, the first such. Of
   * values that have a bound: what is exact may have none. */
  bool any_bound;
  struct {
    int64_t at[4]; /* batch, row, head, column */
    double value, expected, error, bound;
  } worst;
};

struct comparison {
  const fa3_forward_args *forward;
  const fa3_backward_args *backward;           /* null: gradients are not compared */
  struct error_statistics statistics[TENSORS]; /* of the outputs; one that is absent has none */
};

/* Compares `count` of the rows that query has, or all, chosen by sampling_visit; of query's
 * gradient and of key's and value's as many; and all of the sink's. */
void comparison_sample(struct comparison *comparison, int64_t count, uint64_t seed,
                       const char *label);

/* Rows that there are to compare: used ones, in all heads. */
int64_t comparison_rows(const fa3_forward_args *args);

/* What rounds to infinity: half a unit in the last place above the dtype's largest number. */
double comparison_overflow(fa3_dtype dtype);

/* The first value of the output that is not finite, if there is one. */
bool comparison_find_not_finite(const fa3_forward_args *args, int64_t coordinates[4]);

#endif
