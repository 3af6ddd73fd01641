/* What random trials are too small for: the error on the FlashAttention-3 paper's inputs with
 * outliers, and tensors of more than 2^31 elements. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "fa3.h"
#include "gpu.h"
#include "half.h"
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

static struct errors outlier_errors(fa3_dtype dtype, int head_dim) {
  size_t count = (size_t)SEQLEN * HEADS * (size_t)head_dim, bytes = 2 * count;
  struct gpu_arena arena = gpu_arena_new(4 * bytes);
  uint16_t *host[4];
  double *exact[3];
  gpu_pointer device[4];
#pragma omp parallel for
  for (int i = 0; i < 4; i++) {
    host[i] = malloc(bytes);
    if (i == 3) continue;
    exact[i] = malloc(count * sizeof(double));
    fill_with_outliers(exact[i], host[i], count, dtype, (uint64_t)i + (uint64_t)head_dim);
  }
  for (int i = 0; i < 4; i++) {
    device[i] = gpu_arena_take(&arena, bytes);
    if (i < 3) GPU(cuMemcpyHtoDAsync, device[i], host[i], bytes, NULL);
  }
  fa3_forward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_dense((void *)device[i], dtype, 1, SEQLEN, HEADS, head_dim);
  if (fa3_forward(&args)) fail_msg("fa3_forward: %s", fa3_last_error());
  GPU(cuMemcpyDtoHAsync, host[3], device[3], bytes, NULL);
  GPU(cuCtxSynchronize, );

  double ours = 0, plain = 0;
  int64_t compared = 0, stride = (int64_t)HEADS * head_dim;
#pragma omp parallel for collapse(2) reduction(+ : ours, plain, compared)
  for (int head = 0; head < HEADS; head++)
    for (int row = 0; row < SEQLEN; row += ROW_STEP) {
      double expected[256], rounded[256];
      int64_t column = (int64_t)head * head_dim;
      int64_t at = row * stride + column;
      attend(exact[0] + at, exact[1] + column, exact[2] + column, SEQLEN, stride, head_dim,
             expected);
      attend_rounded(dtype, host[0] + at, host[1] + column, host[2] + column, stride, head_dim,
                     rounded);
      for (int d = 0; d < head_dim; d++) {
        ours += pow(from_bits(dtype, host[3][at + d]) - expected[d], 2);
        plain += pow(rounded[d] - expected[d], 2);
      }
      compared += head_dim;
    }
  for (int i = 0; i < 4; i++) free(host[i]);
  for (int i = 0; i < 3; i++) free(exact[i]);
  gpu_arena_free(&arena);
  return (struct errors){sqrt(ours / (double)compared), sqrt(plain / (double)compared)};
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

static void load_row(const uint16_t *from, int head_dim, double *to) {
  for (int d = 0; d < head_dim; d++) to[d] = from_bits(FA3_FLOAT16, from[d]);
}

/* Tensors of 2.3e9 elements, so that offsets pass 2^31; a causal window keeps the work small. */
static void test_past_32_bits(void **state) {
  (void)state;
  enum { BATCH = 2, ROWS = 70001, MANY_HEADS = 128, DIM = 128, WINDOW = 150, CHUNK_ROWS = 1999 };
  const int64_t stride = (int64_t)MANY_HEADS * DIM;
  const size_t rows = (size_t)BATCH * ROWS, row_bytes = 2 * (size_t)stride;
  gpu_pointer device[4];
  uint16_t *chunk[3];
  for (int i = 0; i < 4; i++) GPU(cuMemAlloc, &device[i], rows * row_bytes);
#pragma omp parallel for
  for (int i = 0; i < 3; i++) {
    chunk[i] = malloc(CHUNK_ROWS * row_bytes);
    struct rng rng = rng_for((uint64_t)i);
    for (size_t e = 0; e < CHUNK_ROWS * (size_t)stride; e++)
      chunk[i][e] = (uint16_t)(0x3c00 + (rng_bits(&rng) & 0x83ff)); /* 1 to 2, and -1 to -2 */
  }
  /* Rows repeat every CHUNK_ROWS, which divides no power of two. */
  for (int i = 0; i < 3; i++) {
    GPU(cuMemcpyHtoDAsync, device[i], chunk[i], CHUNK_ROWS * row_bytes, NULL);
    for (size_t done = CHUNK_ROWS; done < rows; done *= 2)
      GPU(cuMemcpyDtoDAsync, device[i] + done * row_bytes, device[i],
          (done < rows - done ? done : rows - done) * row_bytes, NULL);
  }
  GPU(cuMemsetD8Async, device[3], 0xff, rows * row_bytes, NULL);
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = {FA3_CUDA, 0},
                           .flags = FA3_WINDOW,
                           .window_left = WINDOW,
                           .window_right = 0};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_dense((void *)device[i], FA3_FLOAT16, BATCH, ROWS, MANY_HEADS, DIM);
  gpu_pointer workspace;
  GPU(cuMemAlloc, &workspace, 4096);
  args.workspace = (void *)workspace;
  args.workspace_size = 4096;
  if (fa3_forward(&args)) fail_msg("fa3_forward: %s", fa3_last_error());
  uint16_t *output = malloc(row_bytes);
  struct rng rng = rng_for(7);
  for (int n = 0; n < 40; n++) {
    int64_t batch = rng_between(&rng, 0, BATCH - 1);
    int64_t row = n == 0 ? ROWS - 1 : n == 1 ? 0 : rng_between(&rng, 0, ROWS - 1);
    int64_t at = batch * ROWS + row, head = rng_between(&rng, 0, MANY_HEADS - 1);
    GPU(cuMemcpyDtoHAsync, output, device[3] + (size_t)at * row_bytes, row_bytes, NULL);
    GPU(cuCtxSynchronize, );
    int64_t keys = row + 1 < WINDOW + 1 ? row + 1 : WINDOW + 1;
    static double query[DIM], key[(WINDOW + 1) * DIM], value[(WINDOW + 1) * DIM], expected[DIM];
    load_row(chunk[0] + at % CHUNK_ROWS * stride + head * DIM, DIM, query);
    for (int64_t j = 0; j < keys; j++) {
      int64_t source = (at - keys + 1 + j) % CHUNK_ROWS * stride + head * DIM;
      load_row(chunk[1] + source, DIM, key + j * DIM);
      load_row(chunk[2] + source, DIM, value + j * DIM);
    }
    attend(query, key, value, keys, DIM, DIM, expected);
    /* Probabilities and outputs of up to 2 in size, each rounded to 11 bits. */
    for (int d = 0; d < DIM; d++) {
      double got = from_bits(FA3_FLOAT16, output[head * DIM + d]);
      if (!(fabs(got - expected[d]) <= 4 * 4.9e-4))
        fail_msg("batch %" PRId64 ", row %" PRId64 ", head %" PRId64 ", %d: %g, expected %g", batch,
                 row, head, d, got, expected[d]);
    }
  }
  free(output);
  for (int i = 0; i < 3; i++) free(chunk[i]);
  for (int i = 0; i < 4; i++) GPU(cuMemFree, device[i]);
  GPU(cuMemFree, workspace);
}

int main(void) {
  rng_run_seed();
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_outliers),
      cmocka_unit_test(test_past_32_bits),
  };
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %zu tests\n", sizeof tests / sizeof *tests);
  return result;
}
