#include "query_tiles.h"

#include <math.h>
#include <string.h>

#include "element.h"
#include "integer.h"
#include "scratch.h"

#define MOST_BYTES (INT64_MAX / 4) /* so that sums with it don't overflow */

/* A sequence's rows may end inside a tile, so each sequence has a tile more than its rows fill. */
static int64_t first_tile(const struct problem *problem, int64_t batch) {
  int64_t row = problem->cu_seqlens_q ? problem->cu_seqlens_q[batch] : batch * problem->rows_q;
  return divide_up(row * group_size(problem), TILE_Q) + batch;
}

static int64_t tile_words(const struct problem *problem, const struct routines *routines) {
  return TILE_Q * (round_up(problem->head_dim, routines->panel) + 2);
}

int64_t query_tiles_size(const struct problem *problem, const struct routines *routines) {
  if (problem->rows_q == 0) return 0;
  const bool packed = problem->features & FA3_FEATURE_VARLEN_QUERY;
  const int64_t tile_bytes =
      tile_words(problem, routines) * (int64_t)sizeof(float) + (int64_t)sizeof(atomic_llong);
  int64_t rows, spare, bytes;
  if (__builtin_mul_overflow(packed ? 1 : problem->batch, problem->rows_q, &rows) ||
      __builtin_mul_overflow(rows, problem->heads_q, &rows) ||
      __builtin_mul_overflow(problem->batch + 2, problem->heads_k, &spare) ||
      __builtin_mul_overflow(rows / TILE_Q + spare, tile_bytes, &bytes) || bytes > MOST_BYTES)
    return -1;
  return round_up(bytes, CACHE_LINE);
}

struct query_tiles query_tiles_at(const struct problem *problem, const struct routines *routines,
                                  void *memory) {
  struct query_tiles tiles = {.problem = problem,
                              .routines = routines,
                              .head_width = round_up(problem->head_dim, routines->panel),
                              .grad_query = memory};
  if (problem->rows_q > 0) tiles.per_head = first_tile(problem, problem->batch);
  const int64_t count = tiles.per_head * problem->heads_k;
  tiles.lse = tiles.grad_query + count * TILE_Q * tiles.head_width;
  tiles.delta = tiles.lse + count * TILE_Q;
  tiles.turns = (atomic_llong *)(tiles.delta + count * TILE_Q);
  return tiles;
}

/* Rows of a sequence and key head. */
static int64_t query_rows(const struct problem *problem, const struct sequence *sequence) {
  return sequence->seqlen_q * group_size(problem);
}

struct query_tile query_tile_at(const struct query_tiles *tiles, int64_t batch, int64_t head_k,
                                int64_t first_row) {
  const int64_t index =
      head_k * tiles->per_head + first_tile(tiles->problem, batch) + first_row / TILE_Q;
  struct query_tile tile = {.sequence = problem_sequence(tiles->problem, batch),
                            .head_k = head_k,
                            .first_row = first_row,
                            .grad_query = tiles->grad_query + index * TILE_Q * tiles->head_width,
                            .lse = tiles->lse + index * TILE_Q,
                            .delta = tiles->delta + index * TILE_Q,
                            .turn = tiles->turns + index};
  tile.rows = smaller(TILE_Q, query_rows(tiles->problem, &tile.sequence) - first_row);
  return tile;
}

int64_t tile_query(const struct query_tiles *tiles, const struct query_tile *tile, int64_t row) {
  return (tile->first_row + row) / group_size(tiles->problem);
}

static int64_t tile_head(const struct query_tiles *tiles, const struct query_tile *tile,
                         int64_t row) {
  const int64_t group = group_size(tiles->problem);
  return tile->head_k * group + (tile->first_row + row) % group;
}

static char *row_of(const struct operand *operand, const struct query_tiles *tiles,
                    const struct query_tile *tile, int64_t row) {
  return element(operand, tile->sequence.batch_q,
                 tile->sequence.row_q + tile_query(tiles, tile, row), tile_head(tiles, tile, row));
}

void query_tile_prepare(const struct query_tiles *tiles, const struct query_tile *tile) {
  const struct problem *problem = tiles->problem;
  for (int64_t row = 0; row < tile->rows; row++) {
    const float lse = *(const float *)row_of(&problem->lse, tiles, tile, row);
    tile->lse[row] = lse == -INFINITY ? INFINITY : lse;
    tile->delta[row] = tiles->routines->dot(row_of(&problem->grad_output, tiles, tile, row),
                                            row_of(&problem->output, tiles, tile, row),
                                            problem->value_head_dim, problem->output.dtype);
    if (problem->grad_lse.data)
      tile->delta[row] -= *(const float *)row_of(&problem->grad_lse, tiles, tile, row);
  }
  for (int64_t row = tile->rows; row < TILE_Q; row++) {
    tile->lse[row] = INFINITY;
    tile->delta[row] = 0;
  }
  memset(tile->grad_query, 0, (size_t)(tile->rows * tiles->head_width) * sizeof *tile->grad_query);
  atomic_init(tile->turn, 0);
}

void query_tile_store(const struct query_tiles *tiles, const struct query_tile *tile) {
  const struct problem *problem = tiles->problem;
  const struct routines *routines = tiles->routines;
  for (int64_t row = 0; row < tile->rows; row++) {
    const int64_t query = tile_query(tiles, tile, row);
    const struct key_range seen = mask_row(&tile->sequence.mask, query);
    const float *sums = tile->grad_query + row * tiles->head_width;
    void *to = row_of(&problem->grad_query, tiles, tile, row);
    if (seen.begin < seen.end)
      (problem->accumulate ? routines->add_row : routines->store_row)(
          sums, problem->head_dim, problem->scale, problem->grad_query.dtype, to);
    else if (!problem->accumulate)
      memset(to, 0, (size_t)(problem->head_dim * element_size(&problem->grad_query)));
  }
}
