#include "cuda/decode_splits.h"

#include <inttypes.h>

#include "cuda/decode_time.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/combine_params.h"
#include "kernels/decode_params.h"

/* docs/notes/hopper-decode.md says why these. */
static const int64_t many_tiles = 264;  /* row tiles that need no splits, of sequences alike */
static const int64_t short_split = 128; /* keys: with more, more splits where the grid isn't full */
static const int64_t largest_cluster = 16;
static const int64_t large_cluster = 8; /* larger ones load the GPU unevenly */
/* Where lengths differ: clusters of 8 and of 4 that run at once, keys of the longest sequence that
 * a split has at least, rows of pages that take longer to find. */
static const int64_t one_round_by_8 = 30, one_round_by_4 = 62, least_keys = 512, small_pages = 16;
static const int64_t partial_tiles = 64; /* row tiles that have partial results */
/* Keys of a block of a pair, at least. Fewer where blocks on half of the multiprocessors would
 * leave the memory idle: that is worth the kernel which puts several pairs of a tile together. */
static const int64_t pair_keys = 1024, pair_keys_of_codes = 512, pair_keys_if_idle = 384;
static const int64_t least_pairs = 2;          /* of a tile, that are put together */
static const int64_t two_heads_rows = 1 << 19; /* of keys: from here on two heads a block */
static const int64_t most_blocks = 1 << 30;
/* What a block gets of the memory by itself, in GB/s: it has other things to do than to load, and
 * of codes more. So many of the bandwidth are the blocks that use all of it. */
static const int64_t block_bandwidth = 52, block_bandwidth_of_codes = 26;
/* A block that has a multiprocessor to itself has room for twice the warps, with which it gets as
 * much of codes as others of 16 bits. */
static const int64_t lone_warps = 8;
/* Keys dealt out: most blocks of a multiprocessor, units that each has at least, units that a
 * tile's beginning counts for, and most tiles. */
static const int64_t dealt_blocks = 2, dealt_units = 12, piece_units = 6, dealt_tiles = 4096;
/* Sequences of 16 bits whose lengths differ: from `undealt_tiles` on each is split by itself,
 * unless a multiprocessor would have `many_units`. From `never_dealt_tiles` on each is in any case.
 */
static const int64_t undealt_tiles = 192, many_units = 200, never_dealt_tiles = 400;

int64_t decode_rows(const struct problem *problem, int64_t queries) {
  return queries * (problem->heads_q / problem->heads_k);
}

int64_t decode_row_tiles(const struct problem *problem, int64_t queries) {
  return divide_up(decode_rows(problem, queries), FA3_DECODE_ROWS);
}

bool decode_has_codes(const struct problem *problem) {
  return problem->key.dtype == FA3_FLOAT8_E4M3;
}

bool decode_lengths_differ(const struct problem *problem) {
  return problem->batch > 1 && (problem->seqused_k || problem->cu_seqlens_k);
}

static int64_t most_units(const struct problem *problem) {
  return divide_up(larger(problem->max_seqlen_k, 1), FA3_DECODE_KEYS);
}

/* Blocks that use all of the memory's bandwidth. */
static int64_t blocks_needed(const struct problem *problem, const struct cuda_facts *facts) {
  return facts->bandwidth /
         (decode_has_codes(problem) ? block_bandwidth_of_codes : block_bandwidth);
}

/* For blocks that have a multiprocessor each. Null: such a block has no more warps than others. */
static const struct kernel *find_lone_kernel(const struct kernel *kernel) {
  return find_like(kernel, (struct kernel_need){.softcap = kernel->softcap,
                                                .heads = kernel->heads,
                                                .warps = lone_warps,
                                                .tile_q = kernel->tile_q});
}

/* How many blocks use all of the memory where each has a multiprocessor to itself. */
static int64_t lone_blocks_needed(const struct problem *problem, const struct cuda_facts *facts,
                                  const struct kernel *kernel) {
  if (decode_has_codes(problem) && find_lone_kernel(kernel))
    return facts->bandwidth / block_bandwidth;
  return blocks_needed(problem, facts);
}

/* Rows of a page; without pages as many as there can be. */
static int64_t page_rows(const struct problem *problem) {
  return has_pages(problem) ? problem->key.rows : INT32_MAX;
}

/* Long sequences among others are cut finely, and blocks without keys leave; in one round, if that
 * is near. With more row tiles a sequence is less of the whole. */
static int64_t choose_fine_splits(const struct problem *problem, int64_t tiles) {
  const int64_t many = decode_has_codes(problem) ? 2 * many_tiles : 4 * (int64_t)DECODE_FULL_GRID;
  int64_t splits = tiles < many ? 8 : tiles < 3 * many / 2 ? 4 : tiles < 3 * many ? 2 : 1;
  if (tiles > one_round_by_8 && tiles <= one_round_by_4) splits = 4;
  if (tiles >= many && page_rows(problem) < small_pages) splits = smaller(splits, 2);
  while (splits > 1 && splits * least_keys > problem->max_seqlen_k) splits /= 2;
  return splits;
}

/* Splits of a sequence where they are shares of its keys, in clusters. */
static int64_t choose_splits(const struct problem *problem, const struct kernel *kernel,
                             int64_t tiles) {
  /* With two loads a step of all warps takes two units: there are half as many splits at most. */
  const int64_t most = divide_up(most_units(problem), decode_loads(kernel));
  const bool codes = decode_has_codes(problem);
  const int64_t grid = codes && problem->max_seqlen_k >= DECODE_LONG_KEYS
                           ? 2 * (int64_t)DECODE_FULL_GRID
                           : DECODE_FULL_GRID;
  int64_t splits = largest_cluster;
  while (splits > 1 && splits * tiles > grid) splits /= 2;
  if (tiles > grid && tiles <= many_tiles) splits = 2;
  if (splits < large_cluster && 5 * splits * tiles < 4 * grid)
    splits = 2 * tiles * large_cluster <= 2 * many_tiles ? large_cluster : large_cluster / 2;
  if (decode_lengths_differ(problem)) splits = larger(splits, choose_fine_splits(problem, tiles));
  while (problem->max_seqlen_k >= DECODE_LONG_KEYS && splits * tiles < DECODE_FULL_GRID &&
         problem->max_seqlen_k / splits > short_split)
    splits *= 2;
  while (splits > 1 && splits > most) splits /= 2;
  return splits;
}

/* Splits of a sequence in pairs of blocks, each of which has a multiprocessor; 0: they would not
 * fill the GPU, or have few keys; or work is short, and larger clusters on half of the
 * multiprocessors use all of the memory. */
static int64_t choose_pairs(const struct problem *problem, const struct cuda_facts *facts,
                            const struct kernel *kernel, int64_t tiles, bool is_short) {
  const int64_t most = facts->most_multiprocessors, keys = problem->max_seqlen_k;
  const int64_t needed = lone_blocks_needed(problem, facts, kernel);
  const bool idle = needed > DECODE_FULL_GRID; /* the memory, with fewer blocks */
  int64_t splits = 2;
  while (2 * splits * tiles <= most) splits *= 2;
  const int64_t blocks = splits * tiles;
  if (blocks > most || 10 * blocks < 9 * most || blocks < needed ||
      decode_lengths_differ(problem) || (is_short && !idle))
    return 0;
  int64_t least = decode_has_codes(problem) ? pair_keys_of_codes : pair_keys;
  if (splits >= 2 * least_pairs) {
    if (splits / 2 * tiles > partial_tiles) return 0;
    if (!idle && keys < DECODE_LONG_KEYS) return 0;
    if (idle) least = pair_keys_if_idle;
  }
  return keys >= least * splits ? splits : 0;
}

/* Whether row tiles fill the GPU as well as blocks that have as much to do each. */
static bool one_round(const struct cuda_facts *facts, int64_t tiles) {
  return 10 * tiles >= 18 * (int64_t)facts->most_multiprocessors;
}

/* Whether keys of so many row tiles may be dealt out to blocks of so many heads each. Tiles are no
 * more than there is always room for, see reserve_splits. */
static bool may_deal(const struct problem *problem, const struct cuda_facts *facts, int64_t heads,
                     int64_t tiles) {
  return !problem->split_keys && !problem->num_splits && tiles <= dealt_tiles &&
         problem->heads_k / heads <= facts->most_multiprocessors &&
         tiles * (most_units(problem) + piece_units) <= INT32_MAX / 2;
}

/* Whether keys are dealt out. */
static bool deals(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel, int64_t tiles, int64_t splits) {
  const int64_t most = facts->most_multiprocessors, blocks = splits * tiles;
  const int64_t units = tiles * most_units(problem);
  const bool codes = decode_has_codes(problem);
  if (!may_deal(problem, facts, decode_heads(kernel), tiles) ||
      decode_row_tiles(problem, longest_query(problem)) > DECODE_FEW_ROWS / FA3_DECODE_ROWS ||
      FA3_DECODE_KEEPS_WORK(kernel->head_dim, codes ? 1 : 2))
    return false;
  if (!codes && decode_lengths_differ(problem)) {
    /* Few tiles in clusters of 8 use all of the memory, if one sequence's do. */
    const bool in_clusters =
        tiles <= one_round_by_8 && large_cluster * tiles >= DECODE_FULL_GRID * problem->batch;
    return !in_clusters && units >= dealt_units * most &&
           (tiles < undealt_tiles || (tiles < never_dealt_tiles && units >= many_units * most &&
                                      page_rows(problem) >= small_pages));
  }
  if (units < dealt_units * dealt_blocks * most) return false;
  if (codes && decode_lengths_differ(problem)) return true;
  /* Or if some multiprocessors would have two blocks, and others one. */
  const bool uneven = !codes && 10 * blocks > 11 * most && 10 * blocks < 18 * most;
  return uneven || blocks < blocks_needed(problem, facts) ||
         (kernel->heads > 1 && !one_round(facts, tiles));
}

bool decode_deal_chunks(const struct problem *problem, const struct cuda_facts *facts,
                        int64_t tiles, struct decode_plan *plan) {
  const int64_t most = FA3_SPECULATIVE_FP8_BLOCKS * (int64_t)facts->most_multiprocessors;
  /* The room for the tiles' parts may have what each block begins instead. */
  const bool room =
      most * (int64_t)sizeof(fa3_combine_tile) <= dealt_tiles * (int64_t)sizeof(fa3_combine_parts);
  if (!decode_lengths_differ(problem) || !may_deal(problem, facts, 1, tiles) || !room) return false;
  plan->chunk_blocks = (int32_t)(most / problem->heads_k * problem->heads_k);
  plan->most_units = (int32_t)most_units(problem) + 1;
  plan->piece_units = (int32_t)piece_units;
  return true;
}

/* A block for each key head in as many teams as there is room for (decode_deal.cuh): each has a
 * multiprocessor to itself, if so few use all of the memory, and leave few without one. While one
 * block looks up small pages another one loads. */
static void choose_dealt_blocks(const struct problem *problem, const struct cuda_facts *facts,
                                struct decode_plan *plan) {
  const int64_t most = facts->most_multiprocessors;
  const int64_t heads = problem->heads_k / decode_heads(plan->kernel);
  const int64_t blocks = most / heads * heads;
  plan->alone = 10 * blocks >= 9 * most &&
                blocks >= lone_blocks_needed(problem, facts, plan->kernel) &&
                page_rows(problem) >= small_pages;
  plan->blocks = (int32_t)(plan->alone ? blocks : dealt_blocks * most / heads * heads);
}

/* Rows of partial results; 0: there are none, however many queries these keys have. More than the
 * call itself has, so that a larger one never takes less. */
static fa3_status count_split_rows(const struct problem *problem, const struct cuda_facts *facts,
                                   int64_t *rows) {
  const int64_t blocks = dealt_blocks * facts->most_multiprocessors;
  const int64_t tiles = DECODE_FEW_ROWS / FA3_DECODE_ROWS;
  int64_t units;
  const bool several =
      problem->num_splits != 1 && problem->max_seqlen_k >= 2 * least_pairs * pair_keys_if_idle;
  *rows = several ? partial_tiles * FA3_DECODE_ROWS : 0;
  if (__builtin_mul_overflow(problem->batch, problem->heads_k * tiles, &units) ||
      __builtin_mul_overflow(units, most_units(problem), &units) ||
      units >= dealt_units * facts->most_multiprocessors)
    *rows = larger(*rows, 2 * blocks * FA3_DECODE_ROWS);
  if (problem->split_keys &&
      (__builtin_mul_overflow(longest_query(problem), problem->batch, rows) ||
       __builtin_mul_overflow(*rows, problem->heads_q, rows) ||
       __builtin_mul_overflow(*rows, divide_up(problem->max_seqlen_k, problem->split_keys), rows)))
    return set_error(FA3_UNSUPPORTED,
                     "split_keys is %" PRId64 ": too many splits for the workspace",
                     problem->split_keys);
  if (problem->split_keys) *rows = larger(*rows, 1);
  return FA3_OK;
}

fa3_status reserve_splits(const struct problem *problem, const struct cuda_facts *facts,
                          int64_t rows, struct split_room *room, size_t *workspace_size) {
  int64_t few_rows_take;
  TRY(count_split_rows(problem, facts, &few_rows_take));
  rows = larger(rows, few_rows_take);
  if (!rows) return FA3_OK;
  const int64_t row_bytes = (int64_t)sizeof(float) * problem->value_head_dim;
  TRY(reserve(workspace_size, &room->partial, "the splits' output", 1, rows, row_bytes));
  TRY(reserve(workspace_size, &room->partial_lse, "the splits' lse", 1, rows, sizeof(float)));
  return reserve(workspace_size, &room->parts, "the tiles' parts", 1, dealt_tiles,
                 sizeof(fa3_combine_parts));
}

/* A kernel whose blocks have two heads of keys: rows of codes are short, and memory is read faster
 * in pieces of two. Null: there is none, or too little to read for half as many tiles. */
static const struct kernel *find_two_heads_kernel(const struct problem *problem,
                                                  const struct kernel *kernel) {
  int64_t rows;
  if (!decode_has_codes(problem) || problem->heads_k % 2 || longest_query(problem) > 1 ||
      decode_rows(problem, 1) > FA3_DECODE_ROWS / 2 || problem->split_keys || problem->num_splits)
    return NULL;
  if (!__builtin_mul_overflow(problem->batch * problem->heads_k, problem->max_seqlen_k, &rows) &&
      rows < two_heads_rows)
    return NULL;
  return find_like(kernel, (struct kernel_need){
                               .softcap = kernel->softcap, .heads = 2, .tile_q = FA3_DECODE_ROWS});
}

fa3_status decode_too_many_tiles(const struct problem *problem) {
  return set_error(FA3_UNSUPPORTED,
                   "%" PRId64 " heads of %" PRId64 " sequences of up to %" PRId64
                   " rows: more tiles than the CUDA kernels count",
                   problem->heads_q, problem->batch, problem->max_seqlen_q);
}

fa3_status decode_find_combine(const struct problem *problem, const struct cuda_facts *facts,
                               struct decode_plan *plan) {
  plan->combine = find_kernel(
      &(struct kernel_need){.kind = &combine_kind, .architecture = facts->architecture});
  if (problem->batch <= MAX_GRID) return FA3_OK;
  return set_error(FA3_UNSUPPORTED,
                   "%" PRId64 " sequences in splits that are combined: the CUDA kernels take %d",
                   problem->batch, MAX_GRID);
}

/* Where there is much to read, or for a kernel that decode_fastest_way does not know. `all`: of all
 * sequences; else of those with few queries, in a batch that has others too. */
static void choose_other_splits(const struct problem *problem, const struct cuda_facts *facts,
                                bool all, int64_t tiles, struct decode_plan *plan, int64_t *splits,
                                int64_t *cluster) {
  *splits = *cluster = choose_splits(problem, plan->kernel, tiles);
  if (*splits > large_cluster &&
      (*splits > largest_cluster || problem->max_seqlen_k > DECODE_LONG_KEYS ||
       plan->kernel->head_dim > 128))
    *cluster = large_cluster;
  /* Without room for partial results, a cluster is all; so it is where others need that room. */
  if (*cluster < *splits && (problem->max_seqlen_k < DECODE_LONG_KEYS || !all)) *splits = *cluster;
  if (all && deals(problem, facts, plan->kernel, tiles, *splits)) {
    *splits = *cluster = 1;
    choose_dealt_blocks(problem, facts, plan);
    plan->most_units = (int32_t)most_units(problem) + 1;
    plan->piece_units = (int32_t)piece_units;
  } else if (plan->kernel->heads > 1 && one_round(facts, tiles)) {
    *splits = *cluster = 1;
  }
}

fa3_status plan_decode_splits(const struct problem *problem, const struct cuda_facts *facts,
                              struct decode_plan *plan) {
  const bool all = plan->most_queries == INT32_MAX;
  const int64_t tiles =
      decode_row_tiles(problem, all ? longest_query(problem) : plan->most_queries);
  int64_t all_tiles, grid;
  if (__builtin_mul_overflow(problem->batch, tiles, &all_tiles) ||
      __builtin_mul_overflow(all_tiles, problem->heads_k, &all_tiles) || all_tiles > MAX_TILES)
    return decode_too_many_tiles(problem);
  const struct kernel *two_heads = all ? find_two_heads_kernel(problem, plan->kernel) : NULL;
  if (two_heads) {
    plan->kernel = two_heads;
    all_tiles /= 2;
  }
  const bool is_short = all && all_tiles && !two_heads && decode_is_short(problem, all_tiles);
  const int64_t pairs =
      all && all_tiles ? choose_pairs(problem, facts, plan->kernel, all_tiles, is_short) : 0;
  int64_t splits, cluster;
  if (pairs) {
    splits = pairs;
    cluster = 2;
    plan->alone = true;
  } else if (is_short) {
    const struct decode_way way =
        decode_fastest_way(problem, facts, plan->kernel, find_lone_kernel(plan->kernel), all_tiles);
    splits = cluster = way.splits;
    plan->alone = way.alone;
  } else {
    choose_other_splits(problem, facts, all, all_tiles, plan, &splits, &cluster);
  }
  while (splits > 1 && problem->num_splits && splits > problem->num_splits) splits /= 2;
  cluster = smaller(cluster, splits);
  if (problem->split_keys) {
    splits = larger(divide_up(problem->max_seqlen_k, problem->split_keys), 1);
    cluster = 1;
    plan->alone = false;
    plan->split_units = (int32_t)smaller(problem->split_keys / FA3_DECODE_KEYS, INT32_MAX / 2);
  }
  if (__builtin_mul_overflow(all_tiles, splits, &grid) || grid > most_blocks)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " tiles of %" PRId64 " splits: the CUDA kernels take %" PRId64
                     " in all",
                     all_tiles, splits, most_blocks);
  const struct kernel *lone = plan->alone ? find_lone_kernel(plan->kernel) : NULL;
  if (lone) plan->kernel = lone;
  plan->row_tiles = (int32_t)tiles;
  plan->splits = (int32_t)splits;
  plan->cluster = (int32_t)cluster;
  return splits > cluster || plan->blocks ? decode_find_combine(problem, facts, plan) : FA3_OK;
}
