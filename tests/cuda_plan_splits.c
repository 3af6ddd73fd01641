/* Which forward calls would share the keys of their tiles out, without a GPU. */
#include <fenv.h>
#include <string.h>

#include "cuda/forward_splits.h"
#include "cuda/kernels.h"
#include "cuda_facts.h"
#include "engine.h"
#include "integer.h"
#include "test.h"

static struct problem make_problem(int64_t batch, int64_t seqlen_q, int64_t seqlen_k,
                                   int64_t heads_q, int64_t heads_k, int64_t head_dim) {
  fa3_forward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  struct problem problem;
  args.query = fa3_dense(NULL, FA3_BFLOAT16, batch, seqlen_q, heads_q, head_dim);
  args.key = fa3_dense(NULL, FA3_BFLOAT16, batch, seqlen_k, heads_k, head_dim);
  args.value = args.key;
  args.output = args.query;
  assert_int_equal(problem_from_args(FA3_FORWARD, &args, &problem), FA3_OK);
  return problem;
}

static struct cuda_plan plan_of(const struct problem *problem, const struct cuda_facts *of) {
  struct cuda_plan plan;
  if (plan_forward(problem, of, &plan)) fail_msg("%s", fa3_last_error());
  return plan;
}

/* What the launch relies on. */
static void check_plan(const struct problem *problem, const struct cuda_facts *of,
                       const struct cuda_plan *cuda_plan) {
  const struct forward_plan *plan = &cuda_plan->forward;
  assert_int_equal(plan->tiles.blocks, divide_up(problem->max_seqlen_q, plan->tile_queries));
  assert_true(plan->workers <= of->multiprocessors);
  assert_true((plan->combine != NULL) == (plan->splits > 1 || plan->shares > 0));
  assert_true(plan->tile_queries * plan->tile_heads <= plan->kernel->tile_q);
  if (!plan->combine) return;
  assert_true(plan->kernel->pages);
  assert_true(plan->splits == 1 || plan->shares == 0);
  int64_t rows = plan->splits * problem->batch * problem->max_seqlen_q * problem->heads_q;
  if (plan->shares > 0) {
    rows = 2 * (int64_t)plan->shares * plan->tile_queries * plan->tile_heads;
    assert_int_equal(plan->workers, plan->shares);
    assert_int_equal(plan->shares % plan->team, 0);
    assert_int_equal(plan->tiles.heads % plan->team, 0);
    assert_true(plan->room.parts.offset + (size_t)plan->shares * sizeof(fa3_combine_tile) <=
                cuda_plan->workspace_size);
  } else {
    assert_true((int64_t)plan->splits * plan->kernel->tile_k <= problem->max_seqlen_k);
  }
  const size_t partial = sizeof(float) * (size_t)rows * (size_t)problem->value_head_dim;
  assert_true(plan->room.partial.offset + partial <= plan->room.partial_lse.offset);
  assert_true(plan->room.partial_lse.offset + sizeof(float) * (size_t)rows <=
              cuda_plan->workspace_size);
}

/* On a GPU that is whole or in parts. */
static void test_every_plan_fits(void **state) {
  (void)state;
  static const int64_t lengths[] = {1, 65, 100, 512, 2000, 8192, 70000};
  static const int multiprocessors[] = {8, 32, 85, 132};
  enum { LENGTHS = sizeof lengths / sizeof *lengths };
  enum { SIZES = sizeof multiprocessors / sizeof *multiprocessors };
  for (int64_t head_dim = 64; head_dim <= 256; head_dim += 32)
    for (int64_t heads = 1; heads <= 16; heads *= 2)
      for (int q = 0; q < LENGTHS; q++)
        for (int k = 0; k < LENGTHS; k++)
          for (int causal = 0; causal < 2; causal++) {
            struct problem problem =
                make_problem(1 + q % 2, lengths[q], lengths[k], heads, heads, head_dim);
            if (causal) problem.window_right = 0;
            for (int i = 0; i < SIZES; i++) {
              struct cuda_facts part = facts;
              part.multiprocessors = part.most_multiprocessors = multiprocessors[i];
              const struct cuda_plan plan = plan_of(&problem, &part);
              if (!plan.decodes) check_plan(&problem, &part, &plan);
            }
          }
}

static void test_few_tiles_share_keys_out(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim;
    bool causal, shared;
  } cases[] = {{1, 2048, 2048, 1, 1, 128, true, true},    {1, 8192, 8192, 1, 1, 128, true, true},
               {1, 2048, 2048, 1, 1, 64, false, true},    {1, 2048, 2048, 1, 1, 256, true, true},
               {1, 256, 16384, 1, 1, 128, false, true},   {1, 512, 16384, 8, 1, 128, true, true},
               {8, 2048, 2048, 16, 16, 128, true, false}, {1, 256, 256, 1, 1, 128, true, false},
               {1, 16384, 16384, 8, 8, 128, true, false}, {64, 197, 197, 12, 12, 64, false, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_problem(cases[i].batch, cases[i].seqlen_q, cases[i].seqlen_k,
                                          cases[i].heads_q, cases[i].heads_k, cases[i].head_dim);
    if (cases[i].causal) problem.window_right = 0;
    const struct cuda_plan plan = plan_of(&problem, &facts);
    assert_true((plan.forward.splits > 1) == cases[i].shared);
    check_plan(&problem, &facts, &plan);
    /* Not with all multiprocessors, and the same results. */
    struct cuda_facts fewer = facts;
    fewer.multiprocessors = 40;
    const struct cuda_plan beside = plan_of(&problem, &fewer);
    assert_int_equal(beside.forward.splits, plan.forward.splits);
    if (plan.forward.splits > 1)
      assert_int_equal(beside.forward.tile_queries, plan.forward.tile_queries);
    assert_int_equal(beside.workspace_size, plan.workspace_size);
    /* At most so many as the caller wants. */
    for (problem.num_splits = 1; problem.num_splits < 4; problem.num_splits++)
      assert_true(plan_of(&problem, &facts).forward.splits <= problem.num_splits);
  }
}

/* Where lengths may be far apart, or tiles are a little more than multiprocessors. */
static void test_keys_are_dealt_out(void **state) {
  (void)state;
  static const int32_t lengths[64];
  static const struct {
    int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim;
    bool differ, dealt;
    int64_t window_left; /* 0: none */
  } cases[] = {{16, 16, 32768, 32, 8, 128, true, true, 0},
               {16, 16, 32768, 32, 8, 128, false, false, 0},
               {8, 100, 32768, 6, 1, 128, true, true, 0},
               {30, 128, 4096, 5, 5, 128, false, true, 0},
               {16, 16, 1000, 32, 8, 128, true, false, 0},
               {1, 16, 32768, 32, 8, 128, true, false, 0},
               {64, 512, 32768, 32, 32, 128, true, false, 0},
               {16, 200, 16384, 20, 4, 64, true, true, 0},
               {16, 30, 16384, 8, 8, 256, true, true, 0},
               {4, 4096, 8192, 1, 1, 128, true, false, 0},
               {8, 5, 4096, 36, 6, 128, true, true, 0},
               {8, 5, 1024, 36, 6, 128, true, false, 0},
               /* Of one length: fewer tiles than multiprocessors, or little more; heads whose row
                * tiles read the same keys at about the same time. */
               {5, 172, 17799, 12, 6, 128, false, true, 0},
               {5, 180, 21905, 12, 3, 128, false, true, 0},
               {4, 207, 5447, 10, 5, 256, false, true, 0},
               /* Each tile of a head would read its keys anew. */
               {64, 2432, 12160, 1, 1, 128, false, false, 0},
               /* Those that it sees through a window. */
               {6, 610, 63617, 3, 3, 128, false, true, 6719}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_problem(cases[i].batch, cases[i].seqlen_q, cases[i].seqlen_k,
                                          cases[i].heads_q, cases[i].heads_k, cases[i].head_dim);
    if (cases[i].differ) problem.seqused_k = lengths;
    if (cases[i].window_left) {
      problem.window_left = cases[i].window_left;
      problem.window_right = 0;
    }
    const struct cuda_plan plan = plan_of(&problem, &facts);
    assert_false(plan.decodes);
    if ((plan.forward.shares > 0) != cases[i].dealt) fail_msg("case %zu", i);
    check_plan(&problem, &facts, &plan);
    /* Not where multiprocessors are to be left free, nor against the caller's wish. */
    struct cuda_facts fewer = facts;
    fewer.multiprocessors = 100;
    assert_int_equal(plan_of(&problem, &fewer).forward.shares, 0);
    problem.num_splits = 2;
    assert_int_equal(plan_of(&problem, &facts).forward.shares, 0);
  }
}

/* Whichever dimension grows, and where other kernels then take the call. */
static void test_size_never_falls(void **state) {
  (void)state;
  enum { BATCH, QUERIES, KEYS, HEADS, GROUP, HEAD_DIM, DIMENSIONS, SIZES = 5 };
  static const int64_t sizes[DIMENSIONS][SIZES] = {
      {1, 2, 8, 9, 70}, {1, 16, 17, 300, 3000}, {100, 512, 1500, 8192, 20000},
      {1, 2, 3, 8, 16}, {1, 2, 4, 8, 16},       {40, 64, 128, 136, 256}};
  enum { COMBINATIONS = 2 * 5 * 5 * 5 * 5 * 5 * 5 };
  for (int number = 0; number < COMBINATIONS; number++) {
    int64_t size[DIMENSIONS];
    size_t before = 0;
    int rest = number / 2, at[DIMENSIONS];
    for (int i = 0; i < DIMENSIONS; i++, rest /= SIZES) size[i] = sizes[i][at[i] = rest % SIZES];
    for (int grown = -1; grown < DIMENSIONS; grown++) {
      if (grown >= 0 && at[grown] == SIZES - 1) continue;
      if (grown >= 0) size[grown] = sizes[grown][at[grown] + 1];
      struct problem problem = make_problem(size[BATCH], size[QUERIES], size[KEYS],
                                            size[HEADS] * size[GROUP], size[HEADS], size[HEAD_DIM]);
      if (number % 2) problem.window_right = 0;
      const size_t bytes = plan_of(&problem, &facts).workspace_size;
      if (bytes < before)
        fail_msg("combination %d, dimension %d: %zu bytes, less than %zu", number, grown, bytes,
                 before);
      if (grown < 0)
        before = bytes;
      else
        size[grown] = sizes[grown][at[grown]];
    }
  }
}

/* Nor does a call take room that wants its tiles whole. */
static void test_no_room_without_splits(void **state) {
  (void)state;
  struct problem problem = make_problem(1, 2048, 2048, 1, 1, 128);
  assert_true(plan_of(&problem, &facts).forward.room.partial.used);
  problem.num_splits = 1;
  assert_false(plan_of(&problem, &facts).forward.room.partial.used);
}

/* Packed queries have their tiles whole, and take no room, with keys so few that fewer queries take
 * none either. */
static void test_packed_queries_do_not(void **state) {
  (void)state;
  enum { QUERIES = 1280 };
  struct problem problem = make_problem(1, QUERIES, QUERIES, 1, 1, 128);
  const int32_t lengths[] = {0, QUERIES};
  assert_true(plan_of(&problem, &facts).forward.splits > 1);
  problem.cu_seqlens_q = lengths;
  assert_int_equal(plan_of(&problem, &facts).forward.splits, 1);
  assert_false(plan_of(&problem, &facts).forward.room.partial.used);
}

/* No dimension that may be 0 is divided by, whole numbers or not. */
static void test_nothing_is_divided_by_zero(void **state) {
  (void)state;
  static const int64_t lengths[] = {0, 1, 300, 4096};
  static const int32_t none[3] = {0};
  enum { LENGTHS = sizeof lengths / sizeof *lengths, MASKS = 3 };
  for (int64_t batch = 0; batch < 3; batch++)
    for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
      for (int number = 0; number < LENGTHS * LENGTHS * MASKS * 4; number++) {
        const int packed = number % 4, mask = number / 4 % MASKS, rest = number / 4 / MASKS;
        struct problem problem =
            make_problem(batch, lengths[rest % LENGTHS], lengths[rest / LENGTHS], 8, 2, head_dim);
        if (mask) problem.window_right = 0;
        if (mask == 2) problem.window_left = 64;
        if (packed & 1) problem.cu_seqlens_q = none;
        if (packed & 2) problem.cu_seqlens_k = none;
        feclearexcept(FE_ALL_EXCEPT);
        const struct cuda_plan plan = plan_of(&problem, &facts);
        if (fetestexcept(FE_DIVBYZERO | FE_INVALID))
          fail_msg("batch %d, head dim %d, number %d", (int)batch, (int)head_dim, number);
        if (batch == 0 && !plan.decodes) assert_int_equal(plan.forward.workers, 0);
      }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_plan_fits),
      cmocka_unit_test(test_few_tiles_share_keys_out),
      cmocka_unit_test(test_keys_are_dealt_out),
      cmocka_unit_test(test_size_never_falls),
      cmocka_unit_test(test_no_room_without_splits),
      cmocka_unit_test(test_packed_queries_do_not),
      cmocka_unit_test(test_nothing_is_divided_by_zero),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
