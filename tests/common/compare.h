/* Comparisons with the float64 reference, element by element. */
#ifndef FA3_TESTS_COMPARE_H
#define FA3_TESTS_COMPARE_H

#include "fa3.h"

/* One row of one head, and the largest error so far as a fraction of its bound. */
struct comparison {
  int64_t batch;
  int64_t head;
  int64_t row;
  double worst;
};

/* Fails the test unless `got` is within `bound` of `expected`, or NaN where that is. */
void compare(struct comparison *comparison, const char *name, int64_t d, double got,
             double expected, double bound);

/* That row of a forward call's output, and its lse where there is one. */
void compare_row(struct comparison *at, const fa3_forward_args *args);

/* Elements of a gradient from `index` on, as the reference has them before they are stored.
 * `before`: what the tensor held, where gradients are added to. */
void compare_gradient(struct comparison *at, const fa3_backward_args *args, const char *name,
                      const fa3_tensor *tensor, const void *before, int64_t index, int64_t count,
                      const double *expected, const double *bound);

/* That row of grad_query; and, of a key head, of grad_key and grad_value. `before`: of each. */
void compare_grad_query(struct comparison *at, const fa3_backward_args *args, const void *before);
void compare_grad_key_value(struct comparison *at, const fa3_backward_args *args,
                            const void *key_before, const void *value_before);

#endif
