/* The backward pass over a block of keys, on one thread: its keys' and values' gradients, and what
 * it adds to its queries'. */
#ifndef FA3_CPU_KEY_BLOCK_H
#define FA3_CPU_KEY_BLOCK_H

#include "query_tiles.h"

/* What one thread works in. An operand is named by the rows that it is made of; `_columns` and
 * `_depth` are right operands with these rows as their columns or their depth. */
struct key_scratch {
  float *keys; /* left operands */
  float *values;
  float *keys_depth;
  float *grad_keys;
  float *grad_values;
  float *query_columns;
  float *query_depth;
  float *grad_output_columns;
  float *grad_output_depth;
  float *rows;          /* a tile's rows as the caller has them, one after the other */
  float *scores;        /* of a strip of keys with a tile of queries; then P */
  float *gradients;     /* likewise; then dS */
  float *grad_scores_q; /* dS of the block with a tile of queries, queries by rows */
};

struct key_block {
  const struct query_tiles *tiles;
  struct key_scratch scratch;
  int64_t tile_k;
  int64_t batch;
  int64_t head_k;
  int64_t key; /* the block's first */
  int64_t keys;
  struct sequence sequence;
};

/* The most keys of a block for which its scratch has room. */
int64_t key_block_largest(const struct problem *problem, const struct routines *routines);

/* Lays the scratch out at `base` (null to measure only); returns its size in bytes, which never
 * falls when a head dim grows. */
size_t key_scratch_layout(const struct problem *problem, const struct routines *routines,
                          char *base, struct key_scratch *scratch);

/* Where the block lies is set. Blocks of a sequence and key head are started in the order of their
 * keys. */
void key_block_run(struct key_block *block);

#endif
