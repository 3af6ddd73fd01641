/* What the backward pass keeps of the queries while threads go through the keys: each row's
 * statistics and the sums of its gradient. Linear in the rows; shared by the threads.
 *
 * The rows of a sequence and key head (element.h says which) are cut into tiles. A tile's gradient
 * is summed over blocks of keys, each on a thread, in the order of the keys: a block waits for its
 * turn at a tile. So the gradients are bitwise the same from call to call. */
#ifndef FA3_CPU_QUERY_TILES_H
#define FA3_CPU_QUERY_TILES_H

#include <stdatomic.h>

#include "problem.h"
#include "routines.h"

enum { TILE_Q = 96 }; /* a multiple of every level's panel, strip and depth_step in elements */

struct query_tiles {
  const struct problem *problem;
  const struct routines *routines;
  int64_t per_head;   /* tiles of a key head, of all sequences */
  int64_t head_width; /* words of a gradient's row */
  float *grad_query;
  float *lse;   /* infinity where no key is seen and after a sequence's end, for P to be 0 */
  float *delta; /* rowsum(grad_output * output) - grad_lse */
  atomic_llong *turns;
};

struct query_tile {
  struct sequence sequence;
  int64_t head_k;
  int64_t first_row;
  int64_t rows;
  float *grad_query;
  float *lse;
  float *delta;
  atomic_llong *turn; /* how many blocks of keys have added to grad_query */
};

/* Bytes that the tiles of a problem need at most, which never fall when an extent grows; negative
 * if there are too many. */
int64_t query_tiles_size(const struct problem *problem, const struct routines *routines);
struct query_tiles query_tiles_at(const struct problem *problem, const struct routines *routines,
                                  void *memory);

/* The tile of a sequence's and key head's rows that begins at first_row. */
struct query_tile query_tile_at(const struct query_tiles *tiles, int64_t batch, int64_t head_k,
                                int64_t first_row);

/* The query of a tile's row. */
int64_t tile_query(const struct query_tiles *tiles, const struct query_tile *tile, int64_t row);

void query_tile_prepare(const struct query_tiles *tiles, const struct query_tile *tile);
void query_tile_store(const struct query_tiles *tiles, const struct query_tile *tile);

#endif
