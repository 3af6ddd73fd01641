#include "comparison.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "reference.h"
#include "sampling.h"

double comparison_overflow(fa3_dtype dtype) {
  if (dtype == FA3_FLOAT16) return 65520;
  if (dtype == FA3_BFLOAT16) return 0x1.ffp127;
  return 0x1.ffffffp127;
}

/* Infinite where the places of NaN and infinity differ. */
static double error_of(double value, double expected, double bound, fa3_dtype dtype) {
  if (isnan(expected)) return isnan(value) ? 0 : INFINITY;
  if (isinf(expected)) return value == expected ? 0 : INFINITY;
  if (isfinite(value)) return fabs(value - expected);
  bool overflows = !isnan(value) && fabs(expected) + bound >= comparison_overflow(dtype);
  return overflows && signbit(value) == signbit(expected) ? 0 : INFINITY;
}

/* Which of two elements comes first in the tensor. */
static bool comes_first(const int64_t coordinates[4], const struct error_statistics *statistics) {
  const int64_t *other = statistics->worst.at;
  for (int i = 0; i < 4; i++)
    if (coordinates[i] != other[i]) return coordinates[i] < other[i];
  return false;
}

static void take_up(struct error_statistics *statistics, double value, double expected,
                    double bound, double error, const int64_t coordinates[4]) {
  const bool unbounded =
      error != 0 && !isfinite(bound) && (isfinite(expected) || statistics->finite);
  if (unbounded) {
    statistics->unbounded++;
    return;
  }
  const bool inside = error == 0 || error <= bound; /* a bound that is NaN holds nothing */
  const double ratio = error == 0 ? 0 : inside ? error / bound : fmax(error / bound, 1);
  const bool earlier = comes_first(coordinates, statistics);
  const bool bounded = error != 0 || isfinite(bound), first = bounded && !statistics->any_bound;
  statistics->count++;
  statistics->any_bound |= bounded;
  if (!(error <= statistics->max_error)) statistics->max_error = error;
  statistics->sum_squares += error * error;
  /* Whatever the order in which values come. */
  if (first ||
      (bounded && (statistics->outside ? !inside && earlier
                                       : !inside || ratio > statistics->worst_ratio ||
                                             (ratio == statistics->worst_ratio && earlier)))) {
    memcpy(statistics->worst.at, coordinates, sizeof statistics->worst.at);
    statistics->worst.value = value;
    statistics->worst.expected = expected;
    statistics->worst.error = error;
    statistics->worst.bound = bound;
  }
  if (ratio > statistics->worst_ratio) statistics->worst_ratio = ratio;
  statistics->outside += !inside;
  statistics->nan += isnan(value) && isnan(expected);
}

static void add(struct error_statistics *statistics, double value, double expected, double bound,
                fa3_dtype dtype, const int64_t coordinates[4]) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* rows come from several threads */
  const double error = error_of(value, expected, bound, dtype);
  pthread_mutex_lock(&lock);
  take_up(statistics, value, expected, bound, error, coordinates);
  pthread_mutex_unlock(&lock);
}

/* What one row is to be, and how far it may be off before it is stored. */
struct expected {
  double values[COMPARISON_MAX_HEAD_DIM];
  double bounds[COMPARISON_MAX_HEAD_DIM];
};

static void compare_output(void *context, int64_t batch, int64_t head, int64_t row) {
  struct comparison *comparison = context;
  const fa3_forward_args *args = comparison->forward;
  const int64_t columns = args->value.shape[args->value.rank - 1];
  const int64_t first = reference_output_index(args, batch, head, row);
  struct expected output;
  double lse = NAN;
  double lse_bound = 0;
  reference_row(args, batch, head, row, output.values, &lse);
  reference_bound(args, batch, head, row, output.values, lse, output.bounds, &lse_bound);
  const bool sees_nothing = lse == -INFINITY;
  for (int64_t d = 0; d < columns; d++)
    add(&comparison->statistics[TENSOR_output], reference_load(&args->output, first + d),
        output.values[d], sees_nothing ? 0 : output.bounds[d], args->output.dtype,
        (int64_t[]){batch, row, head, d});
  if (!args->lse.data) return;
  add(&comparison->statistics[TENSOR_lse],
      reference_load(&args->lse, reference_lse_index(args, batch, head, row)), lse, lse_bound,
      FA3_FLOAT32, (int64_t[]){batch, row, head, 0});
}

/* Columns of a gradient from element `first` on. */
static void compare_gradient(struct error_statistics *statistics, const fa3_tensor *tensor,
                             int64_t first, int64_t columns, const struct expected *expected,
                             int64_t batch, int64_t head, int64_t row) {
  for (int64_t d = 0; tensor->rank && d < columns; d++)
    add(statistics, reference_load(tensor, first + d), expected->values[d],
        reference_stored_bound(tensor->dtype, expected->values[d], expected->bounds[d]),
        tensor->dtype, (int64_t[]){batch, row, head, d});
}

static void compare_query(void *context, int64_t batch, int64_t head, int64_t row) {
  struct comparison *comparison = context;
  const fa3_backward_args *args = comparison->backward;
  struct expected query;
  reference_grad_query(args, batch, head, row, query.values, query.bounds);
  compare_gradient(&comparison->statistics[TENSOR_grad_query], &args->grad_query,
                   reference_grad_query_index(args, batch, head, row),
                   args->query.shape[args->query.rank - 1], &query, batch, head, row);
}

static void compare_key_value(void *context, int64_t batch, int64_t head, int64_t row) {
  struct comparison *comparison = context;
  const fa3_backward_args *args = comparison->backward;
  struct expected key;
  struct expected value;
  reference_grad_key_value(args, batch, head, row, key.values, value.values, key.bounds,
                           value.bounds);
  compare_gradient(&comparison->statistics[TENSOR_grad_key], &args->grad_key,
                   reference_grad_key_index(args, batch, head, row),
                   args->key.shape[args->key.rank - 1], &key, batch, head, row);
  compare_gradient(&comparison->statistics[TENSOR_grad_value], &args->grad_value,
                   reference_grad_value_index(args, batch, head, row),
                   args->value.shape[args->value.rank - 1], &value, batch, head, row);
}

static void compare_sink(struct comparison *comparison) {
  const fa3_backward_args *args = comparison->backward;
  const fa3_tensor *sink = &args->grad_sink;
  for (int64_t head = 0; head < sink->shape[0]; head++) {
    struct expected expected;
    reference_grad_sink(args, head, expected.values, expected.bounds);
    compare_gradient(&comparison->statistics[TENSOR_grad_sink], sink, head * sink->strides[0], 1,
                     &expected, 0, head, 0);
  }
}

static int64_t query_rows(const void *context, int64_t batch) {
  return reference_seqlen_q(((const struct comparison *)context)->forward, batch);
}

static int64_t key_rows(const void *context, int64_t batch) {
  return reference_seqlen_k(((const struct comparison *)context)->forward, batch);
}

static struct sampling of_queries(struct comparison *comparison,
                                  void (*visit)(void *, int64_t, int64_t, int64_t)) {
  const fa3_forward_args *args = comparison->forward;
  return (struct sampling){.batch = reference_batch(args),
                           .heads = args->query.shape[args->query.rank - 2],
                           .context = comparison,
                           .rows = query_rows,
                           .visit = visit};
}

int64_t comparison_rows(const fa3_forward_args *args) {
  struct comparison comparison = {.forward = args};
  const struct sampling sampling = of_queries(&comparison, compare_output);
  return sampling_total(&sampling);
}

void comparison_sample(struct comparison *comparison, int64_t count, uint64_t seed,
                       const char *label) {
  const fa3_backward_args *backward = comparison->backward;
  const struct sampling output = of_queries(comparison, compare_output);
  sampling_visit(&output, count, seed, label);
  if (!backward) return;
  const struct sampling query = of_queries(comparison, compare_query);
  struct sampling key = query;
  key.heads = backward->key.shape[backward->key.rank - 2];
  key.rows = key_rows;
  key.visit = compare_key_value;
  if (backward->grad_query.rank) sampling_visit(&query, count, seed, label);
  if (backward->grad_key.rank || backward->grad_value.rank)
    sampling_visit(&key, count, seed, label);
  compare_sink(comparison);
}

bool comparison_find_not_finite(const fa3_forward_args *args, int64_t coordinates[4]) {
  int64_t heads = args->query.shape[args->query.rank - 2];
  int64_t columns = args->value.shape[args->value.rank - 1];
  for (int64_t b = 0; b < reference_batch(args); b++) {
    for (int64_t row = 0; row < reference_seqlen_q(args, b); row++) {
      for (int64_t head = 0; head < heads; head++) {
        int64_t first = reference_output_index(args, b, head, row);
        for (int64_t d = 0; d < columns; d++) {
          if (isfinite(reference_load(&args->output, first + d))) continue;
          coordinates[0] = b;
          coordinates[1] = row;
          coordinates[2] = head;
          coordinates[3] = d;
          return true;
        }
      }
    }
  }
  return false;
}
