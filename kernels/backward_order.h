/* Who computes what of the backward pass, and in which order dQ is summed: plain C, for host and
 * device.
 *
 * A tile is a range of keys of one head. Its work is the blocks of queries that see them, of all
 * query heads that share the keys. Where there are few tiles, that work is dealt out in parts: each
 * has some of the query heads, and some of the blocks. No block of dQ belongs to two parts of a
 * tile, so parts never wait for each other; what they have of dK and dV is summed afterwards.
 *
 * Tiles add to a block of dQ in the order of their numbers, always. So a tile waits only for the
 * same part of tiles with smaller numbers, which are taken before it, and never for one that is
 * taken later: however few workers there are, the one whose tile was taken first of all that are
 * not done can go on. */
#ifndef FA3_BACKWARD_ORDER_H
#define FA3_BACKWARD_ORDER_H

#include "mask.h"
#include "scheduler.h"

typedef struct {
  int tiles; /* of keys, of the longest sequence */
  int heads; /* of keys */
  int batches;
  int section;    /* heads, over all batches, that are in flight together */
  int head_parts; /* by query heads of a group */
  int row_parts;  /* by blocks of queries */
} fa3_key_tiles;

typedef struct {
  int tile; /* its place among the head's */
  int head; /* of keys */
  int batch;
  int head_part; /* which query heads */
  int row_part;  /* which blocks of queries */
} fa3_key_tile;

FA3_SHARED int fa3_key_tile_parts(const fa3_key_tiles *tiles) {
  return tiles->head_parts * tiles->row_parts;
}

FA3_SHARED int fa3_key_tile_count(const fa3_key_tiles *tiles) {
  return tiles->tiles * tiles->heads * tiles->batches * fa3_key_tile_parts(tiles);
}

/* Section by section, the first tile of all its heads in all parts, then the second of all, and so
 * on. Under a causal mask the first tiles are the longest. */
FA3_SHARED fa3_key_tile fa3_key_tile_at(const fa3_key_tiles *tiles, int index) {
  const int parts = fa3_key_tile_parts(tiles);
  const int all_heads = tiles->heads * tiles->batches;
  const int section = index / (tiles->section * tiles->tiles * parts);
  const int first = section * tiles->section;
  const int width = all_heads - first < tiles->section ? all_heads - first : tiles->section;
  const int rest = index - first * tiles->tiles * parts;
  const int of_tile = rest % (width * parts);
  const int head = first + of_tile / parts, part = of_tile % parts;
  fa3_key_tile tile;
  tile.tile = rest / (width * parts);
  tile.head = head % tiles->heads;
  tile.batch = head / tiles->heads;
  tile.head_part = part / tiles->row_parts;
  tile.row_part = part % tiles->row_parts;
  return tile;
}

/* The blocks of queries that a part of a tile visits, from the last down to the first: under a
 * causal mask the tiles of a head then begin at the same block, and each follows the one before it
 * by a step or two. */
FA3_SHARED fa3_range fa3_blocks_of_part(const fa3_key_tiles *tiles, const fa3_key_tile *tile,
                                        const fa3_mask *mask, int tile_q, int tile_k) {
  const int all = (mask->queries + tile_q - 1) / tile_q;
  const int begin = all * tile->row_part / tiles->row_parts;
  const int end = all * (tile->row_part + 1) / tiles->row_parts;
  fa3_range blocks = fa3_seeing_tiles(mask, tile->tile * tile_k, (tile->tile + 1) * tile_k, tile_q);
  if (blocks.begin < begin) blocks.begin = begin;
  if (blocks.end > end) blocks.end = end;
  return blocks;
}

/* When a tile adds to a block of dQ. */
typedef struct {
  int before; /* how many tiles add before it */
  int last;   /* none does after it */
} fa3_turn;

FA3_SHARED fa3_turn fa3_find_turn(const fa3_mask *mask, int tile, int block, int tile_q,
                                  int tile_k) {
  const fa3_range tiles = fa3_visible_tiles(mask, block * tile_q, (block + 1) * tile_q, tile_k);
  fa3_turn turn;
  turn.before = tile - tiles.begin;
  turn.last = tile + 1 == tiles.end;
  return turn;
}

#endif
