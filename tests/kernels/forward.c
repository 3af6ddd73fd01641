/* The tile loop on one level's routines, against the float64 reference. The tests of the public
 * API go through every argument; here it is lengths around the tiles' edges. */
#include <math.h>

#include "calls.h"
#include "reference.h"
#include "sanitized.h"

static bool check_row(const struct run *run, const fa3_forward_args *args, int64_t batch,
                      int64_t head, int64_t row) {
  double expected[256], bound[256], lse, lse_bound;
  reference_row(args, batch, head, row, expected, &lse);
  reference_bound(args, batch, head, row, expected, lse, bound, &lse_bound);
  int64_t at = reference_output_index(args, batch, head, row);
  for (int64_t d = 0; d < args->output.shape[3]; d++) {
    double value = reference_load(&args->output, at + d);
    if (!(value == expected[d] || fabs(value - expected[d]) <= bound[d]))
      return wrong(run, "batch %d, head %d, row %d, element %d is %g: expected %g within %.2g",
                   (int)batch, (int)head, (int)row, (int)d, value, expected[d], bound[d]);
  }
  double value = reference_load(&args->lse, reference_lse_index(args, batch, head, row));
  if (value == lse || fabs(value - lse) <= lse_bound) return true;
  return wrong(run, "the lse of batch %d, head %d, row %d is %g: expected %g within %.2g",
               (int)batch, (int)head, (int)row, value, lse, lse_bound);
}

static bool check(struct run *run) {
  struct rng *rng = &run->rng;
  struct call c = random_call(run);
  const fa3_forward_args args = reference_forward_args(&c.args);
  const int64_t *shape = args.output.shape;
  prepare_forward(run, &c, (int32_t)rng_between(rng, 1, 3));
  run_forward(run, &c);
  bool good = call_intact(run, &c);
  for (int i = 0; good && i < (SANITIZED ? 3 : 10); i++)
    good = check_row(run, &args, rng_between(rng, 0, shape[0] - 1),
                     rng_between(rng, 0, shape[2] - 1), rng_between(rng, 0, shape[1] - 1));
  call_free(&c);
  return good;
}

static void bench(struct run *run) {
  time_call(run, prepare_forward, run_forward, 4);
}

const struct subject forward_subject = {"forward", true, check, bench};
