/* A cache of keys and values in pages, and parts of its keys: what is refused, and what must give
 * the same bits. tests/attention.c compares such calls with float64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "expect.h"
#include "fa3.h"
#include "level.h"
#include "rng.h"
#include "test.h"

enum {
  BATCH = 5,
  HEADS_Q = 8,
  HEADS_K = 2,
  HEAD_DIM = 64,
  PAGE_SIZE = 16,
  COLUMNS = 40,
  LONGEST = PAGE_SIZE * COLUMNS,
  QUERIES = 3,
  PAGES = BATCH * COLUMNS,
  ROW = HEADS_K * HEAD_DIM
};

/* The same keys and values twice: row after row, and in pages; what no sequence uses is NaN. */
struct cache {
  float query[BATCH * QUERIES * HEADS_Q * HEAD_DIM];
  float key[BATCH * LONGEST * ROW];
  float value[BATCH * LONGEST * ROW];
  float paged_key[PAGES * PAGE_SIZE * ROW];
  float paged_value[PAGES * PAGE_SIZE * ROW];
  int32_t page_table[BATCH * COLUMNS];
  int32_t used[BATCH];
};

static struct cache *cache_new(struct rng *rng) {
  struct cache *cache = malloc(sizeof *cache);
  assert_non_null(cache);
  memset(cache, 0xff, sizeof *cache);
  for (size_t i = 0; i < sizeof cache->query / sizeof *cache->query; i++)
    cache->query[i] = (float)rng_normal(rng);
  rng_order(rng, cache->page_table, PAGES);
  const int32_t used[BATCH] = {LONGEST, 1, PAGE_SIZE, 333, 0};
  memcpy(cache->used, used, sizeof used);
  for (int b = 0; b < BATCH; b++)
    for (int r = 0; r < used[b]; r++) {
      const int page = cache->page_table[b * COLUMNS + r / PAGE_SIZE];
      const size_t dense = (size_t)(b * LONGEST + r) * ROW;
      const size_t paged = (size_t)(page * PAGE_SIZE + r % PAGE_SIZE) * ROW;
      for (int i = 0; i < ROW; i++) {
        cache->key[dense + i] = cache->paged_key[paged + i] = (float)rng_normal(rng);
        cache->value[dense + i] = cache->paged_value[paged + i] = (float)rng_normal(rng);
      }
    }
  return cache;
}

/* A call on sequences `first` to `first + batch - 1`. */
static fa3_forward_args call_of(struct cache *cache, bool paged, int first, int batch,
                                int queries) {
  fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_CAUSAL, .num_threads = 2};
  args.query = fa3_dense(cache->query + (size_t)first * QUERIES * HEADS_Q * HEAD_DIM, FA3_FLOAT32,
                         batch, queries, HEADS_Q, HEAD_DIM);
  args.query.strides[0] = (int64_t)QUERIES * HEADS_Q * HEAD_DIM;
  args.seqused_k = fa3_vector(cache->used + first, FA3_INT32, batch);
  if (paged) {
    args.key = fa3_dense(cache->paged_key, FA3_FLOAT32, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM);
    args.value = fa3_dense(cache->paged_value, FA3_FLOAT32, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM);
    args.page_table =
        make_matrix(cache->page_table + (size_t)first * COLUMNS, FA3_INT32, batch, COLUMNS);
  } else {
    const size_t at = (size_t)first * LONGEST * ROW;
    args.key = fa3_dense(cache->key + at, FA3_FLOAT32, batch, LONGEST, HEADS_K, HEAD_DIM);
    args.value = fa3_dense(cache->value + at, FA3_FLOAT32, batch, LONGEST, HEADS_K, HEAD_DIM);
  }
  return args;
}

/* The output, which starts as NaN, of the caller to free. */
static float *run(fa3_forward_args args) {
  const int64_t count = args.query.shape[0] * args.query.shape[1] * HEADS_Q * HEAD_DIM;
  float *output = malloc((size_t)(count + 1) * sizeof *output);
  assert_non_null(output);
  memset(output, 0xff, (size_t)count * sizeof *output);
  args.output =
      fa3_dense(output, FA3_FLOAT32, args.query.shape[0], args.query.shape[1], HEADS_Q, HEAD_DIM);
  expect_forward(args);
  return output;
}

static void same_bits(const float *a, const float *b, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (!(a[i] == b[i]) || signbit(a[i]) != signbit(b[i]))
      fail_msg("element %d is %.9g and %.9g", (int)i, (double)a[i], (double)b[i]);
}

static void test_pages_change_no_bit(void **state) {
  (void)state;
  struct rng rng = rng_for(0);
  struct cache *cache = cache_new(&rng);
  for (int queries = 1; queries <= QUERIES; queries += 2)
    for (int splits = 0; splits < 3; splits++) {
      fa3_forward_args dense = call_of(cache, false, 0, BATCH, queries);
      fa3_forward_args paged = call_of(cache, true, 0, BATCH, queries);
      dense.num_splits = paged.num_splits = splits;
      float *a = run(dense), *b = run(paged);
      same_bits(a, b, (int64_t)BATCH * queries * HEADS_Q * HEAD_DIM);
      free(a);
      free(b);
    }
  free(cache);
}

static void test_a_sequence_alone_gives_the_same_bits(void **state) {
  (void)state;
  struct rng rng = rng_for(1);
  struct cache *cache = cache_new(&rng);
  const int64_t row = (int64_t)HEADS_Q * HEAD_DIM;
  for (int queries = 1; queries <= QUERIES; queries += 2) {
    fa3_forward_args all = call_of(cache, true, 0, BATCH, queries);
    all.split_keys = 64;
    float *together = run(all);
    for (int first = 0; first < BATCH; first++)
      for (int batch = 1; first + batch <= BATCH; batch++) {
        fa3_forward_args part = call_of(cache, true, first, batch, queries);
        part.split_keys = 64;
        part.num_threads = 1 + batch;
        float *alone = run(part);
        same_bits(together + (int64_t)first * queries * row, alone, (int64_t)batch * queries * row);
        free(alone);
      }
    free(together);
  }
  free(cache);
}

/* Also of a zero's sign: a sequence of one part, alone and beside one of several. */
static void test_a_negative_zero_stays(void **state) {
  (void)state;
  enum { LONG = 256, DIM = 8 };
  static float query[2 * DIM], key[2 * LONG * DIM], value[2 * LONG * DIM], output[2][2 * DIM];
  int32_t used[2] = {64, LONG};
  /* The first key has most of the weight, and the others' products are below every float. */
  for (int i = 0; i < 2 * LONG * DIM; i++) value[i] = -0x1p-149f;
  for (int64_t i = 0; i < (int64_t)2 * LONG; i++) key[i * DIM] = i % LONG ? -3 : 0;
  for (int64_t b = 0; b < 2; b++) {
    query[b * DIM] = 1;
    for (int d = 0; d < DIM; d++) value[b * LONG * DIM + d] = -0.0f;
  }
  for (int batch = 1; batch <= 2; batch++) {
    fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_SCALE, .softmax_scale = 1};
    args.query = fa3_dense(query, FA3_FLOAT32, batch, 1, 1, DIM);
    args.key = fa3_dense(key, FA3_FLOAT32, batch, LONG, 1, DIM);
    args.value = fa3_dense(value, FA3_FLOAT32, batch, LONG, 1, DIM);
    args.output = fa3_dense(output[batch - 1], FA3_FLOAT32, batch, 1, 1, DIM);
    args.seqused_k = fa3_vector(used, FA3_INT32, batch);
    args.split_keys = 64;
    expect_forward(args);
  }
  same_bits(output[0], output[1], DIM);
}

/* Batches of 1 to 64: each sequence's output is the same, whatever its place and its company. */
static void test_any_batch_gives_the_same_bits(void **state) {
  (void)state;
  enum { MOST = 64, ROW_OUT = HEADS_Q * HEAD_DIM };
  struct rng rng = rng_for(3);
  struct cache *cache = cache_new(&rng);
  static float query[MOST * ROW_OUT];
  static int32_t tables[MOST * COLUMNS], used[MOST];
  fa3_forward_args call = call_of(cache, true, 0, BATCH, 1);
  call.split_keys = 128;
  float *alone[BATCH];
  for (int b = 0; b < BATCH; b++) {
    fa3_forward_args one = call_of(cache, true, b, 1, 1);
    one.split_keys = 128;
    alone[b] = run(one);
  }
  for (int batch = 1; batch <= MOST; batch += batch < 8 ? 1 : 7) {
    const int first = (int)rng_between(&rng, 0, BATCH - 1);
    for (int i = 0; i < batch; i++) {
      const int b = (first + i) % BATCH;
      memcpy(query + (size_t)i * ROW_OUT, cache->query + (size_t)b * QUERIES * ROW_OUT,
             ROW_OUT * sizeof *query);
      memcpy(tables + (size_t)i * COLUMNS, cache->page_table + (size_t)b * COLUMNS,
             COLUMNS * sizeof *tables);
      used[i] = cache->used[b];
    }
    call.query = fa3_dense(query, FA3_FLOAT32, batch, 1, HEADS_Q, HEAD_DIM);
    call.page_table.data = tables;
    call.page_table.shape[0] = batch;
    call.seqused_k = fa3_vector(used, FA3_INT32, batch);
    call.num_threads = 1 + batch % 3;
    float *together = run(call);
    for (int i = 0; i < batch; i++)
      same_bits(together + (size_t)i * ROW_OUT, alone[(first + i) % BATCH], ROW_OUT);
    free(together);
  }
  for (int b = 0; b < BATCH; b++) free(alone[b]);
  free(cache);
}

static void refused(fa3_forward_args args, fa3_status status, const char *text) {
  float output[BATCH * HEADS_Q * HEAD_DIM];
  args.output = fa3_dense(output, FA3_FLOAT32, args.query.shape[0], 1, HEADS_Q, HEAD_DIM);
  char workspace[1];
  args.workspace = workspace;
  args.workspace_size = (size_t)1 << 40; /* it must not get that far */
  expect_refused(fa3_forward(&args), status, text);
}

static void test_refusals(void **state) {
  (void)state;
  struct rng rng = rng_for(2);
  struct cache *cache = cache_new(&rng);
  const fa3_forward_args good = call_of(cache, true, 0, BATCH, 1);
  fa3_forward_args bad = good;
  int32_t numbers[BATCH + 1] = {0};
  bad.cu_seqlens_k = fa3_vector(numbers, FA3_INT32, BATCH + 1);
  bad.key.rank = bad.value.rank = 3;
  bad.key = fa3_packed(cache->key, FA3_FLOAT32, LONGEST, HEADS_K, HEAD_DIM);
  bad.value = fa3_packed(cache->value, FA3_FLOAT32, LONGEST, HEADS_K, HEAD_DIM);
  refused(bad, FA3_INVALID_FLAGS, "page_table is given with cu_seqlens_k");
  bad = good;
  bad.cache_batch_index = fa3_vector(numbers, FA3_INT32, BATCH);
  refused(bad, FA3_INVALID_FLAGS, "page_table is given with cache_batch_index");
  bad = good;
  bad.page_table.shape[0] = BATCH - 1;
  refused(bad, FA3_INVALID_SHAPE, "page_table.shape[0]");
  bad = good;
  bad.page_table.dtype = FA3_INT64;
  refused(bad, FA3_INVALID_DTYPE, "page_table.dtype");
  bad = good;
  bad.num_splits = -1;
  refused(bad, FA3_INVALID_SPLITS, "num_splits is -1");
  bad = good;
  bad.split_keys = 100;
  refused(bad, FA3_INVALID_SPLITS, "split_keys is 100");
  bad.split_keys = -64;
  refused(bad, FA3_INVALID_SPLITS, "split_keys is -64");
  bad.split_keys = 64;
  bad.num_splits = 2;
  refused(bad, FA3_INVALID_SPLITS, "num_splits is 2");
  cache->used[0] = LONGEST + 1;
  refused(good, FA3_INVALID_LENGTHS, "seqused_k[0] is 641");
  cache->used[0] = LONGEST;
  bad = good;
  bad.max_seqlen_k = LONGEST - 1;
  refused(bad, FA3_INVALID_LENGTHS, "seqused_k[0] is 640");
  const int32_t pages[] = {-1, PAGES, INT32_MAX, INT32_MIN};
  for (int i = 0; i < 4; i++) {
    const int32_t before = cache->page_table[3 * COLUMNS + 20];
    cache->page_table[3 * COLUMNS + 20] = pages[i];
    refused(good, FA3_INVALID_LENGTHS, "page_table[3][20]");
    cache->page_table[3 * COLUMNS + 20] = before;
  }
  free(cache);
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages_change_no_bit),
      cmocka_unit_test(test_a_sequence_alone_gives_the_same_bits),
      cmocka_unit_test(test_any_batch_gives_the_same_bits),
      cmocka_unit_test(test_a_negative_zero_stays),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
