/* src/mask.h and problem_sequence against their definitions, for every small size, and what the
 * kernels make of a problem (kernels/sequence.h) against both. */
#include <stdbool.h>

#include "cuda/sequences.h"
#include "mask.h"
#include "problem.h"
#include "test.h"

/* The definition in mask.h. */
static bool sees(const struct mask *mask, int64_t i, int64_t j) {
  if (mask->left < MASK_UNBOUNDED && j < i + mask->diagonal - mask->left) return false;
  if (mask->right < MASK_UNBOUNDED && j > i + mask->diagonal + mask->right) return false;
  return true;
}

static bool in_range(struct key_range range, int64_t j) {
  return range.begin <= j && j < range.end;
}

static void check_range(const struct mask *mask, struct key_range range) {
  if (!(0 <= range.begin && range.begin <= range.end && range.end <= mask->seqlen_k))
    fail_msg("range %d..%d of %d keys", (int)range.begin, (int)range.end, (int)mask->seqlen_k);
}

/* Rows [first, last]: mask_visible holds every key that any row sees and ends at keys that are
 * seen; mask_full is exactly the keys that all rows see. */
static void check_rows(const struct mask *mask, int64_t first, int64_t last) {
  struct key_range visible = mask_visible(mask, first, last);
  struct key_range full = mask_full(mask, first, last);
  check_range(mask, visible);
  check_range(mask, full);
  int64_t lowest = -1, highest = -1;
  for (int64_t j = 0; j < mask->seqlen_k; j++) {
    bool any = false, all = true;
    for (int64_t i = first; i <= last; i++) {
      any = any || sees(mask, i, j);
      all = all && sees(mask, i, j);
    }
    if (any && lowest < 0) lowest = j;
    if (any) highest = j;
    if (any && !in_range(visible, j)) fail_msg("key %d is seen, but not visible", (int)j);
    if (all != in_range(full, j)) fail_msg("key %d: full is %d", (int)j, !all);
  }
  if (lowest < 0) {
    assert_int_equal(visible.begin, visible.end);
  } else {
    assert_int_equal(visible.begin, lowest);
    assert_int_equal(visible.end, highest + 1);
  }
}

/* Of the queries [0, seqlen_q), mask_seeing holds every one that sees any key of [first, last] and
 * ends at queries that see one. */
static void check_keys(const struct mask *mask, int64_t seqlen_q, int64_t first, int64_t last) {
  struct query_range seeing = mask_seeing(mask, seqlen_q, first, last);
  assert_true(0 <= seeing.begin && seeing.begin <= seeing.end && seeing.end <= seqlen_q);
  int64_t lowest = -1, highest = -1;
  for (int64_t i = 0; i < seqlen_q; i++) {
    bool any = false;
    for (int64_t j = first; j <= last; j++) any = any || sees(mask, i, j);
    if (any && lowest < 0) lowest = i;
    if (any) highest = i;
  }
  if (lowest < 0) {
    assert_int_equal(seeing.begin, seeing.end);
  } else {
    assert_int_equal(seeing.begin, lowest);
    assert_int_equal(seeing.end, highest + 1);
  }
}

static void check_mask(const struct mask *mask) {
  enum { ROWS = 6 };
  for (int64_t first = 0; first < ROWS; first++) {
    struct key_range row = mask_row(mask, first);
    check_range(mask, row);
    for (int64_t j = 0; j < mask->seqlen_k; j++)
      assert_int_equal(in_range(row, j), sees(mask, first, j));
    for (int64_t last = first; last < ROWS; last++) check_rows(mask, first, last);
  }
  for (int64_t first = 0; first < mask->seqlen_k; first++)
    for (int64_t last = first; last < mask->seqlen_k; last++) check_keys(mask, ROWS, first, last);
}

static void test_every_small_mask(void **state) {
  (void)state;
  static const int64_t bounds[] = {0, 1, 2, 3, 5, 9, 1000, MASK_UNBOUNDED};
  enum { BOUNDS = sizeof bounds / sizeof *bounds };
  for (int64_t seqlen_k = 0; seqlen_k <= 8; seqlen_k++)
    for (int64_t diagonal = -8; diagonal <= 10; diagonal++)
      for (int left = 0; left < BOUNDS; left++)
        for (int right = 0; right < BOUNDS; right++)
          check_mask(&(struct mask){diagonal, bounds[left], bounds[right], seqlen_k});
}

static void test_extreme_masks(void **state) {
  (void)state;
  const int64_t far = (int64_t)1 << 60;
  static const int64_t bounds[] = {0, 1, MASK_UNBOUNDED - 1, MASK_UNBOUNDED};
  for (int sign = -1; sign <= 1; sign += 2)
    for (int left = 0; left < 4; left++)
      for (int right = 0; right < 4; right++)
        check_mask(&(struct mask){sign * far, bounds[left], bounds[right], 7});
}

/* The kernels' sequence is the host's: where it lies, how long it is, and what each query sees. */
static void check_kernel_sequence(const struct problem *problem, int b,
                                  const struct sequence *expected) {
  const fa3_sequences sequences = make_sequences(problem);
  const fa3_sequence sequence = fa3_find_sequence(&sequences, b);
  assert_int_equal(sequence.query_batch, expected->batch_q);
  assert_int_equal(sequence.key_batch, expected->batch_k);
  assert_int_equal(sequence.query_row, expected->row_q);
  assert_int_equal(sequence.key_row, expected->row_k);
  assert_int_equal(sequence.mask.queries, expected->seqlen_q);
  assert_int_equal(sequence.mask.keys, expected->mask.seqlen_k);
  for (int i = 0; i < sequence.mask.queries; i++) {
    struct key_range seen = mask_row(&expected->mask, i);
    fa3_range range = fa3_visible_keys(&sequence.mask, i);
    assert_int_equal(range.begin < range.end, seen.begin < seen.end);
    if (seen.begin == seen.end) continue;
    assert_int_equal(range.begin, seen.begin);
    assert_int_equal(range.end, seen.end);
  }
}

/* Lengths of two sequences, counted by hand from the definitions in fa3.h. */
static void test_dense_sequence(void **state) {
  (void)state;
  const struct problem problem = {.batch = 2,
                                  .rows_q = 5,
                                  .rows_k = 9,
                                  .batch_k = 2,
                                  .max_seqlen_q = 5,
                                  .max_seqlen_k = 9,
                                  .window_left = 3,
                                  .window_right = MASK_UNBOUNDED};
  struct sequence sequence = problem_sequence(&problem, 1);
  assert_int_equal(sequence.seqlen_q, 5);
  assert_int_equal(sequence.row_q, 0);
  assert_int_equal(sequence.batch_q, 1);
  assert_int_equal(sequence.row_k, 0);
  assert_int_equal(sequence.batch_k, 1);
  assert_int_equal(sequence.mask.seqlen_k, 9);
  assert_int_equal(sequence.mask.diagonal, 4);
  assert_int_equal(sequence.mask.left, 3);
  assert_int_equal(sequence.mask.right, MASK_UNBOUNDED);
  check_kernel_sequence(&problem, 1, &sequence);
}

/* Every combination of optional lengths, on either kind of batch. */
static void test_every_kind_of_sequence(void **state) {
  (void)state;
  static const int32_t cu_seqlens_q[] = {0, 4, 4, 11};
  static const int32_t cu_seqlens_k[] = {0, 6, 14, 15};
  static const int32_t seqused_q[] = {2, 0, 6};
  static const int32_t seqused_k[] = {5, 7, 1};
  static const int32_t leftpad_k[] = {3, 0, 1};
  static const int32_t cache_batch_index[] = {4, 4, 1};
  static const int64_t diagonal[] = {-3, 100, 7};
  enum { DENSE_Q = 8, DENSE_K = 10 };
  for (unsigned mask = 0; mask < 128; mask++) {
    bool packed_q = mask & 1, packed_k = mask & 2;
    struct problem problem = {.batch = 3,
                              .rows_q = packed_q ? 11 : DENSE_Q,
                              .rows_k = packed_k ? 15 : DENSE_K,
                              .max_seqlen_q = DENSE_Q,
                              .max_seqlen_k = DENSE_K,
                              .cu_seqlens_q = packed_q ? cu_seqlens_q : NULL,
                              .cu_seqlens_k = packed_k ? cu_seqlens_k : NULL,
                              .seqused_q = mask & 4 ? seqused_q : NULL,
                              .seqused_k = mask & 8 ? seqused_k : NULL,
                              .leftpad_k = mask & 16 ? leftpad_k : NULL,
                              .diagonal = mask & 32 ? diagonal : NULL,
                              .window_left = 1,
                              .window_right = 2};
    if (mask & 64 && !packed_k) problem.cache_batch_index = cache_batch_index;
    for (int64_t b = 0; b < 3; b++) {
      struct sequence sequence = problem_sequence(&problem, b);
      int64_t length_q = packed_q ? cu_seqlens_q[b + 1] - cu_seqlens_q[b] : DENSE_Q;
      int64_t length_k = packed_k ? cu_seqlens_k[b + 1] - cu_seqlens_k[b] : DENSE_K;
      int64_t skipped = mask & 16 ? leftpad_k[b] : 0;
      if (mask & 4) length_q = seqused_q[b];
      if (mask & 8) length_k = seqused_k[b];
      length_k -= skipped;
      assert_int_equal(sequence.seqlen_q, length_q);
      assert_int_equal(sequence.mask.seqlen_k, length_k);
      assert_int_equal(sequence.batch_q, packed_q ? 0 : b);
      assert_int_equal(sequence.row_q, packed_q ? cu_seqlens_q[b] : 0);
      assert_int_equal(sequence.row_k, (packed_k ? cu_seqlens_k[b] : 0) + skipped);
      assert_int_equal(sequence.batch_k, packed_k ? 0 : mask & 64 ? cache_batch_index[b] : b);
      assert_int_equal(sequence.mask.diagonal, mask & 32 ? diagonal[b] : length_k - length_q);
      assert_int_equal(sequence.mask.left, 1);
      assert_int_equal(sequence.mask.right, 2);
      check_kernel_sequence(&problem, (int)b, &sequence);
    }
  }
}

/* A bound of packed lengths that is more than all rows. */
static void test_large_bound(void **state) {
  (void)state;
  static const int32_t starts[] = {0, 5};
  const struct problem problem = {
      .batch = 1, .rows_q = 5, .max_seqlen_q = 9, .cu_seqlens_q = starts};
  assert_int_equal(make_sequences(&problem).seqlen_q, 5);
}

/* Of a cache in pages: which entry of the table a row is looked up in, and a length that is more
 * than the table has. */
static void test_pages(void **state) {
  (void)state;
  static const int table[2 * 7];
  static const int used[] = {31, 33};
  static const int leftpad[] = {0, 5};
  const fa3_sequences sequences = {.used_k = used,
                                   .leftpad_k = leftpad,
                                   .page_table = table,
                                   .page_table_stride = 7,
                                   .seqlen_q = 2,
                                   .seqlen_k = 32,
                                   .window_left = FA3_NO_LIMIT,
                                   .window_right = FA3_NO_LIMIT};
  fa3_sequence sequence = fa3_find_sequence(&sequences, 0);
  assert_int_equal(sequence.mask.keys, 31);
  assert_ptr_equal(fa3_find_page(&sequences, &sequence, 3), table + 3);
  sequence = fa3_find_sequence(&sequences, 1);
  assert_int_equal(sequence.key_row, 5);
  assert_int_equal(sequence.mask.keys, 32 - 5);
  assert_ptr_equal(fa3_find_page(&sequences, &sequence, 3), table + 7 + 3);
}

/* Lengths that the host has not planned for are those that it has. */
static void test_lengths_beyond_bounds(void **state) {
  (void)state;
  static const int starts[] = {0, 100, 1000};
  static const int used_q[] = {5, INT32_MAX}, used_k[] = {7, INT32_MAX};
  fa3_sequences sequences = {.cu_seqlens_q = starts,
                             .cu_seqlens_k = starts,
                             .seqlen_q = 40,
                             .seqlen_k = 50,
                             .window_left = FA3_NO_LIMIT,
                             .window_right = FA3_NO_LIMIT};
  for (int b = 0; b < 2; b++) {
    const fa3_sequence packed = fa3_find_sequence(&sequences, b);
    assert_int_equal(packed.mask.queries, 40);
    assert_int_equal(packed.mask.keys, 50);
    sequences.used_q = used_q;
    sequences.used_k = used_k;
    const fa3_sequence used = fa3_find_sequence(&sequences, b);
    assert_int_equal(used.mask.queries, b ? 40 : 5);
    assert_int_equal(used.mask.keys, b ? 50 : 7);
    sequences.used_q = sequences.used_k = NULL;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_small_mask),      cmocka_unit_test(test_extreme_masks),
      cmocka_unit_test(test_dense_sequence),        cmocka_unit_test(test_every_kind_of_sequence),
      cmocka_unit_test(test_large_bound),           cmocka_unit_test(test_pages),
      cmocka_unit_test(test_lengths_beyond_bounds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
