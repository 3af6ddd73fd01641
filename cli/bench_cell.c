#include "bench_cell.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "bench_read.h"
#include "comparison.h"
#include "cuda.h"
#include "dtype.h"
#include "failure.h"
#include "float8.h"
#include "half.h"
#include "library.h"
#include "random.h"
#include "upload.h"

enum { ROWS_CHECKED = 4 };

/* On a GPU a run is as many calls as take so long: the events' resolution and the gap between two
 * runs then do not count. */
static const double gpu_run_seconds = 5e-3;

/* On the CPU with a cache: long beside a thread's start. */
static const double cache_run_seconds = 2e-3;
enum { MAX_CALLS = 1000 };

double bench_flops(const struct bench_cell *cell) {
  const double keys = (double)(cell->keys ? cell->keys : cell->seqlen);
  double pairs = (double)cell->seqlen * keys * (cell->causal ? 0.5 : 1);
  return (cell->backward ? 10 : 4) * (double)cell->batch * (double)cell->heads * pairs *
         (double)cell->head_dim;
}

double bench_cache_bytes(const struct bench_cell *cell) {
  return 2 * (double)cell->batch * (double)cell->keys * (double)cell->heads_k *
         (double)cell->head_dim * (double)fa3_dtype_size(cell->cache_dtype);
}

static int64_t pages_of_sequence(const struct bench_cell *cell) {
  return (cell->keys + cell->page_size - 1) / cell->page_size;
}

/* What reads a cache in place of keys as many as queries. */
static void use_cache(const struct bench_cell *cell, fa3_forward_args *args) {
  const int64_t pages = cell->page_size ? pages_of_sequence(cell) : 1;
  args->key = args->value =
      fa3_dense(NULL, cell->cache_dtype, cell->batch * pages,
                cell->page_size ? cell->page_size : cell->keys, cell->heads_k, cell->head_dim);
  if (!cell->page_size) return;
  args->page_table = (fa3_tensor){
      .dtype = FA3_INT32, .rank = 2, .shape = {cell->batch, pages}, .strides = {pages, 1}};
  args->seqused_k = fa3_vector(NULL, FA3_INT32, cell->batch);
}

/* What a cell computes, forward and, if it is wanted, backward: the tensors' shapes. */
struct calls {
  struct call forward;
  struct call backward;
};

static struct calls cell_calls(const struct bench_cell *cell) {
  const int64_t batch = cell->batch, seqlen = cell->seqlen;
  const uint32_t flags = cell->causal ? FA3_CAUSAL : 0;
  const fa3_tensor query = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads, cell->head_dim);
  const fa3_tensor key = fa3_dense(NULL, cell->dtype, batch, seqlen, cell->heads_k, cell->head_dim);
  const fa3_tensor lse = fa3_lse(NULL, batch, cell->heads, seqlen);
  struct calls calls = {.forward.phase = FA3_FORWARD, .backward.phase = FA3_BACKWARD};
  calls.forward.args.forward = (fa3_forward_args){.struct_size = sizeof(fa3_forward_args),
                                                  .query = query,
                                                  .key = key,
                                                  .value = key,
                                                  .output = query,
                                                  .flags = flags};
  if (cell->backward) calls.forward.args.forward.lse = lse;
  if (cell->keys) use_cache(cell, &calls.forward.args.forward);
  calls.backward.args.backward = (fa3_backward_args){.struct_size = sizeof(fa3_backward_args),
                                                     .query = query,
                                                     .key = key,
                                                     .value = key,
                                                     .output = query,
                                                     .lse = lse,
                                                     .grad_output = query,
                                                     .grad_query = query,
                                                     .grad_key = key,
                                                     .grad_value = key,
                                                     .flags = flags};
  if (cell->deterministic) calls.backward.args.backward.flags |= FA3_DETERMINISTIC;
  call_set_device(&calls.forward, cell->device, cell->num_threads);
  call_set_device(&calls.backward, cell->device, cell->num_threads);
  return calls;
}

fa3_status bench_supported(const struct bench_cell *cell) {
  const struct calls calls = cell_calls(cell);
  size_t bytes;
  fa3_status status = library_check(&calls.forward, &bytes);
  return status || !cell->backward ? status : library_check(&calls.backward, &bytes);
}

int bench_check_size(const struct bench_cell *cell) {
  const int64_t rows = cell->keys ? cell->keys + cell->page_size : cell->seqlen;
  const int64_t extents[] = {cell->batch, rows, cell->heads, cell->head_dim};
  size_t size = fa3_dtype_size(FA3_FLOAT32);
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
    else if (tensor->dtype == FA3_FLOAT8_E4M3)
      ((uint8_t *)tensor->data)[i] = e4m3_from_float(value);
    else
      ((uint16_t *)tensor->data)[i] =
          tensor->dtype == FA3_FLOAT16 ? half_from_float(value) : bfloat_from_float(value);
  }
  for (int64_t i = period; i < count; i += period)
    memcpy((char *)tensor->data + (size_t)i * size, tensor->data,
           (size_t)(count - i < period ? count - i : period) * size);
  return 0;
}

static int judge(const struct bench_cell *cell, const char *what,
                 const struct error_statistics *statistics) {
  if (!statistics->outside) return 0;
  return fail(EXIT_DIFFERS,
              "wrong %s for %s, seqlen %" PRId64 ", head_dim %" PRId64 ": %.9g, expected %.9g",
              what, dtype_name(cell->dtype), cell->seqlen, cell->head_dim, statistics->worst.value,
              statistics->worst.expected);
}

static int check(const struct bench_cell *cell, const struct calls *host) {
  struct comparison comparison = {
      .forward = &host->forward.args.forward,
      .backward = cell->backward ? &host->backward.args.backward : NULL};
  comparison_sample(&comparison, ROWS_CHECKED, 1, NULL);
  for (int i = 0; i < TENSORS; i++)
    TRY(judge(cell, tensor_rows[i].name, &comparison.statistics[i]));
  return 0;
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

/* What is timed: the call of a cell, in the device's memory. */
struct run {
  const struct bench_cell *cell;
  struct call on_device;
  int64_t calls;
};

static int queue(void *context) {
  struct run *run = context;
  for (int64_t i = 0; i < run->calls; i++) TRY(library_run(&run->on_device));
  return 0;
}

/* Seconds of one call. */
static int time_run(struct run *run, double *seconds) {
  if (run->cell->device.type == FA3_CUDA) {
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
  const bool cpu = run->cell->device.type == FA3_CPU;
  double seconds;
  if (cpu && !run->cell->keys) return 0;
  TRY(time_run(run, &seconds));
  double calls = (cpu ? cache_run_seconds : gpu_run_seconds) / seconds;
  run->calls = calls < 1 ? 1 : calls < MAX_CALLS ? (int64_t)calls : MAX_CALLS;
  return 0;
}

/* As often as the run has called, on as many threads. */
static int read_cache(const struct run *run, const fa3_forward_args *args, double *seconds) {
  fa3_device_info info = {.struct_size = sizeof info};
  const struct memory memory[] = {
      {args->key.data, (size_t)element_count(&args->key) * fa3_dtype_size(args->key.dtype)},
      {args->value.data, (size_t)element_count(&args->value) * fa3_dtype_size(args->value.dtype)}};
  (void)fa3_get_device_info(run->cell->device, &info);
  *seconds =
      bench_read(memory, run->calls, run->cell->num_threads ? run->cell->num_threads : info.units);
  return *seconds > 0 ? 0 : fail(EXIT_FAILED, "no threads to read the cache with");
}

/* `seconds` has room for three times of each run. */
static int measure(struct run *run, const struct calls *host, const struct upload *upload,
                   int64_t repeat, struct progress *progress, double *seconds,
                   struct bench_times *times) {
  const struct bench_cell *cell = run->cell;
  TRY(queue(run));
  if (cell->device.type == FA3_CUDA) TRY(upload_fetch(upload));
  progress_add(progress, bench_flops(cell));
  TRY(check(cell, host));
  TRY(choose_calls(run));
  double *const reads = cell->keys && cell->device.type == FA3_CPU ? seconds + repeat : NULL;
  double *const ratios = seconds + 2 * repeat;
  for (int64_t i = 0; i < repeat; i++) {
    TRY(time_run(run, &seconds[i]));
    if (reads) {
      TRY(read_cache(run, &host->forward.args.forward, &reads[i]));
      ratios[i] = reads[i] / seconds[i];
    }
    progress_add(progress, bench_flops(cell));
  }
  if (reads) {
    qsort(reads, (size_t)repeat, sizeof *reads, by_value);
    qsort(ratios, (size_t)repeat, sizeof *ratios, by_value);
  }
  qsort(seconds, (size_t)repeat, sizeof *seconds, by_value);
  *times = (struct bench_times){.calls = run->calls,
                                .min = seconds[0],
                                .lower = quantile(seconds, repeat, 0.25),
                                .median = quantile(seconds, repeat, 0.5),
                                .upper = quantile(seconds, repeat, 0.75),
                                .max = seconds[repeat - 1],
                                .read = reads ? quantile(reads, repeat, 0.5) : 0,
                                .read_ratio = reads ? quantile(ratios, repeat, 0.5) : 0};
  return 0;
}

/* All pages of all sequences in random order. */
static int make_pages(const struct bench_cell *cell, fa3_forward_args *args, uint64_t *state) {
  TRY(allocate(&args->page_table));
  TRY(allocate(&args->seqused_k));
  int32_t *pages = args->page_table.data, *used = args->seqused_k.data;
  const int64_t count = element_count(&args->page_table);
  for (int64_t i = 0; i < count; i++) {
    const int64_t other = (int64_t)(random_bits(state) % (uint64_t)(i + 1));
    pages[i] = pages[other];
    pages[other] = (int32_t)i;
  }
  for (int64_t b = 0; b < cell->batch; b++) used[b] = (int32_t)cell->keys;
  return 0;
}

/* For the backward pass with the output and the lse that it starts from. */
static int make_tensors(const struct bench_cell *cell, struct calls *host) {
  fa3_forward_args *forward = &host->forward.args.forward;
  fa3_backward_args *backward = &host->backward.args.backward;
  uint64_t state = 1;
  TRY(allocate_random(&forward->query, &state));
  TRY(allocate_random(&forward->key, &state));
  TRY(allocate_random(&forward->value, &state));
  TRY(allocate(&forward->output));
  if (cell->page_size) TRY(make_pages(cell, forward, &state));
  if (!cell->backward) return 0;
  TRY(allocate(&forward->lse));
  TRY(allocate_random(&backward->grad_output, &state));
  TRY(allocate(&backward->grad_query));
  TRY(allocate(&backward->grad_key));
  TRY(allocate(&backward->grad_value));
  backward->query = forward->query;
  backward->key = forward->key;
  backward->value = forward->value;
  backward->output = forward->output;
  backward->lse = forward->lse;
  return attention_run(&host->forward);
}

/* What the backward call shares with the forward call is that one's. */
static void free_tensors(const struct calls *host) {
  for (enum tensor i = 0; i < TENSORS; i++) {
    const struct argument *forward = find_argument(FA3_FORWARD, i);
    const struct argument *backward = find_argument(FA3_BACKWARD, i);
    if (forward)
      free(argument_in(&host->forward.args, forward)->data);
    else if (backward)
      free(argument_in(&host->backward.args, backward)->data);
  }
}

int bench_run(const struct bench_cell *cell, int64_t repeat, struct progress *progress,
              struct bench_times *times) {
  struct calls host = cell_calls(cell);
  struct upload upload = {0};
  double *seconds = malloc(3 * (size_t)repeat * sizeof *seconds);
  if (!seconds) return fail(EXIT_FAILED, "out of memory");
  int code = make_tensors(cell, &host);
  const struct call *timed = cell->backward ? &host.backward : &host.forward;
  struct run run = {.cell = cell, .on_device = *timed, .calls = 1};
  if (!code && cell->device.type == FA3_CUDA) code = upload_call(timed, &run.on_device, &upload);
  if (!code) code = measure(&run, &host, &upload, repeat, progress, seconds, times);
  library_free_workspace(&run.on_device);
  upload_free(&upload);
  free(seconds);
  free_tensors(&host);
  return code;
}
