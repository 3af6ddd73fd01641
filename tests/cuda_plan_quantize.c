/* How fa3_quantize would deal rows out on a GPU, without one. */
#include "cuda/kernels.h"
#include "cuda/quantize.h"
#include "cuda_facts.h"
#include "engine.h"
#include "integer.h"
#include "kernels/quantize_params.h"
#include "test.h"

/* With rotary embedding of whole heads, if `tables` is a dtype. */
static struct problem make_turned(int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim,
                                  int64_t rows, uint32_t flags, fa3_dtype tables) {
  const int64_t blocks = rows ? divide_up(seqlen, rows) : 1;
  fa3_quantize_args args = {.struct_size = sizeof args,
                            .device = {FA3_CUDA, 0},
                            .codes_scale_rows = rows,
                            .flags = flags};
  struct problem problem;
  args.input = fa3_dense(NULL, FA3_BFLOAT16, batch, seqlen, heads, head_dim);
  args.codes = fa3_dense(NULL, FA3_FLOAT8_E4M3, batch, seqlen, heads, head_dim);
  args.codes_scale = (fa3_tensor){.dtype = FA3_FLOAT32,
                                  .rank = rows ? 3 : 2,
                                  .shape = {batch, heads, rows ? blocks : 0},
                                  .strides = {heads * blocks, blocks, rows ? 1 : 0}};
  if (tables)
    args.rotary_cos = args.rotary_sin = (fa3_tensor){
        .dtype = tables, .rank = 2, .shape = {seqlen, head_dim / 2}, .strides = {head_dim / 2, 1}};
  if (problem_from_args(FA3_QUANTIZE, &args, &problem)) fail_msg("%s", fa3_last_error());
  return problem;
}

static struct problem make_problem(int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim,
                                   int64_t rows, uint32_t flags) {
  return make_turned(batch, seqlen, heads, head_dim, rows, flags, 0);
}

static struct quantize_plan plan_of(const struct problem *problem) {
  struct cuda_plan plan;
  if (plan_quantize(problem, &facts, &plan)) fail_msg("%s", fa3_last_error());
  assert_int_equal(plan.workspace_size, 0);
  return plan.quantize;
}

/* What the kernels rely on. */
static void check_plan(const struct problem *problem, const struct quantize_plan *plan) {
  const int64_t rows = problem->codes_scale_rows, longest = problem->max_seqlen_q;
  const int64_t lanes = (problem->head_dim > 128  ? 256
                         : problem->head_dim > 64 ? 128
                                                  : 64) /
                        FA3_QUANTIZE_ELEMENTS;
  const int64_t heads = problem->batch * problem->heads_q;
  assert_true(plan->threads % 32 == 0 && plan->threads <= FA3_QUANTIZE_THREADS);
  assert_true(plan->shared_bytes <= FA3_QUANTIZE_SHARED_BYTES);
  assert_true(plan->tile_rows >= 1 && plan->tile_rows * lanes <= plan->threads);
  assert_true(plan->tile_rows <= FA3_QUANTIZE_TILE_ROWS);
  /* All rows have a tile, and no tile has rows of two spans. */
  assert_int_equal(plan->span_tiles, divide_up(plan->span_rows, plan->tile_rows));
  assert_int_equal(plan->tiles, divide_up(longest, plan->span_rows) * plan->span_tiles);
  /* A scale is of one tile that has all of its rows, or of a span. */
  if (plan->from == FA3_QUANTIZE_OF_TILE)
    assert_true(plan->span_tiles == 1 && (rows && rows < longest ? plan->tile_rows % rows == 0
                                                                 : plan->tile_rows >= longest));
  else
    assert_int_equal(plan->span_rows, rows && rows < longest ? rows : longest);
  if (plan->cluster) {
    assert_true(plan->cluster <= 16 && (plan->cluster & (plan->cluster - 1)) == 0);
    assert_true(plan->cluster <= plan->tiles);
    assert_int_equal(plan->blocks, heads * plan->cluster);
    assert_int_equal(plan->in_turn, 1);
  } else {
    assert_true(plan->from != FA3_QUANTIZE_OF_SEQUENCE && !problem->subtract_mean);
    assert_true(plan->blocks >= 1 && plan->blocks <= heads * plan->tiles);
    assert_int_equal(problem->heads_q % plan->in_turn, 0);
  }
}

static void test_every_plan_fits(void **state) {
  (void)state;
  static const int64_t head_dims[] = {16, 64, 80, 128, 192, 256};
  static const int64_t lengths[] = {1, 100, 129, 1000, 4096, 50000};
  static const int64_t rows[] = {0, 1, 48, 128, 1000};
  static const uint32_t flags[] = {0, FA3_SUBTRACT_MEAN, FA3_ROTATE};
  static const fa3_dtype tables[] = {0, FA3_BFLOAT16, FA3_FLOAT32};
  enum { LENGTHS = sizeof lengths / sizeof *lengths, ROWS = sizeof rows / sizeof *rows };
  enum { FLAGS = sizeof flags / sizeof *flags, TABLES = sizeof tables / sizeof *tables };
  for (size_t d = 0; d < sizeof head_dims / sizeof *head_dims; d++)
    for (int64_t heads = 1; heads <= 64; heads *= 4)
      for (int n = 0; n < LENGTHS * ROWS; n++)
        for (int f = 0; f < FLAGS * TABLES; f++) {
          const struct problem problem =
              make_turned(1 + n % 3, lengths[n / ROWS], heads, head_dims[d], rows[n % ROWS],
                          flags[f % FLAGS], tables[f / FLAGS]);
          const struct quantize_plan plan = plan_of(&problem);
          check_plan(&problem, &plan);
        }
}

/* Heads of long sequences, each with one scale: clusters take them. Few heads have small blocks,
 * two for each multiprocessor; so few that 16 blocks each would leave some without work have no
 * clusters, but where a mean is subtracted. */
static void test_few_heads(void **state) {
  (void)state;
  static const struct {
    int64_t heads;
    uint32_t flags;
    int32_t cluster, threads, from;
  } cases[] = {
      {4, 0, 0, 0, FA3_QUANTIZE_FIND},
      {8, 0, 0, 0, FA3_QUANTIZE_FIND},
      {9, 0, 16, 256, FA3_QUANTIZE_OF_SEQUENCE},
      {16, 0, 16, 256, FA3_QUANTIZE_OF_SEQUENCE},
      {33, 0, 8, 256, FA3_QUANTIZE_OF_SEQUENCE},
      {34, 0, 4, 0, FA3_QUANTIZE_OF_SEQUENCE},
      {8, FA3_SUBTRACT_MEAN, 16, 0, FA3_QUANTIZE_OF_SEQUENCE},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct problem problem = make_problem(1, 16384, cases[i].heads, 128, 0, cases[i].flags);
    const struct quantize_plan plan = plan_of(&problem);
    check_plan(&problem, &plan);
    assert_int_equal(plan.from, cases[i].from);
    assert_int_equal(plan.cluster, cases[i].cluster);
    if (cases[i].threads)
      assert_int_equal(plan.threads, cases[i].threads);
    else
      assert_true(plan.threads > 256);
  }
}

/* Rows that are rotated after rotary embedding: the kernel of tensor cores has those that fill its
 * head dim, in blocks of half the threads where a scale's rows fit, heads of the same rows in turn.
 */
static void test_turned_and_rotated(void **state) {
  (void)state;
  static const struct {
    int64_t head_dim, rows;
    uint32_t flags;
    int rotated; /* 1: by tensor cores */
    int32_t threads, in_turn;
  } cases[] = {
      {64, 128, FA3_ROTATE, 1, 1024, 8},  {128, 128, FA3_ROTATE, 1, 512, 4},
      {128, 1, FA3_ROTATE, 1, 512, 4},    {128, 256, FA3_ROTATE, 1, 1024, 4},
      {256, 128, FA3_ROTATE, 1, 1024, 4}, {256, 64, FA3_ROTATE, 1, 512, 4},
      {96, 128, FA3_ROTATE, 0, 1024, 4},  {128, 128, 0, 0, 1024, 1},
      {64, 128, 0, 0, 1024, 8},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct problem problem =
        make_turned(4, 8192, 16, cases[i].head_dim, cases[i].rows, cases[i].flags, FA3_BFLOAT16);
    const struct quantize_plan plan = plan_of(&problem);
    check_plan(&problem, &plan);
    assert_int_equal(plan.kernel->kind == &quantize_rotated_kind, cases[i].rotated);
    assert_int_equal(plan.threads, cases[i].threads);
    assert_int_equal(plan.in_turn, cases[i].in_turn);
  }
}

/* A scale of all heads, or of all sequences, is no cluster's. */
static void test_scale_of_all(void **state) {
  (void)state;
  for (int64_t heads = 1; heads <= 64; heads *= 2) {
    struct problem problem = make_problem(2, 5000, heads, 128, 0, 0);
    problem.codes_scale.batch = problem.codes_scale.heads = 1;
    const struct quantize_plan plan = plan_of(&problem);
    check_plan(&problem, &plan);
    assert_int_equal(plan.from, FA3_QUANTIZE_FIND);
    assert_int_equal(plan.cluster, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_plan_fits),
      cmocka_unit_test(test_few_heads),
      cmocka_unit_test(test_turned_and_rotated),
      cmocka_unit_test(test_scale_of_all),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
