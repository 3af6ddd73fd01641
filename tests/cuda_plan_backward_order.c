/* In which order tiles are done, and how many sums a block of dQ has. */
#include "cuda_backward_problem.h"

/* Under a causal mask, too, the longest of packed sequences come first. Of heads that rise some
 * long ones are left to go downwards behind them, as far as the rows tell how many are long. */
static void test_long_sequences_rise(void **state) {
  (void)state;
  static const struct {
    int64_t batch, rows, longest, heads, head_dim;
    int32_t rising;
    bool longest_first;
  } cases[] = {
      {2, 1873, 1841, 32, 128, 14, true},        /* one is long: 18 of its heads go downwards */
      {6, 9327, 3350, 8, 128, 12, true},         /* as many rows as 22 long heads have */
      {6, 6800, 1829, 6, 96, 18, false},         /* too few long ones: as they come */
      {40, 44697, 5401, 8, 128, 320 - 7, false}, /* more than are sorted */
      {3, 3881, 3582, 8, 128, 4, true},          /* half of the heads of one */
      {3, 3881, 3582, 8, 64, 0, true},           /* not with 128 queries a step */
      {3, 4485, 3043, 8, 128, 0, true},          /* others are not so short */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t heads = cases[i].heads;
    const struct backward_plan plan = deal_packed(cases[i].batch, cases[i].rows, cases[i].longest,
                                                  heads, heads, cases[i].head_dim);
    if (plan.tiles.rising != cases[i].rising ||
        (plan.tiles.longest_first != 0) != cases[i].longest_first)
      fail_msg("case %zu: %d heads rise%s", i, plan.tiles.rising,
               plan.tiles.longest_first ? ", the longest sequence's first" : "");
  }
  /* A long sequence among many short ones is dealt out in parts, though most numbers are of none.
   */
  assert_true(deal_packed(32, 10445, 6161, 16, 2, 128).tiles.head_parts > 1);
  assert_true(deal_packed(24, 8358, 4464, 6, 3, 128).tiles.head_parts > 1);
}

/* A kernel of its own stores dQ where no mask shortens the last tile of a head, and others would
 * wait for it. */
static void test_finished_later(void **state) {
  (void)state;
  assert_true(deal(1, 2048, 2048, 16, 16, 128, false).finished_later);
  assert_true(deal(2, 4096, 4096, 10, 10, 64, false).finished_later);
  assert_true(deal(2, 8192, 8192, 16, 16, 128, false).finished_later);
  assert_true(deal(2, 8192, 8192, 32, 32, 64, false).finished_later);
  assert_true(deal(6, 1500, 1500, 16, 16, 64, false).finished_later);   /* twelve steps */
  assert_false(deal(16, 1024, 1024, 32, 32, 64, false).finished_later); /* many tiles */
  assert_false(deal(32, 512, 512, 16, 16, 128, false).finished_later);
  assert_true(deal(3, 512, 512, 16, 16, 128, false).finished_later);
  assert_false(deal(3, 256, 512, 16, 16, 128, false).finished_later); /* short ones */
  assert_true(deal_packed_full(16, 48000, 8192, 16, 64).finished_later);
  assert_false(deal_packed_full(64, 19200, 8192, 16, 64).finished_later); /* nearly all short */
  assert_true(deal(6, 600, 600, 8, 8, 64, false).finished_later);
  assert_false(deal(3, 512, 512, 16, 16, 64, false).finished_later);
  assert_false(deal(18, 588, 108, 20, 20, 96, false).finished_later);  /* one tile */
  assert_true(deal(1, 5752, 102, 24, 3, 128, false).finished_later);   /* few of them */
  assert_false(deal(42, 2048, 206, 16, 16, 64, false).finished_later); /* two, and many */
  assert_true(deal(49, 2594, 321, 6, 6, 64, false).finished_later);
  assert_false(deal(8, 2048, 2048, 16, 16, 128, true).finished_later);
  assert_true(deal(16, 512, 512, 8, 8, 256, false).finished_later);  /* pairs of blocks */
  assert_false(deal(16, 384, 256, 8, 8, 256, false).finished_later); /* two tiles, six steps */
  assert_true(deal(16, 512, 256, 8, 8, 256, false).finished_later);  /* eight */
  assert_false(deal(8, 2048, 2048, 8, 8, 256, true).finished_later);
  assert_false(deal(64, 128, 128, 8, 8, 256, false).finished_later); /* one tile */
}

static void check_sums(struct backward_plan plan, int32_t upward, int32_t sums) {
  assert_int_equal(plan.tiles.upward, upward);
  assert_int_equal(fa3_sum_count(&plan.tiles), sums);
  /* Steps of 128 queries under a causal mask: the last tile takes two sums. */
  if (sums > 1 && !plan.finished_later) assert_int_equal(plan.kernel->tile_q, 128);
}

/* Where tiles of a head that run side by side would wait for each other. */
static void test_sums(void **state) {
  (void)state;
  check_sums(deal(1, 8192, 8192, 8, 1, 128, true), 33, 2);
  check_sums(deal(1, 8192, 8192, 4, 4, 128, true), 33, 2);
  check_sums(deal(1, 2048, 2048, 12, 12, 64, true), 0, 2); /* 128 queries a step */
  check_sums(deal(3, 1537, 1537, 5, 5, 64, true), 0, 2);
  check_sums(deal(8, 1024, 1024, 12, 12, 64, true), 0, 1); /* many tiles */
  assert_false(deal(1, 2048, 2048, 12, 12, 64, true).finished_later);
  assert_true(deal(2, 1400, 1400, 8, 8, 128, true).finished_later);
  assert_true(deal(1, 16384, 16384, 2, 2, 64, false).finished_later);
  check_sums(deal(1, 12288, 12288, 2, 2, 64, true), 0, 4);   /* parts by rows */
  check_sums(deal(2, 8837, 8837, 2, 2, 64, true), 0, 4);     /* 33 side by side */
  check_sums(deal(1, 10000, 10000, 8, 1, 128, true), 26, 2); /* three rounds */
  check_sums(deal(2, 1400, 1400, 8, 8, 128, true), 8, 2);    /* tests/gpu/deterministic.c */
  check_sums(deal(4, 2048, 2048, 16, 1, 128, true), 0, 1);   /* would take longer to add up */
  check_sums(deal(1, 16384, 16384, 1, 1, 128, true), 0, 4);  /* parts by rows */
  check_sums(deal(1, 6016, 6016, 1, 1, 96, true), 0, 8);
  check_sums(deal(1, 2800, 2800, 1, 1, 128, true), 0, 8); /* tests/gpu/deterministic.c */
  check_sums(deal(2, 1704, 1704, 4, 4, 128, true), 0, 4);
  check_sums(deal(4, 256, 4096, 8, 8, 128, true), 0, 2); /* rounds of tiles get out of step */
  check_sums(deal(3, 128, 3353, 48, 16, 64, true), 0, 2);
  check_sums(deal(1, 1024, 1024, 8, 8, 128, true), 0, 2);   /* three parts by rows */
  check_sums(deal(4, 4096, 4096, 16, 16, 128, true), 0, 1); /* many tiles */
  check_sums(deal(1, 2048, 16384, 2, 2, 64, false), 0, 16);
  check_sums(deal(2, 60, 16384, 3, 3, 64, false), 0, 32); /* all tiles see the same block */
  check_sums(deal(6, 128, 16384, 2, 2, 128, true), 0, 16);
  check_sums(deal(1, 2048, 32768, 8, 1, 128, true), 0, 4); /* nearly all is seen */
  check_sums(deal(4, 128, 4096, 16, 16, 128, false), 0, 2);
  check_sums(deal(2, 165, 558, 12, 12, 128, false), 0, 4); /* all tiles side by side */
  check_sums(deal(1, 460, 1211, 1, 1, 64, false), 0, 16);
  check_sums(deal(3, 211, 211, 10, 10, 64, false), 0, 1);   /* two of two steps */
  check_sums(deal(2, 0, 4096, 3, 3, 64, true), 0, 1);       /* no query */
  check_sums(deal(3, 5000, 5000, 12, 12, 64, false), 0, 1); /* beyond the workspace */
  check_sums(deal(1, 16384, 16384, 2, 2, 256, false), 0, 1);
  check_sums(deal(1, 4096, 4096, 4, 1, 256, false), 0, 2); /* pairs of blocks */
  check_sums(deal(1, 4096, 4096, 1, 1, 256, false), 0, 4);
  check_sums(deal(1, 4096, 4096, 1, 1, 256, true), 0, 4);
}

/* Where the sequence is short for its window, all of whose tiles begin at the last block. */
static void test_sums_of_windows(void **state) {
  (void)state;
  check_sums(deal_windows(2, 1024, 11648, 4, 4, 128, 4095), 0, 4);
  check_sums(deal_windows(4, 256, 4096, 8, 8, 128, 4095), 0, 4);
  check_sums(deal_windows(4, 512, 8192, 8, 8, 64, 1023), 0, 2);
  assert_true(deal_windows(4, 512, 8192, 8, 8, 64, 1023).finished_later);
  check_sums(deal_windows(4, 8192, 8192, 8, 8, 128, 1023), 0, 1); /* few see the last block */
  check_sums(deal_windows(1, 4096, 4096, 8, 8, 64, 511), 0, 1);
}

static void check_stagger(const struct backward_plan plan, int32_t staggered, int32_t log2) {
  assert_int_equal(plan.tiles.staggered, staggered);
  assert_int_equal(plan.tiles.stagger_log2, log2);
  if (!staggered) return;
  assert_int_equal(plan.tiles.row_parts, 1);
  assert_true(plan.finished_later);
}

/* Tiles that begin at blocks of their own, where none of them has a mask. */
static void test_stagger(void **state) {
  (void)state;
  check_stagger(deal(5, 1599, 1599, 6, 6, 64, false), 1, 0);
  check_stagger(deal(16, 1792, 1792, 1, 1, 96, false), 1, 1); /* places for all */
  check_stagger(deal(1, 2048, 2048, 16, 16, 128, false), 1, 0);
  check_stagger(deal(1, 8192, 8192, 4, 4, 128, false), 1, 0);
  check_stagger(deal(1, 700, 700, 20, 4, 128, false), 1, 1);   /* parts by heads */
  check_stagger(deal(3, 364, 364, 12, 12, 64, false), 1, 0);   /* three tiles */
  check_stagger(deal(3, 155, 1140, 12, 12, 96, false), 0, 0);  /* three of nine side by side */
  check_stagger(deal(1, 16384, 16384, 2, 2, 64, false), 1, 1); /* places for a round */
  check_stagger(deal(1, 16384, 16384, 4, 4, 64, false), 1, 2);
  check_stagger(deal(1, 2048, 2048, 16, 16, 64, false), 1, 1);
  check_stagger(deal(2, 2100, 2000, 8, 8, 64, false), 1, 0); /* tests/gpu/deterministic.c */
  check_stagger(deal(2, 2100, 2000, 8, 8, 96, false), 1, 1);
  check_stagger(deal(2, 2100, 2000, 8, 8, 128, false), 1, 0);
  check_stagger(deal(1, 16384, 16384, 2, 2, 64, true), 0, 0);
  check_stagger(deal(2, 4096, 4096, 10, 10, 64, false), 1, 0);  /* five heads of 20 in flight */
  check_stagger(deal(3, 8192, 6479, 6, 6, 64, false), 1, 0);    /* likewise */
  check_stagger(deal(3, 5000, 5000, 12, 12, 64, false), 0, 0);  /* beyond the workspace */
  check_stagger(deal(2, 3000, 3000, 16, 16, 64, false), 0, 0);  /* would take longer to add up */
  check_stagger(deal(1, 2048, 32768, 8, 1, 128, false), 0, 0);  /* too few places */
  check_stagger(deal(4, 128, 4096, 16, 16, 128, false), 0, 0);  /* two side by side */
  check_stagger(deal(1, 3000, 3000, 7, 7, 128, false), 0, 0);   /* parts by rows */
  check_stagger(deal(1, 16384, 16384, 2, 2, 256, false), 0, 0); /* pairs of blocks */
  check_stagger(deal(2, 0, 4096, 3, 3, 64, false), 0, 0);       /* no query */
  check_stagger(deal_packed_full(2, 8000, 5000, 8, 128), 1, 0);
  check_stagger(deal_packed_full(4, 10000, 4000, 8, 64), 1, 0);
  check_stagger(deal_packed_full(20, 14000, 700, 16, 96), 0, 0); /* beyond the workspace */
}

/* As many heads as the cache holds, or as it takes that none waits for another; in equal parts. */
static void test_backward_section(void **state) {
  (void)state;
  assert_int_equal(deal(32, 512, 512, 16, 16, 128, false).tiles.section,
                   47); /* of 512, by elevens */
  assert_int_equal(deal(1, 2048, 2048, 16, 16, 128, false).tiles.section, 8);
  /* Short ones, beside what tiles have of their own. */
  assert_int_equal(deal(33, 128, 1879, 10, 10, 128, false).tiles.section, 83);
  assert_int_equal(deal(8, 384, 3000, 16, 16, 128, false).tiles.section, 43);
  assert_int_equal(deal(24, 128, 1500, 12, 12, 256, false).tiles.section, 48);
  assert_int_equal(deal(6, 350, 2500, 20, 20, 64, false).tiles.section, 120); /* half would wait */
  assert_int_equal(deal(1, 1500, 1500, 16, 16, 128, false).tiles.section, 16);
  assert_int_equal(deal(1, 16384, 16384, 16, 16, 128, false).tiles.section, 4);
  assert_int_equal(deal(1, 16384, 16384, 24, 8, 128, true).tiles.section, 8); /* 14 at most */
  assert_int_equal(deal(2, 8192, 8192, 128, 64, 64, true).tiles.section, 32); /* 35 at most */
  assert_int_equal(deal(1, 131072, 131072, 16, 16, 128, true).tiles.section, 4);
  assert_int_equal(deal(1, 32768, 65536, 16, 16, 128, true).tiles.section, 8);
  assert_int_equal(deal(2, 8192, 8192, 8, 8, 256, true).tiles.section, 8);
  /* Large groups: those that fit the cache, or as many as it takes, in two, four or eight parts. */
  assert_int_equal(deal(2, 4096, 4096, 48, 6, 128, true).tiles.section, 4 * 4);
  assert_int_equal(deal(5, 5787, 5787, 40, 8, 128, true).tiles.section, 2 * 4);
  assert_int_equal(deal(1, 16384, 16384, 64, 8, 128, true).tiles.section, 4 * 1);
  assert_int_equal(deal(4, 2048, 2048, 40, 8, 128, true).tiles.section, 2 * 8);  /* equal, not 7 */
  assert_int_equal(deal(16, 1024, 1024, 64, 8, 64, true).tiles.section, 1 * 11); /* not a round */
  assert_int_equal(deal(2, 8192, 1024, 32, 4, 128, true).tiles.section, 4 * 2);  /* likewise */
  assert_int_equal(deal(1, 32768, 32768, 28, 4, 128, true).tiles.section, 1);    /* half a group */
  /* As in tests/gpu/deterministic.c, which is to have several sections: two of them. */
  assert_int_equal(deal(1, 2200, 2600, 64, 8, 128, true).tiles.section, 4 * 4);
  /* Two rounds of tiles of groups, or three of pairs of blocks, are together. */
  assert_int_equal(deal(1, 1100, 1300, 64, 8, 128, true).tiles.section, 2 * 8);
  assert_int_equal(deal(1, 1024, 1024, 64, 8, 256, true).tiles.section, 2 * 8);
  /* More rounds of heads with few tiles are, too: of pairs of blocks, and of groups of eight. */
  assert_int_equal(deal(4, 320, 320, 128, 8, 256, true).tiles.section, 4 * 8);
  assert_int_equal(deal(8, 185, 1005, 16, 8, 256, true).tiles.section, 32); /* of 64: long keys */
  assert_int_equal(deal(1, 768, 768, 256, 32, 128, true).tiles.section, 2 * 32);
  assert_int_equal(deal(16, 384, 384, 24, 6, 128, true).tiles.section, 16); /* of 96: fours */
  /* Few tiles of long heads, without a mask: all parts of one. */
  assert_int_equal(deal(1, 12288, 697, 48, 24, 128, false).tiles.section, 2);
  /* Packed, of whole sequences, or equal ones of each. */
  assert_int_equal(deal_packed(17, 32768, 8036, 32, 8, 128).tiles.section, 2 * 4);
  assert_int_equal(deal_packed(40, 44697, 5401, 8, 1, 64).tiles.section, 2 * 12);
  assert_int_equal(deal_packed(17, 32768, 3799, 32, 4, 64).tiles.section, 2 * 8);
  assert_int_equal(deal_packed_full(4, 10000, 4000, 8, 64).tiles.section, 8); /* few tiles */
  assert_int_equal(deal_packed_full(8, 8464, 2000, 16, 64).tiles.section, 32);
  assert_int_equal(deal_packed_full(8, 8464, 2000, 64, 64).tiles.section, 24); /* less than half */
  assert_int_equal(deal_packed(8, 41785, 9000, 12, 6, 64).tiles.section, 12);
  assert_int_equal(deal_packed(8, 41785, 9000, 14, 2, 64).tiles.section, 4);
  assert_int_equal(deal_packed(2, 15000, 12000, 12, 12, 128).tiles.section, 12); /* 10 fit */
  assert_int_equal(deal_packed(2, 30000, 24000, 12, 12, 128).tiles.section, 4);
  assert_int_equal(deal_packed(4, 25903, 10500, 7, 1, 64).tiles.section, 3 * 4); /* 3 fit */
}

/* Packed sequences are taken longest first, but where all tiles begin at once. */
static void test_longest_first(void **state) {
  (void)state;
  assert_true(deal_packed_full(4, 10000, 4000, 8, 64).tiles.longest_first);
  assert_true(deal_packed_full(32, 40000, 8000, 16, 128).tiles.longest_first); /* many tiles */
  assert_false(deal_packed_full(33, 40000, 8000, 16, 128).tiles.longest_first);
  assert_false(deal_packed_full(1, 4000, 4000, 8, 64).tiles.longest_first);
  assert_false(deal_packed_full(4, 10000, 4000, 8, 256).tiles.longest_first); /* pairs of blocks */
  assert_false(deal_packed_full(2, 200, 150, 4, 64).tiles.longest_first); /* all begin at once */
  assert_true(deal_packed(4, 4000, 2000, 4, 4, 128).tiles.longest_first);
  assert_false(deal(4, 1000, 1000, 8, 8, 64, false).tiles.longest_first);
}

static int32_t section_of_packed_windows(int64_t batch, int64_t seqlen, int64_t heads,
                                         int64_t window_left) {
  struct problem problem = make_packed_problem(batch, batch * seqlen, seqlen, 128);
  struct cuda_plan plan;
  problem.heads_q = problem.heads_k = heads;
  set_window(&problem, window_left);
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward.tiles.section;
}

/* What windows are at is to stay in the L2 cache, or many tiles of a head run side by side. */
static void test_section_of_windows(void **state) {
  (void)state;
  assert_int_equal(deal_windows(8, 12928, 12928, 6, 6, 128, 4095).tiles.section, 4);
  assert_int_equal(deal_windows(4, 8192, 8192, 8, 8, 128, 2047).tiles.section, 8);
  assert_int_equal(deal_windows(1, 7726, 7726, 8, 8, 128, 4096).tiles.section, 8); /* all do */
  assert_int_equal(section_of_packed_windows(2, 65536, 8, 4095), 4); /* as dense ones */
  /* Groups by head, and block by block, where twice as many bytes and more are in flight. */
  assert_int_equal(deal_windows(2, 16384, 16384, 32, 8, 128, 4095).tiles.section, 4);
  assert_int_equal(deal_windows(2, 8192, 8192, 32, 8, 128, 4095).tiles.section, 16); /* all */
  assert_int_equal(deal_windows(4, 3103, 3103, 48, 12, 128, 1023).tiles.section, 16);
  assert_int_equal(deal_windows(1, 6880, 6880, 32, 8, 128, 4096).tiles.section, 2 * 2);
  assert_int_equal(deal_windows(8, 2048, 2048, 24, 12, 128, 2000).tiles.section, 9);
  /* All of few chains. */
  assert_int_equal(deal_windows(1, 8192, 8192, 32, 8, 128, 4095).tiles.section, 2 * 8);
  assert_int_equal(deal_windows(1, 4921, 4921, 20, 5, 128, 4095).tiles.section, 2 * 5);
  /* Tiles that are not in step, since the first ones see few queries. */
  assert_int_equal(deal_windows(2, 4096, 16384, 16, 4, 128, 2047).tiles.section, 4);
  assert_int_equal(deal_windows(4, 4406, 7190, 48, 12, 128, 1023).tiles.section, 4);
  assert_int_equal(deal_windows(1, 1024, 8192, 32, 8, 128, 4095).tiles.section, 8); /* all */
}

static void check_rising(const fa3_key_tiles tiles, int32_t rising, int32_t together) {
  assert_int_equal(tiles.rising, rising);
  if (rising > 0) assert_int_equal(tiles.rising_section, together);
}

/* Heads whose tiles go upwards: as many together as the cache holds, and all but those whose tiles
 * are two for each multiprocessor. */
static void test_rising(void **state) {
  (void)state;
  check_rising(deal(4, 4096, 4096, 32, 32, 64, true).tiles, 128 - 12, 12);
  check_rising(deal(1, 16384, 16384, 32, 32, 64, true).tiles, 32 - 3, 3);
  check_rising(deal(2, 8192, 8192, 16, 16, 128, true).tiles, 32 - 5, 3);
  check_rising(deal(5, 1400, 1400, 14, 14, 64, true).tiles, 70 - 35, 35); /* deterministic.c */
  check_rising(deal(3, 1400, 1400, 14, 14, 128, true).tiles, 42 - 24, 17);
  check_rising(deal(4, 4096, 4096, 32, 32, 64, false).tiles, 0, 0);
  check_rising(deal(2, 8192, 8192, 32, 8, 64, true).tiles, 0, 0);          /* heads of a group */
  check_rising(deal(2, 8192, 8192, 8, 8, 256, true).tiles, 0, 0);          /* pairs of blocks */
  check_rising(deal(1, 65536, 65536, 16, 16, 64, true).tiles, 0, 0);       /* beyond the cache */
  check_rising(deal(8, 1024, 8192, 32, 32, 64, true).tiles, 0, 0);         /* nearly all is seen */
  check_rising(deal_packed(6, 20424, 5584, 24, 24, 128).tiles, 87 - 6, 4); /* as long as 87 */
  check_rising(deal(1, 16000, 16000, 8, 8, 128, true).tiles, 8 - 3, 1);
  check_rising(deal_packed(4, 16550, 16000, 8, 8, 128).tiles, 8 - 3, 1); /* as that one */
}

static void check_half_rising(struct backward_plan plan, int32_t rising, bool finished_later) {
  check_rising(plan.tiles, rising, rising);
  assert_int_equal(plan.tiles.section, fa3_chain_count(&plan.tiles) - rising);
  assert_int_equal(fa3_sum_count(&plan.tiles), 1);
  assert_int_equal(plan.finished_later, finished_later);
}

/* A round of tiles, of half of the chains at most; dQ is finished later where all would wait for a
 * head's first tile. */
static void test_half_rising(void **state) {
  (void)state;
  check_half_rising(deal(4, 1000, 1000, 8, 8, 128, true), 16, false);
  check_half_rising(deal(2, 1000, 1000, 16, 4, 128, true), 16, false); /* parts by heads */
  check_half_rising(deal(1, 4096, 4096, 8, 1, 128, true), 4, true);    /* of one head */
  check_half_rising(deal(1, 4096, 4096, 16, 16, 64, true), 4, false);  /* four rounds */
  check_half_rising(deal(1, 2048, 2048, 16, 16, 128, true), 8, true);
  check_half_rising(deal(1, 8192, 8192, 4, 4, 64, true), 2, true);
  check_half_rising(deal(1, 2048, 2048, 32, 8, 128, true), 8, true);   /* two heads in turn */
  check_half_rising(deal(2, 1400, 1400, 12, 12, 64, true), 12, false); /* deterministic.c */
  check_half_rising(deal(2, 1400, 1400, 12, 12, 128, true), 12, true);
  check_rising(deal(1, 3072, 3072, 32, 8, 128, true).tiles, 0, 0);   /* beyond two rounds */
  check_rising(deal(1, 6144, 6144, 6, 6, 64, true).tiles, 0, 0);     /* likewise, long steps */
  check_rising(deal(1, 2048, 2048, 12, 12, 64, true).tiles, 0, 0);   /* less than two */
  check_rising(deal(2, 1400, 1400, 8, 8, 128, true).tiles, 0, 0);    /* about one */
  check_rising(deal(1, 8192, 8192, 8, 1, 128, true).tiles, 0, 0);    /* a long way */
  check_rising(deal(1, 2048, 2048, 8, 1, 128, true).tiles, 0, 0);    /* likewise */
  check_rising(deal(1, 2048, 2048, 16, 16, 128, false).tiles, 0, 0); /* no mask */
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_long_sequences_rise),
                                     cmocka_unit_test(test_finished_later),
                                     cmocka_unit_test(test_sums),
                                     cmocka_unit_test(test_sums_of_windows),
                                     cmocka_unit_test(test_stagger),
                                     cmocka_unit_test(test_backward_section),
                                     cmocka_unit_test(test_longest_first),
                                     cmocka_unit_test(test_section_of_windows),
                                     cmocka_unit_test(test_rising),
                                     cmocka_unit_test(test_half_rising)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
