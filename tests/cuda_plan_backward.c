/* How backward calls would run on a GPU, without one: which kernel, and in which parts tiles are
 * done. */
#include "cuda_backward_problem.h"

/* At every head dim, and where there is nothing to differentiate. */
static void test_backward_plans(void **state) {
  (void)state;
  static const int64_t lengths[] = {0, 1, 64, 129, 1000, 2048};
  for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8)
    for (int64_t value_head_dim = 8; value_head_dim <= 256; value_head_dim += 8)
      for (int q = 0; q < 6; q++)
        for (int k = 0; k < 6; k++) {
          const struct problem problem =
              make_backward_problem(lengths[q], lengths[k], head_dim, value_head_dim);
          struct cuda_plan cuda_plan;
          assert_int_equal(plan_backward(&problem, &facts, &cuda_plan), FA3_OK);
          const struct backward_plan plan = cuda_plan.backward;
          const struct kernel *kernel = plan.kernel;
          assert_true(kernel->head_dim >= head_dim && kernel->value_head_dim >= value_head_dim);
          assert_true((int64_t)plan.tiles.tiles * kernel->tile_k >= lengths[k]);
          assert_true((int64_t)plan.blocks_q * kernel->tile_q >= lengths[q]);
          assert_true(plan.slots >= 2 * plan.blocks_q);
          const size_t counters =
              (size_t)fa3_sum_count(&plan.tiles) * 6 * (size_t)plan.slots; /* twice */
          assert_true(plan.counters.offset + 2 * counters * sizeof(int32_t) <= plan.rows.offset);
          const size_t sums =
              counters * sizeof(float) * (size_t)(kernel->tile_q * kernel->head_dim);
          assert_true(plan.partial.offset + sums <= plan.parts.offset);
          assert_in_range(plan.tiles.section, 1, fa3_chain_count(&plan.tiles));
          assert_in_range(plan.tiles.head_parts, 1, 3);
          assert_in_range(plan.tiles.row_parts, 1, plan.blocks_q > 1 ? plan.blocks_q : 1);
          const int parts = fa3_key_tile_parts(&plan.tiles);
          const size_t rows = plan.cluster > 1 ? 2 * (size_t)lengths[k]
                                               : (size_t)plan.key_slots * (size_t)kernel->tile_k;
          const size_t columns = plan.cluster > 1
                                     ? (size_t)(head_dim + value_head_dim)
                                     : (size_t)(kernel->head_dim + kernel->value_head_dim);
          const size_t in_parts = sizeof(float) * rows * 2 * (size_t)parts * columns;
          if (parts > 1) assert_true(plan.parts.offset + in_parts <= plan.arrivals.offset);
          assert_int_equal(plan.summed_later, parts > 1 && plan.cluster > 1);
          assert_int_equal(plan.arrival_words, parts > 1 && plan.cluster == 1
                                                   ? 2 * plan.key_slots * FA3_BACKWARD_PART_WARPS
                                                   : 0);
          assert_true(plan.arrivals.offset + sizeof(int32_t) * (size_t)plan.arrival_words <=
                      cuda_plan.workspace_size);
        }
}

static int32_t queries_of_step(int64_t head_dim, int64_t seqlen_q, uint32_t flags, float softcap) {
  struct problem problem = make_backward_problem(seqlen_q, 300, head_dim, head_dim);
  struct cuda_plan plan;
  if (flags & FA3_CAUSAL) problem.window_right = 0;
  if (flags & FA3_WINDOW) problem.window_left = 1000;
  problem.softcap = softcap;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward.kernel->tile_q;
}

/* More queries at a time where a tile of keys meets many, or where fewer rows are then empty. */
static void test_backward_kernel_by_length(void **state) {
  (void)state;
  assert_int_equal(queries_of_step(128, 77, 0, 0), 80);
  assert_int_equal(queries_of_step(128, 141, 0, 0), 80);
  assert_int_equal(queries_of_step(128, 128, 0, 0), 64);
  assert_int_equal(queries_of_step(128, 300, 0, 0), 64);
  assert_int_equal(queries_of_step(128, 141, 0, 1), 64);
  assert_int_equal(queries_of_step(128, 141, FA3_CAUSAL, 0), 64);
  assert_int_equal(queries_of_step(128, 2047, 0, 0), 64); /* few tiles */
  assert_int_equal(queries_of_step(128, 2048, 0, 0), 80);
  assert_int_equal(queries_of_step(104, 2048, 0, 0), 80);
  assert_int_equal(queries_of_step(96, 2048, 0, 0), 64);
  assert_int_equal(queries_of_step(128, 2048, 0, 30), 64);
  assert_int_equal(queries_of_step(128, 4915, FA3_CAUSAL, 0), 64);
  assert_int_equal(queries_of_step(128, 4916, FA3_CAUSAL, 0), 80);
  assert_int_equal(queries_of_step(128, 100000, FA3_CAUSAL | FA3_WINDOW, 0), 64);
  assert_int_equal(queries_of_step(64, 2048, 0, 0), 128);
  assert_int_equal(queries_of_step(64, 65, 0, 0), 128);
  assert_int_equal(queries_of_step(64, 64, 0, 0), 64);
}

/* Under a window, with 2 heads of keys in 2 sequences. */
static int32_t goes_by_head(int64_t group, int64_t head_dim, int64_t seqlen, int64_t window_left,
                            float softcap) {
  struct problem problem = make_backward_problem(seqlen, seqlen, head_dim, head_dim);
  struct cuda_plan plan;
  problem.heads_q = 2 * group;
  set_window(&problem, window_left);
  problem.softcap = softcap;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward.kernel->by_head;
}

static void test_backward_kernel_by_head(void **state) {
  (void)state;
  assert_true(goes_by_head(4, 128, 8192, 1000, 0));
  assert_true(goes_by_head(4, 128, 8192, 1000, 30));
  assert_true(goes_by_head(4, 128, 8192, 4096, 0));
  assert_true(goes_by_head(4, 64, 8192, 1000, 0));
  assert_false(goes_by_head(1, 128, 8192, 1000, 0));
  assert_false(goes_by_head(3, 64, 8192, 1000, 0)); /* stays in the L2 cache */
  assert_false(goes_by_head(4, 128, 1800, 500, 0));
  assert_false(goes_by_head(4, 128, 8192, 5000, 0)); /* tiles would wait */
  assert_false(goes_by_head(4, 128, 8192, FA3_NO_LIMIT, 0));
  assert_false(goes_by_head(4, 64, 8192, 1000, 30)); /* there is none as narrow */
  assert_false(goes_by_head(4, 96, 8192, 1000, 0));
  assert_false(goes_by_head(4, 256, 8192, 1000, 0)); /* the wide kernel always does */
}

/* Without a mask shorter ones have steps of 80 queries, too, if tiles are not few. */
static void test_backward_steps_without_mask(void **state) {
  (void)state;
  assert_int_equal(deal(4, 640, 640, 16, 16, 128, false).kernel->tile_q, 80);
  assert_int_equal(deal(4, 639, 640, 16, 16, 128, false).kernel->tile_q, 64);
  assert_int_equal(deal(2, 1300, 1300, 12, 12, 128, false).kernel->tile_q, 80);
  assert_int_equal(deal(4, 832, 832, 16, 16, 128, false).kernel->tile_q, 64); /* empty rows */
  assert_int_equal(deal(4, 1300, 385, 16, 16, 128, false).kernel->tile_q, 80);
  assert_int_equal(deal(4, 1300, 384, 16, 16, 128, false).kernel->tile_q, 64); /* three tiles */
  assert_int_equal(deal(1, 1300, 1300, 6, 6, 128, false).kernel->tile_q, 80);
  assert_int_equal(deal(1, 1300, 1300, 10, 5, 128, false).kernel->tile_q, 64); /* few in all */
  assert_int_equal(deal(4, 1300, 1300, 16, 16, 128, true).kernel->tile_q, 64);
}

/* At head dim 64, of few tiles: steps of 64 queries, not of 128. */
static void test_backward_short_steps(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries, keys, heads_q, heads_k;
    bool causal, is_short;
  } cases[] = {
      {4, 192, 192, 16, 4, false, true},   /* 128 tiles of query heads; half of a step is empty */
      {3, 192, 192, 23, 23, false, false}, /* 138 */
      {1, 128, 128, 2, 2, false, false},   /* one step of 128 */
      {1, 640, 640, 6, 6, false, true},    /* 30 tiles */
      {1, 640, 640, 7, 7, false, false},   /* 35 */
      {1, 2048, 2048, 2, 1, false, true},  /* 32 */
      {1, 2049, 2048, 2, 1, false, false}, /* long */
      {1, 850, 154, 16, 1, false, false},  /* of few keys */
      {1, 640, 640, 9, 9, true, true},     /* 45 */
      {1, 640, 640, 10, 5, true, false},   /* 50 */
      {1, 384, 384, 4, 4, true, false},    /* short: half is not seen */
      {2, 300, 3000, 1, 1, true, false},   /* likewise */
      {1, 5632, 5632, 1, 1, true, true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct backward_plan plan = deal(cases[i].batch, cases[i].queries, cases[i].keys,
                                           cases[i].heads_q, cases[i].heads_k, 64, cases[i].causal);
    assert_int_equal(plan.kernel->tile_q, cases[i].is_short ? 64 : 128);
  }
  assert_int_equal(deal(1, 640, 640, 6, 6, 48, false).kernel->tile_q, 64);
  assert_int_equal(deal_windows(1, 640, 640, 6, 6, 64, 500).kernel->tile_q, 128);
}

static void check_parts(struct backward_plan plan, int32_t head_parts, int32_t row_parts) {
  assert_int_equal(plan.tiles.head_parts, head_parts);
  assert_int_equal(plan.tiles.row_parts, row_parts);
}

/* Where there are fewer tiles than keep 132 multiprocessors busy to the end, their work is dealt
 * out: by heads of a group, and else by blocks of queries. */
static void test_backward_parts(void **state) {
  (void)state;
  check_parts(deal(1, 4096, 4096, 8, 1, 128, true), 8, 1);
  check_parts(deal(1, 8192, 8192, 8, 1, 128, true), 4, 1);
  check_parts(deal(1, 2048, 2048, 32, 8, 128, true), 2, 1);
  check_parts(deal(1, 2048, 2048, 8, 1, 256, true), 8, 1); /* 66 pairs of multiprocessors */
  check_parts(deal(2, 4096, 77, 8, 8, 64, false), 1, 8);
  check_parts(deal(1, 2048, 2048, 16, 16, 128, false), 1, 1);
  check_parts(deal(4, 4096, 4096, 16, 16, 128, true), 1, 1);
  check_parts(deal(1, 5000, 5000, 20, 5, 128, false), 1, 5);
  check_parts(deal(3, 14981, 1513, 32, 8, 128, false), 4, 1); /* nine rounds, not five */
  check_parts(deal(1, 9000, 9000, 16, 2, 128, false), 8, 1);
  check_parts(deal(3, 8701, 8701, 12, 3, 128, false), 1, 1); /* for four there is no room */
  check_parts(deal(3, 700, 700, 20, 4, 128, true), 3, 1);    /* five would cost more to add up */
  check_parts(deal(1, 2944, 2944, 24, 8, 128, true), 3, 1);
  check_parts(deal(1, 3026, 3026, 4, 4, 64, true), 1, 2);
  check_parts(deal(2, 320, 320, 5, 5, 128, true), 1, 3);  /* few tiles wait less for each other */
  check_parts(deal(1, 631, 631, 8, 8, 256, true), 1, 1);  /* two would be taken from a counter */
  check_parts(deal(1, 64, 64, 24, 3, 64, true), 4, 1);    /* the smallest steps */
  check_parts(deal(2, 256, 256, 40, 10, 96, true), 2, 2); /* one round */
  check_parts(deal(1, 617, 617, 32, 8, 256, true), 2, 1);
  check_parts(deal(3, 66, 512, 20, 4, 128, true), 2, 1); /* tiles alike */
}

/* Large groups under a causal mask: few heads take a block in turn, each with 32 queries of a step
 * at most, in parts of 32 steps at least, if these do not take half as much as dQ's sum. */
static void test_parts_of_groups(void **state) {
  (void)state;
  check_parts(deal(5, 2558, 2558, 64, 8, 128, true), 4, 1); /* two heads in turn */
  check_parts(deal(4, 4096, 4096, 16, 1, 128, true), 8, 1);
  check_parts(deal(2, 8192, 8192, 32, 8, 128, true), 2, 1);
  check_parts(deal(4, 4096, 4096, 64, 8, 64, true), 2, 1);  /* four, of half the size */
  check_parts(deal(8, 1024, 1024, 64, 8, 128, true), 2, 1); /* short ones */
  check_parts(deal(16, 512, 512, 64, 8, 128, true), 1, 1);
  check_parts(deal(3, 6000, 6000, 48, 8, 128, true), 2, 1);  /* for three there is no room */
  check_parts(deal(2, 8192, 8192, 24, 8, 128, true), 1, 1);  /* small ones */
  check_parts(deal(4, 4096, 4096, 64, 8, 128, false), 1, 1); /* no mask */
  check_parts(deal(4, 1024, 8192, 64, 8, 128, true), 1, 1);  /* nearly all is seen */
  check_parts(deal(4, 4096, 4096, 64, 8, 256, true), 1, 1);  /* the wide kernel goes by head */
  check_parts(deal(2, 0, 1000, 8, 1, 128, true), 1, 1);      /* no queries */
}

/* Packed sequences have no more tiles than their rows allow, and are as many long ones as there are
 * rows for; one alone is dealt out as where lengths are not packed, but for tiles and heads that go
 * upwards.
 */
static void test_packed_sequences(void **state) {
  (void)state;
  check_parts(deal_packed(4, 8133, 7000, 8, 1, 128), 8, 1); /* as one of 7000 */
  check_parts(deal_packed(17, 108436, 16000, 8, 1, 128), 4, 1);
  check_parts(deal_packed(40, 44697, 5401, 8, 1, 64), 2, 1);
  check_parts(deal_packed(160, 44697, 5401, 8, 1, 64), 1, 1); /* most are short */
  for (int64_t longest = 100; longest < 10000; longest += 700)
    for (int64_t heads = 1; heads <= 16; heads *= 2)
      for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2) {
        const struct backward_plan packed = deal_packed(1, longest, longest, 16, heads, head_dim);
        const struct backward_plan dense = deal(1, longest, longest, 16, heads, head_dim, true);
        check_parts(packed, dense.tiles.head_parts, dense.tiles.row_parts);
        assert_int_equal(packed.tiles.upward, 0);
        assert_int_equal(packed.tiles.rising, 0);
        if (dense.tiles.rising == 0)
          assert_int_equal(packed.tiles.sums_log2, dense.tiles.sums_log2);
      }
  /* No sequence, and sequences without a row. */
  for (int64_t batch = 0; batch <= 2; batch++)
    for (int64_t longest = 0; longest <= 1000; longest += 1000)
      for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
        for (int64_t rows = 0; rows <= 1000; rows += 1000) {
          const struct backward_plan plan = deal_packed(batch, rows, longest, 8, 2, head_dim);
          if (batch == 0 || longest == 0 || rows == 0) assert_int_equal(plan.workers, 0);
        }
}

/* Groups are dealt out as under a causal mask, and to no parts by rows. */
static void test_parts_of_windows(void **state) {
  (void)state;
  check_parts(deal_windows(1, 9512, 9512, 16, 2, 128, 2047), 4, 1);
  check_parts(deal_windows(1, 8189, 8189, 16, 1, 128, 4095), 8, 1);
  check_parts(deal_windows(1, 8192, 8192, 40, 8, 64, 4095), 2, 1);
  check_parts(deal_windows(2, 16384, 16384, 32, 8, 128, 4095), 1, 1); /* 16 chains as it is */
  check_parts(deal_windows(2, 6013, 6013, 32, 8, 128, 1023), 1, 1);   /* short ones */
  check_parts(deal_windows(7, 2581, 2581, 14, 2, 64, 1023), 1, 1);    /* likewise */
  check_parts(deal_windows(3, 4921, 4921, 20, 5, 128, 4095), 2, 1);   /* a wide window */
  check_parts(deal_windows(3, 8192, 8192, 15, 5, 128, 1023), 1, 1);   /* short ones */
  check_parts(deal_windows(4, 2417, 2417, 40, 8, 64, 511), 1, 1);
  check_parts(deal_windows(1, 2048, 32768, 8, 1, 128, 4095), 4, 1);
}

static void check_first(const fa3_key_tiles tiles, int32_t first, int32_t taken) {
  assert_int_equal(tiles.first, first);
  assert_int_equal(tiles.tiles, taken);
}

/* Tiles that no query sees are not taken, if it is known which these are. */
static void test_unseen_tiles(void **state) {
  (void)state;
  check_first(deal_windows(2, 1000, 5000, 4, 4, 128, 1000).tiles, 23, 17); /* from key 3000 on */
  check_first(deal_windows(4, 128, 8192, 8, 8, 256, 127).tiles, 62, 2);
  check_first(deal_windows(2, 1000, 1900, 4, 4, 128, 1000).tiles, 0, 15);
  check_first(deal_windows(2, 1000, 1000, 4, 4, 128, 100).tiles, 0, 8);
  check_first(deal(2, 1000, 5000, 4, 4, 128, true).tiles, 0, 40);
  struct problem problem = make_backward_problem(1000, 5000, 128, 128);
  struct cuda_plan plan;
  static const int32_t lengths[2];
  static const int64_t diagonals[2];
  problem.window_left = problem.window_right = 0;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  check_first(plan.backward.tiles, 31, 9);
  problem.seqused_k = lengths;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  check_first(plan.backward.tiles, 0, 40);
  problem.seqused_k = NULL;
  problem.leftpad_k = lengths;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  check_first(plan.backward.tiles, 0, 40);
  problem.leftpad_k = NULL;
  problem.diagonal = diagonals;
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  check_first(plan.backward.tiles, 0, 40);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_backward_plans),
                                     cmocka_unit_test(test_backward_kernel_by_length),
                                     cmocka_unit_test(test_backward_kernel_by_head),
                                     cmocka_unit_test(test_backward_steps_without_mask),
                                     cmocka_unit_test(test_backward_short_steps),
                                     cmocka_unit_test(test_backward_parts),
                                     cmocka_unit_test(test_parts_of_groups),
                                     cmocka_unit_test(test_packed_sequences),
                                     cmocka_unit_test(test_parts_of_windows),
                                     cmocka_unit_test(test_unseen_tiles)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
