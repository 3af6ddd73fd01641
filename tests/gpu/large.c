/* What random trials are too small for: the error on the FlashAttention-3 paper's inputs with
 * outliers, and tensors of more than 2^31 elements. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "fa3.h"
#include "float8.h"
#include "gpu.h"
#include "half.h"
#include "parallel.h"
#include "reference.h"
#include "rng.h"
#include "test.h"

static double from_bits(fa3_dtype dtype, uint16_t bits) {
  return (double)(dtype == FA3_FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits));
}

static uint16_t to_bits(fa3_dtype dtype, double value) {
  return dtype == FA3_FLOAT16 ? half_from_float((float)value) : bfloat_from_float((float)value);
}

/* One query against `keys` keys, in float64; rows of keys and values are `stride` elements apart.
 */
static void attend(const double *query, const double *key, const double *value, int64_t keys,
                   int64_t stride, int head_dim, double *output) {
  double *scores = malloc((size_t)keys * sizeof *scores);
  double top = -INFINITY, sum = 0;
  assert_non_null(scores);
  for (int64_t j = 0; j < keys; j++) {
    double score = 0;
    for (int d = 0; d < head_dim; d++) score += query[d] * key[j * stride + d];
    scores[j] = score / sqrt(head_dim);
    if (scores[j] > top) top = scores[j];
  }
  for (int d = 0; d < head_dim; d++) output[d] = 0;
  for (int64_t j = 0; j < keys; j++) {
    double probability = exp(scores[j] - top);
    sum += probability;
    for (int d = 0; d < head_dim; d++) output[d] += probability * value[j * stride + d];
  }
  for (int d = 0; d < head_dim; d++) output[d] /= sum;
  free(scores);
}

/* N(0,1) + N(0,100) * Bernoulli(0.001): arXiv 2407.08608, section 4.3. */
static void fill_with_outliers(double *exact, uint16_t *rounded, size_t count, fa3_dtype dtype,
                               uint64_t number) {
  struct rng rng = rng_for(number);
  for (size_t i = 0; i < count; i++) {
    exact[i] = rng_normal(&rng);
    if (rng_chance(&rng, 0.001)) exact[i] += 10 * rng_normal(&rng);
    rounded[i] = to_bits(dtype, exact[i]);
  }
}

enum { SEQLEN = 4096, HEADS = 16, ROW_STEP = 37 };

/* Root mean square errors against attention of the inputs as they were before they were rounded to
 * 16 bits: the kernel's, and those of the algorithm with nothing but the roundings that any 16-bit
 * kernel makes (inputs, probabilities, output). */
struct errors {
  double ours;
  double plain;
};

/* The row as it is with rounded probabilities and a rounded output. */
static void attend_rounded(fa3_dtype dtype, const uint16_t *query, const uint16_t *key,
                           const uint16_t *value, int64_t stride, int head_dim, double *output) {
  static _Thread_local double scores[SEQLEN];
  double top = -INFINITY, sum = 0;
  for (int64_t j = 0; j < SEQLEN; j++) {
    double score = 0;
    for (int d = 0; d < head_dim; d++)
      score += from_bits(dtype, query[d]) * from_bits(dtype, key[j * stride + d]);
    scores[j] = score / sqrt(head_dim);
    if (scores[j] > top) top = scores[j];
  }
  for (int d = 0; d < head_dim; d++) output[d] = 0;
  for (int64_t j = 0; j < SEQLEN; j++) {
    double weight = exp(scores[j] - top);
    sum += weight;
    weight = from_bits(dtype, to_bits(dtype, weight));
    for (int d = 0; d < head_dim; d++)
      output[d] += weight * from_bits(dtype, value[j * stride + d]);
  }
  for (int d = 0; d < head_dim; d++) output[d] = from_bits(dtype, to_bits(dtype, output[d] / sum));
}

struct outliers {
  fa3_dtype dtype;
  int head_dim;
  uint16_t *host[4];
  double *exact[3];
  double ours[HEADS], plain[HEADS]; /* sums of squares */
};

static void fill_input(void *argument, int64_t i) {
  struct outliers *c = argument;
  const size_t count = (size_t)SEQLEN * HEADS * (size_t)c->head_dim;
  c->exact[i] = malloc(count * sizeof(double));
  fill_with_outliers(c->exact[i], c->host[i], count, c->dtype, (uint64_t)i + (uint64_t)c->head_dim);
}

static void compare_head(void *argument, int64_t head) {
  struct outliers *c = argument;
  const int64_t stride = (int64_t)HEADS * c->head_dim, column = head * c->head_dim;
  double expected[256], rounded[256];
  for (int64_t row = 0; row < SEQLEN; row += ROW_STEP) {
    const int64_t at = row * stride + column;
    attend(c->exact[0] + at, c->exact[1] + column, c->exact[2] + column, SEQLEN, stride,
           c->head_dim, expected);
    attend_rounded(c->dtype, c->host[0] + at, c->host[1] + column, c->host[2] + column, stride,
                   c->head_dim, rounded);
    for (int d = 0; d < c->head_dim; d++) {
      c->ours[head] += pow(from_bits(c->dtype, c->host[3][at + d]) - expected[d], 2);
      c->plain[head] += pow(rounded[d] - expected[d], 2);
    }
  }
}

static struct errors outlier_errors(fa3_dtype dtype, int head_dim) {
  size_t count = (size_t)SEQLEN * HEADS * (size_t)head_dim, bytes = 2 * count;
  struct gpu_arena arena = gpu_arena_new(4 * bytes + (64 << 20));
  struct outliers c = {.dtype = dtype, .head_dim = head_dim};
  gpu_pointer device[4];
  for (int i = 0; i < 4; i++) c.host[i] = malloc(bytes);
  reference_for(3, 3, fill_input, &c);
  for (int i = 0; i < 4; i++) {
    device[i] = gpu_arena_take(&arena, bytes);
    if (i < 3) GPU(cuMemcpyHtoDAsync, device[i], c.host[i], bytes, NULL);
  }
  fa3_forward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_dense((void *)device[i], dtype, 1, SEQLEN, HEADS, head_dim);
  if (fa3_forward_workspace(&args, &args.workspace_size)) fail_msg("%s", fa3_last_error());
  args.workspace = (void *)gpu_arena_take(&arena, args.workspace_size);
  if (fa3_forward(&args)) fail_msg("fa3_forward: %s", fa3_last_error());
  GPU(cuMemcpyDtoHAsync, c.host[3], device[3], bytes, NULL);
  GPU(cuCtxSynchronize, );

  double ours = 0, plain = 0;
  reference_for(reference_threads(), HEADS, compare_head, &c);
  for (int head = 0; head < HEADS; head++) {
    ours += c.ours[head];
    plain += c.plain[head];
  }
  const int64_t rows = (SEQLEN + ROW_STEP - 1) / ROW_STEP;
  const double compared = (double)(rows * HEADS * head_dim);
  for (int i = 0; i < 4; i++) free(c.host[i]);
  for (int i = 0; i < 3; i++) free(c.exact[i]);
  gpu_arena_free(&arena);
  return (struct errors){sqrt(ours / compared), sqrt(plain / compared)};
}

/* Beside them, what FlashAttention-2 or 3 and cuDNN had on inputs drawn in the same way: the few
 * outliers make the figure vary by tens of per cent from draw to draw. */
static void test_outliers(void **state) {
  (void)state;
  static const struct {
    fa3_dtype dtype;
    int head_dim;
    double theirs;
  } cases[] = {{FA3_FLOAT16, 64, 2.5e-4},   {FA3_FLOAT16, 128, 1.45e-4},
               {FA3_FLOAT16, 256, 1.5e-4},  {FA3_BFLOAT16, 64, 1.9e-3},
               {FA3_BFLOAT16, 128, 1.2e-3}, {FA3_BFLOAT16, 256, 1.16e-3}};
  bool good = true;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct errors errors = outlier_errors(cases[i].dtype, cases[i].head_dim);
    printf("outliers: %s, head dim %d: error %.3g, by rounding alone %.3g; theirs %.3g\n",
           cases[i].dtype == FA3_FLOAT16 ? "float16" : "bfloat16", cases[i].head_dim, errors.ours,
           errors.plain, cases[i].theirs);
    if (!(errors.ours <= 1.02 * errors.plain)) good = false;
  }
  assert_true(good);
}

/* Tensors of 2.3e9 elements, so that offsets pass 2^31; a causal window keeps the work small. */
enum {
  BATCH = 2,
  ROWS = 70001,
  MANY_HEADS = 128,
  DIM = 128,
  STRIDE = MANY_HEADS * DIM,
  WINDOW = 150,
  CHUNK_ROWS = 1999,
  SLICE = 2 * WINDOW + 1
};
static const size_t far_rows = (size_t)BATCH * ROWS, row_bytes = 2 * (size_t)STRIDE;

/* Rows repeat every CHUNK_ROWS, which divides no power of two. */
static uint16_t *make_chunk(uint64_t number) {
  uint16_t *chunk = malloc(CHUNK_ROWS * row_bytes);
  struct rng rng = rng_for(number);
  for (size_t e = 0; chunk && e < CHUNK_ROWS * (size_t)STRIDE; e++)
    chunk[e] = (uint16_t)(0x3c00 + (rng_bits(&rng) & 0x83ff)); /* 1 to 2, and -1 to -2 */
  return chunk;
}

static void repeat_chunk(gpu_pointer tensor, const uint16_t *chunk) {
  GPU(cuMemcpyHtoDAsync, tensor, chunk, CHUNK_ROWS * row_bytes, NULL);
  for (size_t done = CHUNK_ROWS; done < far_rows; done *= 2)
    GPU(cuMemcpyDtoDAsync, tensor + done * row_bytes, tensor,
        (done < far_rows - done ? done : far_rows - done) * row_bytes, NULL);
}

/* The rows around one that its outputs and gradients depend on, of one head, on the host. */
struct slice {
  int64_t first; /* in the whole */
  int64_t count;
  uint16_t rows[8][SLICE * DIM]; /* query, key, value, output, grad_output and three gradients */
  float lse[SLICE];
};

enum { OUTPUT = 3, GRAD_OUTPUT, FAR_TENSORS = 8 };

static void fetch(const gpu_pointer device[FAR_TENSORS], gpu_pointer lse, int64_t batch,
                  int64_t head, int64_t row, uint16_t *buffer, struct slice *slice) {
  slice->first = row < WINDOW ? 0 : row - WINDOW;
  slice->count = (row + WINDOW < ROWS ? row + WINDOW + 1 : ROWS) - slice->first;
  const size_t start = (size_t)(batch * ROWS + slice->first);
  for (int i = 0; i < FAR_TENSORS; i++) {
    GPU(cuMemcpyDtoHAsync, buffer, device[i] + start * row_bytes, (size_t)slice->count * row_bytes,
        NULL);
    GPU(cuCtxSynchronize, );
    for (int64_t j = 0; j < slice->count; j++)
      memcpy(slice->rows[i] + j * DIM, buffer + j * STRIDE + head * DIM, 2 * (size_t)DIM);
  }
  const size_t place = (size_t)((batch * MANY_HEADS + head) * ROWS + slice->first);
  GPU(cuMemcpyDtoHAsync, slice->lse, lse + place * sizeof(float),
      (size_t)slice->count * sizeof(float), NULL);
  GPU(cuCtxSynchronize, );
}

/* Row `row` of what was fetched against the reference, which sees nothing but the slice. Its mask
 * is the whole's: query i is at key i in both. */
static void check_slice(struct slice *slice, int64_t row) {
  fa3_backward_args args = {.struct_size = sizeof args,
                            .flags = FA3_WINDOW,
                            .window_left = WINDOW,
                            .window_right = 0,
                            .lse = fa3_lse(slice->lse, 1, 1, slice->count)};
  fa3_tensor *tensors[FAR_TENSORS] = {&args.query,    &args.key,         &args.value,
                                      &args.output,   &args.grad_output, &args.grad_query,
                                      &args.grad_key, &args.grad_value};
  for (int i = 0; i < FAR_TENSORS; i++)
    *tensors[i] = fa3_dense(slice->rows[i], FA3_FLOAT16, 1, slice->count, 1, DIM);
  const fa3_forward_args forward = reference_forward_args(&args);
  struct comparison at = {.row = row - slice->first};
  compare_row(&at, &forward);
  compare_grad_query(&at, &args, NULL);
  compare_grad_key_value(&at, &args, NULL, NULL);
}

static gpu_pointer run_far_calls(const gpu_pointer device[FAR_TENSORS], gpu_pointer lse) {
  fa3_backward_args args = {.struct_size = sizeof args,
                            .device = {FA3_CUDA, 0},
                            .flags = FA3_WINDOW,
                            .window_left = WINDOW,
                            .window_right = 0,
                            .lse = fa3_lse((void *)lse, BATCH, MANY_HEADS, ROWS)};
  fa3_tensor *tensors[FAR_TENSORS] = {&args.query,    &args.key,         &args.value,
                                      &args.output,   &args.grad_output, &args.grad_query,
                                      &args.grad_key, &args.grad_value};
  for (int i = 0; i < FAR_TENSORS; i++)
    *tensors[i] = fa3_dense((void *)device[i], FA3_FLOAT16, BATCH, ROWS, MANY_HEADS, DIM);
  fa3_forward_args forward = reference_forward_args(&args);
  gpu_pointer workspace;
  forward.device = args.device;
  if (fa3_backward_workspace(&args, &args.workspace_size) ||
      fa3_forward_workspace(&forward, &forward.workspace_size))
    fail_msg("the workspace: %s", fa3_last_error());
  if (args.workspace_size < forward.workspace_size) args.workspace_size = forward.workspace_size;
  GPU(cuMemAlloc, &workspace, args.workspace_size + 1);
  args.workspace = forward.workspace = (void *)workspace;
  if (fa3_forward(&forward)) fail_msg("fa3_forward: %s", fa3_last_error());
  if (fa3_backward(&args)) fail_msg("fa3_backward: %s", fa3_last_error());
  return workspace;
}

static void make_input_chunk(void *chunks, int64_t i) {
  if (i != OUTPUT) ((uint16_t **)chunks)[i] = make_chunk((uint64_t)i);
}

static void test_past_32_bits(void **state) {
  (void)state;
  gpu_pointer device[FAR_TENSORS], lse;
  uint16_t *chunk[FAR_TENSORS] = {0};
  static struct slice slice;
  for (int i = 0; i < FAR_TENSORS; i++) GPU(cuMemAlloc, &device[i], far_rows * row_bytes);
  GPU(cuMemAlloc, &lse, far_rows * MANY_HEADS * sizeof(float));
  reference_for(reference_threads(), GRAD_OUTPUT + 1, make_input_chunk, chunk);
  for (int i = 0; i < FAR_TENSORS; i++) {
    if (chunk[i])
      repeat_chunk(device[i], chunk[i]);
    else
      GPU(cuMemsetD8Async, device[i], 0xff, far_rows * row_bytes, NULL);
  }
  gpu_pointer workspace = run_far_calls(device, lse);
  uint16_t *buffer = malloc(SLICE * row_bytes);
  assert_non_null(buffer);
  struct rng rng = rng_for(7);
  for (int n = 0; n < 40; n++) {
    int64_t batch = rng_between(&rng, 0, BATCH - 1), head = rng_between(&rng, 0, MANY_HEADS - 1);
    int64_t row = n == 0 ? ROWS - 1 : n == 1 ? 0 : rng_between(&rng, 0, ROWS - 1);
    fetch(device, lse, batch, head, row, buffer, &slice);
    check_slice(&slice, row);
  }
  free(buffer);
  for (int i = 0; i < FAR_TENSORS; i++) {
    free(chunk[i]);
    GPU(cuMemFree, device[i]);
  }
  GPU(cuMemFree, lse);
  GPU(cuMemFree, workspace);
}

enum {
  PART_KEYS = 600000, /* of which the workspace has room for one head, unpacked */
  PART_HEADS = 2,
  PART_GROUP = 16,
  PART_QUERIES = 512,
  PART_DIM = 128
};

/* Memory on the GPU, filled with the same bytes over and over. */
static gpu_pointer filled(struct gpu_arena *arena, size_t size, const void *bytes, size_t count) {
  const gpu_pointer to = gpu_arena_take(arena, size);
  for (size_t at = 0; at < size; at += count)
    GPU(cuMemcpyHtoDAsync, to + at, bytes, at + count < size ? count : size - at, NULL);
  return to;
}

/* A tensor's heads from `first` on. */
static fa3_tensor heads_of(fa3_tensor tensor, int64_t first, int64_t heads) {
  const int64_t bytes = (int64_t)fa3_dtype_size(tensor.dtype) * tensor.strides[2] * first;
  tensor.data = (char *)tensor.data + bytes;
  tensor.shape[2] = heads;
  return tensor;
}

static void attend_on_gpu(fa3_forward_args *args, struct gpu_arena *arena) {
  const size_t before = arena->used;
  if (fa3_forward_workspace(args, &args->workspace_size)) fail_msg("%s", fa3_last_error());
  args->workspace = (void *)gpu_arena_take(arena, args->workspace_size);
  if (fa3_forward(args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  arena->used = before;
}

/* Codes of so many keys that they are unpacked a head after the other: the same bits as of calls
 * with one of them each. */
static void test_parts_of_heads(void **state) {
  (void)state;
  enum { COUNT = 1 << 20 };
  const size_t elements_k = (size_t)PART_KEYS * PART_HEADS * PART_DIM;
  const size_t elements_q = (size_t)PART_QUERIES * PART_HEADS * PART_GROUP * PART_DIM;
  struct gpu_arena arena = gpu_arena_new(2 * elements_k + 6 * elements_q + ((size_t)800 << 20));
  uint8_t *codes = malloc(COUNT);
  uint16_t *query = malloc(2 * elements_q),
           *output[] = {malloc(2 * elements_q), malloc(2 * elements_q)};
  struct rng rng = rng_for(3);
  assert_true(codes && query && output[0] && output[1]);
  for (int i = 0; i < COUNT; i++) codes[i] = e4m3_from_float((float)rng_normal(&rng));
  for (size_t i = 0; i < elements_q; i++) query[i] = bfloat_from_float((float)rng_normal(&rng));
  fa3_forward_args args = {
      .struct_size = sizeof args, .device = {FA3_CUDA, 0}, .flags = FA3_CAUSAL};
  args.key = fa3_dense((void *)filled(&arena, elements_k, codes, COUNT), FA3_FLOAT8_E4M3, 1,
                       PART_KEYS, PART_HEADS, PART_DIM);
  args.value = args.key;
  args.value.data = (void *)filled(&arena, elements_k, codes + 12345, COUNT - 12345);
  args.query = fa3_dense((void *)filled(&arena, 2 * elements_q, query, 2 * elements_q),
                         FA3_BFLOAT16, 1, PART_QUERIES, (int64_t)PART_HEADS * PART_GROUP, PART_DIM);
  for (int i = 0; i < 2; i++) {
    args.output = args.query;
    args.output.data = (void *)filled(&arena, 2 * elements_q, query, 2 * elements_q);
    const fa3_forward_args all = args;
    for (int64_t head = 0; head < (i ? PART_HEADS : 1); head++) {
      args = all;
      if (i) {
        args.key = heads_of(all.key, head, 1);
        args.value = heads_of(all.value, head, 1);
        args.query = heads_of(all.query, head * PART_GROUP, PART_GROUP);
        args.output = heads_of(all.output, head * PART_GROUP, PART_GROUP);
      }
      attend_on_gpu(&args, &arena);
    }
    args = all;
    GPU(cuMemcpyDtoHAsync, output[i], (gpu_pointer)all.output.data, 2 * elements_q, NULL);
    GPU(cuCtxSynchronize, );
  }
  for (size_t i = 0; i < elements_q; i++)
    if (output[0][i] != output[1][i] || !(fabs((double)float_from_bfloat(output[0][i])) < 1))
      fail_msg("output %zu is %g: expected %g", i, (double)float_from_bfloat(output[0][i]),
               (double)float_from_bfloat(output[1][i]));
  free(codes);
  free(query);
  free(output[0]);
  free(output[1]);
  gpu_arena_free(&arena);
}

int main(void) {
  rng_run_seed();
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_outliers),
      cmocka_unit_test(test_past_32_bits),
      cmocka_unit_test(test_parts_of_heads),
  };
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %zu tests\n", sizeof tests / sizeof *tests);
  return result;
}
