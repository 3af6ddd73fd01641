/* What a caller takes for the largest of its calls on a GPU is enough for them all: the workspace's
 * size never falls when a dimension grows. */
#include <inttypes.h>

#include "cuda/plan.h"
#include "cuda_facts.h"
#include "integer.h"
#include "rng.h"
#include "test.h"

enum { BATCH, QUERIES, KEYS, HEADS_K, GROUP, HEAD_DIM, VALUE_HEAD_DIM, DIMENSIONS };
enum { TRIALS = 4000, STEPS = 30 };

static const struct {
  int64_t step, largest;
} dimensions[DIMENSIONS] = {
    [BATCH] = {1, 70000},        [QUERIES] = {1, 1 << 20}, [KEYS] = {1, 1 << 20},
    [HEADS_K] = {1, 100},        [GROUP] = {1, 200},       [HEAD_DIM] = {16, 256},
    [VALUE_HEAD_DIM] = {16, 256}};

/* Of a call what is no dimension. */
struct call {
  bool backward, causal, packed, lengths;
  int64_t packed_queries; /* at least so many in all, on pages; 0: they are not packed */
  fa3_dtype query, key;
  int64_t window, scale_rows, split_keys;
  int64_t page_size; /* 0: no pages */
};

static fa3_status make_problem(const struct call *call, const int64_t *size,
                               struct problem *problem) {
  const int64_t heads_q = size[HEADS_K] * size[GROUP];
  const fa3_dtype output = call->query == FA3_FLOAT8_E4M3 ? FA3_BFLOAT16 : call->query;
  const fa3_tensor query =
      fa3_dense(NULL, call->query, size[BATCH], size[QUERIES], heads_q, size[HEAD_DIM]);
  const fa3_tensor key =
      fa3_dense(NULL, call->key, size[BATCH], size[KEYS], size[HEADS_K], size[HEAD_DIM]);
  const fa3_tensor value =
      fa3_dense(NULL, call->key, size[BATCH], size[KEYS], size[HEADS_K], size[VALUE_HEAD_DIM]);
  const fa3_tensor result =
      fa3_dense(NULL, output, size[BATCH], size[QUERIES], heads_q, size[VALUE_HEAD_DIM]);
  const fa3_device device = {FA3_CUDA, 0};
  const uint64_t flags = (call->causal ? FA3_CAUSAL : 0) | (call->window ? FA3_WINDOW : 0);
  if (call->backward) {
    fa3_backward_args args = {.struct_size = sizeof args,
                              .device = device,
                              .query = query,
                              .key = key,
                              .value = value,
                              .output = result,
                              .lse = fa3_lse(NULL, size[BATCH], heads_q, size[QUERIES]),
                              .grad_output = result,
                              .grad_query = query,
                              .grad_key = key,
                              .grad_value = value,
                              .flags = flags,
                              .window_left = call->window,
                              .window_right = call->window};
    return problem_from_args(FA3_BACKWARD, &args, problem);
  }
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = device,
                           .query = query,
                           .key = key,
                           .value = value,
                           .output = result,
                           .flags = flags,
                           .window_left = call->window,
                           .window_right = call->window,
                           .split_keys = call->split_keys};
  return problem_from_args(FA3_FORWARD, &args, problem);
}

static fa3_status find_size(const struct call *call, const int64_t *size, size_t *bytes) {
  static const int32_t lengths[1];
  struct problem problem;
  struct cuda_plan plan;
  fa3_status status = make_problem(call, size, &problem);
  if (status) return status;
  problem.key_scale_rows = problem.value_scale_rows = call->scale_rows;
  if (call->lengths) problem.seqused_k = lengths;
  if (call->page_size) {
    problem.features |= FA3_FEATURE_PAGE_TABLE;
    problem.rows_k = problem.max_seqlen_k =
        divide_up(size[KEYS], call->page_size) * call->page_size;
    problem.key.rows = problem.value.rows = call->page_size;
  }
  if (call->packed_queries) {
    problem.cu_seqlens_q = lengths;
    problem.rows_q = problem.query.rows = problem.output.rows =
        larger(call->packed_queries, size[QUERIES]);
  }
  if (call->packed) {
    problem.cu_seqlens_q = problem.cu_seqlens_k = lengths;
    problem.rows_q = size[BATCH] * size[QUERIES];
    problem.rows_k = problem.key.rows = problem.value.rows = size[BATCH] * size[KEYS];
    problem.query.rows = problem.output.rows = problem.rows_q;
  }
  status = call->backward ? plan_backward(&problem, &facts, &plan)
                          : plan_forward(&problem, &facts, &plan);
  *bytes = plan.workspace_size;
  return status;
}

static struct call random_call(struct rng *rng) {
  const fa3_dtype half = (fa3_dtype)RNG_PICK(rng, FA3_FLOAT16, FA3_BFLOAT16);
  const bool codes = rng_chance(rng, 0.4), paged = rng_chance(rng, 0.3);
  return (struct call){
      .backward = !codes && !paged && rng_chance(rng, 0.5),
      .causal = rng_chance(rng, 0.5),
      .packed = !paged && rng_chance(rng, 0.3),
      .packed_queries = paged && rng_chance(rng, 0.5) ? rng_between(rng, 1, 20000) : 0,
      .lengths = rng_chance(rng, 0.3),
      .query = codes && rng_chance(rng, 0.7) ? FA3_FLOAT8_E4M3 : half,
      .key = codes ? FA3_FLOAT8_E4M3 : half,
      .window = rng_chance(rng, 0.2) ? rng_between(rng, 1, 5000) : 0,
      .scale_rows = RNG_PICK(rng, 0, 0, 1, 128),
      .split_keys = codes ? 0 : RNG_PICK(rng, 0, 0, 0, 512),
      .page_size = paged ? RNG_PICK(rng, 1, 16, 64, 256) : 0};
}

static void test_size_never_falls(void **state) {
  (void)state;
  int compared = 0;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct call call = random_call(&rng);
    int64_t size[DIMENSIONS] = {[BATCH] = rng_between(&rng, 1, RNG_PICK(&rng, 4, 200)),
                                [QUERIES] = rng_between(&rng, 1, RNG_PICK(&rng, 2, 300, 9000)),
                                [KEYS] = rng_between(&rng, 1, RNG_PICK(&rng, 300, 5000, 40000)),
                                [HEADS_K] = rng_between(&rng, 1, 16),
                                [GROUP] = rng_between(&rng, 1, RNG_PICK(&rng, 16, 200)),
                                [HEAD_DIM] = 16 * rng_between(&rng, 1, 16)};
    size[VALUE_HEAD_DIM] = size[HEAD_DIM];
    size_t before = 0, after;
    for (int step = 0; step < STEPS && !find_size(&call, size, &after); step++) {
      if (after < before)
        fail_msg("trial %" PRIu64 ": %zu bytes, and %zu before it grew to %" PRId64 ", %" PRId64
                 " x %" PRId64 ", %" PRId64 " x %" PRId64 ", %" PRId64 ", %" PRId64
                 " (backward %d, dtypes %d and %d, causal %d, window %" PRId64
                 ", packed %d, lengths %d, scales of %" PRId64 " rows, splits of %" PRId64
                 " keys, pages of %" PRId64 ")",
                 number, after, before, size[BATCH], size[QUERIES], size[KEYS], size[HEADS_K],
                 size[GROUP], size[HEAD_DIM], size[VALUE_HEAD_DIM], call.backward, call.query,
                 call.key, call.causal, call.window, call.packed, call.lengths, call.scale_rows,
                 call.split_keys, call.page_size);
      before = after;
      compared += step > 0;
      const int which = (int)rng_between(&rng, 0, DIMENSIONS - 1);
      size[which] += dimensions[which].step * RNG_PICK(&rng, 1, 1, 2, size[which] / 8 + 1);
      if (size[which] > dimensions[which].largest) size[which] = dimensions[which].largest;
    }
  }
  assert_true(compared > TRIALS * STEPS / 3); /* not all are refused */
}

/* At head dim 64 another query may make steps longer, and parts of large groups fewer. */
static void test_steps_of_gradients(void **state) {
  (void)state;
  const struct call call = {
      .backward = true, .causal = true, .query = FA3_BFLOAT16, .key = FA3_BFLOAT16};
  for (int64_t group = 1; group <= 200; group++)
    for (int64_t keys = 100; keys <= 500; keys += 100) {
      int64_t size[DIMENSIONS] = {1, 0, keys, 1, group, 64, 64};
      size_t before = 0, after = 0;
      for (int64_t queries = 60; queries <= 400; queries++) {
        size[QUERIES] = queries;
        assert_int_equal(find_size(&call, size, &after), FA3_OK);
        assert_true(after >= before);
        before = after;
      }
    }
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_size_never_falls),
                                     cmocka_unit_test(test_steps_of_gradients)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
