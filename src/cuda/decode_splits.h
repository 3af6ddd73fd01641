/* How the keys of a call of few queries, or on a cache, are split. */
#ifndef FA3_SRC_CUDA_DECODE_SPLITS_H
#define FA3_SRC_CUDA_DECODE_SPLITS_H

#include "cuda/decode_plan.h"

enum {
  DECODE_FEW_ROWS = 64,   /* of a key head: with more, the forward kernel's tiles are full */
  DECODE_FULL_GRID = 64,  /* blocks that use the memory well, of clusters */
  DECODE_LONG_KEYS = 8192 /* from here on a sequence may have several clusters, or sooner: in pairs
                             of blocks, where the memory would be idle beside fewer */
};

/* Rows of a key head, for that many queries of a sequence, and their tiles. */
int64_t decode_rows(const struct problem *problem, int64_t queries);
int64_t decode_row_tiles(const struct problem *problem, int64_t queries);

bool decode_has_codes(const struct problem *problem);

/* Whether the lengths of keys may be far apart. */
bool decode_lengths_differ(const struct problem *problem);

/* More tiles than the kernels count: the error. */
fa3_status decode_too_many_tiles(const struct problem *problem);

/* The kernel that puts splits together. */
fa3_status decode_find_combine(const struct problem *problem, const struct cuda_facts *facts,
                               struct decode_plan *plan);

/* Whether speculative_fp8 deals the keys of so many tiles out, since lengths may be far apart:
 * `plan` then says to how many blocks. */
bool decode_deal_chunks(const struct problem *problem, const struct cuda_facts *facts,
                        int64_t tiles, struct decode_plan *plan);

/* The splits of sequences that `plan` has a kernel for, or how keys are dealt out: and so another
 * kernel, where one suits that better. */
fa3_status plan_decode_splits(const struct problem *problem, const struct cuda_facts *facts,
                              struct decode_plan *plan);

/* Room for so many rows of partial results of a forward call, or for those that splits of such keys
 * take in a call of few queries: the workspace does not shrink where more queries need none. */
fa3_status reserve_splits(const struct problem *problem, const struct cuda_facts *facts,
                          int64_t rows, struct split_room *room, size_t *workspace_size);

#endif
