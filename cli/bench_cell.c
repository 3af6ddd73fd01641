#include "bench_cell.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"
#include "comparison.h"
#include "cuda.h"
#include "dtype.h"
#include "failure.h"
#include "half.h"
#include "random.h"
#include "upload.h"

enum { ROWS_CHECKED = 4 };

/* On a GPU a run is as many calls as take so long: the events' resolution and the gap between two
 * runs then do not count. */
static const double gpu_run_seconds = 5e-3;
enum { MAX_CALLS = 1000 };

double bench_flops(const struct bench_cell *cell) {
  double pairs = (double)cell->seqlen * (double)cell->seqlen * (cell->causal ? 0.5 : 1);
  return 4 * (double)cell->batch * (double)cell->heads * pairs * (double)cell->head_dim;
}

static fa3_forward_args cell_args(const struct bench_cell *cell) {
  const int64_t batch = cell->batch;
  const int64_t seqlen = cell->seqlen;
  return (fa3_forward_args){
      .struct_size = sizeof(fa3_forward_args),
      .device = cell->device,
      .query = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads, cell->head_dim),
      .key = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads_k, cell->head_dim),
      .value = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads_k, cell->head_dim),
      .output = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads, cell->head_dim),
      .flags = cell->causal ? FA3_CAUSAL : 0,
      .num_threads = cell->num_threads};
}

fa3_status bench_supported(const struct bench_cell *cell) {
  const fa3_forward_args args = cell_args(cell);
  size_t bytes;
  return fa3_forward_workspace(&args, &bytes);
}

int bench_check_size(const struct bench_cell *cell) {
  const int64_t extents[] = {cell->batch, cell->seqlen, cell->heads, cell->head_dim};
  size_t size = fa3_dtype_size(cell->dtype);
  for (int i = 0; i < 4; i++) {
    if (__builtin_mul_overflow(size, (size_t)extents[i], &size) || size > PTRDIFF_MAX)
      return fail(EXIT_USAGE, "a tensor of this shape is too large");
  }
  return 0;
}

static int64_t element_count(const fa3_tensor *tensor) {
  return tensor->shape[0] * tensor->strides[0];
}

static int allocate(fa3_tensor *tensor) {
  size_t size = (size_t)element_count(tensor) * fa3_dtype_size(tensor->dtype);
  tensor->data = aligned_alloc(64, (size + 63) / 64 * 64);
  return tensor->data ? 0 : fail(EXIT_FAILED, "out of memory: a tensor needs %zu bytes", size);
}

/* Random numbers, which recur after a prime number of them: more would only take time. */
static int allocate_random(fa3_tensor *tensor, uint64_t *state) {
  const int64_t period = 1000003;
  const size_t size = fa3_dtype_size(tensor->dtype);
  TRY(allocate(tensor));
  const int64_t count = element_count(tensor);
  for (int64_t i = 0; i < count && i < period; i++) {
    float value = random_normal(state);
    if (tensor->dtype == FA3_FLOAT32)
      ((float *)tensor->data)[i] = value;
    else
      ((uint16_t *)tensor->data)[i] =
          tensor->dtype == FA3_FLOAT16 ? half_from_float(value) : bfloat_from_float(value);
  }
  for (int64_t i = period; i < count; i += period)
    memcpy((char *)tensor->data + (size_t)i * size, tensor->data,
           (size_t)(count - i < period ? count - i : period) * size);
  return 0;
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

/* What is timed. */
struct run {
  fa3_forward_args *args;
  int64_t calls;
};

static int queue(void *context) {
  const struct run *run = context;
  for (int64_t i = 0; i < run->calls; i++) TRY(library_forward(run->args));
  return 0;
}

/* Seconds of one call. */
static int time_run(struct run *run, double *seconds) {
  if (run->args->device.type == FA3_CUDA) {
    TRY(cuda_time(queue, run, seconds));
  } else {
    double start = seconds_now();
    TRY(queue(run));
    *seconds = seconds_now() - start;
  }
  *seconds /= (double)run->calls;
  return 0;
}

static int choose_calls(struct run *run) {
  double seconds;
  run->calls = 1;
  if (run->args->device.type == FA3_CPU) return 0;
  TRY(time_run(run, &seconds));
  double calls = gpu_run_seconds / seconds;
  run->calls = calls < 1 ? 1 : calls < MAX_CALLS ? (int64_t)calls : MAX_CALLS;
  return 0;
}

/* `host` has its tensors in host memory, `args` in the device's. */
static int measure(const struct bench_cell *cell, const fa3_forward_args *host,
                   fa3_forward_args *args, const struct upload *upload, int64_t repeat,
                   struct progress *progress, double *seconds, struct bench_times *times) {
  struct run run = {.args = args};
  TRY(library_forward(args));
  if (cell->device.type == FA3_CUDA) TRY(upload_fetch(upload));
  progress_add(progress, bench_flops(cell));
  TRY(check(host));
  TRY(choose_calls(&run));
  for (int64_t i = 0; i < repeat; i++) {
    TRY(time_run(&run, &seconds[i]));
    progress_add(progress, bench_flops(cell));
  }
  qsort(seconds, (size_t)repeat, sizeof *seconds, by_value);
  *times = (struct bench_times){.calls = run.calls,
                                .min = seconds[0],
                                .lower = quantile(seconds, repeat, 0.25),
                                .median = quantile(seconds, repeat, 0.5),
                                .upper = quantile(seconds, repeat, 0.75),
                                .max = seconds[repeat - 1]};
  return 0;
}

static int make_tensors(fa3_forward_args *args) {
  uint64_t state = 1;
  TRY(allocate_random(&args->query, &state));
  TRY(allocate_random(&args->key, &state));
  TRY(allocate_random(&args->value, &state));
  return allocate(&args->output);
}

int bench_run(const struct bench_cell *cell, int64_t repeat, struct progress *progress,
              struct bench_times *times) {
  fa3_forward_args host = cell_args(cell);
  struct upload upload = {0};
  double *seconds = malloc((size_t)repeat * sizeof *seconds);
  if (!seconds) return fail(EXIT_FAILED, "out of memory");
  int code = make_tensors(&host);
  fa3_forward_args args = host;
  if (!code && cell->device.type == FA3_CUDA) code = upload_forward(&host, &args, &upload);
  if (!code) code = measure(cell, &host, &args, &upload, repeat, progress, seconds, times);
  library_free_workspace(args.device, args.workspace);
  upload_free(&upload);
  free(seconds);
  free(host.query.data);
  free(host.key.data);
  free(host.value.data);
  free(host.output.data);
  return code;
}
