#include "compare.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "reference.h"
#include "test.h"

enum { LARGEST_DIM = 256 };

void compare(struct comparison *comparison, const char *name, int64_t d, double got,
             double expected, double bound) {
  if (bound == INFINITY && !isnan(expected)) return; /* none can be derived */
  double error = fabs(got - expected);
  /* Written so that a NaN that is not expected fails. */
  bool good = isnan(expected) ? isnan(got) : isfinite(expected) ? error <= bound : got == expected;
  if (!good)
    fail_msg("%s[batch %" PRId64 ", head %" PRId64 ", row %" PRId64 ", %" PRId64
             "] is %.9g: expected %.9g, at most %.3g off",
             name, comparison->batch, comparison->head, comparison->row, d, got, expected, bound);
  if (isfinite(expected) && error > bound * comparison->worst) comparison->worst = error / bound;
}

static int64_t width(const fa3_tensor *tensor) {
  return tensor->shape[tensor->rank - 1];
}

void compare_row(struct comparison *at, const fa3_forward_args *args) {
  double output[LARGEST_DIM], output_bound[LARGEST_DIM], lse, lse_bound;
  reference_row(args, at->batch, at->head, at->row, output, &lse);
  reference_bound(args, at->batch, at->head, at->row, output, lse, output_bound, &lse_bound);
  int64_t index = reference_output_index(args, at->batch, at->head, at->row);
  for (int64_t d = 0; d < width(&args->output); d++)
    compare(at, "output", d, reference_load(&args->output, index + d), output[d], output_bound[d]);
  if (!args->lse.data) return;
  index = reference_lse_index(args, at->batch, at->head, at->row);
  compare(at, "lse", 0, reference_load(&args->lse, index), lse, lse_bound);
}

/* What is beyond the dtype's largest number is stored as infinity, and what may be is anything. */
static void settle_overflow(fa3_dtype dtype, double *expected, double *bound) {
  const double largest = dtype == FA3_FLOAT16    ? 65504
                         : dtype == FA3_BFLOAT16 ? 0x1.fep127
                                                 : (double)FLT_MAX;
  if (!(fabs(*expected) + *bound > largest)) return;
  if (fabs(*expected) - *bound > largest) *expected = copysign(INFINITY, *expected);
  *bound = isinf(*expected) ? 0 : INFINITY;
}

void compare_gradient(struct comparison *at, const fa3_backward_args *args, const char *name,
                      const fa3_tensor *tensor, const void *before, int64_t index, int64_t count,
                      const double *expected, const double *bound) {
  fa3_tensor held = *tensor;
  held.data = (void *)(uintptr_t)before;
  for (int64_t d = 0; d < count; d++) {
    double sum = expected[d];
    if (args->flags & FA3_ACCUMULATE) sum += reference_load(&held, index + d);
    double most = reference_stored_bound(tensor->dtype, sum, bound[d]);
    settle_overflow(tensor->dtype, &sum, &most);
    compare(at, name, d, reference_load(tensor, index + d), sum, most);
  }
}

void compare_grad_query(struct comparison *at, const fa3_backward_args *args, const void *before) {
  double gradient[LARGEST_DIM], bound[LARGEST_DIM];
  reference_grad_query(args, at->batch, at->head, at->row, gradient, bound);
  compare_gradient(at, args, "grad_query", &args->grad_query, before,
                   reference_grad_query_index(args, at->batch, at->head, at->row),
                   width(&args->grad_query), gradient, bound);
}

void compare_grad_key_value(struct comparison *at, const fa3_backward_args *args,
                            const void *key_before, const void *value_before) {
  double key[LARGEST_DIM], value[LARGEST_DIM], key_bound[LARGEST_DIM], value_bound[LARGEST_DIM];
  reference_grad_key_value(args, at->batch, at->head, at->row, key, value, key_bound, value_bound);
  compare_gradient(at, args, "grad_key", &args->grad_key, key_before,
                   reference_grad_key_index(args, at->batch, at->head, at->row),
                   width(&args->grad_key), key, key_bound);
  compare_gradient(at, args, "grad_value", &args->grad_value, value_before,
                   reference_grad_value_index(args, at->batch, at->head, at->row),
                   width(&args->grad_value), value, value_bound);
}
