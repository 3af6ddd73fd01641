#include "bench_cell.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "attention.h"
#include "comparison.h"
#include "dtype.h"
#include "failure.h"
#include "half.h"
#include "random.h"

enum { ROWS_CHECKED = 4 };

double bench_flops(const struct bench_cell *cell) {
  double pairs = (double)cell->seqlen * (double)cell->seqlen * (cell->causal ? 0.5 : 1);
  return 4 * (double)cell->batch * (double)cell->heads * pairs * (double)cell->head_dim;
}

static void fill_random(const fa3_tensor *tensor, uint64_t *state) {
  int64_t count = tensor->shape[0] * tensor->strides[0];
  for (int64_t i = 0; i < count; i++) {
    float value = random_normal(state);
    if (tensor->dtype == FA3_FLOAT32)
      ((float *)tensor->data)[i] = value;
    else
      ((uint16_t *)tensor->data)[i] =
          tensor->dtype == FA3_FLOAT16 ? half_from_float(value) : bfloat_from_float(value);
  }
}

static int allocate(const struct bench_cell *cell, int64_t heads, fa3_tensor *tensor) {
  size_t size = fa3_dtype_size(cell->dtype);
  const int64_t extents[] = {cell->batch, cell->seqlen, heads, cell->head_dim};
  for (int i = 0; i < 4; i++) {
    if (__builtin_mul_overflow(size, (size_t)extents[i], &size) || size > PTRDIFF_MAX)
      return fail(EXIT_USAGE, "a tensor of this shape is too large");
  }
  void *data = aligned_alloc(64, (size + 63) / 64 * 64);
  if (!data) return fail(EXIT_FAILED, "out of memory: a tensor needs %zu bytes", size);
  *tensor = fa3_dense(data, cell->dtype, cell->batch, cell->seqlen, heads, cell->head_dim);
  return 0;
}

static int make_tensors(const struct bench_cell *cell, fa3_forward_args *args) {
  uint64_t state = 1;
  TRY(allocate(cell, cell->heads, &args->query));
  TRY(allocate(cell, cell->heads_k, &args->key));
  TRY(allocate(cell, cell->heads_k, &args->value));
  TRY(allocate(cell, cell->heads, &args->output));
  fill_random(&args->query, &state);
  fill_random(&args->key, &state);
  fill_random(&args->value, &state);
  return 0;
}

static int call(fa3_forward_args *args) {
  fa3_status status = attention_call(args);
  if (!status) return 0;
  if (status == FA3_OUT_OF_MEMORY) return fail(EXIT_FAILED, "out of memory");
  return fail(status < 100   ? EXIT_USAGE
              : status < 200 ? EXIT_UNSUPPORTED
                             : EXIT_FAILED,
              "%s", fa3_last_error());
}

static int check(const fa3_forward_args *args) {
  struct comparison comparison = {.args = args};
  TRY(comparison_sample(&comparison, ROWS_CHECKED, 1, NULL));
  if (!comparison.output.outside) return 0;
  return fail(EXIT_DIFFERS,
              "wrong result for %s, seqlen %" PRId64 ", head_dim %" PRId64 ": %.9g, expected %.9g",
              dtype_name(args->query.dtype), args->query.shape[1], args->query.shape[3],
              comparison.output.worst.value, comparison.output.worst.expected);
}

static int by_value(const void *left, const void *right) {
  double a = *(const double *)left;
  double b = *(const double *)right;
  return (a > b) - (a < b);
}

/* Between the sorted values around it. */
static double quantile(const double *sorted, int64_t count, double fraction) {
  double at = fraction * (double)(count - 1);
  int64_t below = (int64_t)at;
  int64_t above = below + 1 < count ? below + 1 : below;
  return sorted[below] + (at - (double)below) * (sorted[above] - sorted[below]);
}

static int measure(const struct bench_cell *cell, fa3_forward_args *args, int64_t repeat,
                   struct progress *progress, double *seconds, struct bench_times *times) {
  TRY(make_tensors(cell, args));
  TRY(call(args));
  progress_add(progress, bench_flops(cell));
  TRY(check(args));
  for (int64_t i = 0; i < repeat; i++) {
    double start = seconds_now();
    TRY(call(args));
    seconds[i] = seconds_now() - start;
    progress_add(progress, bench_flops(cell));
  }
  qsort(seconds, (size_t)repeat, sizeof *seconds, by_value);
  *times = (struct bench_times){.min = seconds[0],
                                .lower = quantile(seconds, repeat, 0.25),
                                .median = quantile(seconds, repeat, 0.5),
                                .upper = quantile(seconds, repeat, 0.75),
                                .max = seconds[repeat - 1]};
  return 0;
}

int bench_run(const struct bench_cell *cell, int64_t repeat, struct progress *progress,
              struct bench_times *times) {
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = cell->device,
                           .flags = cell->causal ? FA3_CAUSAL : 0,
                           .num_threads = cell->num_threads};
  double *seconds = malloc((size_t)repeat * sizeof *seconds);
  int code = seconds ? measure(cell, &args, repeat, progress, seconds, times)
                     : fail(EXIT_FAILED, "out of memory");
  free(seconds);
  free(args.query.data);
  free(args.key.data);
  free(args.value.data);
  free(args.output.data);
  free(args.workspace);
  return code;
}
