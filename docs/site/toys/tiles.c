/* Which tiles a mask leaves, and who computes them when: kernels/mask.h and kernels/scheduler.h, in
 * the way that the forward kernel uses them (find_work and schedule in kernels/forward_work.cuh).
 */
#include <stddef.h>
#include <stdlib.h>

#include "kernels/mask.h"
#include "kernels/scheduler.h"
#include "toys.h"

static int divide_up(int a, int b) {
  return (a + b - 1) / b;
}

static fa3_mask mask_of(const struct tile_problem *p) {
  const int64_t left = p->left < 0 ? FA3_NO_LIMIT : p->left;
  const int64_t right = p->causal ? 0 : p->right < 0 ? FA3_NO_LIMIT : p->right;
  return fa3_make_mask(p->queries, p->keys, p->keys - p->queries, left, right);
}

void toy_tile_kinds(const struct tile_problem *p, uint8_t *kinds) {
  const fa3_mask mask = mask_of(p);
  const int blocks = divide_up(p->queries, p->tile_q), columns = divide_up(p->keys, p->tile_k);
  for (int block = 0; block < blocks; block++) {
    const int first = block * p->tile_q, last = first + p->tile_q;
    const fa3_range tiles = fa3_visible_tiles(&mask, first, last, p->tile_k);
    const fa3_range common = fa3_common_keys(&mask, first, last);
    const fa3_range whole = {divide_up(common.begin, p->tile_k), common.end / p->tile_k};
    for (int tile = 0; tile < columns; tile++) {
      uint8_t *kind = &kinds[(size_t)block * (size_t)columns + (size_t)tile];
      if (tile < tiles.begin || tile >= tiles.end)
        *kind = TILE_SKIPPED;
      else if (tile >= whole.begin && tile < whole.end)
        *kind = TILE_WHOLE;
      else
        *kind = TILE_MASKED;
    }
  }
}

/* The multiprocessor that is free first; the lowest number of several. */
static int next_free(const double *free_at, int count) {
  int next = 0;
  for (int m = 1; m < count; m++)
    if (free_at[m] < free_at[next]) next = m;
  return next;
}

int toy_schedule(const struct tile_problem *p, const struct schedule *s,
                 struct scheduled_tile *tiles) {
  const fa3_mask mask = mask_of(p);
  const fa3_tile_space space = {.blocks = divide_up(p->queries, p->tile_q),
                                .heads = s->heads,
                                .batches = s->batches,
                                .section = s->section,
                                .uneven = s->order == ORDER_LONGEST_FIRST};
  const int total = fa3_tile_count(&space);
  const int workers = total < s->multiprocessors ? total : s->multiprocessors;
  if (workers < 1) return 0;
  double *free_at = calloc((size_t)workers, sizeof *free_at);
  if (!free_at) return 0;
  for (int taken = 0; taken < total; taken++) {
    /* In turn, each round of tiles begins at the next worker. */
    const int round = taken / workers;
    const int worker = s->order == ORDER_IN_TURN ? (taken + workers - round % workers) % workers
                                                 : next_free(free_at, workers);
    const fa3_tile tile = fa3_tile_at(&space, taken);
    const int first = tile.block * p->tile_q;
    const fa3_range keys = fa3_visible_tiles(&mask, first, first + p->tile_q, p->tile_k);
    tiles[taken] = (struct scheduled_tile){.block = tile.block,
                                           .head = tile.head,
                                           .batch = tile.batch,
                                           .multiprocessor = worker,
                                           .begin = free_at[worker]};
    free_at[worker] += s->row_block_clocks + s->key_tile_clocks * (keys.end - keys.begin);
    tiles[taken].end = free_at[worker];
  }
  free(free_at);
  return total;
}
