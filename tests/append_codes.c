/* fa3_append into a cache of E4M3 codes: what is written against rows turned in double precision,
 * in every form of the scales, and attention to that cache against float64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "expect.h"
#include "fa3.h"
#include "float8.h"
#include "level.h"
#include "reference.h"
#include "rng.h"
#include "tensor.h"
#include "test.h"

enum {
  BATCH = 3,
  NEW = 37, /* rows of the longest sequence of the first call; the second adds one */
  HEADS_Q = 8,
  HEADS_K = 2,
  HEAD_DIM = 32,
  VALUE_DIM = 48,
  PAIRS = 10, /* that rotary embedding turns */
  PAGE_SIZE = 16,
  COLUMNS = 4,
  ROWS = PAGE_SIZE * COLUMNS,
  PAGES = BATCH * COLUMNS,
  BLOCK = 6, /* rows that share a scale: no divisor of a page */
  WIDEST = 48
};

enum form { NO_SCALE, ONE, HEADS, BLOCKS, ROW, FORMS };

/* A case, and what the cache should hold: the numbers before they become codes. */
struct cache {
  bool paged, turned;
  enum form form;
  fa3_dtype dtype;
  float fresh[2][BATCH * NEW * HEADS_K * WIDEST]; /* room for rows of any dtype */
  float cos[(NEW + 1) * PAIRS], sin[(NEW + 1) * PAIRS];
  int32_t page_table[PAGES], used_q[BATCH], used_k[BATCH];
  fa3_append_args args;
  uint8_t codes[2][BATCH * ROWS * HEADS_K * WIDEST];
  float scales[2][BATCH * ROWS * HEADS_K];
  double expected[2][BATCH][ROWS][HEADS_K][WIDEST];
};

static int64_t dim_of(int which) {
  return which ? VALUE_DIM : HEAD_DIM;
}

/* The shape of a cache's scales; entries and rows are a page's where there are pages. */
static fa3_tensor make_scale(struct cache *cache, int which) {
  const int64_t entries = cache->paged ? PAGES : BATCH, rows = cache->paged ? PAGE_SIZE : ROWS;
  const int64_t blocks = cache->form == ROW ? rows : (rows + BLOCK - 1) / BLOCK;
  fa3_tensor scale = {.data = cache->scales[which], .dtype = FA3_FLOAT32};
  if (cache->form == NO_SCALE) return (fa3_tensor){0};
  scale.rank = cache->form == ONE ? 1 : cache->form == HEADS ? 2 : 3;
  const int64_t shape[3] = {scale.rank == 1 ? 1 : entries, HEADS_K, blocks};
  for (int d = 0; d < scale.rank; d++) scale.shape[d] = shape[d];
  /* Heads are innermost, as a cache of (pages, page_size, heads) scales has them. */
  scale.strides[0] = scale.rank == 1 ? 1 : HEADS_K * (scale.rank == 2 ? 1 : blocks);
  if (scale.rank > 1) scale.strides[1] = 1;
  if (scale.rank > 2) scale.strides[2] = HEADS_K;
  return scale;
}

static int64_t rows_per_scale(const struct cache *cache) {
  return cache->form == ROW ? 1 : cache->form == BLOCKS ? BLOCK : 0;
}

/* Where row `r` of a sequence is: the page or batch entry, and the row in it. */
static int64_t place(const struct cache *cache, int b, int64_t r, int64_t *row) {
  *row = cache->paged ? r % PAGE_SIZE : r;
  return cache->paged ? cache->page_table[b * COLUMNS + (int)r / PAGE_SIZE] : b;
}

static float *scale_at(struct cache *cache, int which, int b, int64_t r, int64_t head) {
  static float one = 1;
  const fa3_tensor *scale = which ? &cache->args.value_scale : &cache->args.key_scale;
  int64_t row;
  const int64_t entry = place(cache, b, r, &row);
  if (!scale->data) return &one;
  if (scale->rank == 1) return cache->scales[which];
  const int64_t block = cache->form == ROW ? row : cache->form == BLOCKS ? row / BLOCK : 0;
  return cache->scales[which] + entry * scale->strides[0] + head * scale->strides[1] +
         block * scale->strides[2];
}

static void make(struct cache *cache, struct rng *rng) {
  fa3_append_args *args = &cache->args;
  memset(cache->codes, 0xff, sizeof cache->codes);
  memset(cache->scales, 0xff, sizeof cache->scales);
  memset(cache->used_k, 0, sizeof cache->used_k);
  for (int i = 0; i < (NEW + 1) * PAIRS; i++) {
    const double angle = 10 * rng_normal(rng);
    cache->cos[i] = (float)cos(angle);
    cache->sin[i] = (float)sin(angle);
  }
  rng_order(rng, cache->page_table, PAGES);
  *args = (fa3_append_args){.struct_size = sizeof *args, .num_threads = 2};
  const int64_t entries = cache->paged ? PAGES : BATCH, rows = cache->paged ? PAGE_SIZE : ROWS;
  args->key = fa3_dense(cache->codes[0], FA3_FLOAT8_E4M3, entries, rows, HEADS_K, HEAD_DIM);
  args->value = fa3_dense(cache->codes[1], FA3_FLOAT8_E4M3, entries, rows, HEADS_K, VALUE_DIM);
  args->seqused_q = fa3_vector(cache->used_q, FA3_INT32, BATCH);
  args->seqused_k = fa3_vector(cache->used_k, FA3_INT32, BATCH);
  if (cache->paged) args->page_table = make_matrix(cache->page_table, FA3_INT32, BATCH, COLUMNS);
  if (cache->turned) {
    args->rotary_cos = make_matrix(cache->cos, FA3_FLOAT32, NEW + 1, PAIRS);
    args->rotary_sin = make_matrix(cache->sin, FA3_FLOAT32, NEW + 1, PAIRS);
  }
  args->key_scale = make_scale(cache, 0);
  args->value_scale = make_scale(cache, 1);
  args->key_scale_rows = args->value_scale_rows = rows_per_scale(cache);
  for (int which = 0; which < 2; which++)
    for (int b = 0; b < BATCH && cache->form != ROW; b++)
      for (int64_t r = 0; r < ROWS; r++)
        for (int head = 0; head < HEADS_K; head++)
          *scale_at(cache, which, b, r, head) = cache->form == NO_SCALE ? 1 : 0.015625f;
}

/* Element d of a new row's head, turned if it is to be. */
static double turned(const struct cache *cache, const double *head, int64_t position, int64_t d) {
  if (!cache->turned || d >= 2 * (int64_t)PAIRS) return head[d];
  const int64_t pair = d % PAIRS;
  const double c = (double)cache->cos[position * PAIRS + pair];
  const double s = (double)cache->sin[position * PAIRS + pair];
  return d < PAIRS ? head[pair] * c - head[pair + PAIRS] * s
                   : head[pair] * s + head[pair + PAIRS] * c;
}

/* A call with so many rows of each sequence. */
static void append(struct cache *cache, const int32_t counts[BATCH], struct rng *rng) {
  fa3_append_args *args = &cache->args;
  args->new_key = fa3_dense(cache->fresh[0], cache->dtype, BATCH, NEW, HEADS_K, HEAD_DIM);
  args->new_value = fa3_dense(cache->fresh[1], cache->dtype, BATCH, NEW, HEADS_K, VALUE_DIM);
  memcpy(cache->used_q, counts, sizeof cache->used_q);
  for (int which = 0; which < 2; which++) {
    const fa3_tensor *fresh = which ? &args->new_value : &args->new_key;
    for (int b = 0; b < BATCH; b++)
      for (int64_t r = 0; r < counts[b]; r++)
        for (int head = 0; head < HEADS_K; head++) {
          /* A row of zeros, rows large and small, and numbers beyond the largest code. */
          const double size = r == 3 ? 0 : exp(2 * rng_normal(rng)) * (r == 7 ? 1e4 : 1);
          double numbers[WIDEST];
          for (int64_t d = 0; d < dim_of(which); d++) {
            const int64_t at = (((int64_t)b * NEW + r) * HEADS_K + head) * dim_of(which) + d;
            tensor_store(fresh, at, fmax(fmin(size * rng_normal(rng), 6e4), -6e4));
            numbers[d] = reference_load(fresh, at);
          }
          const int64_t to = cache->used_k[b] + r;
          for (int64_t d = 0; d < dim_of(which); d++)
            cache->expected[which][b][to][head][d] =
                which ? numbers[d] : turned(cache, numbers, to, d);
        }
  }
  if (fa3_append(args)) fail_msg("%s", fa3_last_error());
  for (int b = 0; b < BATCH; b++) cache->used_k[b] += counts[b];
}

/* Three roundings of numbers below twice the row's largest come before the one that a code is. */
static void check_row(struct cache *cache, int which, int b, int64_t r, int head) {
  const double *expected = cache->expected[which][b][r][head];
  const double scale = (double)*scale_at(cache, which, b, r, head);
  double largest = 0;
  int64_t row;
  const int64_t entry = place(cache, b, r, &row);
  const int64_t rows = cache->paged ? PAGE_SIZE : ROWS;
  const uint8_t *codes =
      cache->codes[which] + ((entry * rows + row) * HEADS_K + head) * dim_of(which);
  for (int64_t d = 0; d < dim_of(which); d++) largest = fmax(largest, fabs(expected[d]));
  const double before = 8 * 0x1p-24 * 2 * largest;
  if (cache->form == ROW) {
    const double wanted = fmax(largest / 448, 0x1p-126);
    if (!(fabs(scale - wanted) <= before / 448 + 0x1p-23 * wanted))
      fail_msg("scale of row %d is %g: expected %g", (int)r, scale, wanted);
  }
  for (int64_t d = 0; d < dim_of(which); d++) {
    const double got = (double)float_from_e4m3(codes[d]) * scale;
    const double nearest = fmax(fmin(expected[d], 448 * scale), -448 * scale);
    const double bound = before + fmax(fabs(nearest) * 0x1p-4, scale * 0x1p-10) * (1 + 0x1p-20);
    if (!(fabs(got - nearest) <= bound))
      fail_msg("%s[%d][%d][%d][%d] is %g: expected %g, at most %g off", which ? "value" : "key", b,
               (int)r, head, (int)d, got, nearest, bound);
  }
}

static void check(struct cache *cache) {
  int64_t written[2] = {0};
  for (int which = 0; which < 2; which++) {
    for (int b = 0; b < BATCH; b++)
      for (int64_t r = 0; r < cache->used_k[b]; r++)
        for (int head = 0; head < HEADS_K; head++) check_row(cache, which, b, r, head);
    for (size_t i = 0; i < sizeof cache->codes[which]; i++)
      written[which] += cache->codes[which][i] != 0xff;
  }
  const int64_t rows = cache->used_k[0] + cache->used_k[1] + cache->used_k[2];
  assert_int_equal(written[0], rows * HEADS_K * HEAD_DIM);
  assert_int_equal(written[1], rows * HEADS_K * VALUE_DIM);
}

/* Queries of one row and of several tiles. */
static void attend(struct cache *cache, int64_t queries, struct rng *rng) {
  static float query[BATCH * 40 * HEADS_Q * HEAD_DIM], output[BATCH * 40 * HEADS_Q * VALUE_DIM];
  static float lse[BATCH * HEADS_Q * 40];
  fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_CAUSAL, .num_threads = 2};
  args.query = fa3_dense(query, cache->dtype, BATCH, queries, HEADS_Q, HEAD_DIM);
  args.output = fa3_dense(output, cache->dtype, BATCH, queries, HEADS_Q, VALUE_DIM);
  args.lse = fa3_lse(lse, BATCH, HEADS_Q, queries);
  args.key = cache->args.key;
  args.value = cache->args.value;
  args.page_table = cache->args.page_table;
  args.seqused_k = cache->args.seqused_k;
  args.key_scale = cache->args.key_scale;
  args.value_scale = cache->args.value_scale;
  args.key_scale_rows = args.value_scale_rows = cache->args.key_scale_rows;
  for (int64_t i = 0; i < BATCH * queries * HEADS_Q * HEAD_DIM; i++)
    tensor_store(&args.query, i, 0.05 * rng_normal(rng));
  memset(output, 0xff, sizeof output);
  memset(lse, 0xff, sizeof lse);
  expect_forward(args);
  struct comparison at = {0};
  for (at.batch = 0; at.batch < BATCH; at.batch++)
    for (at.head = 0; at.head < HEADS_Q; at.head += 3)
      for (at.row = 0; at.row < queries; at.row += 7) compare_row(&at, &args);
}

static void test_every_form(void **state) {
  (void)state;
  static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16};
  static const int32_t counts[2][BATCH] = {{NEW, 0, 12}, {1, 1, 0}};
  struct rng rng = rng_for(0);
  struct cache *cache = calloc(1, sizeof *cache);
  assert_non_null(cache);
  for (int i = 0; i < 4 * FORMS * 3; i++) {
    cache->paged = i % 2;
    cache->turned = i / 2 % 2;
    cache->form = (enum form)(i / 4 % FORMS);
    cache->dtype = dtypes[i / 4 / FORMS];
    make(cache, &rng);
    for (int call = 0; call < 2; call++) append(cache, counts[call], &rng);
    check(cache);
    attend(cache, 1, &rng);
    attend(cache, 40, &rng);
  }
  free(cache);
}

/* NaN stays, an infinity becomes NaN and leaves the other numbers their scale; codes go into a
 * cache of codes as they are, and of a scale 0 those of finite numbers are finite. */
static void test_codes(void **state) {
  (void)state;
  float fresh[16] = {1, -2, NAN, INFINITY, 448, -300}, scales[2] = {-1, 0};
  uint8_t codes[2][16] = {{0}}, copied[2][16] = {{0}};
  int32_t used = 0;
  fa3_append_args args = {.struct_size = sizeof args, .key_scale_rows = 1};
  args.new_key = args.new_value = fa3_dense(fresh, FA3_FLOAT32, 1, 1, 1, 16);
  args.key = fa3_dense(codes[0], FA3_FLOAT8_E4M3, 1, 1, 1, 16);
  args.value = fa3_dense(codes[1], FA3_FLOAT8_E4M3, 1, 1, 1, 16);
  args.seqused_k = fa3_vector(&used, FA3_INT32, 1);
  args.key_scale = (fa3_tensor){
      .data = scales, .dtype = FA3_FLOAT32, .rank = 3, .shape = {1, 1, 1}, .strides = {1, 1, 1}};
  args.value_scale = fa3_vector(scales + 1, FA3_FLOAT32, 1);
  if (fa3_append(&args)) fail_msg("%s", fa3_last_error());
  assert_true(scales[0] == 1 && scales[1] == 0);
  assert_int_equal(codes[0][0], e4m3_from_float(1));
  assert_int_equal(codes[0][1], e4m3_from_float(-2));
  assert_int_equal(codes[0][2] & 0x7f, 0x7f);
  assert_int_equal(codes[0][3] & 0x7f, 0x7f);
  assert_int_equal(codes[0][4], 0x7e);
  for (int i = 0; i < 16; i++)
    assert_int_equal((codes[1][i] & 0x7f) != 0x7f, isfinite(fresh[i]) != 0);
  args.new_key.dtype = args.new_value.dtype = FA3_FLOAT8_E4M3;
  args.new_key.data = codes[0];
  args.new_value.data = codes[1];
  args.key.data = copied[0];
  args.value.data = copied[1];
  expect_refused(fa3_append(&args), FA3_INVALID_DTYPE, "key_scale is given");
  args.key_scale = args.value_scale = (fa3_tensor){0};
  args.key_scale_rows = 0;
  if (fa3_append(&args)) fail_msg("%s", fa3_last_error());
  assert_memory_equal(copied, codes, sizeof codes);
  args.rotary_cos = args.rotary_sin = make_matrix(fresh, FA3_FLOAT32, 1, 4);
  expect_refused(fa3_append(&args), FA3_INVALID_DTYPE, "rotary_cos is given, but new_key.dtype");
}

static void test_refusals(void **state) {
  (void)state;
  static const int32_t none[BATCH];
  struct rng rng = rng_for(1);
  struct cache *cache = calloc(1, sizeof *cache);
  assert_non_null(cache);
  cache->paged = true;
  cache->form = ROW;
  cache->dtype = FA3_BFLOAT16;
  make(cache, &rng);
  append(cache, none, &rng);
  const fa3_append_args good = cache->args;
  fa3_append_args bad = good;
  bad.key_scale.strides[2] = 0; /* written: entries must be apart */
  expect_refused(fa3_append(&bad), FA3_INVALID_STRIDE, "key_scale.strides[2]");
  bad = good;
  bad.value_scale.shape[2] = PAGE_SIZE - 1;
  expect_refused(fa3_append(&bad), FA3_INVALID_SHAPE, "value_scale.shape[2] is 15: expected 16");
  bad = good;
  bad.value_scale = (fa3_tensor){0};
  expect_refused(fa3_append(&bad), FA3_INVALID_FLAGS,
                 "value_scale_rows is 1, but value_scale is absent");
  bad = good;
  bad.value.dtype = FA3_BFLOAT16;
  expect_refused(fa3_append(&bad), FA3_INVALID_DTYPE, "value.dtype is 3");
  bad = good;
  bad.key.dtype = bad.value.dtype = FA3_BFLOAT16;
  bad.key.data = bad.value.data = cache->expected;
  expect_refused(fa3_append(&bad), FA3_INVALID_DTYPE, "only FA3_FLOAT8_E4M3 has a scale");
  bad = good;
  bad.new_key.shape[3] = bad.key.shape[3] = 24;
  expect_refused(fa3_append(&bad), FA3_UNSUPPORTED, "head_dim is 24: expected a multiple of 16");
  free(cache);
  const fa3_capability on_gpu = {.struct_size = sizeof on_gpu,
                                 .device = {FA3_CUDA, 0},
                                 .phase = FA3_FORWARD,
                                 .query_dtype = FA3_FLOAT32,
                                 .key_dtype = FA3_FLOAT8_E4M3,
                                 .value_dtype = FA3_FLOAT8_E4M3,
                                 .output_dtype = FA3_FLOAT32,
                                 .head_dim = 128,
                                 .value_head_dim = 128};
  assert_int_equal(fa3_supports(&on_gpu), FA3_UNSUPPORTED);
  if (!strstr(fa3_last_error(), "no CUDA kernels")) /* a build without any */
    assert_non_null(
        strstr(fa3_last_error(), "query's dtype is FA3_FLOAT32 and key's FA3_FLOAT8_E4M3"));
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_form),
      cmocka_unit_test(test_codes),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
