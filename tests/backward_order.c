/* The plain C that the backward kernels share with the host: which blocks of queries a tile of keys
 * visits, in which order the tiles add to dQ, how its parts are added up, and where that order's
 * counters are. By counting. */
#include <stdbool.h>

#include "kernels/backward_params.h"
#include "rng.h"
#include "test.h"

enum { TILE_Q = 3, TILE_K = 4, MOST = 12 };

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
  for (int n = 0; n * TILE_K < mask->keys; n++) {
    const int first = n * TILE_K;
    const int last = first + TILE_K < mask->keys ? first + TILE_K : mask->keys;
    const fa3_range blocks = fa3_seeing_tiles(mask, first, first + TILE_K, TILE_Q);
    const fa3_range common = fa3_common_queries(mask, first, first + TILE_K);
    for (int m = 0; m * TILE_Q < mask->queries; m++) {
      bool any = false;
      for (int i = m * TILE_Q; i < (m + 1) * TILE_Q && i < mask->queries; i++)
        for (int j = first; j < last; j++) {
          any |= sees(mask, i, j);
          if (i >= common.begin && i < common.end) assert_true(sees(mask, i, j));
        }
      /* A tile visits a block exactly if the block counts on it. */
      const fa3_range tiles = fa3_visible_tiles(mask, m * TILE_Q, (m + 1) * TILE_Q, TILE_K);
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

/* Which tile is taken as number `place` of a head of which so many go upwards; and where a tile
 * comes. */
static int in_turn(int upward, int place) {
  return place < upward ? upward - 1 - place : place;
}

static int chain_of(const fa3_key_tiles *tiles, const fa3_key_tile *tile) {
  return (tile->batch * tiles->heads + tile->head) * tiles->head_parts + tile->head_part;
}

/* Every part of every tile comes once, and after the same part of those that come before it. */
static void test_tile_order(void **state) {
  (void)state;
  enum { HEADS = 3, BATCHES = 3, HEAD_PARTS = 2, ROW_PARTS = 3 };
  enum { CHAINS = HEADS * BATCHES * HEAD_PARTS };
  for (int trial = 0; trial < 3 * 5 * CHAINS * ROW_PARTS; trial++) {
    fa3_key_tiles tiles = {.tiles = 1 + trial % 5,
                           .heads = 1 + trial / 5 % HEADS,
                           .batches = 1 + trial / 15 % BATCHES,
                           .first = trial % 3,
                           .head_parts = 1 + trial / 45 % 2,
                           .row_parts = 1 + trial / 90 % 3};
    const int all = fa3_chain_count(&tiles);
    tiles.upward = trial % 7 % (tiles.tiles + 1);
    for (tiles.section = 1; tiles.section <= all; tiles.section++) {
      tiles.rising_section = 1 + trial % 4;
      tiles.rising = trial / 270 * all / 2;
      int next[CHAINS][ROW_PARTS] = {{0}};
      for (int index = 0; index < fa3_key_tile_count(&tiles); index++) {
        const fa3_key_tile tile = fa3_key_tile_at(&tiles, index);
        assert_in_range(tile.head, 0, tiles.heads - 1);
        assert_in_range(tile.batch, 0, tiles.batches - 1);
        assert_in_range(tile.head_part, 0, tiles.head_parts - 1);
        assert_in_range(tile.row_part, 0, tiles.row_parts - 1);
        const int chain = chain_of(&tiles, &tile), place = next[chain][tile.row_part]++;
        assert_in_range(chain, 0, all - 1);
        const int upward = chain < tiles.rising ? tiles.tiles : tiles.upward;
        assert_int_equal(tile.upward, upward > 0 ? tiles.first + upward : 0);
        assert_int_equal(tile.tile, tiles.first + in_turn(upward, place));
      }
      for (int chain = 0; chain < all; chain++)
        for (int part = 0; part < tiles.row_parts; part++)
          assert_int_equal(next[chain][part], tiles.tiles);
    }
  }
}

/* The tiles of a head under a mask, of which so many go upwards: each visits the blocks that see it
 * in one part each, and adds to one of their sums as the next after tiles that are taken before it.
 */
static void check_turns(const fa3_key_tiles *tiles, int upward, const fa3_mask *mask) {
  int added[FA3_MOST_SUMS][MOST / TILE_Q + 1] = {{0}};
  bool complete[MOST / TILE_Q + 1] = {0};
  for (int place = 0; place < tiles->tiles; place++) {
    const int n = in_turn(upward, place);
    const fa3_range seeing = fa3_seeing_tiles(mask, n * TILE_K, (n + 1) * TILE_K, TILE_Q);
    int visited = 0;
    for (int part = 0; part < tiles->row_parts; part++) {
      const fa3_key_tile tile = {.tile = n, .row_part = part};
      const fa3_range blocks = fa3_blocks_of_part(tiles, &tile, mask, TILE_Q, TILE_K);
      for (int m = blocks.end - 1; m >= blocks.begin; m--) {
        const fa3_turn turn = fa3_find_turn(tiles, upward, mask, n, m, TILE_Q, TILE_K);
        assert_true(m >= seeing.begin && m < seeing.end);
        assert_false(complete[m]);
        assert_in_range(turn.sum, 0, fa3_sum_count(tiles) - 1);
        assert_int_equal(turn.before, added[turn.sum][m]++);
        complete[m] = turn.last;
        const fa3_range seen = fa3_visible_tiles(mask, m * TILE_Q, (m + 1) * TILE_Q, TILE_K);
        for (int sum = 0; turn.last && seen.begin == 0 && sum < fa3_sum_count(tiles); sum++)
          assert_int_equal(added[sum][m], fa3_tiles_of_sum(tiles, seen.end - seen.begin, sum));
        visited++;
      }
    }
    assert_int_equal(visited, seeing.end > seeing.begin ? seeing.end - seeing.begin : 0);
  }
  for (int m = 0; m * TILE_Q < mask->queries; m++) {
    const fa3_range seen = fa3_visible_tiles(mask, m * TILE_Q, (m + 1) * TILE_Q, TILE_K);
    assert_int_equal(complete[m], seen.begin < seen.end);
    for (int sum = 0; sum < fa3_sum_count(tiles); sum++)
      assert_int_equal(fa3_additions_to_sum(tiles, mask, m, sum, TILE_Q, TILE_K), added[sum][m]);
  }
}

static void test_turns(void **state) {
  (void)state;
  for (int queries = 0; queries <= MOST; queries++)
    for (int keys = 0; keys <= MOST; keys++)
      for (int diagonal = -MOST - 2; diagonal <= MOST + 2; diagonal += 3)
        for (int left = -1; left <= 7; left += 4)
          for (int right = -1; right <= 5; right += 3)
            for (int parts = 1; parts <= 5; parts++) {
              fa3_key_tiles tiles = {.tiles = (keys + TILE_K - 1) / TILE_K, .row_parts = parts};
              const fa3_mask mask =
                  fa3_make_mask(queries, keys, diagonal, left < 0 ? FA3_NO_LIMIT : left,
                                right < 0 ? FA3_NO_LIMIT : right);
              for (tiles.upward = 0; tiles.upward <= tiles.tiles; tiles.upward++)
                for (tiles.sums_log2 = 0;
                     1 << tiles.sums_log2 <= (tiles.upward > 0 ? 1 : FA3_MOST_SUMS);
                     tiles.sums_log2++)
                  check_turns(&tiles, tiles.upward, &mask);
              tiles.upward = tiles.sums_log2 = 0;
              check_turns(&tiles, tiles.tiles, &mask); /* all, and one sum */
              tiles.tiles += 2; /* of the longest sequence, which this one is not */
              check_turns(&tiles, tiles.tiles, &mask);
            }
}

/* Staggered tiles visit each block once, and add to one of two sums as the next after tiles of
 * lower numbers. Those of a round never meet: each begins at a block of its own. */
static void check_staggered_turns(const fa3_key_tiles *tiles, const fa3_mask *mask) {
  enum { BLOCKS = MOST / TILE_Q };
  const int blocks = (mask->queries + TILE_Q - 1) / TILE_Q;
  int added[2][BLOCKS] = {{0}};
  bool begun[BLOCKS + 1][BLOCKS] = {{false}};
  for (int n = 0; n < tiles->tiles; n++) {
    const fa3_stagger at = fa3_find_stagger(tiles, blocks, n);
    const int start = fa3_staggered_start(tiles, blocks, at.place);
    bool visited[BLOCKS] = {false};
    assert_in_range(start, 0, blocks - 1);
    assert_in_range(at.round, 0, n);
    if (at.round <= BLOCKS) {
      assert_false(begun[at.round][start]);
      begun[at.round][start] = true;
    }
    const fa3_range all = {0, blocks};
    for (int step = 0, m = start; step < blocks; step++, m = fa3_next_block(all, m, -1)) {
      const fa3_turn turn = fa3_find_staggered_turn(tiles, at, n, m);
      assert_false(visited[m]);
      visited[m] = true;
      assert_int_equal(turn.sum, step > start);
      assert_int_equal(turn.before, added[turn.sum][m]++);
    }
  }
  for (int m = 0; m < blocks; m++)
    for (int sum = 0; sum < fa3_sum_count(tiles); sum++)
      assert_int_equal(fa3_additions_to_sum(tiles, mask, m, sum, TILE_Q, TILE_K), added[sum][m]);
}

static void test_staggered_turns(void **state) {
  (void)state;
  for (int queries = 1; queries <= MOST; queries++)
    for (int keys = 1; keys <= 4 * MOST; keys++)
      for (int log2 = 0; log2 < 4; log2++) {
        const fa3_key_tiles tiles = {.tiles = (keys + TILE_K - 1) / TILE_K,
                                     .row_parts = 1,
                                     .staggered = true,
                                     .stagger_log2 = log2};
        const fa3_mask mask =
            fa3_make_mask(queries, keys, keys - queries, FA3_NO_LIMIT, FA3_NO_LIMIT);
        check_staggered_turns(&tiles, &mask);
      }
}

/* The parts of a tile that have blocks are numbered, and no others. Exactly one part stores the
 * zeros of a tile that no query sees. */
static void check_parts(const fa3_key_tiles *tiles, const fa3_mask *mask, int n) {
  int with_work = 0, zeros = 0, visited = 0, count = -1;
  for (int index = 0; index < fa3_key_tile_parts(tiles); index++) {
    const fa3_key_tile tile = {
        .tile = n, .head_part = index / tiles->row_parts, .row_part = index % tiles->row_parts};
    const fa3_range blocks = fa3_blocks_of_part(tiles, &tile, mask, TILE_Q, TILE_K);
    const fa3_place_of_part place = fa3_find_part(tiles, &tile, mask, TILE_Q, TILE_K);
    if (count < 0) count = place.count;
    assert_int_equal(place.count, count);
    if (blocks.begin < blocks.end) {
      assert_int_equal(place.number, with_work++);
      visited += blocks.end - blocks.begin;
    } else if (count > 0) {
      assert_int_equal(place.number, -1);
    } else {
      zeros += place.number >= 0;
    }
  }
  const fa3_range seeing = fa3_seeing_tiles(mask, n * TILE_K, (n + 1) * TILE_K, TILE_Q);
  const int seen = seeing.end > seeing.begin ? seeing.end - seeing.begin : 0;
  assert_int_equal(visited, seen * tiles->head_parts);
  assert_int_equal(count, with_work);
  assert_int_equal(zeros, seen == 0);
}

static void test_parts(void **state) {
  (void)state;
  for (int queries = 0; queries <= MOST; queries++)
    for (int keys = 1; keys <= MOST; keys++)
      for (int diagonal = -MOST - 2; diagonal <= MOST + 2; diagonal += 2)
        for (int left = -1; left <= 7; left += 4)
          for (int right = -1; right <= 5; right += 3)
            for (int parts = 0; parts < 3 * 6; parts++) {
              const fa3_key_tiles tiles = {.tiles = (keys + TILE_K - 1) / TILE_K,
                                           .head_parts = 1 + parts % 3,
                                           .row_parts = 1 + parts / 3};
              const fa3_mask mask =
                  fa3_make_mask(queries, keys, diagonal, left < 0 ? FA3_NO_LIMIT : left,
                                right < 0 ? FA3_NO_LIMIT : right);
              for (int n = 0; n < tiles.tiles; n++) check_parts(&tiles, &mask, n);
            }
}

/* A sum over parts: which they are, and how it was added up, but for the order within a pair. */
struct sum {
  unsigned parts;
  uint64_t form;
};

static struct sum add(struct sum a, struct sum b) {
  const uint64_t low = a.form < b.form ? a.form : b.form, high = a.form ^ b.form ^ low;
  assert_int_equal(a.parts & b.parts, 0);
  return (struct sum){a.parts | b.parts, (low * 31 + high) * 0x9e3779b97f4a7c15U + 1};
}

/* A part on its way from pair to pair. Between any two steps others may go on. */
struct part {
  enum { ARRIVES, STORES, LEAVES, ADDS, GONE, HAS_ALL } next;
  int number, level;
  struct sum sum;
};

static void go_on(struct part *part, int count, struct sum *left, int *arrivals) {
  const fa3_pair at = fa3_find_pair(count, part->number, part->level);
  const int before = *arrivals;
  switch (part->next) {
    case ARRIVES:
      if (1 << part->level >= count) {
        part->next = HAS_ALL;
      } else if (at.alone) {
        part->level++;
      } else { /* the second to arrive comes back here until it finds something */
        *arrivals |= at.arrived;
        part->next = !(before & at.arrived) ? STORES : before & at.left ? ADDS : ARRIVES;
      }
      break;
    case STORES:
      assert_in_range(at.mine, 0, fa3_part_places(count) - 1);
      assert_int_equal(left[at.mine].parts, 0);
      left[at.mine] = part->sum;
      part->next = LEAVES;
      break;
    case LEAVES:
      *arrivals |= at.left;
      part->next = GONE;
      break;
    case ADDS:
      part->sum = add(part->sum, left[at.other]);
      left[at.other].parts = 0; /* the place is free */
      part->level++;
      part->next = ARRIVES;
      break;
    case GONE:
    case HAS_ALL:
      break;
  }
}

/* Pair by pair, until one part has the sum of all, which is always added up in the same way. */
static void test_pairs(void **state) {
  (void)state;
  enum { RUNS = 200 };
  struct rng rng = rng_for(0);
  for (int count = 1; count <= FA3_MOST_PARTS; count++) {
    struct sum first = {0, 0};
    for (int run = 0; run < RUNS; run++) {
      struct part parts[FA3_MOST_PARTS];
      struct sum left[FA3_MOST_PARTS] = {{0, 0}};
      int arrivals = 0, under_way = count;
      for (int i = 0; i < count; i++)
        parts[i] = (struct part){.number = i, .sum = {1U << i, (uint64_t)i + 1}};
      while (under_way > 0) {
        struct part *part = &parts[rng_between(&rng, 0, count - 1)];
        if (part->next == GONE || part->next == HAS_ALL) continue;
        go_on(part, count, left, &arrivals);
        if (part->next == GONE) under_way--;
        if (part->next != HAS_ALL) continue;
        assert_int_equal(under_way--, 1);
        assert_int_equal(part->sum.parts, (1U << count) - 1);
        if (run == 0) first = part->sum;
        assert_true(part->sum.form == first.form);
      }
    }
  }
}

/* Any number of workers gets through: each takes the next tile when it is done with the one that it
 * has, and a tile goes on when the one before it, of the same chain and part by rows, is done. */
static void test_any_number_of_workers(void **state) {
  (void)state;
  enum { HEADS = 2, HEAD_PARTS = 2, CHAINS = HEADS * HEAD_PARTS };
  enum { TILES = 5, PARTS = 2, WORKERS = 7 };
  for (int trial = 0; trial < WORKERS * CHAINS * CHAINS; trial++) {
    const int workers = 1 + trial % WORKERS, section = 1 + trial / WORKERS % CHAINS;
    for (int rising = 0; rising <= CHAINS; rising++) {
      const fa3_key_tiles tiles = {.tiles = TILES,
                                   .heads = HEADS,
                                   .batches = 1,
                                   .section = section,
                                   .rising = rising,
                                   .rising_section = 1 + trial / (WORKERS * CHAINS),
                                   .head_parts = HEAD_PARTS,
                                   .row_parts = PARTS};
      int done[CHAINS][PARTS] = {{0}}, in_hand[WORKERS], next = 0,
          left = fa3_key_tile_count(&tiles);
      for (int w = 0; w < workers; w++) in_hand[w] = next < left ? next++ : -1;
      while (left > 0) {
        bool any = false;
        for (int w = workers - 1; w >= 0; w--) { /* the last that came first: the worst case */
          if (in_hand[w] < 0) continue;
          const fa3_key_tile tile = fa3_key_tile_at(&tiles, in_hand[w]);
          const int chain = chain_of(&tiles, &tile);
          if (done[chain][tile.row_part] < in_turn(tile.upward, tile.tile)) continue;
          done[chain][tile.row_part]++;
          in_hand[w] = next < fa3_key_tile_count(&tiles) ? next++ : -1;
          left--;
          any = true;
        }
        assert_true(any);
      }
    }
  }
}

/* No two blocks of rows share a slot, nor tiles of keys, and none is beyond the last, whatever the
 * lengths. */
static void test_slots(void **state) {
  (void)state;
  enum { BATCH = 4, LONGEST = 7, LENGTHS = LONGEST + 1 };
  for (int trial = 0; trial < LENGTHS * LENGTHS * LENGTHS * LENGTHS; trial++) {
    int cu_seqlens[BATCH + 1] = {0};
    for (int b = 0, rest = trial; b < BATCH; b++, rest /= LENGTHS)
      cu_seqlens[b + 1] = cu_seqlens[b] + rest % LENGTHS;
    fa3_sequences sequences = {.cu_seqlens_q = cu_seqlens, .seqlen_q = LONGEST};
    const fa3_query_blocks blocks = {.tile_q = TILE_Q, .blocks_q = (LONGEST + TILE_Q - 1) / TILE_Q};
    const int64_t slots = FA3_BACKWARD_SLOTS(true, BATCH, cu_seqlens[BATCH], TILE_Q);
    const fa3_sequences keys = {.cu_seqlens_k = cu_seqlens, .seqlen_k = LONGEST};
    const fa3_key_tiles tiles = {.tiles = (LONGEST + TILE_Q - 1) / TILE_Q};
    int64_t end = 0;
    for (int b = 0; b < BATCH; b++) {
      const int first = fa3_backward_slot(&sequences, &blocks, b, cu_seqlens[b]);
      assert_true(first >= end);
      assert_int_equal(fa3_backward_key_slot(&keys, &tiles, b, cu_seqlens[b], TILE_Q), first);
      end = first + (cu_seqlens[b + 1] - cu_seqlens[b] + TILE_Q - 1) / TILE_Q;
    }
    assert_true(end <= slots);
    sequences.cu_seqlens_q = NULL;
    assert_int_equal(fa3_backward_key_slot(&sequences, &tiles, BATCH, 0, TILE_Q),
                     FA3_BACKWARD_SLOTS(false, BATCH, LONGEST, TILE_Q));
    assert_int_equal(fa3_backward_slot(&sequences, &blocks, BATCH, 0),
                     FA3_BACKWARD_SLOTS(false, BATCH, LONGEST, TILE_Q));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tiles_and_blocks_agree),
      cmocka_unit_test(test_tile_order),
      cmocka_unit_test(test_turns),
      cmocka_unit_test(test_staggered_turns),
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_any_number_of_workers),
      cmocka_unit_test(test_slots),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
