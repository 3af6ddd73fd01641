/* What the parts of a backward plan count by: tiles of keys, and what they read and add to. */
#ifndef FA3_SRC_CUDA_BACKWARD_TILES_H
#define FA3_SRC_CUDA_BACKWARD_TILES_H

#include "cuda/backward_plan.h"
#include "problem.h"

enum { TILE_K = 128 };                               /* of all kernels */
enum { SMALLEST_TILE_Q = 64, LARGEST_TILE_Q = 128 }; /* of any */

/* A plan is made for an H100 or H200 that the call has to itself, wherever it runs: without a mask
 * what is summed in which order must not depend on how many multiprocessors are free. */
enum { MULTIPROCESSORS = 132 };

/* What a section of heads keeps in the L2 cache. */
enum { CACHE_BYTES = 24 << 20 };

/* Bytes of all sums of dQ beyond the first in the workspace; and tiles in all, for each worker, up
 * to which several sums pay under a causal mask. */
enum { MORE_SUMS_BYTES = 40 << 20, FEW_ROUNDS = 3 };

/* Chains of windows that are few: some eight tiles of each run side by side. */
enum { FEW_WINDOWS = 16 };

/* In steps. Measured: docs/notes/hopper-backward-tiles.md. */
static const double bytes_of_step = 8.3e6; /* that a kernel reads or writes in the time of one */
static const double boundary_steps = 2.5;  /* where a tile begins and ends */

/* Numbers that the tiles of a head of keys may have, of all sequences: as blocks of queries. */
int64_t count_key_slots(const struct problem *problem);

/* Tiles at the beginning of each head whose keys no query sees, where lengths are known: outside of
 * a window, where keys are more than queries. */
int64_t count_unseen_tiles(const struct problem *problem, int32_t tile_k);

int64_t count_key_tiles(const struct problem *problem); /* of all heads */
int64_t query_heads_of_key_head(const struct problem *problem);
bool is_causal(const struct problem *problem); /* without a window */
bool is_masked(const struct problem *problem); /* by either */
bool has_window(const struct problem *problem);

/* Whether the kernel for softcaps is faster without one, too: its step has 64 queries, that of the
 * other one at head dim 64 has 128 (kernels/variants.def). */
bool takes_short_steps(const struct problem *problem);

bool is_packed(const struct problem *problem);

/* Whether packed sequences have different numbers of queries, as far as their total and the longest
 * tell. */
bool lengths_differ(const struct problem *problem);

/* Sequences as long as the longest that there are rows for, where lengths are packed. */
int64_t count_sequences(const struct problem *problem);

/* Tiles with keys: of packed sequences, no more than there can be in so many rows. */
int64_t count_tiles(const struct problem *problem, const fa3_key_tiles *tiles);

/* What most tiles have of the longest sequence's length. Of packed lengths only their mean is
 * known, and most tiles are those of longer ones. */
double find_typical_share(const struct problem *problem, const fa3_key_tiles *tiles);

/* Q, dO and dQ of a head of keys, which each of its tiles reads and adds to. */
int64_t bytes_of_head(const struct problem *problem, const struct kernel *kernel);

/* Of dQ in float32, whose blocks are summed there. */
double bytes_of_sum(const struct problem *problem, const struct backward_plan *plan);

/* Tiles that are looked at, to know what all do. */
enum { SAMPLES = 64 };

/* Blocks of queries that a tile visits for a query head: how many in the mean and at most, and
 * which ones, of some tiles, in order. */
struct visits {
  double mean;
  double most;
  fa3_range of[SAMPLES];
  int samples;
};

struct visits count_visits(const struct problem *problem, const struct kernel *kernel,
                           const fa3_key_tiles *tiles);

/* Whether tiles are nearly alike. */
bool alike(const struct visits *visits);

#endif
