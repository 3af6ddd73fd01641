/* Who computes what of the backward pass, and in which order dQ is summed: plain C, for host and
 * device.
 *
 * A tile is a range of keys of one head. Its work is the blocks of queries that see them, of all
 * query heads that share the keys. Where there are few tiles, that work is dealt out in parts: each
 * has some of the query heads, and some of the blocks. No block of dQ belongs to two parts of a
 * tile. What parts have of dK and dV is added up pair by pair, by whoever of a pair arrives last;
 * it waits for the other only while that one stores its sum.
 *
 * Tiles add to a sum of dQ in the order in which they are taken, always: that of their numbers,
 * but for some of a head's first tiles, or all, which may come in reverse. So a tile waits only for
 * the same part of tiles that are taken before it, and never for one that is taken later: however
 * few workers there are, the one whose tile was taken first of all that are not done can go on.
 *
 * A chain is what waits for each other: the tiles of a head or, where its query heads are dealt
 * out, the same of their parts.
 *
 * A block of dQ may have several sums, so that tiles of a head which run side by side wait less.
 * Which tile adds to which is fixed, and so is the order in which the sums are added up: by the
 * last tile of all that see the block, or by a kernel of its own. The last one waits for tiles of
 * all sums, which were all taken before it. */
#ifndef FA3_BACKWARD_ORDER_H
#define FA3_BACKWARD_ORDER_H

#include <stdbool.h>

#include "mask.h"
#include "scheduler.h"

#define FA3_MOST_SORTED 32 /* sequences that are taken longest first: a lane of a warp for each */

typedef struct {
  int tiles; /* of keys, of the longest sequence, from `first` on */
  int first; /* no query sees the keys of those before it, which nobody takes */
  int heads; /* of keys */
  int batches;
  int rising;         /* chains that come first and whose tiles all go upwards */
  int rising_section; /* of these that are in flight together */
  int section;        /* likewise of the others */
  int head_parts;     /* by query heads of a group */
  int row_parts;      /* by blocks of queries */
  int upward;         /* of their first tiles: taken in reverse, visiting blocks upwards */
  int sums_log2; /* neighbours add to 2^this sums of a block of dQ; 0 if tiles go upwards, which add
                    to a sum of their own, or are staggered */
  int staggered; /* tiles begin at different blocks; without a mask, and if row_parts is 1 */
  int stagger_log2;  /* 2^this blocks from where a tile begins to where the next one does */
  int longest_first; /* packed sequences are numbered by their queries, the most first */
} fa3_key_tiles;

typedef struct {
  int tile; /* its place among the head's */
  int head; /* of keys */
  int batch;
  int head_part; /* which query heads */
  int row_part;  /* which blocks of queries */
  int upward;    /* how many of its chain's tiles, the first ones, go upwards */
} fa3_key_tile;

FA3_SHARED int fa3_key_tile_parts(const fa3_key_tiles *tiles) {
  return tiles->head_parts * tiles->row_parts;
}

FA3_SHARED int fa3_key_tile_count(const fa3_key_tiles *tiles) {
  return tiles->batches * tiles->heads * tiles->tiles * fa3_key_tile_parts(tiles);
}

FA3_SHARED int fa3_chain_count(const fa3_key_tiles *tiles) {
  return tiles->batches * tiles->heads * tiles->head_parts;
}

/* Section by section, the first tile of all its chains in all parts by rows, then the second of
 * all, and so on, but the upward ones in reverse. Under a causal mask the first tiles are the
 * longest. */
FA3_SHARED fa3_key_tile fa3_key_tile_at(const fa3_key_tiles *tiles, int index) {
  const int of_chain = tiles->tiles * tiles->row_parts;
  const bool rises = index < tiles->rising * of_chain;
  const int begin = rises ? 0 : tiles->rising;
  const int end = rises ? tiles->rising : fa3_chain_count(tiles);
  const int most = rises ? tiles->rising_section : tiles->section;
  int first = begin;
  if (most < end - begin) first += (index - begin * of_chain) / (most * of_chain) * most;
  const int width = end - first < most ? end - first : most;
  const int rest = index - first * of_chain, of_all = width * tiles->row_parts;
  fa3_key_tile tile;
  tile.tile = fa3_divide(rest, of_all);
  const int of_tile = rest - tile.tile * of_all;
  const int chain = fa3_divide(of_tile, tiles->row_parts); /* from `first` on */
  tile.row_part = of_tile - chain * tiles->row_parts;
  const int head = fa3_divide(first + chain, tiles->head_parts); /* over all batches */
  tile.head_part = first + chain - head * tiles->head_parts;
  tile.batch = tiles->batches == 1 ? 0 : fa3_divide(head, tiles->heads);
  tile.head = head - tile.batch * tiles->heads;
  tile.upward = rises ? tiles->tiles : tiles->upward;
  if (tile.tile < tile.upward) tile.tile = tile.upward - 1 - tile.tile;
  tile.tile += tiles->first;
  if (tile.upward > 0) tile.upward += tiles->first;
  return tile;
}

/* Ranges of blocks that a sequence is dealt out in: no more than it has blocks. */
FA3_SHARED int fa3_row_parts_of(const fa3_key_tiles *tiles, int blocks) {
  return tiles->row_parts < blocks ? tiles->row_parts : blocks > 0 ? blocks : 1;
}

/* The blocks of queries that a part of a tile visits, from the last down to the first: under a
 * causal mask the tiles of a head then begin at the same block, and each follows the one before it
 * by a step or two. Those that go upwards begin at the diagonal, each at a block of its own; taken
 * in reverse, none has to wait. Staggered tiles begin in between, and go round. */
FA3_SHARED fa3_range fa3_blocks_of_part(const fa3_key_tiles *tiles, const fa3_key_tile *tile,
                                        const fa3_mask *mask, int tile_q, int tile_k) {
  const int all = (mask->queries + tile_q - 1) / tile_q;
  const int rows = fa3_row_parts_of(tiles, all);
  const int begin = fa3_divide(all * tile->row_part, rows);
  const int end = fa3_divide(all * (tile->row_part + 1), rows);
  fa3_range blocks = fa3_seeing_tiles(mask, tile->tile * tile_k, (tile->tile + 1) * tile_k, tile_q);
  if (blocks.begin < begin) blocks.begin = begin;
  if (blocks.end > end) blocks.end = end;
  return blocks;
}

/* Which of them comes next, `step` being 1 or -1. */
FA3_SHARED int fa3_next_block(fa3_range blocks, int block, int step) {
  block += step;
  return block < blocks.begin ? blocks.end - 1 : block;
}

/* The parts of a tile that have work, in their order, and the number of this one among them; a tile
 * that no query sees is left to its first part. */
typedef struct {
  int number; /* -1: there is nothing to do */
  int count;  /* 0: no part has */
} fa3_place_of_part;

FA3_SHARED fa3_place_of_part fa3_find_part(const fa3_key_tiles *tiles, const fa3_key_tile *tile,
                                           const fa3_mask *mask, int tile_q, int tile_k) {
  const int all = (mask->queries + tile_q - 1) / tile_q, rows = fa3_row_parts_of(tiles, all);
  const fa3_range seen =
      fa3_seeing_tiles(mask, tile->tile * tile_k, (tile->tile + 1) * tile_k, tile_q);
  fa3_place_of_part place;
  place.number = tile->head_part + tile->row_part == 0 ? 0 : -1;
  place.count = 0;
  if (seen.begin >= seen.end) return place;
  /* Block b belongs to part ((b + 1) * rows - 1) / all. */
  const int first = ((seen.begin + 1) * rows - 1) / all;
  const int of_head = (seen.end * rows - 1) / all - first + 1;
  const int in_head = tile->row_part - first;
  place.number = in_head < 0 || in_head >= of_head ? -1 : tile->head_part * of_head + in_head;
  place.count = tiles->head_parts * of_head;
  return place;
}

#define FA3_MOST_PARTS 16 /* of a tile, where they are added up in pairs */

/* A pair of sides, of 2^level neighbouring parts each, one of which has part `number`. The side
 * that arrives first leaves its sum and goes; the other adds it to its own, and goes on to the next
 * level. Both orders give the same bits. Two neighbouring parts have one place, since only one of
 * them leaves something. */
typedef struct {
  int mine;    /* the place that this side leaves its sum in */
  int other;   /* that of the other side */
  bool alone;  /* there is no other side */
  int arrived; /* a bit that the first side sets when it arrives, */
  int left;    /* and when it has left its sum */
} fa3_pair;

/* Of a tile's parts. */
FA3_SHARED int fa3_part_places(int parts) {
  return (parts + 1) / 2;
}

FA3_SHARED fa3_pair fa3_find_pair(int count, int number, int level) {
  const int mine = number >> level << level, other = mine ^ 1 << level;
  fa3_pair pair;
  pair.mine = mine / 2;
  pair.other = other / 2;
  pair.alone = other >= count;
  /* Behind those of the levels below, each of which has half as many as the one before it. */
  pair.arrived = 1 << (FA3_MOST_PARTS - (FA3_MOST_PARTS >> level) + (number >> (level + 1)));
  pair.left = (int)((unsigned)pair.arrived << FA3_MOST_PARTS);
  return pair;
}

FA3_SHARED int fa3_sum_count(const fa3_key_tiles *tiles) {
  return tiles->upward > 0 || tiles->staggered ? 2 : 1 << tiles->sums_log2;
}

/* A lane of a warp waits for each (backward_finish.cuh). */
#define FA3_MOST_SUMS 32

/* How many of a head's first `n` tiles add to a sum of a block that sees all of them. */
FA3_SHARED int fa3_tiles_of_sum(const fa3_key_tiles *tiles, int n, int sum) {
  const int upward = tiles->upward, log2 = tiles->sums_log2;
  if (upward == 0) return (n + (1 << log2) - 1 - sum) >> log2;
  if (sum > 0) return n > upward ? n - upward : 0;
  return n < upward ? n : upward;
}

/* Staggered tiles begin each at a block of its own, visit blocks down to the first, and then from
 * the last one down to where they began: those that run side by side are never at the same block.
 * A block has two sums: of tiles that come to it before they go round, and of those that come to it
 * after. In both a tile follows those of lower numbers, so it waits for none that is taken later.
 */
typedef struct {
  int round; /* how many tiles before this one have the same place */
  int place; /* each is 2^stagger_log2 neighbouring blocks, at the last of which the tile begins */
} fa3_stagger;

FA3_SHARED fa3_stagger fa3_find_stagger(const fa3_key_tiles *tiles, int blocks, int tile) {
  const int places = ((blocks - 1) >> tiles->stagger_log2) + 1;
  fa3_stagger at;
  at.round = tile / places;
  at.place = tile % places;
  return at;
}

FA3_SHARED int fa3_staggered_start(const fa3_key_tiles *tiles, int blocks, int place) {
  const int end = (place + 1) << tiles->stagger_log2;
  return (end < blocks ? end : blocks) - 1;
}

/* To which of a block's sums tiles of a place add. */
FA3_SHARED int fa3_staggered_sum(const fa3_key_tiles *tiles, int place, int block) {
  return place < block >> tiles->stagger_log2;
}

/* How many tiles before `tile`, which is at `at`, add to it. */
FA3_SHARED int fa3_staggered_before(const fa3_key_tiles *tiles, fa3_stagger at, int tile, int block,
                                    int sum) {
  const int places = block >> tiles->stagger_log2; /* that come to it after they go round */
  const int after = at.round * places + (at.place < places ? at.place : places);
  return sum > 0 ? after : tile - after;
}

/* When a tile adds to a block of dQ. */
typedef struct {
  int sum;    /* to which of the block's sums */
  int before; /* how many tiles add to it before this one */
  int last;   /* it is taken after all others that see the block */
} fa3_turn;

/* `upward`: of the head's tiles. */
FA3_SHARED fa3_turn fa3_find_turn(const fa3_key_tiles *tiles, int upward, const fa3_mask *mask,
                                  int tile, int block, int tile_q, int tile_k) {
  const fa3_range seen = fa3_visible_tiles(mask, block * tile_q, (block + 1) * tile_q, tile_k);
  const int log2 = tiles->sums_log2;
  fa3_turn turn;
  if (tile < upward) {
    turn.sum = 0;
    turn.before = (seen.end < upward ? seen.end : upward) - 1 - tile;
  } else {
    turn.sum = upward > 0 ? 1 : tile & ((1 << log2) - 1);
    turn.before = (tile - (seen.begin > upward ? seen.begin : upward)) >> log2;
  }
  turn.last = tile == (seen.end > upward ? seen.end - 1 : seen.begin);
  return turn;
}

FA3_SHARED fa3_turn fa3_find_staggered_turn(const fa3_key_tiles *tiles, fa3_stagger at, int tile,
                                            int block) {
  fa3_turn turn;
  turn.sum = fa3_staggered_sum(tiles, at.place, block);
  turn.before = fa3_staggered_before(tiles, at, tile, block, turn.sum);
  turn.last = 0; /* dQ is finished later */
  return turn;
}

/* How many tiles add to a block's sum in all, where dQ is finished later. */
FA3_SHARED int fa3_additions_to_sum(const fa3_key_tiles *tiles, const fa3_mask *mask, int block,
                                    int sum, int tile_q, int tile_k) {
  const fa3_range seen = fa3_visible_tiles(mask, block * tile_q, (block + 1) * tile_q, tile_k);
  if (seen.begin >= seen.end) return 0;
  if (!tiles->staggered)
    return fa3_tiles_of_sum(tiles, seen.end, sum) - fa3_tiles_of_sum(tiles, seen.begin, sum);
  const int blocks = (mask->queries + tile_q - 1) / tile_q, n = seen.end;
  return fa3_staggered_before(tiles, fa3_find_stagger(tiles, blocks, n), n, block, sum);
}

#endif
