/* fa3_append against rows turned in double precision. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "rng.h"
#include "test.h"

enum {
  BATCH = 4,
  NEW = 37, /* rows of the longest sequence: several tasks */
  HEADS_Q = 4,
  HEADS_K = 2,
  HEAD_DIM = 24,
  VALUE_DIM = 16,
  PAGE_SIZE = 7,
  COLUMNS = 12,
  ROWS = PAGE_SIZE * COLUMNS,
  PAGES = BATCH * COLUMNS,
  TOTAL = BATCH * NEW
};

static const float nothing = -77; /* what the cache holds where nothing is to be written */

struct append {
  float new_key[TOTAL * HEADS_K * HEAD_DIM];
  float new_value[TOTAL * HEADS_K * VALUE_DIM];
  float query[TOTAL * HEADS_Q * HEAD_DIM];
  float rotated[TOTAL * HEADS_Q * HEAD_DIM];
  float key[BATCH * ROWS * HEADS_K * HEAD_DIM];
  float value[BATCH * ROWS * HEADS_K * VALUE_DIM];
  float cos[ROWS * HEAD_DIM / 2];
  float sin[ROWS * HEAD_DIM / 2];
  int32_t positions[TOTAL];
  int32_t page_table[BATCH * COLUMNS];
  int32_t starts[BATCH + 1];
  int32_t used_q[BATCH];
  int32_t used_k[BATCH];
  int32_t leftpad[BATCH];
  fa3_append_args args;
  bool paged, packed;
};

static void fill(struct rng *rng, float *x, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof *x; i++) x[i] = (float)rng_normal(rng);
}

static void make_tensors(struct append *a, int64_t pairs, bool queries) {
  fa3_append_args *args = &a->args;
  *args = (fa3_append_args){.struct_size = sizeof *args, .num_threads = 3};
  if (a->packed) {
    args->new_key = fa3_packed(a->new_key, FA3_FLOAT32, TOTAL, HEADS_K, HEAD_DIM);
    args->new_value = fa3_packed(a->new_value, FA3_FLOAT32, TOTAL, HEADS_K, VALUE_DIM);
    args->query = fa3_packed(a->query, FA3_FLOAT32, TOTAL, HEADS_Q, HEAD_DIM);
    args->cu_seqlens_q = fa3_vector(a->starts, FA3_INT32, BATCH + 1);
    args->max_seqlen_q = NEW;
    args->positions = fa3_vector(a->positions, FA3_INT32, TOTAL);
  } else {
    args->new_key = fa3_dense(a->new_key, FA3_FLOAT32, BATCH, NEW, HEADS_K, HEAD_DIM);
    args->new_value = fa3_dense(a->new_value, FA3_FLOAT32, BATCH, NEW, HEADS_K, VALUE_DIM);
    args->query = fa3_dense(a->query, FA3_FLOAT32, BATCH, NEW, HEADS_Q, HEAD_DIM);
    args->seqused_q = fa3_vector(a->used_q, FA3_INT32, BATCH);
    args->leftpad_k = fa3_vector(a->leftpad, FA3_INT32, BATCH);
  }
  args->rotated_query = args->query;
  args->rotated_query.data = a->rotated;
  if (!queries) args->query = args->rotated_query = (fa3_tensor){0};
  if (a->paged) {
    args->key = fa3_dense(a->key, FA3_FLOAT32, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM);
    args->value = fa3_dense(a->value, FA3_FLOAT32, PAGES, PAGE_SIZE, HEADS_K, VALUE_DIM);
    args->page_table = make_matrix(a->page_table, FA3_INT32, BATCH, COLUMNS);
  } else {
    args->key = fa3_dense(a->key, FA3_FLOAT32, BATCH, ROWS, HEADS_K, HEAD_DIM);
    args->value = fa3_dense(a->value, FA3_FLOAT32, BATCH, ROWS, HEADS_K, VALUE_DIM);
  }
  args->seqused_k = fa3_vector(a->used_k, FA3_INT32, BATCH);
  args->rotary_cos = make_matrix(a->cos, FA3_FLOAT32, ROWS, HEAD_DIM / 2);
  args->rotary_sin = make_matrix(a->sin, FA3_FLOAT32, ROWS, HEAD_DIM / 2);
  args->rotary_cos.shape[1] = args->rotary_sin.shape[1] = pairs; /* of a table's rows */
}

static void make(struct append *a, struct rng *rng, bool paged, bool packed, int64_t pairs,
                 bool queries) {
  static const int32_t lengths[BATCH] = {NEW, 0, 5, NEW - 1};
  memset(a, 0, sizeof *a);
  a->paged = paged;
  a->packed = packed;
  fill(rng, a->new_key, sizeof a->new_key);
  fill(rng, a->new_value, sizeof a->new_value);
  fill(rng, a->query, sizeof a->query);
  for (size_t i = 0; i < sizeof a->key / sizeof *a->key; i++) a->key[i] = nothing;
  for (size_t i = 0; i < sizeof a->value / sizeof *a->value; i++) a->value[i] = nothing;
  for (size_t i = 0; i < sizeof a->rotated / sizeof *a->rotated; i++) a->rotated[i] = nothing;
  for (int i = 0; i < ROWS * HEAD_DIM / 2; i++) {
    const double angle = 10 * rng_normal(rng);
    a->cos[i] = (float)cos(angle);
    a->sin[i] = (float)sin(angle);
  }
  for (int i = 0; i < TOTAL; i++) a->positions[i] = (int32_t)rng_between(rng, 0, ROWS - 1);
  rng_order(rng, a->page_table, PAGES);
  for (int b = 0; b < BATCH; b++) {
    a->used_q[b] = lengths[b];
    a->starts[b + 1] = a->starts[b] + lengths[b];
    a->used_k[b] = (int32_t)rng_between(rng, 0, ROWS - lengths[b]);
    a->leftpad[b] = (int32_t)rng_between(rng, 0, a->used_k[b]);
  }
  make_tensors(a, pairs, queries);
}

/* Element `d` of a head that is turned in double precision. */
static double turned(const struct append *a, const float *head, int64_t position, int64_t d) {
  const int64_t pairs = a->args.rotary_cos.data ? a->args.rotary_cos.shape[1] : 0;
  const bool interleaved = a->args.flags & FA3_ROTARY_INTERLEAVED;
  if (d >= 2 * pairs) return (double)head[d];
  const int64_t pair = interleaved ? d / 2 : d % pairs;
  const bool second = interleaved ? d % 2 : d >= pairs;
  const int64_t first_at = interleaved ? 2 * pair : pair;
  const double x = (double)head[first_at];
  const double y = (double)head[interleaved ? first_at + 1 : pair + pairs];
  const double c = (double)a->cos[position * (HEAD_DIM / 2) + pair];
  const double s = (double)a->sin[position * (HEAD_DIM / 2) + pair];
  return second ? x * s + y * c : x * c - y * s;
}

/* Three roundings of terms below twice the largest element, and nothing else where nothing turns.
 */
static void compare(const char *what, float got, double expected, bool exact) {
  const double bound = exact ? 0 : 3 * 0x1p-24 * 16;
  if (!(fabs((double)got - expected) <= bound))
    fail_msg("%s is %.9g: expected %.9g", what, (double)got, expected);
}

static void check(const struct append *a) {
  static bool written_key[BATCH * ROWS];
  memset(written_key, 0, sizeof written_key);
  const bool exact = !a->args.rotary_cos.data;
  for (int b = 0; b < BATCH; b++)
    for (int i = 0; i < a->used_q[b]; i++) {
      const int from = a->packed ? a->starts[b] + i : b * NEW + i, at = a->used_k[b] + i;
      const int to = a->paged
                         ? a->page_table[b * COLUMNS + at / PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
                         : b * ROWS + at;
      const int64_t position = a->packed && a->args.positions.data ? a->positions[from]
                               : a->packed                         ? at
                                                                   : at - a->leftpad[b];
      written_key[to] = true;
      for (int h = 0; h < HEADS_K; h++) {
        const float *head = a->new_key + ((size_t)from * HEADS_K + h) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++)
          compare("key", a->key[(to * HEADS_K + h) * HEAD_DIM + d], turned(a, head, position, d),
                  exact);
        for (int d = 0; d < VALUE_DIM; d++)
          compare("value", a->value[(to * HEADS_K + h) * VALUE_DIM + d],
                  (double)a->new_value[(from * HEADS_K + h) * VALUE_DIM + d], true);
      }
      for (int h = 0; a->args.query.data && h < HEADS_Q; h++) {
        const float *head = a->query + ((size_t)from * HEADS_Q + h) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++)
          compare("rotated_query", a->rotated[(from * HEADS_Q + h) * HEAD_DIM + d],
                  turned(a, head, position, d), exact);
      }
    }
  for (int row = 0; row < BATCH * ROWS; row++)
    for (int d = 0; !written_key[row] && d < HEADS_K * HEAD_DIM; d++)
      compare("a row beside", a->key[row * HEADS_K * HEAD_DIM + d], (double)nothing, true);
}

static void test_append(void **state) {
  (void)state;
  struct rng rng = rng_for(0);
  struct append *a = malloc(sizeof *a);
  assert_non_null(a);
  for (int form = 0; form < 64; form++) {
    static const int64_t pairs[] = {HEAD_DIM / 2, 5, 0, 8};
    const bool queries = form & 4;
    make(a, &rng, form & 1, form & 2, pairs[form / 16], queries);
    if (form & 8) a->args.flags |= FA3_ROTARY_INTERLEAVED;
    if (pairs[form / 16] == 0) {
      a->args.rotary_cos = a->args.rotary_sin = a->args.positions = (fa3_tensor){0};
      a->args.query = a->args.rotated_query = (fa3_tensor){0};
      a->args.flags = 0;
    }
    if (fa3_append(&a->args)) fail_msg("form %d: %s", form, fa3_last_error());
    check(a);
  }
  free(a);
}

static void refused(struct append *a, fa3_status status, const char *text) {
  expect_refused(fa3_append(&a->args), status, text);
  for (size_t i = 0; i < sizeof a->key / sizeof *a->key; i++)
    if (a->key[i] != nothing) fail_msg("something was written");
}

static void test_refusals(void **state) {
  (void)state;
  struct rng rng = rng_for(1);
  struct append *a = malloc(sizeof *a);
  assert_non_null(a);
#define REFUSED(paged, packed, spoil, ...)            \
  do {                                                \
    make(a, &rng, paged, packed, HEAD_DIM / 2, true); \
    fa3_append_args *args = &a->args;                 \
    (void)args;                                       \
    spoil;                                            \
    refused(a, __VA_ARGS__);                          \
  } while (0)
  const fa3_tensor absent = {0};
  REFUSED(false, false, a->used_k[0] = ROWS - NEW + 1, FA3_INVALID_LENGTHS, "seqused_k[0]");
  REFUSED(true, true, a->used_k[3] = ROWS, FA3_INVALID_LENGTHS, "seqused_k[3]");
  REFUSED(true, true, a->page_table[a->used_k[0] / PAGE_SIZE] = PAGES, FA3_INVALID_LENGTHS,
          "page_table[0]");
  REFUSED(true, true, a->positions[3] = ROWS, FA3_INVALID_LENGTHS, "row 3 of sequence 0");
  REFUSED(true, true, a->positions[0] = -1, FA3_INVALID_LENGTHS, "position -1");
  REFUSED(false, false, args->rotary_sin = absent, FA3_INVALID_FLAGS, "rotary_cos is given");
  REFUSED(false, false, args->rotated_query = absent, FA3_INVALID_FLAGS, "query is given");
  REFUSED(false, false, args->rotary_cos = args->rotary_sin = absent, FA3_INVALID_FLAGS,
          "query is given without rotary_cos");
  REFUSED(false, false, args->rotary_cos.shape[1] = args->rotary_sin.shape[1] = HEAD_DIM / 2 + 1,
          FA3_INVALID_SHAPE, "rotary_cos.shape[1]");
  REFUSED(false, false, args->seqused_k = absent, FA3_INVALID_POINTER, "seqused_k");
  REFUSED(false, false, args->key.dtype = FA3_BFLOAT16, FA3_INVALID_DTYPE, "key.dtype");
  REFUSED(false, false, args->flags = FA3_CAUSAL, FA3_INVALID_FLAGS, "flags");
  free(a);
}

/* Both calls in one are what they are one after the other; queries and cache are the same. */
static void test_append_and_attend(void **state) {
  (void)state;
  static float output[TOTAL * HEADS_Q * VALUE_DIM], expected[TOTAL * HEADS_Q * VALUE_DIM];
  static char workspace[1 << 21];
  int32_t used[BATCH];
  struct rng rng = rng_for(2);
  struct append *a = malloc(sizeof *a);
  assert_non_null(a);
  make(a, &rng, true, true, HEAD_DIM / 2, true);
  for (int b = 0; b < BATCH; b++) used[b] = a->used_k[b] + a->starts[b + 1] - a->starts[b];
  fill(&rng, a->key, sizeof a->key);
  fill(&rng, a->value, sizeof a->value);
  fa3_forward_args forward = {
      .struct_size = sizeof forward,
      .query = a->args.rotated_query,
      .key = a->args.key,
      .value = a->args.value,
      .output = fa3_packed(expected, FA3_FLOAT32, TOTAL, HEADS_Q, VALUE_DIM),
      .cu_seqlens_q = a->args.cu_seqlens_q,
      .seqused_k = fa3_vector(used, FA3_INT32, BATCH),
      .page_table = a->args.page_table,
      .flags = FA3_CAUSAL,
      .num_threads = 2, /* each has its part of the workspace */
      .workspace = workspace,
      .workspace_size = sizeof workspace};
  memset(expected, 0, sizeof expected);
  memset(output, 0, sizeof output);
  if (fa3_append(&a->args) || fa3_forward(&forward)) fail_msg("%s", fa3_last_error());
  for (int b = 0; b < BATCH; b++) /* what is new is to come from the second call */
    for (int i = a->used_k[b]; i < used[b]; i++) {
      const int64_t page = a->page_table[b * COLUMNS + i / PAGE_SIZE];
      a->key[(page * PAGE_SIZE + i % PAGE_SIZE) * HEADS_K * HEAD_DIM] = nothing;
    }
  memset(a->rotated, 0, sizeof a->rotated);
  forward.output.data = output;
  if (fa3_append_forward(&a->args, &forward)) fail_msg("%s", fa3_last_error());
  assert_memory_equal(output, expected, sizeof output);

  /* Nothing is written if either is refused. */
  memset(a->rotated, 0, sizeof a->rotated);
  forward.flags = 1u << 31;
  assert_int_equal(fa3_append_forward(&a->args, &forward), FA3_INVALID_FLAGS);
  forward.flags = FA3_CAUSAL;
  forward.device.index = 1;
  assert_int_equal(fa3_append_forward(&a->args, &forward), FA3_INVALID_DEVICE);
  forward.device.index = 0;
  forward.workspace_size = 0;
  assert_int_equal(fa3_append_forward(&a->args, &forward), FA3_INVALID_WORKSPACE);
  for (size_t i = 0; i < sizeof a->rotated / sizeof *a->rotated; i++)
    if (a->rotated[i] != 0) fail_msg("something was written");
  free(a);
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_append),
      cmocka_unit_test(test_append_and_attend),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
