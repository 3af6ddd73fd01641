/* The plain C that kernels share with the host, the order of tiles (kernels/scheduler.h) and the
 * mask (kernels/mask.h): by counting, and against the host's own. */
#include <stdlib.h>

#include "kernels/mask.h"
#include "kernels/scheduler.h"
#include "mask.h"
#include "test.h"

/* Each tile has exactly one index. */
static void expect_every_tile_once(const fa3_tile_space *space) {
  int total = fa3_tile_count(space);
  assert_int_equal(total, space->blocks * space->heads * space->batches);
  char *seen = calloc((size_t)total, 1);
  assert_non_null(seen);
  for (int index = 0; index < total; index++) {
    fa3_tile tile = fa3_tile_at(space, index);
    assert_in_range(tile.block, 0, space->blocks - 1);
    assert_in_range(tile.head, 0, space->heads - 1);
    assert_in_range(tile.batch, 0, space->batches - 1);
    seen[(tile.batch * space->heads + tile.head) * space->blocks + tile.block]++;
  }
  for (int i = 0; i < total; i++) assert_int_equal(seen[i], 1);
  free(seen);
}

static void test_every_tile_once(void **state) {
  (void)state;
  for (int blocks = 1; blocks <= 9; blocks++)
    for (int heads = 1; heads <= 4; heads++)
      for (int batches = 1; batches <= 3; batches++) {
        const int all = heads * batches;
        for (int section = 1; section <= all; section++)
          for (int uneven = 0; uneven < 2; uneven++)
            expect_every_tile_once(&(fa3_tile_space){.blocks = blocks,
                                                     .heads = heads,
                                                     .batches = batches,
                                                     .section = section,
                                                     .uneven = uneven});
        for (int group = 1; group <= all; group++)
          for (int grouped = 0; grouped <= all; grouped += group)
            expect_every_tile_once(&(fa3_tile_space){.blocks = blocks,
                                                     .heads = heads,
                                                     .batches = batches,
                                                     .uneven = 1,
                                                     .group = group,
                                                     .grouped = grouped});
      }
}

/* Where tiles are cut, each part of a row block is in one of them. */
static void test_every_part_once(void **state) {
  (void)state;
  enum { BLOCKS = 5, HEADS = 3, BATCHES = 2, PARTS = 3 };
  for (int cut = 0; cut <= BLOCKS * HEADS * BATCHES; cut++) {
    const fa3_tile_space space = {
        .blocks = BLOCKS, .heads = HEADS, .batches = BATCHES, .cut = cut, .parts = PARTS};
    int seen[BATCHES][HEADS][BLOCKS * PARTS] = {{{0}}};
    const int total = fa3_part_count(&space), whole = BLOCKS * HEADS * BATCHES - cut;
    assert_int_equal(total, whole + cut * PARTS);
    for (int index = 0; index < total; index++) {
      const fa3_tile tile = fa3_part_at(&space, index);
      int *parts = seen[tile.batch][tile.head];
      assert_true((tile.block >= BLOCKS) == (index >= whole));
      if (index >= whole)
        parts[tile.block - BLOCKS]++;
      else
        for (int i = 0; i < PARTS; i++) parts[tile.block * PARTS + i]++;
    }
    for (int batch = 0; batch < BATCHES; batch++)
      for (int head = 0; head < HEADS; head++)
        for (int part = 0; part < BLOCKS * PARTS; part++)
          assert_int_equal(seen[batch][head][part], 1);
  }
}

/* The longest tiles of a causal mask do not come last. */
static void test_long_tiles_first(void **state) {
  (void)state;
  const fa3_tile_space spaces[] = {
      {.blocks = 16, .heads = 4, .batches = 2, .section = 8, .uneven = 1},
      {.blocks = 8, .heads = 4, .batches = 2, .uneven = 1, .group = 2, .grouped = 4}};
  for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
    assert_int_equal(fa3_tile_at(&spaces[i], 0).block, spaces[i].blocks - 1);
    assert_true(fa3_tile_at(&spaces[i], fa3_tile_count(&spaces[i]) - 1).block < 2);
  }
}

/* The kernels' mask, of 32 bits, says what the host's says. */
static void test_masks_agree(void **state) {
  (void)state;
  static const int64_t limits[] = {0, 1, 3, 7, INT64_C(1) << 30, INT64_C(1) << 59, MASK_UNBOUNDED};
  static const int64_t diagonals[] = {-(INT64_C(1) << 60), -20, -3, 0, 2, 6, 20, INT64_C(1) << 31,
                                      INT64_C(1) << 60};
  for (int queries = 1; queries <= 7; queries++)
    for (int keys = 0; keys <= 7; keys++)
      for (size_t left = 0; left < sizeof limits / sizeof *limits; left++)
        for (size_t right = 0; right < sizeof limits / sizeof *limits; right++)
          for (size_t d = 0; d < sizeof diagonals / sizeof *diagonals; d++) {
            const struct mask host = {diagonals[d], limits[left], limits[right], keys};
            const fa3_mask device =
                fa3_make_mask(queries, keys, diagonals[d], limits[left], limits[right]);
            for (int query = 0; query < queries; query++) {
              struct key_range expected = mask_row(&host, query);
              fa3_range got = fa3_visible_keys(&device, query);
              if (expected.begin >= expected.end) {
                assert_true(got.begin >= got.end);
              } else {
                assert_int_equal(got.begin, expected.begin);
                assert_int_equal(got.end, expected.end);
              }
            }
          }
}

/* Shares follow one on the other, are nearly equal, and warpgroups' tiles of keys that a share has
 * are those that its neighbours lack. */
static void test_shares(void **state) {
  (void)state;
  for (int count = 0; count <= 40; count++)
    for (int shares = 1; shares <= 9; shares++) {
      const fa3_range all = {3, 3 + count}, own = {5, 3 + count - 2};
      int end = all.begin, found = 0;
      for (int number = 0; number < shares; number++) {
        const fa3_range share = fa3_share_of(all, number, shares);
        const fa3_range common = fa3_common_range(own, share);
        assert_int_equal(share.begin, end);
        assert_in_range(share.end - share.begin, count / shares, (count + shares - 1) / shares);
        assert_true(common.begin < common.end || (common.begin == 0 && common.end == 0));
        found += common.end - common.begin;
        end = share.end;
      }
      assert_int_equal(end, all.end);
      assert_int_equal(found, own.end > own.begin ? own.end - own.begin : 0);
    }
}

/* Tiles that any query of a block sees are visited, and those that need no mask hold no masked
 * key. */
static void test_tiles_cover_the_mask(void **state) {
  (void)state;
  enum { WIDTH = 4 };
  for (int queries = 1; queries <= 9; queries += 2)
    for (int keys = 0; keys <= 17; keys++)
      for (int left = -1; left <= 6; left += 2)
        for (int right = -1; right <= 3; right += 2) {
          const fa3_mask mask =
              fa3_make_mask(queries, keys, keys - queries, left < 0 ? FA3_NO_LIMIT : left,
                            right < 0 ? FA3_NO_LIMIT : right);
          for (int first = 0; first < queries; first += 3) {
            int last = first + 3 < queries ? first + 3 : queries;
            fa3_range tiles = fa3_visible_tiles(&mask, first, first + 3, WIDTH);
            fa3_range common = fa3_common_keys(&mask, first, first + 3);
            for (int query = first; query < last; query++) {
              fa3_range seen = fa3_visible_keys(&mask, query);
              for (int key = seen.begin; key < seen.end; key++)
                assert_true(key / WIDTH >= tiles.begin && key / WIDTH < tiles.end);
              for (int key = common.begin; key < common.end; key++)
                assert_true(key >= seen.begin && key < seen.end);
            }
          }
        }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_tile_once),  cmocka_unit_test(test_every_part_once),
      cmocka_unit_test(test_long_tiles_first), cmocka_unit_test(test_masks_agree),
      cmocka_unit_test(test_shares),           cmocka_unit_test(test_tiles_cover_the_mask),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
