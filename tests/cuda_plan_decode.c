/* How calls of few queries, or on a cache, would be split on a GPU, without one. */
#include "cuda/kernels.h"
#include "cuda/plan.h"
#include "cuda_facts.h"
#include "cuda_problem.h"
#include "integer.h"

/* Of as few keys more queries do, if their blocks all begin at once. */
static void test_one_short_round(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k, head_dim;
    bool decodes;
  } cases[] = {{1, 65, 65, 8, 8, 128, true},     {2, 100, 100, 8, 8, 128, true},
               {1, 128, 128, 8, 8, 64, true},    {1, 128, 128, 32, 8, 64, false},
               {1, 129, 129, 8, 8, 64, false},   {1, 100, 129, 8, 8, 64, false},
               {2, 100, 100, 12, 12, 96, false}, {1, 128, 128, 8, 8, 256, true},
               {1, 100, 100, 12, 12, 256, false}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem =
        make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries, cases[i].heads_q,
                     cases[i].heads_k, cases[i].head_dim, cases[i].head_dim);
    problem.rows_k = problem.key.rows = problem.value.rows = problem.max_seqlen_k = cases[i].keys;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decodes, cases[i].decodes);
  }
}

/* Few queries go to the decode kernel: enough blocks for the memory, whatever the batch. */
static void test_splits(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen_k, heads_q, heads_k;
    int32_t splits, cluster;
  } cases[] = {
      {1, 1024, 32, 8, 8, 8},     {1, 8192, 32, 8, 8, 8},   {8, 8192, 32, 8, 2, 2},
      {32, 8192, 32, 8, 2, 2},    {128, 2048, 32, 8, 1, 1}, {1, 1024, 16, 1, 16, 16},
      {1, 131072, 16, 1, 128, 2}, {8, 8192, 16, 1, 8, 8},   {1, 64, 16, 1, 1, 1},
      {1, 0, 16, 1, 1, 1},        {128, 2048, 16, 1, 2, 2}, {1, 8192, 16, 1, 64, 8},
      {1, 131072, 32, 8, 16, 2},  {3, 5000, 32, 8, 8, 8},   {32, 8192, 16, 1, 4, 4},
      {8, 1024, 32, 8, 2, 2},     {7, 1408, 40, 8, 2, 2},   {24, 213, 8, 8, 1, 1},
  };
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem =
        make_problem(FA3_BFLOAT16, cases[i].batch, 1, cases[i].heads_q, cases[i].heads_k, 128, 128);
    problem.rows_k = problem.max_seqlen_k = cases[i].seqlen_k;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_true(plan.decodes);
    assert_int_equal(plan.decode.splits, cases[i].splits);
    assert_int_equal(plan.decode.cluster, cases[i].cluster);
    assert_true((plan.decode.combine != NULL) == (cases[i].splits > cases[i].cluster));
    problem.split_keys = 128;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decode.cluster, 1);
    assert_int_equal(plan.decode.splits, larger(divide_up(cases[i].seqlen_k, 128), 1));
  }
}

/* Of 16 bits with lengths that only the device knows: keys of long sequences are dealt out, if
 * these are few, to a block for each head in every team; others have fewer splits the more they are
 * and the shorter. */
static void test_unknown_lengths(void **state) {
  (void)state;
  static const int32_t lengths[128];
  static const struct {
    int64_t batch, seqlen_k, heads_k;
    int32_t blocks, splits;
  } cases[] = {
      {8, 8192, 8, 128, 1}, {4, 8192, 8, 0, 4},    {16, 4096, 8, 128, 1}, {8, 16384, 1, 132, 1},
      {7, 8192, 5, 130, 1}, {2, 8192, 50, 250, 1}, {3, 8192, 8, 0, 8},    {4, 2048, 8, 0, 4},
      {8, 1024, 8, 0, 2},   {16, 2048, 8, 0, 2},   {32, 8192, 8, 128, 1}, {64, 4096, 8, 0, 2},
      {64, 512, 8, 0, 1},   {128, 2048, 8, 0, 1},  {32, 4096, 8, 0, 4},   {48, 8192, 8, 128, 1},
      {50, 8192, 8, 0, 2},
  };
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t heads = cases[i].heads_k;
    struct problem problem = make_problem(FA3_BFLOAT16, cases[i].batch, 1, heads, heads, 128, 128);
    problem.rows_k = problem.max_seqlen_k = cases[i].seqlen_k;
    problem.seqused_k = lengths;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decode.blocks, cases[i].blocks);
    assert_int_equal(plan.decode.splits, cases[i].splits);
    assert_true(plan.decode.alone == (cases[i].blocks > 0 && cases[i].blocks <= 132));
    assert_true(plan.decode.blocks % heads == 0);
    problem.features |= FA3_FEATURE_PAGE_TABLE; /* pages of one row */
    problem.key.rows = problem.value.rows = 1;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_true((plan.decode.blocks > 0) == (cases[i].blocks > 0 && cases[i].batch * heads < 192));
  }
}

/* An H200's memory. */
static const struct cuda_facts faster = {.architecture = "sm_90a",
                                         .multiprocessors = 132,
                                         .most_multiprocessors = 132,
                                         .bandwidth = 4917};

/* A faster memory would be idle beside clusters on half of the multiprocessors: from some keys on
 * all of these have one of a pair of blocks. */
static void test_pairs(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen_k, heads_k;
    fa3_dtype dtype;
    int32_t splits; /* 0: no pairs */
  } cases[] = {
      {1, 6144, 8, FA3_BFLOAT16, 16},   {1, 6143, 8, FA3_BFLOAT16, 0},
      {2, 4096, 8, FA3_BFLOAT16, 8},    {1, 2048, 32, FA3_BFLOAT16, 4},
      {1, 8192, 6, FA3_BFLOAT16, 0},    {8, 2048, 8, FA3_BFLOAT16, 2},
      {1, 49152, 1, FA3_BFLOAT16, 128}, {4, 6000, 8, FA3_FLOAT8_E4M3, 4},
      {4, 1500, 8, FA3_FLOAT8_E4M3, 0},
  };
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t heads = cases[i].heads_k;
    struct problem problem =
        make_problem(FA3_BFLOAT16, cases[i].batch, 1, 4 * heads, heads, 128, 128);
    problem.key.dtype = problem.value.dtype = cases[i].dtype;
    problem.rows_k = problem.max_seqlen_k = cases[i].seqlen_k;
    assert_int_equal(plan_forward(&problem, &faster, &plan), FA3_OK);
    const bool pairs = plan.decode.alone && plan.decode.cluster == 2;
    if (pairs != (cases[i].splits > 0) || (pairs && plan.decode.splits != cases[i].splits))
      fail_msg("case %zu: %d splits in clusters of %d", i, plan.decode.splits, plan.decode.cluster);
    if (pairs && plan.decode.splits > 2) assert_true(plan.decode.room.partial.used);
    if (cases[i].dtype != FA3_BFLOAT16) continue; /* codes have more warps alone, on any card */
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_false(plan.decode.alone);
  }
}

/* Keys are dealt out to all blocks alike where sequences' own splits would leave the memory idle:
 * of codes with lengths that only the device knows, and where the memory is faster. */
static void test_dealt_keys(void **state) {
  (void)state;
  static const int32_t lengths[32];
  struct cuda_plan plan;
  struct problem problem = make_problem(FA3_BFLOAT16, 11, 1, 16, 1, 128, 128);
  problem.rows_k = problem.max_seqlen_k = 32768;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 0);
  assert_int_equal(plan_forward(&problem, &faster, &plan), FA3_OK);
  assert_true(plan.decode.alone && plan.decode.blocks == 132);
  assert_non_null(plan.decode.combine);
  const size_t size = plan.workspace_size;
  for (int rows = 2; rows <= 8192; rows *= 2) { /* with more there is no less room */
    problem.rows_q = problem.max_seqlen_q = rows;
    assert_int_equal(plan_forward(&problem, &faster, &plan), FA3_OK);
    assert_true(plan.workspace_size >= size);
    if (plan.decodes && plan.decode.blocks)
      assert_true(plan.decode.row_tiles * 11 <= 4096 && plan.decode.row_tiles <= 4);
  }
  problem.rows_q = problem.max_seqlen_q = 1;
  problem.split_keys = 128;
  assert_int_equal(plan_forward(&problem, &faster, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 0);
  problem.split_keys = 0;
  problem.num_splits = 4;
  assert_int_equal(plan_forward(&problem, &faster, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 0);

  problem = make_problem(FA3_BFLOAT16, 8, 1, 32, 8, 128, 128);
  problem.rows_k = problem.max_seqlen_k = 8000;
  problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(plan_forward(&problem, i ? &faster : &facts, &plan), FA3_OK);
    assert_true(plan.decode.alone && plan.decode.splits == 2 && plan.decode.blocks == 0);
    assert_int_equal(plan.decode.kernel->warps, 8);
  }

  problem = make_problem(FA3_BFLOAT16, 32, 1, 33, 11, 128, 128);
  problem.rows_k = problem.max_seqlen_k = 8192;
  problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 0);
  problem.seqused_k = lengths;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(plan_forward(&problem, i ? &faster : &facts, &plan), FA3_OK);
    assert_true(plan.decode.alone && plan.decode.blocks == 132);
    assert_int_equal(plan.decode.kernel->warps, 8);
  }
  problem.features |= FA3_FEATURE_PAGE_TABLE; /* small pages are looked up by two blocks in turns */
  problem.key.rows = problem.value.rows = 1;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(!plan.decode.alone && plan.decode.blocks == 264);
  assert_int_equal(plan.decode.kernel->warps, 0);
  problem.features = 0;
  problem.key.rows = problem.value.rows = problem.rows_k;
  problem.max_seqlen_k = 256;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 0);
}

static int32_t heads_of_block(const struct problem *problem) {
  struct cuda_plan plan;
  assert_int_equal(plan_forward(problem, &facts, &plan), FA3_OK);
  assert_true(plan.decodes);
  return (int32_t)decode_heads(plan.decode.kernel);
}

/* Blocks have two heads of codes where there is much to read, and where all their rows are a
 * block's. Then keys are dealt out, but to many sequences alike. */
static void test_pairs_of_heads(void **state) {
  (void)state;
  struct problem problem = make_problem(FA3_BFLOAT16, 32, 1, 32, 8, 128, 128), other;
  problem.rows_k = problem.max_seqlen_k = 8192;
  assert_int_equal(heads_of_block(&problem), 1);
  problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  assert_int_equal(heads_of_block(&problem), 2);
  struct cuda_plan plan;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.decode.blocks, 132);
  other = problem;
  other.batch = 64;
  assert_int_equal(plan_forward(&other, &facts, &plan), FA3_OK);
  assert_true(plan.decode.blocks == 0 && plan.decode.splits == 1);
  other = problem;
  other.split_keys = 1024; /* the same whatever the batch */
  assert_int_equal(heads_of_block(&other), 1);
  other = problem;
  other.rows_q = other.max_seqlen_q = 2;
  assert_int_equal(heads_of_block(&other), 1);
  other = problem;
  other.rows_k = other.max_seqlen_k = 1024;
  assert_int_equal(heads_of_block(&other), 1);
  problem = make_problem(FA3_BFLOAT16, 32, 1, 128, 8, 128, 128); /* 16 rows of a head */
  problem.rows_k = problem.max_seqlen_k = 8192;
  problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  assert_int_equal(heads_of_block(&problem), 1);
}

/* Sequences alike, of which pairs of blocks fill the GPU: each has a multiprocessor and eight
 * warps. These are the cases of test_lone_blocks in tests/gpu/cache.c. */
static void test_lone_blocks(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries;
    int32_t rows, heads;
  } cases[] = {{32, 1, 8, 0}, {32, 4, 16, 0}, {64, 1, 16, 2}, {32, 3, 16, 0}};
  for (int64_t head_dim = 64; head_dim <= 128; head_dim *= 2)
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
      struct cuda_plan plan;
      struct problem problem =
          make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries, 8, 2, head_dim, head_dim);
      problem.rows_k = problem.max_seqlen_k = 4160;
      problem.key.rows = problem.value.rows = 16;
      problem.features |= FA3_FEATURE_PAGE_TABLE;
      problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_true(plan.decode.alone && plan.decode.splits == 2 && plan.decode.cluster == 2);
      assert_int_equal(plan.decode.kernel->warps, 8);
      assert_int_equal(plan.decode.kernel->tile_q, cases[i].rows);
      assert_int_equal(plan.decode.kernel->heads, cases[i].heads);
      assert_int_equal(decode_threads(plan.decode.kernel), 256);
      problem.split_keys = 1024; /* whose results do not depend on the batch */
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_int_equal(plan.decode.kernel->warps, 0);
    }
}

/* More rows of codes than a block of decode_fp8 has, and much to read again for each block: splits
 * of chunk_fp8, or where rows are few and there is more to read of speculative_fp8, for a last
 * round of blocks that is not short, and for long sequences among others. Where lengths may be far
 * apart speculative_fp8 deals keys out, to a block for each key head in as many teams as there is
 * room for. */
static void test_chunk_splits(void **state) {
  (void)state;
  static const int32_t lengths[600];
  static const struct {
    int64_t batch, queries, heads_k, keys, head_dim;
    int32_t splits, of_unknown;
    bool speculative;
    int32_t dealt_to; /* blocks, where lengths are unknown */
  } cases[] = {       /* Of test_small_chunks in tests/gpu/cache.c. */
               {4, 8, 2, 4160, 128, 13, 13, false, 0},
               {16, 8, 2, 4160, 128, 4, 4, false, 0},
               {21, 6, 2, 4160, 128, 3, 3, false, 0},
               {4, 12, 2, 4160, 128, 13, 13, false, 0},
               {10, 12, 2, 4160, 128, 6, 6, false, 0},
               {7, 18, 2, 4160, 128, 9, 9, false, 0},
               {32, 8, 2, 4160, 128, 4, 1, true, 264},
               {51, 5, 2, 4160, 128, 2, 1, true, 264},
               {36, 7, 2, 4160, 128, 3, 1, true, 264},
               {4, 12, 2, 4160, 64, 7, 7, false, 0},
               {10, 12, 2, 4160, 64, 6, 6, false, 0},
               {7, 18, 2, 4160, 64, 7, 7, false, 0},
               {4, 8, 2, 4160, 64, 7, 7, false, 0},
               {16, 8, 2, 4160, 64, 4, 4, false, 0},
               {21, 6, 2, 4160, 64, 3, 3, false, 0},
               {32, 8, 2, 4160, 64, 4, 1, true, 264},
               /* Of others. */
               {1, 8, 8, 8192, 128, 16, 16, false, 0},
               {32, 8, 8, 8192, 128, 1, 1, true, 264},
               {18, 8, 8, 8192, 128, 3, 1, true, 264},
               {8, 8, 8, 8192, 128, 4, 1, true, 264},
               {32, 8, 8, 32768, 128, 1, 1, true, 264},
               {12, 32, 8, 16384, 128, 1, 2, false, 0},
               {64, 8, 8, 1024, 128, 1, 1, true, 264},
               {27, 8, 5, 8000, 128, 3, 1, true, 260}, /* 52 teams: four blocks are left over */
               {600, 8, 8, 8192, 128, 1, 1, true, 0},  /* more tiles than there is room for */
               {4, 8, 8, 8192, 128, 4, 4, false, 0},
               {32, 8, 8, 8192, 256, 0, 0, false, 0},
               {32, 4, 8, 8192, 128, 0, 0, false, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct cuda_plan plan;
    const int64_t heads = cases[i].heads_k;
    struct problem problem = make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries, 4 * heads,
                                          heads, cases[i].head_dim, cases[i].head_dim);
    problem.rows_k = problem.max_seqlen_k = cases[i].keys;
    problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    for (int unknown = 0; unknown < 2; unknown++) {
      problem.seqused_k = unknown ? lengths : NULL;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_int_equal(!plan.decode.chunk, plan.decode.kernel != NULL);
      assert_int_equal(plan.decode.chunk_splits, unknown ? cases[i].of_unknown : cases[i].splits);
      if (!plan.decode.chunk) continue;
      assert_string_equal(plan.decode.chunk->kind->entries[0],
                          cases[i].speculative ? "speculative_fp8" : "chunk_fp8");
      const int64_t rows = cases[i].batch * cases[i].queries * 4 * heads;
      assert_true(plan.decode.chunk_splits == 1 ||
                  plan.decode.chunk_splits * rows <= chunk_rows(&problem, &facts));
      /* Two blocks a multiprocessor; each has room for two tiles. */
      assert_int_equal(plan.decode.chunk_blocks, unknown ? cases[i].dealt_to : 0);
      assert_true((int64_t)plan.decode.chunk_blocks * 2 * 32 <= chunk_rows(&problem, &facts));
      assert_int_equal(plan.decode.combine != NULL,
                       plan.decode.chunk_splits > 1 || plan.decode.chunk_blocks > 0);
      problem.num_splits = 1;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_int_equal(plan.decode.chunk_blocks, 0);
      problem.num_splits = 0;
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_splits),          cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_unknown_lengths), cmocka_unit_test(test_one_short_round),
      cmocka_unit_test(test_dealt_keys),      cmocka_unit_test(test_pairs_of_heads),
      cmocka_unit_test(test_lone_blocks),     cmocka_unit_test(test_chunk_splits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
