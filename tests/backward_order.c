/* The plain C that the backward kernels share with the host: which blocks of queries a tile of keys
 * visits, in which order the tiles add to dQ, and where that order's counters are. By counting. */
#include <stdbool.h>

#include "kernels/backward_params.h"
#include "test.h"

enum { TILE_M = 3, TILE_N = 4, MOST = 12 };

static bool sees(const fa3_mask *mask, int query, int key) {
  const fa3_range seen = fa3_visible_keys(mask, query);
  return key >= seen.begin && key < seen.end;
}

static void check_mask(const fa3_mask *mask) {
  for (int key = 0; key < mask->keys; key++) {
    const fa3_range seeing = fa3_seeing_queries(mask, key);
    for (int query = 0; query < mask->queries; query++)
      assert_int_equal(query >= seeing.begin && query < seeing.end, sees(mask, query, key));
  }
  for (int n = 0; n * TILE_N < mask->keys; n++) {
    const int first = n * TILE_N;
    const int last = first + TILE_N < mask->keys ? first + TILE_N : mask->keys;
    const fa3_range blocks = fa3_seeing_tiles(mask, first, first + TILE_N, TILE_M);
    const fa3_range common = fa3_common_queries(mask, first, first + TILE_N);
    for (int m = 0; m * TILE_M < mask->queries; m++) {
      bool any = false;
      for (int i = m * TILE_M; i < (m + 1) * TILE_M && i < mask->queries; i++)
        for (int j = first; j < last; j++) {
          any |= sees(mask, i, j);
          if (i >= common.begin && i < common.end) assert_true(sees(mask, i, j));
        }
      /* A tile visits a block exactly if the block counts on it. */
      const fa3_range tiles = fa3_visible_tiles(mask, m * TILE_M, (m + 1) * TILE_M, TILE_N);
      assert_int_equal(m >= blocks.begin && m < blocks.end, any);
      assert_int_equal(n >= tiles.begin && n < tiles.end, any);
    }
  }
}

static void test_tiles_and_blocks_agree(void **state) {
  (void)state;
  for (int queries = 0; queries <= MOST; queries++)
    for (int keys = 0; keys <= MOST; keys++)
      for (int diagonal = -MOST - 2; diagonal <= MOST + 2; diagonal++)
        for (int left = -1; left <= 7; left++)
          for (int right = -1; right <= 5; right++) {
            const fa3_mask mask =
                fa3_make_mask(queries, keys, diagonal, left < 0 ? FA3_NO_LIMIT : left,
                              right < 0 ? FA3_NO_LIMIT : right);
            check_mask(&mask);
          }
}

/* Each tile comes once, and after the tiles of its head that it waits for. */
static void test_tile_order(void **state) {
  (void)state;
  for (int blocks = 1; blocks <= 5; blocks++)
    for (int heads = 1; heads <= 3; heads++)
      for (int batches = 1; batches <= 3; batches++)
        for (int section = 1; section <= heads * batches; section++) {
          const fa3_tile_space space = {blocks, heads, batches, section, 0};
          int next[9] = {0};
          for (int index = 0; index < fa3_tile_count(&space); index++) {
            const fa3_tile tile = fa3_key_tile_at(&space, index);
            assert_in_range(tile.head, 0, heads - 1);
            assert_in_range(tile.batch, 0, batches - 1);
            assert_int_equal(tile.block, next[tile.batch * heads + tile.head]++);
          }
          for (int head = 0; head < heads * batches; head++) assert_int_equal(next[head], blocks);
        }
}

/* No two blocks of rows share a slot, and none is beyond the last, whatever the lengths. */
static void test_slots(void **state) {
  (void)state;
  enum { BATCH = 4, LONGEST = 7, LENGTHS = LONGEST + 1 };
  for (int trial = 0; trial < LENGTHS * LENGTHS * LENGTHS * LENGTHS; trial++) {
    int cu_seqlens[BATCH + 1] = {0};
    for (int b = 0, rest = trial; b < BATCH; b++, rest /= LENGTHS)
      cu_seqlens[b + 1] = cu_seqlens[b] + rest % LENGTHS;
    fa3_backward_sequences sequences = {
        .cu_seqlens_q = cu_seqlens, .tile_m = TILE_M, .blocks_q = (LONGEST + TILE_M - 1) / TILE_M};
    const int64_t slots = FA3_BACKWARD_SLOTS(true, BATCH, cu_seqlens[BATCH], TILE_M);
    int64_t end = 0;
    for (int b = 0; b < BATCH; b++) {
      const int first = fa3_backward_slot(&sequences, b, cu_seqlens[b]);
      assert_true(first >= end);
      end = first + (cu_seqlens[b + 1] - cu_seqlens[b] + TILE_M - 1) / TILE_M;
    }
    assert_true(end <= slots);
    sequences.cu_seqlens_q = NULL;
    assert_int_equal(fa3_backward_slot(&sequences, BATCH, 0),
                     FA3_BACKWARD_SLOTS(false, BATCH, LONGEST, TILE_M));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tiles_and_blocks_agree),
      cmocka_unit_test(test_tile_order),
      cmocka_unit_test(test_slots),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
