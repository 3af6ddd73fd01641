/* Which kernels would take E4M3 codes, and with which tiles, without a GPU. */
#include "cuda/kernels.h"
#include "cuda/plan.h"
#include "cuda_facts.h"
#include "cuda_problem.h"

/* For one query the FP8 forward kernel's tiles are large, and for few in pages: the decode kernel
 * for codes takes both. */
static void test_codes(void **state) {
  (void)state;
  fa3_capability capability = {.phase = FA3_FORWARD,
                               .query_dtype = FA3_FLOAT8_E4M3,
                               .key_dtype = FA3_FLOAT8_E4M3,
                               .value_dtype = FA3_FLOAT8_E4M3,
                               .output_dtype = FA3_BFLOAT16,
                               .head_dim = 128,
                               .value_head_dim = 128};
  assert_int_equal(supports_forward(&capability), FA3_OK);
  capability.features = FA3_FEATURE_PAGE_TABLE;
  assert_int_equal(supports_forward(&capability), FA3_OK);
  capability.query_dtype = FA3_BFLOAT16;
  assert_int_equal(supports_forward(&capability), FA3_OK);
  for (int64_t queries = 1; queries <= 201; queries += 200) {
    struct cuda_plan plan;
    struct problem problem = make_problem(FA3_BFLOAT16, 2, queries, 8, 2, 128, 128);
    problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decodes, queries == 1);
    problem.features |= FA3_FEATURE_PAGE_TABLE;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_true(plan.decodes);
  }
}

/* Queries of bfloat16 on a cache of codes. */
static struct problem make_cache(int64_t batch, int64_t queries, int64_t keys, int64_t heads_q,
                                 int64_t heads_k, int64_t head_dim) {
  struct problem problem =
      make_problem(FA3_BFLOAT16, batch, queries, heads_q, heads_k, head_dim, head_dim);
  problem.rows_k = problem.max_seqlen_k = keys;
  problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  return problem;
}

/* More rows of codes than a block of decode_fp8 has, and many keys: a kernel with tiles of 128
 * rows. Keys are split where that leaves multiprocessors without work; beside single queries, that
 * the device alone knows, they are not. */
static void test_chunks(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k, head_dim;
    int32_t tiles, splits; /* 0: decode_fp8 has them */
  } cases[] = {{1, 512, 8192, 32, 8, 128, 16, 1},    {1, 2048, 8192, 32, 8, 128, 64, 1},
               {1, 8, 8192, 32, 8, 128, 1, 16},      {32, 8, 8192, 32, 8, 128, 1, 1},
               {1, 100, 131072, 16, 1, 128, 13, 10}, {1, 4, 131072, 32, 8, 128, 0, 0},
               {1, 8, 1024, 32, 8, 128, 0, 0},       {1, 8, 8192, 32, 8, 256, 0, 0},
               {1, 16, 8192, 32, 8, 256, 1, 16}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_cache(cases[i].batch, cases[i].queries, cases[i].keys,
                                        cases[i].heads_q, cases[i].heads_k, cases[i].head_dim);
    problem.softcap = 5;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_true(plan.decodes);
    assert_true((plan.decode.chunk != NULL) == (cases[i].tiles > 0));
    assert_true((plan.decode.kernel != NULL) == (cases[i].tiles == 0));
    assert_int_equal(plan.decode.chunk_tiles, cases[i].tiles);
    assert_int_equal(plan.decode.chunk_splits, cases[i].splits);
    if (cases[i].tiles) assert_true((plan.decode.combine != NULL) == (cases[i].splits > 1));
    problem.split_keys = 1024;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_null(plan.decode.chunk);
  }
  static const int32_t starts[3];
  struct problem problem = make_cache(2, 512, 8192, 32, 8, 128);
  problem.softcap = 5;
  problem.cu_seqlens_q = starts;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  assert_true(plan.decode.kernel && plan.decode.chunk && plan.decode.most_queries == 4);
  assert_int_equal(plan.decode.chunk_splits, 1);
}

/* Codes under queries of 16 bits are unpacked for the forward kernel, where so many rows read them
 * that this is faster. */
static void test_unpacked(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k, head_dim;
    int64_t heads; /* at a time; 0: they are not */
  } cases[] = {{1, 512, 8192, 32, 8, 128, 8},   {1, 2048, 8192, 32, 8, 128, 8},
               {1, 256, 8192, 32, 8, 64, 8},    {1, 256, 8192, 32, 8, 256, 8},
               {1, 512, 131072, 32, 8, 128, 8}, {1, 2048, 2048, 32, 8, 128, 8},
               {1, 64, 8192, 32, 8, 128, 0},    {1, 128, 2048, 32, 8, 128, 0},
               {4, 256, 8192, 8, 8, 128, 0},    {2, 512, 131072, 32, 8, 128, 4},
               {5, 512, 131072, 36, 9, 128, 1}, {5, 256, 131072, 36, 9, 128, 0},
               {9, 512, 131072, 32, 8, 128, 0}, {65536, 1024, 16, 8, 1, 64, 0},
               {1, 512, 8192, 32, 8, 192, 8},   {1, 2496, 8192, 32, 8, 64, 8}};
  struct cuda_plan plan;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct problem problem = make_cache(cases[i].batch, cases[i].queries, cases[i].keys,
                                        cases[i].heads_q, cases[i].heads_k, cases[i].head_dim);
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decodes, !cases[i].heads);
    if (plan.decodes) continue;
    assert_non_null(plan.forward.unpack.kernel);
    assert_int_equal(plan.forward.unpack.heads, cases[i].heads);
    assert_int_equal(plan.forward.tiles.heads,
                     cases[i].heads * (plan.forward.tile_heads > 1 ? 1 : 4));
    assert_int_equal(plan.forward.kernel->unpacked, UNPACKED_HEADS);
    assert_int_equal(plan.forward.kernel->head_dim,
                     cases[i].head_dim > 128 ? 256 : cases[i].head_dim);
    assert_null(plan.forward.few.kernel);
    if (plan.forward.kernel->tile_q > 128) assert_int_equal(plan.forward.tiles.cut, 0);
  }
  static const int32_t lengths[3];
  static float scale;
  enum { ALIKE, PAGES, PACKED, PAGE_SCALES, ROWS, CAP, FLOATS, PADDED, KEYS, MINUS, PARTS, ALL };
  for (int other = ALIKE; other < ALL; other++) {
    struct problem problem = make_cache(2, 512, 8192, 32, 8, 128);
    problem.query.dtype = problem.output.dtype = FA3_FLOAT16;
    problem.key_scale = (struct operand){
        .data = (char *)&scale, .dtype = FA3_FLOAT32, .batch = 100, .heads = 8, .stride_head = 1};
    if (other == PAGES || other == PACKED || other == PAGE_SCALES) {
      problem.features |= FA3_FEATURE_PAGE_TABLE;
      problem.key.rows = problem.value.rows = 1; /* any size is */
    }
    if (other == PACKED) problem.cu_seqlens_q = lengths;
    if (other == PAGE_SCALES) problem.key_scale.stride_batch = 8;
    if (other == ROWS) problem.value_scale_rows = 128;
    if (other == CAP) problem.softcap = 5;
    if (other == FLOATS) problem.output.dtype = FA3_FLOAT32;
    if (other == PADDED) problem.leftpad_k = lengths;
    if (other == KEYS) problem.cu_seqlens_k = lengths;
    if (other == MINUS) problem.scale = -1;
    if (other == PARTS) problem.split_keys = 1024;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    assert_int_equal(plan.decodes, other > ROWS);
    if (plan.decodes) continue;
    assert_int_equal(plan.forward.kernel->unpacked,
                     other == PAGE_SCALES || other == ROWS ? UNPACKED_ROWS : UNPACKED_HEADS);
    if (other == PACKED) assert_int_equal(plan.forward.few.most_queries, 4);
  }
}

/* Queries of codes whose tiles would leave most multiprocessors without work: the kernels for
 * caches split keys, unless the call has a window, packed sequences, a number of splits, or
 * multiprocessors that are to be left free. */
static void test_few_tiles(void **state) {
  (void)state;
  static const int32_t starts[2];
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k, head_dim;
    const char *kernel; /* NULL: the forward kernel */
  } cases[] = {{1, 256, 16384, 4, 4, 128, "chunk_fp8"},
               {1, 512, 8192, 8, 1, 128, "chunk_fp8"},
               {1, 38, 27456, 16, 4, 256, "chunk_fp8"},
               {4, 20, 34803, 2, 1, 64, "chunk_fp8"},
               {1, 84, 1315, 4, 4, 128, "decode_fp8"},
               {1, 20, 3712, 1, 1, 256, "decode_fp8"},
               {1, 31, 40000, 8, 8, 128, "speculative_fp8"},
               {1, 1024, 8192, 8, 8, 128, NULL},
               {1, 719, 933, 2, 1, 256, NULL},
               {132, 24, 2000, 8, 1, 128, NULL},
               {1, 512, 8192, 32, 8, 128, NULL},
               {2, 170, 15449, 40, 8, 256, NULL},
               {1, 44, 322, 6, 2, 128, NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int other = 0; other < 5; other++) {
      struct cuda_plan plan;
      struct problem problem =
          make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries, cases[i].heads_q,
                       cases[i].heads_k, cases[i].head_dim, cases[i].head_dim);
      problem.rows_k = problem.max_seqlen_k = cases[i].keys;
      problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
      if (other == 1) problem.num_splits = 1;
      if (other == 2) problem.window_left = 100;
      if (other == 3) problem.cu_seqlens_k = starts;
      struct cuda_facts these = facts;
      if (other == 4) these.multiprocessors = 100;
      assert_int_equal(plan_forward(&problem, &these, &plan), FA3_OK);
      assert_int_equal(plan.decodes, cases[i].kernel && !other);
      if (!plan.decodes) continue;
      const struct kernel *kernel = plan.decode.chunk ? plan.decode.chunk : plan.decode.kernel;
      assert_string_equal(kernel->kind->entries[0], cases[i].kernel);
    }
}

/* Many queries of codes on pages of codes: the forward kernel, if it takes such pages and scales.
 * Of a packed batch decode_fp8 has sequences with few queries. */
static void test_chunks_of_codes(void **state) {
  (void)state;
  static float scale;
  static const int32_t starts[3];
  static const struct {
    int64_t queries, keys, head_dim, page_size, stride_batch, scale_rows;
    int32_t box; /* 0: chunk_fp8 has them */
  } cases[] = {{512, 8192, 128, 64, 0, 0, 64},  {512, 8192, 128, 16, 0, 0, 16},
               {512, 40000, 128, 64, 0, 0, 64}, {512, 8192, 64, 256, 0, 0, 128},
               {512, 8192, 256, 64, 0, 0, 64},  {512, 8192, 128, 8, 0, 0, 0},
               {512, 8192, 128, 64, 8, 0, 0},   {512, 8192, 128, 64, 0, 64, 0},
               {100, 8192, 128, 64, 0, 0, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int packed = 0; packed < 2; packed++) {
      struct cuda_plan plan;
      struct problem problem = make_problem(FA3_BFLOAT16, 1 + packed, cases[i].queries, 32, 8,
                                            cases[i].head_dim, cases[i].head_dim);
      problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
      problem.features |= FA3_FEATURE_PAGE_TABLE;
      problem.rows_k = problem.max_seqlen_k = cases[i].keys;
      problem.key.rows = problem.value.rows = cases[i].page_size;
      problem.key_scale = problem.value_scale =
          (struct operand){.data = (char *)&scale,
                           .dtype = FA3_FLOAT32,
                           .batch = 100,
                           .stride_batch = cases[i].stride_batch};
      problem.value_scale_rows = cases[i].scale_rows;
      if (packed) problem.cu_seqlens_q = starts;
      if (packed) problem.rows_q = cases[i].queries + 1;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_int_equal(plan.decodes, cases[i].box == 0);
      if (plan.decodes) continue;
      assert_int_equal(plan.forward.box, cases[i].box);
      assert_true(plan.forward.kernel->pages);
      assert_int_equal(plan.forward.kernel->head_scales, cases[i].keys < 40000);
      assert_int_equal(plan.forward.few.kernel != NULL, packed);
      const size_t size = plan.workspace_size;
      if (packed) { /* many sequences, nearly all short: too many tiles that are not there */
        struct problem sparse = problem;
        sparse.batch = 64;
        assert_int_equal(plan_forward(&sparse, &facts, &plan), FA3_OK);
        assert_true(plan.decodes && plan.workspace_size >= size);
      }
      problem.scale = -1;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_true(plan.decodes && plan.workspace_size <= size);
      problem.scale = 1;
      problem.cu_seqlens_q = NULL;
      problem.seqused_q = starts; /* lengths of queries that the device alone knows */
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_true(plan.decodes);
    }
}

/* The kernel for scales of heads is for them alone, and for as many keys as its codes have room
 * for. */
static void test_scales_of_heads(void **state) {
  (void)state;
  for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
    for (int i = 0; i < 5; i++) {
      struct cuda_plan plan;
      struct problem problem = make_problem(FA3_BFLOAT16, 1, 4096, 8, 2, head_dim, head_dim);
      problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
      problem.query_scale_rows = 128;
      problem.key_scale_rows = i == 1 ? 128 : 0;
      problem.value_scale_rows = i == 2 ? 1 : 0;
      problem.max_seqlen_k = i == 3 ? 32768 : i == 4 ? 32769 : 4096;
      assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
      assert_int_equal(plan.forward.kernel->head_scales, i == 0 || i == 3);
    }
}

/* Of head dim 256 values that many queries see are transposed ahead, where a head has one scale. */
static void test_transposed_values(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads, heads_k, scale_rows, window;
    bool packed, transposed;
  } cases[] = {
      {4, 4096, 4096, 8, 8, 0, 0, false, true},     {4, 4096, 4096, 8, 8, 128, 0, false, false},
      {8, 2048, 2048, 8, 8, 0, 0, false, false},    {8, 2048, 2048, 32, 8, 0, 0, false, true},
      {16, 1024, 1024, 8, 8, 0, 0, false, false},   {16, 1024, 1024, 32, 8, 0, 0, false, true},
      {1, 256, 256, 8, 8, 0, 0, false, false},      {1, 512, 32768, 64, 8, 0, 0, false, true},
      {1, 8192, 32769, 8, 8, 0, 0, false, false},   {2, 8192, 8192, 8, 8, 0, 256, false, false},
      {100, 4096, 4096, 8, 8, 0, 0, true, false},   {2, 4096, 4096, 8, 8, 0, 0, true, true},
      {70000, 2048, 2048, 8, 8, 0, 0, false, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct cuda_plan plan;
    struct problem problem = make_problem(FA3_BFLOAT16, cases[i].batch, cases[i].queries,
                                          cases[i].heads, cases[i].heads_k, 256, 256);
    problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    problem.rows_k = problem.key.rows = problem.value.rows = problem.max_seqlen_k = cases[i].keys;
    problem.value_scale_rows = cases[i].scale_rows;
    if (cases[i].window) problem.window_left = problem.window_right = cases[i].window;
    static const int32_t starts[101];
    if (cases[i].packed) {
      problem.cu_seqlens_q = problem.cu_seqlens_k = starts;
      problem.rows_q = problem.key.rows = 2 * cases[i].keys;
    }
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    const struct transpose_plan *transpose = &plan.forward.transpose;
    assert_int_equal(plan.forward.kernel->transposed, cases[i].transposed);
    assert_int_equal(transpose->kernel != NULL, cases[i].transposed);
    if (!transpose->kernel) continue;
    const int64_t tile = transpose->kernel->tile_k, tiles = transpose->tiles;
    assert_int_equal(plan.forward.kernel->tile_k, tile);
    assert_true(tiles * tile >= problem.key.rows);
    assert_true(plan.workspace_size >=
                (size_t)(tiles * (cases[i].packed ? 1 : cases[i].batch) * cases[i].heads_k * tile) *
                    256);
  }
}

/* Few tiles of head dim 128 go to the kernel of two warpgroups, and have its rows. */
static void test_small_tiles(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen, head_dim, scale_rows;
    bool small;
  } cases[] = {{1, 2048, 128, 0, true},  {1, 4096, 128, 0, true},    {40, 100, 128, 0, true},
               {40, 60, 128, 0, false},  {16, 4096, 128, 0, false},  {1, 4096, 64, 0, false},
               {1, 4096, 256, 0, false}, {1, 4096, 128, 128, false}, {1, 2048, 96, 0, true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t d = cases[i].head_dim, seqlen = cases[i].seqlen;
    struct cuda_plan plan;
    struct problem problem = make_problem(FA3_BFLOAT16, cases[i].batch, seqlen, 8, 8, d, d);
    problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
    problem.key_scale_rows = problem.value_scale_rows = cases[i].scale_rows;
    assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
    const struct forward_plan *forward = &plan.forward;
    assert_int_equal(forward->kernel->small_tiles, cases[i].small);
    const int64_t rows = forward->tile_queries;
    assert_true(rows * forward->tile_heads <= forward->kernel->tile_q);
    assert_int_equal(forward->tiles.blocks, (seqlen + rows - 1) / rows);
  }
}

static struct forward_plan plan_codes(int64_t batch, int64_t queries, int64_t keys, int64_t heads_q,
                                      int64_t heads_k, int64_t head_dim, bool causal) {
  struct cuda_plan plan;
  struct problem problem =
      make_problem(FA3_BFLOAT16, batch, queries, heads_q, heads_k, head_dim, head_dim);
  problem.query.dtype = problem.key.dtype = problem.value.dtype = FA3_FLOAT8_E4M3;
  problem.rows_k = problem.key.rows = problem.value.rows = problem.max_seqlen_k = keys;
  if (causal) problem.window_right = 0;
  assert_int_equal(plan_forward(&problem, &facts, &plan), FA3_OK);
  return plan.forward;
}

/* Tiles of three warpgroups or fewer, by the steps of keys that they have, and by what they cost
 * beside them: under a mask the longest is soon done, and smaller ones are more of them. */
static void test_steps(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads, head_dim;
    bool causal;
    int32_t rows;
  } cases[] = {{22, 512, 97, 24, 128, false, 192},   {22, 512, 178, 24, 128, false, 128},
               {2, 1024, 1024, 16, 128, false, 128}, {2, 604, 604, 16, 128, true, 192},
               {1, 1500, 1500, 12, 128, true, 128},  {2, 938, 938, 16, 64, true, 192},
               {2, 515, 515, 12, 64, false, 128},    {32, 116, 116, 12, 128, true, 128},
               {32, 60, 60, 16, 128, true, 192},     {1, 129, 129, 32, 128, true, 128},
               {1, 160, 160, 16, 128, true, 128},    {4, 256, 256, 12, 64, true, 192},
               {1, 384, 384, 8, 256, true, 64},      {4, 384, 384, 8, 256, false, 128}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct forward_plan plan =
        plan_codes(cases[i].batch, cases[i].queries, cases[i].keys, cases[i].heads, cases[i].heads,
                   cases[i].head_dim, cases[i].causal);
    assert_int_equal(plan.tile_queries, cases[i].rows);
  }
}

/* Where one step sees all keys, and not of the kernels that take any number. */
static void test_one_step(void **state) {
  (void)state;
  static const struct {
    int64_t batch, keys, head_dim;
    bool causal;
    int32_t most_keys;
  } cases[] = {{64, 128, 64, false, 0},   {64, 129, 64, false, 160}, {64, 160, 64, true, 160},
               {64, 161, 64, false, 0},   {64, 192, 128, false, 0},  {64, 193, 128, false, 224},
               {4, 224, 128, true, 224},  {64, 224, 128, true, 0},   {64, 225, 128, false, 0},
               {64, 200, 96, false, 224}, {64, 140, 256, false, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct forward_plan plan = plan_codes(cases[i].batch, cases[i].keys, cases[i].keys, 12,
                                                12, cases[i].head_dim, cases[i].causal);
    assert_int_equal(plan.kernel->most_keys, cases[i].most_keys);
    if (cases[i].most_keys) assert_true(plan.kernel->tile_k >= cases[i].keys);
  }
}

/* Few tiles: query heads share them where that leaves fewer multiprocessors without work. */
static void test_few_shared_tiles(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k, head_dim;
    bool causal;
    int32_t heads, rows; /* of a tile */
  } cases[] = {{3, 309, 5188, 16, 8, 128, false, 2, 64},  {3, 309, 5188, 16, 8, 64, false, 2, 64},
               {4, 256, 4096, 16, 8, 128, false, 1, 128}, {1, 1024, 1024, 32, 8, 128, true, 4, 48},
               {2, 265, 368, 40, 8, 128, true, 5, 36},    {6, 450, 1000, 12, 4, 64, true, 3, 63},
               {8, 200, 200, 48, 16, 64, false, 3, 63},   {1, 1024, 1024, 8, 8, 128, true, 1, 64},
               {4, 700, 700, 16, 4, 64, true, 1, 192},    {4, 129, 129, 32, 8, 256, false, 1, 128}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct forward_plan plan =
        plan_codes(cases[i].batch, cases[i].queries, cases[i].keys, cases[i].heads_q,
                   cases[i].heads_k, cases[i].head_dim, cases[i].causal);
    assert_int_equal(plan.tile_heads, cases[i].heads);
    assert_int_equal(plan.tile_queries, cases[i].rows);
  }
}

/* Many: where that makes less work. */
static void test_many_shared_tiles(void **state) {
  (void)state;
  static const struct {
    int64_t batch, seqlen, heads_q, heads_k, head_dim;
    bool causal;
    int32_t heads;
  } cases[] = {{64, 256, 16, 4, 64, false, 4},  {16, 450, 16, 4, 64, false, 4},
               {16, 300, 32, 8, 64, true, 4},   {16, 300, 32, 8, 64, false, 1},
               {4, 1024, 32, 8, 64, false, 1},  {64, 224, 16, 4, 64, true, 4},
               {4, 1024, 32, 8, 128, true, 4},  {64, 150, 32, 8, 128, false, 1},
               {16, 320, 32, 8, 128, true, 4},  {4, 2048, 32, 8, 128, true, 1},
               {40, 100, 24, 6, 128, false, 1}, {40, 230, 24, 6, 128, false, 4}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct forward_plan plan =
        plan_codes(cases[i].batch, cases[i].seqlen, cases[i].seqlen, cases[i].heads_q,
                   cases[i].heads_k, cases[i].head_dim, cases[i].causal);
    assert_int_equal(plan.tile_heads, cases[i].heads);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_many_shared_tiles),
      cmocka_unit_test(test_one_step),
      cmocka_unit_test(test_codes),
      cmocka_unit_test(test_chunks),
      cmocka_unit_test(test_unpacked),
      cmocka_unit_test(test_few_tiles),
      cmocka_unit_test(test_scales_of_heads),
      cmocka_unit_test(test_transposed_values),
      cmocka_unit_test(test_small_tiles),
      cmocka_unit_test(test_chunks_of_codes),
      cmocka_unit_test(test_steps),
      cmocka_unit_test(test_few_shared_tiles),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
