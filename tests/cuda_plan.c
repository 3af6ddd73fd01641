/* How calls would run on a GPU, without one: which kernel, how query heads share tiles, what goes
 * through the workspace. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "cuda/append.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/scales.h"
#include "cuda_facts.h"
#include "cuda_problem.h"
#include "engine.h"
#include "integer.h"
#include "kernels/mask.h"
#include "test.h"

/* Every pair of head dims finds a kernel that holds it and no smaller one does. */
static void test_every_head_dim(void **state) {
  (void)state;
  for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8)
    for (int64_t value_head_dim = 8; value_head_dim <= 256; value_head_dim += 8)
      for (int softcap = 0; softcap < 2; softcap++) {
        const struct kernel *kernel;
        assert_int_equal(find_forward_kernel(NULL, FA3_BFLOAT16, head_dim, value_head_dim,
                                             softcap ? FA3_FEATURE_SOFTCAP : 0, false, &kernel),
                         FA3_OK);
        assert_true(kernel->head_dim >= head_dim && kernel->value_head_dim >= value_head_dim);
        assert_true(kernel->softcap || !softcap);
        for (int k = 0; k < KERNELS; k++) {
          const struct kernel *other = &kernels[k];
          if (other->kind == kernel->kind && other->dtype == kernel->dtype &&
              other->head_dim >= head_dim && other->value_head_dim >= value_head_dim &&
              (other->softcap || !softcap))
            assert_true(other->head_dim + other->value_head_dim >=
                        kernel->head_dim + kernel->value_head_dim);
        }
      }
  const struct kernel *kernel;
  assert_int_equal(find_forward_kernel(NULL, FA3_FLOAT16, 264, 64, 0, false, &kernel),
                   FA3_UNSUPPORTED);
}

/* A block has at most 227 KiB of shared memory. */
static void test_kernels_fit(void **state) {
  (void)state;
  for (int k = 0; k < KERNELS; k++)
    assert_in_range(kernel_shared_bytes(&kernels[k]), kernels[k].kind->phase ? 1 : 0, 232448);
}

static void test_pages(void **state) {
  (void)state;
  static const struct {
    int64_t head_dim, page_size;
    int32_t box;
  } cases[] = {{128, 1, 0},    {128, 2, 0},    {128, 3, 0},   {128, 4, 0},     {128, 16, 16},
               {128, 48, 16},  {128, 64, 64},  {128, 100, 0}, {128, 128, 128}, {128, 256, 128},
               {128, 1000, 8}, {256, 256, 64}, {192, 64, 32}, {192, 96, 96},   {64, 7, 0}};
  static const int32_t leftpad_k[1];
  static int32_t page_table[1];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem =
        make_problem(FA3_FLOAT16, 1, 500, 2, 2, cases[i].head_dim, cases[i].head_dim);
    problem.key.rows = problem.value.rows = cases[i].page_size;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.box, 0);
    problem.features |= FA3_FEATURE_PAGE_TABLE;
    problem.page_table =
        (struct operand){.data = (char *)page_table, .dtype = FA3_INT32, .batch = 1, .rows = 1};
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.box, cases[i].box);
    assert_true(plan.forward.kernel->pages);
    problem.leftpad_k = leftpad_k; /* tiles begin anywhere */
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.box, 0);
  }
}

/* The kernels that leave out what the last tile of keys lacks are for calls whose sequences all
 * have as many keys, and see them all. */
static void test_few_last_keys(void **state) {
  (void)state;
  static const struct {
    int64_t keys, head_dim;
    int32_t last_keys;
  } cases[] = {{523, 128, 32}, {257, 64, 32},  {544, 128, 32},  {545, 128, 64}, {577, 64, 96},
               {20, 64, 32},   {77, 128, 96},  {2144, 128, 96}, {609, 128, 0},  {512, 64, 0},
               {523, 96, 0},   {523, 120, 32}, {523, 40, 32},   {523, 256, 0},  {523, 80, 0}};
  static int32_t lengths[65];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t dim = cases[i].head_dim;
    struct problem problem = make_problem(FA3_FLOAT16, 64, cases[i].keys, 8, 8, dim, dim);
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->last_keys, cases[i].last_keys);
    problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->last_keys, 0);
    problem.window_right = FA3_NO_LIMIT;
    problem.seqused_k = lengths;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->last_keys, 0);
    problem.seqused_k = NULL;
    problem.features |= FA3_FEATURE_SOFTCAP;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->last_keys, 0);
  }
  /* Keys that are shared out to several blocks. */
  struct problem problem = make_problem(FA3_BFLOAT16, 1, 4100, 1, 1, 128, 128);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(plan.forward.splits > 1);
  assert_int_equal(plan.forward.kernel->last_keys, 0);
}

/* The kernels for a causal mask's diagonal are for dense calls in whole tiles, each of one query
 * head, whose diagonal begins at a multiple of 64 keys. */
static void test_diagonal(void **state) {
  (void)state;
  static const struct {
    int64_t queries, keys, head_dim;
    int32_t diagonal;
  } cases[] = {{2048, 2048, 128, 1}, {2000, 2000, 128, 1}, {2048, 2112, 128, 1},
               {2048, 1984, 64, 1},  {1999, 2127, 256, 1}, {2048, 2049, 128, 0},
               {2048, 2080, 64, 0},  {2048, 2048, 40, 1},  {2048, 2048, 96, 0},
               {2048, 2048, 192, 0}, {2048, 2048, 200, 1}, {200, 200, 128, 1}};
  static int32_t lengths[65];
  static int64_t diagonals[64];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t dim = cases[i].head_dim;
    struct problem problem = make_problem(FA3_BFLOAT16, 64, cases[i].queries, 8, 8, dim, dim);
    problem.max_seqlen_k = problem.key.rows = problem.value.rows = cases[i].keys;
    problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->diagonal, cases[i].diagonal);
    for (int other = 0; other < 9; other++) {
      struct problem changed = problem;
      if (other == 0) changed.window_right = FA3_NO_LIMIT;
      if (other == 1) changed.window_right = 64;
      if (other == 2) changed.window_left = 100;
      if (other == 3) changed.seqused_k = lengths;
      if (other == 4) changed.features |= FA3_FEATURE_SOFTCAP;
      if (other == 5) changed.seqused_q = lengths;
      if (other == 6) changed.leftpad_k = lengths;
      if (other == 7) changed.diagonal = diagonals;
      if (other == 8) changed.features |= FA3_FEATURE_PAGE_TABLE;
      assert_int_equal(plan_forward(&changed, &facts, &plan), FA3_OK);
      assert_int_equal(plan.forward.kernel->diagonal, 0);
    }
  }
  /* A tile of one warpgroup, keys shared out, and heads that share tiles. */
  static const struct {
    int64_t batch, seqlen, heads_q, heads_k;
  } others[] = {{1, 500, 20, 20}, {1, 16384, 1, 1}, {64, 139, 24, 6}};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    struct problem problem = make_problem(FA3_BFLOAT16, others[i].batch, others[i].seqlen,
                                          others[i].heads_q, others[i].heads_k, 128, 128);
    problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.kernel->diagonal, 0);
  }
}

/* Threads that copy rows count in 32 bits. */
static void test_far_rows(void **state) {
  (void)state;
  static const struct {
    int64_t page_size, stride;
    fa3_status status;
  } cases[] = {{1, 256, FA3_OK}, {1, 264, FA3_UNSUPPORTED}, {16, 264, FA3_OK}};
  static int32_t page_table[1];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_problem(FA3_BFLOAT16, 1, 500, 2, 2, 128, 128);
    problem.features |= FA3_FEATURE_PAGE_TABLE;
    problem.page_table =
        (struct operand){.data = (char *)page_table, .dtype = FA3_INT32, .batch = 1, .rows = 1};
    problem.value.batch = 1 << 30;
    problem.value.rows = problem.key.rows = cases[i].page_size;
    problem.value.stride_batch = cases[i].stride;
    assert_int_equal(plan_forward(&problem, &facts, &plan), cases[i].status);
  }
}

/* Tiles that are not there have no numbers where they would be many. */
static void test_packed_lengths(void **state) {
  (void)state;
  static const struct {
    int64_t rows, longest, batch;
    int packed;
  } cases[] = {{7000, 3000, 41, 1},
               {8192, 1024, 8, 0},  /* all alike */
               {4000, 200, 50, 0}}; /* two blocks at most */
  static int32_t cu_seqlens[64];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_problem(FA3_BFLOAT16, 1, cases[i].rows, 16, 16, 128, 128);
    problem.cu_seqlens_q = problem.cu_seqlens_k = cu_seqlens;
    problem.max_seqlen_q = problem.max_seqlen_k = cases[i].longest;
    problem.batch = cases[i].batch;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tiles.packed, cases[i].packed);
    assert_true(plan.forward.next_tile.used);
  }
}

/* Causal and short: heads go in groups, but for the last, with a tile for each multiprocessor. */
static void test_short_sequences(void **state) {
  (void)state;
  static const struct {
    int64_t seqlen, batch;
    bool grouped;
  } cases[] = {{128, 128, false}, {256, 64, true}, {512, 32, true}, {1000, 16, true},
               {512, 2, true},    {1024, 1, true}, {2048, 8, false}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem =
        make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].seqlen, 32, 32, 128, 128);
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tiles.group, 0);
    problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    const fa3_tile_space tiles = plan.forward.tiles;
    assert_int_equal(tiles.grouped > 0, cases[i].grouped);
    if (!tiles.grouped) continue;
    assert_int_equal(tiles.grouped % tiles.group, 0);
    const int last = (tiles.heads * tiles.batches - tiles.grouped) * tiles.blocks;
    assert_in_range(last, 132 - tiles.blocks, 132 + tiles.group * tiles.blocks);
  }
}

/* Causal and long: all heads are under way together where the cache holds their keys and values, or
 * where they are few and each is more than a section. */
static void test_long_sequences(void **state) {
  (void)state;
  static const struct {
    int64_t seqlen, batch, heads, heads_k;
    int32_t group;
  } cases[] = {{2048, 1, 32, 32, 32},  {2048, 2, 16, 16, 32}, {2048, 3, 16, 16, 0},
               {8192, 1, 8, 8, 8},     {8192, 1, 64, 8, 64},  {8192, 1, 16, 16, 0},
               {16384, 1, 16, 16, 16}, {16384, 1, 17, 17, 0}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].seqlen,
                                          cases[i].heads, cases[i].heads_k, 128, 128);
    problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tiles.group, cases[i].group);
    assert_int_equal(plan.forward.tiles.grouped, 0);
  }
}

/* As many queries as keys, and key heads as query heads. */
static struct problem make_square(int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim,
                                  bool causal) {
  struct problem problem =
      make_problem(FA3_BFLOAT16, batch, seqlen, heads, heads, head_dim, head_dim);
  if (causal) problem.window_right = 0;
  return problem;
}

/* Tiles are smaller where the grid has few of them, or few in its last round. */
static void test_tile_sizes(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen, heads, head_dim;
    bool causal;
    int32_t queries;
  } cases[] = {
      {1, 1024, 1, 128, false, 64},   {1, 1024, 8, 128, true, 64},    {1, 16384, 1, 128, true, 64},
      {1, 2048, 16, 128, false, 128}, {8, 2048, 16, 128, false, 128}, {8, 2048, 16, 128, true, 128},
      {1, 16384, 2, 64, false, 128},  {1, 2048, 12, 64, true, 128},   {1, 1024, 1, 64, false, 64},
      {2, 8192, 32, 64, true, 192},   {1, 1024, 4, 256, true, 64},    {1, 16384, 8, 256, true, 128},
      {64, 197, 12, 64, false, 192},  {32, 77, 16, 64, true, 192},    {2, 250, 32, 64, false, 128},
      {3, 512, 12, 128, true, 128},   {1, 2048, 10, 128, true, 128},  {1, 4096, 5, 128, true, 128},
      {4, 70, 12, 128, false, 128},   {4, 100, 12, 256, true, 128},   {4, 128, 12, 128, false, 64}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_square(cases[i].batch, cases[i].seqlen, cases[i].heads,
                                         cases[i].head_dim, cases[i].causal);
    problem.num_splits = 1;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tile_queries, cases[i].queries);
    assert_int_equal(plan.forward.tiles.blocks, divide_up(cases[i].seqlen, cases[i].queries));
  }
  /* Query heads that share tiles; codes, of which few tiles and keys alone leave one warpgroup of
   * two. */
  struct problem problem = make_problem(FA3_BFLOAT16, 40, 40, 8, 1, 128, 128);
  problem.key.rows = problem.value.rows = problem.rows_k = problem.max_seqlen_k = 129;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 8);
  assert_int_equal(plan.forward.tile_queries, 16);
  assert_int_equal(plan.forward.tiles.blocks, 3);
  static const struct {
    int64_t seqlen, heads, head_dim;
    int32_t queries;
  } of_codes[] = {{1024, 1, 128, 64},   {2048, 8, 64, 128},   {8192, 16, 128, 128},
                  {8192, 20, 128, 192}, {1024, 80, 128, 192}, {8192, 8, 64, 192},
                  {1024, 1, 256, 64},   {1100, 1, 256, 128},  {256, 200, 64, 128}};
  for (size_t i = 0; i < sizeof of_codes / sizeof *of_codes; i++) {
    problem = make_problem(FA3_BFLOAT16, 1, of_codes[i].seqlen, of_codes[i].heads,
                           of_codes[i].heads, of_codes[i].head_dim, of_codes[i].head_dim);
    problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    problem.num_splits = 1; /* else the kernels for caches have some of them */
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tile_queries, of_codes[i].queries);
  }
}

/* Without a mask, tiles of a last round are cut where there is a multiprocessor for each part. */
static void test_cut_tiles(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen, heads, head_dim;
    bool causal, packed, pages, codes;
    int32_t cut, parts;
  } cases[] = {{2, 4096, 10, 64, false, false, false, false, 44, 3},
               {8, 665, 4, 128, false, false, false, false, 60, 2},
               {2, 2156, 12, 256, false, false, false, false, 12, 2},
               {8, 665, 4, 128, false, false, true, false, 60, 2},
               {16, 1024, 16, 128, false, false, false, false, 0, 0}, /* too many */
               {11, 1024, 12, 128, false, false, false, false, 0, 0}, /* none are left */
               {8, 665, 4, 128, true, false, false, false, 0, 0},
               {8, 665, 4, 128, false, true, false, false, 0, 0},
               {8, 665, 4, 128, false, false, false, true, 0, 0},
               {2, 4096, 10, 64, false, false, true, false, 0, 0}, /* no registers */
               {1, 2048, 2, 128, false, false, false, false, 0, 0} /* keys are shared out */};
  static int32_t cu_seqlens[64], page_table[64];
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_square(cases[i].batch, cases[i].seqlen, cases[i].heads,
                                         cases[i].head_dim, cases[i].causal);
    if (cases[i].packed) problem.cu_seqlens_q = problem.cu_seqlens_k = cu_seqlens;
    if (cases[i].codes)
      problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    if (cases[i].pages) {
      problem.features |= FA3_FEATURE_PAGE_TABLE;
      problem.page_table =
          (struct operand){.data = (char *)page_table, .dtype = FA3_INT32, .batch = 1, .rows = 1};
    }
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    const fa3_tile_space *tiles = &plan.forward.tiles;
    assert_int_equal(tiles->cut, cases[i].cut);
    if (!tiles->cut) continue;
    assert_int_equal(tiles->parts, cases[i].parts);
    assert_int_equal(plan.forward.workers, 132);
  }
}

/* Few queries: the query heads of a key head share tiles, whatever their number. */
static void test_tiles_of_groups(void **state) {
  (void)state;
  static const int64_t groups[] = {2, 3, 5, 6, 7, 8, 16, 64};
  struct cuda_plan plan;
  for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
    /* More rows than the decode kernel is for. */
    const int64_t queries = 16 / groups[g] + 1;
    struct problem problem = make_problem(FA3_FLOAT16, 200, queries, 2 * groups[g], 2, 128, 128);
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tile_heads, groups[g]);
    assert_int_equal(plan.forward.tiles.heads, 2);
    assert_int_equal(plan.forward.tiles.blocks, 1);
  }
  /* More heads than a tile has rows, or one head each: as they are. */
  struct problem problem = make_problem(FA3_FLOAT16, 20, 1, 128, 1, 128, 128);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 1);
  problem = make_problem(FA3_FLOAT16, 3, 8192, 32, 8, 128, 128);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 1);
  assert_int_equal(plan.forward.tiles.heads, 32);
  problem = make_problem(FA3_FLOAT16, 3, 200, 8, 8, 128, 128);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 1);
  /* Fewer tiles, or shorter ones, and many fewer where O leaves row by row. */
  static const struct {
    int64_t batch, queries, keys, heads, heads_k, head_dim;
    bool causal, shared;
  } cases[] = {{60, 139, 139, 24, 6, 128, true, true},  {60, 100, 100, 24, 6, 128, true, false},
               {40, 200, 200, 24, 6, 128, true, true},  {64, 70, 70, 32, 8, 128, false, true},
               {2, 64, 64, 32, 8, 128, false, false},   {32, 150, 1024, 32, 8, 128, true, true},
               {40, 300, 300, 16, 8, 128, false, true}, {40, 300, 300, 24, 8, 128, false, false},
               {60, 139, 139, 24, 4, 128, true, true},  {24, 250, 1024, 24, 4, 128, true, false},
               {60, 250, 250, 32, 8, 64, false, true},  {60, 139, 139, 12, 4, 64, true, true},
               {16, 60, 60, 60, 12, 96, true, true},    {64, 143, 143, 24, 8, 128, true, true},
               {60, 139, 139, 16, 4, 256, true, true},  {40, 100, 100, 16, 2, 256, false, false},
               {6, 69, 69, 36, 12, 128, true, false},   {6, 69, 69, 36, 12, 256, false, false},
               {16, 129, 129, 16, 4, 256, false, true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    problem = make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries, cases[i].heads,
                           cases[i].heads_k, cases[i].head_dim, cases[i].head_dim);
    problem.key.rows = problem.value.rows = problem.rows_k = problem.max_seqlen_k = cases[i].keys;
    if (cases[i].causal) problem.window_right = 0;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.forward.tile_heads > 1, cases[i].shared);
  }
}

static bool is_staged(const struct cuda_plan *plan, enum tensor tensor) {
  for (int i = 0; i < plan->staging.count; i++)
    if (plan->staging.tensors[i].demand.tensor == tensor) return true;
  return false;
}

static void test_staging(void **state) {
  (void)state;
  struct cuda_plan plan;
  struct problem problem = make_problem(FA3_FLOAT16, 2, 200, 4, 2, 64, 64);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.workspace_size, 0);

  /* 200 rows of 4 heads of 64, twice, in 16 bits. */
  const size_t query_bytes = (size_t)2 * 200 * 4 * 64 * 2;
  problem.query.data = (char *)8;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(plan.staging.count == 1 && is_staged(&plan, TENSOR_query));
  assert_true(plan.workspace_size >= query_bytes && plan.workspace_size < query_bytes + 128);

  problem.query.data = NULL;
  problem.key.stride_head += 4;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(plan.staging.count == 1 && is_staged(&plan, TENSOR_key));
  problem.key.stride_head = 0; /* an expanded tensor needs no copy */
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.staging.count, 0);
  problem.key.stride_row = 7; /* nor the odd stride of a single row */
  problem.key.rows = problem.value.rows = problem.rows_k = problem.max_seqlen_k = 1;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.staging.count, 0);

  problem.scale = -1;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(is_staged(&plan, TENSOR_query) && plan.staging.tensors[0].demand.form == FORM_MINUS);
}

/* No stride is more than the copy engine takes: of heads that share tiles, or of a copy. */
static void test_long_strides(void **state) {
  (void)state;
  struct cuda_plan plan;
  struct problem few = make_problem(FA3_FLOAT16, 60, 40, 8, 1, 64, 64);
  few.key.rows = few.value.rows = few.rows_k = few.max_seqlen_k = 129;
  struct problem problem = few;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(!plan.decodes && plan.forward.tile_heads == 8);
  problem.query.stride_head = (int64_t)1 << 36; /* times 8, and 2 bytes: 2^40 */
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 1);
  problem = few;
  problem.output.stride_head = (int64_t)1 << 36;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_int_equal(plan.forward.tile_heads, 1);
  problem = make_problem(FA3_FLOAT16, 2, 1 << 20, 1, 1, 128, 128);
  problem.key.heads = problem.heads_q = problem.heads_k = 1 << 13;
  problem.key.stride_head = 1; /* to be copied */
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "key"));
  problem = make_problem(FA3_FLOAT16, 1, 1, 1 << 25, 1, 64, 64); /* a row of 2^31 elements */
  problem.scale = -1;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "query has rows of 2^31 elements"));
}

static void test_limits(void **state) {
  (void)state;
  struct cuda_plan plan;
  struct problem problem = make_problem(FA3_FLOAT16, 1, (int64_t)1 << 29, 1, 1, 64, 64);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  problem = make_problem(FA3_FLOAT16, (int64_t)1 << 40, 64, 1, 1, 64, 64);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  problem = make_problem(FA3_FLOAT16, 1, 1000000, 1, 1, 128, 128);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  problem = make_problem(FA3_FLOAT16, MAX_GRID, 1, 1, 1, 64, 64);
  problem.rows_k = problem.max_seqlen_k = 200;
  problem.split_keys = 128;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  problem.batch++;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  problem.split_keys = 0;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  problem = make_problem(FA3_FLOAT16, 1, 1, 1, 1, 64, 64);
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(plan.decodes);
  problem = make_problem(FA3_FLOAT16, 1, (int64_t)1 << 23, 128, 1, 8, 8); /* 2^30 rows of a head */
  problem.rows_k = problem.max_seqlen_k = problem.key.rows = problem.value.rows = 64;
  problem.output.dtype = FA3_FLOAT32;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  problem = make_problem(FA3_FLOAT16, 1, 1, 1, 1, 64, 64);
  problem.batch_k = (int64_t)1 << 32; /* of which 32 bits are 0 */
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_UNSUPPORTED);
  problem = (struct problem){.phase = FA3_APPEND,
                             .batch = 1,
                             .rows_q = 1,
                             .rows_k = 1,
                             .heads_k = 1,
                             .head_dim = 64,
                             .value_head_dim = 64};
  assert_int_equal(plan_append(&problem, &facts, &plan), FA3_OK);
  problem.head_dim = (int64_t)1 << 32;
  assert_int_equal(plan_append(&problem, &facts, &plan), FA3_UNSUPPORTED);
}

static fa3_status supports_all(const fa3_capability *capability) {
  (void)capability;
  return FA3_OK;
}

/* What an engine does not list is refused by its name, not ignored. */
static void test_a_feature_that_is_lacking(void **state) {
  (void)state;
  const struct engine engine = {
      .name = "small", .features = FA3_FEATURE_CAUSAL, .supports = supports_all};
  fa3_capability capability = {.phase = FA3_FORWARD, .features = FA3_FEATURE_CAUSAL};
  assert_int_equal(engine_supports(&engine, &capability), FA3_OK);
  capability.features |= FA3_FEATURE_LEFTPAD_KEY;
  assert_int_equal(engine_supports(&engine, &capability), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "small engine does not take leftpad_k"));
}

/* Of a scale and a cap that are not refused no factor is 0 or infinite. */
static void test_scales(void **state) {
  (void)state;
  static const float values[] = {0, 1e-45F, 1e-38F, 0.125F, 1, 3e10F, 2.35e38F, 2.37e38F, FLT_MAX};
  enum { VALUES = sizeof values / sizeof *values };
  int taken = 0;
  for (int i = 0; i < VALUES; i++)
    for (int j = 0; j < VALUES; j++)
      for (int sign = -1; sign <= 1; sign += 2) {
        const struct problem problem = {.scale = (float)sign * values[i], .softcap = values[j]};
        const float largest = fmaxf(values[i], values[j]);
        if (check_scale(&problem)) {
          assert_true(largest > 2.36e38F || (values[j] > 0 && values[i] / values[j] > 1e38F));
          continue;
        }
        taken++;
        assert_true(largest < 2.36e38F);
        const struct scales scales = make_scales((double)problem.scale, (double)problem.softcap);
        assert_true(isfinite(scales.scale_log2) && scales.scale_log2 != 0);
        assert_true(isfinite(scales.softcap_log2));
        assert_int_equal(scales.softcap_log2 != 0, values[j] > 0);
        const fa3_softmax_scale scale = make_softmax_scale((double)values[j ? j : i]);
        assert_true(isfinite(scale.inverse) && scale.inverse > 0 && scale.log2 > 0);
        assert_true(isfinite(scale.limit) && scale.limit > 0);
        assert_true(isfinite(scale.none * scale.log2) && scale.none < 0);
      }
  assert_int_equal(taken, 2 * (7 * 7 - 8));
  assert_float_equal(make_scales(1, 0).scale_log2, 1.44269504f, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_head_dim),  cmocka_unit_test(test_kernels_fit),
      cmocka_unit_test(test_tile_sizes),      cmocka_unit_test(test_cut_tiles),
      cmocka_unit_test(test_tiles_of_groups), cmocka_unit_test(test_short_sequences),
      cmocka_unit_test(test_long_sequences),  cmocka_unit_test(test_pages),
      cmocka_unit_test(test_few_last_keys),   cmocka_unit_test(test_diagonal),
      cmocka_unit_test(test_far_rows),        cmocka_unit_test(test_packed_lengths),
      cmocka_unit_test(test_staging),         cmocka_unit_test(test_long_strides),
      cmocka_unit_test(test_limits),          cmocka_unit_test(test_a_feature_that_is_lacking),
      cmocka_unit_test(test_scales),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
