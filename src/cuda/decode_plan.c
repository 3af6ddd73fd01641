#include "cuda/decode_plan.h"

#include <inttypes.h>

#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/combine_params.h"
#include "kernels/decode_params.h"

/* docs/notes/hopper-decode.md says why these. */
static const int64_t few_rows = 64; /* with more, the forward kernel's tiles are full */
/* Keys, each counted once for each row tile that reads it: where there are more, and more than one
 * row tile, the forward kernel is faster, and of codes chunk_fp8. */
static const int64_t few_tile_keys = 1 << 15, few_tile_keys_of_codes = 1 << 16;
static const int64_t full_grid = 64;    /* blocks that use the memory well, of clusters */
static const int64_t many_tiles = 264;  /* row tiles that need no splits, of sequences alike */
static const int64_t long_keys = 8192;  /* from here on splits may be more than a cluster */
static const int64_t short_split = 128; /* keys: with more, more splits where the grid isn't full */
static const int64_t largest_cluster = 16;
static const int64_t large_cluster = 8; /* larger ones load the GPU unevenly */
/* Where lengths differ: clusters of 8 and of 4 that run at once, keys of the longest sequence that
 * a split has at least, rows of pages that take longer to find. */
static const int64_t one_round_by_8 = 30, one_round_by_4 = 62, least_keys = 512, small_pages = 16;
static const int64_t partial_tiles = 64;       /* row tiles that have partial results */
static const int64_t two_heads_rows = 1 << 19; /* of keys: from here on two heads a block */
static const int64_t few_keys = 1280; /* that the forward kernel's tiles hold without loss */
static const int64_t most_blocks = 1 << 30;
/* What a block gets of the memory by itself, in GB/s: it has other things to do than to load, and
 * of codes more. So many of the bandwidth are the blocks that use all of it. */
static const int64_t block_bandwidth = 52, block_bandwidth_of_codes = 26;
/* A block that has a multiprocessor to itself has room for twice the warps, with which it gets as
 * much of codes as others of 16 bits. */
static const int64_t lone_warps = 8;
/* Keys dealt out: most blocks of a multiprocessor, units that each has at least, units that a
 * tile's beginning counts for, and most tiles; and tiles from which on sequences of 16 bits whose
 * lengths differ are many enough to be split each by itself. */
static const int64_t dealt_blocks = 2, dealt_units = 12, piece_units = 6, dealt_tiles = 4096;
static const int64_t undealt_tiles = 192;
/* Chunks: in tiles of keys, what a block takes beside them, what it takes to put splits together,
 * and the least of a split; blocks of a multiprocessor that have room for partial results. */
static const int64_t chunk_start = 3, chunk_combine = 3, chunk_least = 4;
static const int64_t chunk_blocks = 2;

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_DECODE_SHARED_BYTES(kernel->tile_q, kernel->head_dim, kernel->stages);
}

const struct kernel_kind decode_kind = {.phase = FA3_FORWARD,
                                        .entries = {"decode", "decode_dealt"},
                                        .others_with_shared = 1,
                                        .shared_bytes = shared_bytes,
                                        .large_clusters = true,
                                        .may_be_alone = true};

int64_t decode_heads(const struct kernel *kernel) {
  return larger(kernel->heads, 1);
}

static int32_t decode_warps(const struct kernel *kernel) {
  return kernel->warps ? kernel->warps : FA3_DECODE_WARPS;
}

int32_t decode_threads(const struct kernel *kernel) {
  return 32 * decode_warps(kernel);
}

static int32_t fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_DECODE_FP8_SHARED_BYTES(decode_warps(kernel), kernel->tile_q, kernel->head_dim,
                                     (int32_t)decode_heads(kernel) * kernel->stages);
}

const struct kernel_kind decode_fp8_kind = {.phase = FA3_FORWARD,
                                            .entries = {"decode_fp8", "decode_fp8_dealt"},
                                            .others_with_shared = 1,
                                            .shared_bytes = fp8_shared_bytes,
                                            .large_clusters = true,
                                            .may_be_alone = true};

static int32_t chunk_fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_CHUNK_FP8_SHARED_BYTES(kernel->head_dim, kernel->tile_k, kernel->stages);
}

const struct kernel_kind chunk_fp8_kind = {
    .phase = FA3_FORWARD, .entries = {"chunk_fp8"}, .shared_bytes = chunk_fp8_shared_bytes};

const struct kernel *find_decode_kernel(const char *architecture, fa3_dtype key_dtype,
                                        int64_t head_dim, int64_t value_head_dim, bool softcap,
                                        int64_t rows) {
  return find_kernel(
      &(struct kernel_need){.kind = key_dtype == FA3_FLOAT8_E4M3 ? &decode_fp8_kind : &decode_kind,
                            .architecture = architecture,
                            .dtype = key_dtype,
                            .head_dim = head_dim,
                            .value_head_dim = value_head_dim,
                            .softcap = softcap,
                            .tile_q = smaller(rows, FA3_DECODE_ROWS)});
}

/* Of a key head, for that many queries of a sequence. */
static int64_t rows_of(const struct problem *problem, int64_t queries) {
  return queries * (problem->heads_q / problem->heads_k);
}

static int64_t row_tiles(const struct problem *problem, int64_t queries) {
  return divide_up(rows_of(problem, queries), FA3_DECODE_ROWS);
}

/* Of a sequence, where others may have many. */
static int32_t few_queries(const struct problem *problem) {
  return (int32_t)larger(FA3_DECODE_ROWS / (problem->heads_q / problem->heads_k), 1);
}

/* Of sequences that are full. */
static double count_tile_keys(const struct problem *problem) {
  return (double)row_tiles(problem, longest_query(problem)) * (double)problem->batch *
         (double)problem->heads_k * (double)problem->max_seqlen_k;
}

bool decode_takes(const struct problem *problem) {
  const int64_t tiles = row_tiles(problem, longest_query(problem));
  const bool paged = problem->features & FA3_FEATURE_PAGE_TABLE;
  /* There is no forward kernel for codes in pages, nor for codes under wider queries. */
  if (problem->query.dtype == FA3_FLOAT8_E4M3) return paged || problem->split_keys || tiles <= 1;
  if (problem->key.dtype == FA3_FLOAT8_E4M3) return true;
  if (problem->split_keys || problem->output.dtype != problem->query.dtype) return true;
  if (tiles <= 1) return true;
  return tiles * FA3_DECODE_ROWS <= few_rows && tiles * problem->batch <= 2 * full_grid &&
         tiles * problem->batch * problem->heads_k <= 2 * full_grid &&
         count_tile_keys(problem) <= (double)few_tile_keys;
}

static bool has_codes(const struct problem *problem) {
  return problem->key.dtype == FA3_FLOAT8_E4M3;
}

/* Whether the lengths of keys may be far apart. */
static bool lengths_differ(const struct problem *problem) {
  return problem->batch > 1 && (problem->seqused_k || problem->cu_seqlens_k);
}

static int64_t most_units(const struct problem *problem) {
  return divide_up(larger(problem->max_seqlen_k, 1), FA3_DECODE_KEYS);
}

/* Blocks that use all of the memory's bandwidth. */
static int64_t blocks_needed(const struct problem *problem, const struct cuda_facts *facts) {
  return facts->bandwidth / (has_codes(problem) ? block_bandwidth_of_codes : block_bandwidth);
}

/* The same with blocks of more warps, for multiprocessors that have one block each; `kernel` itself
 * where there is none. */
static const struct kernel *find_lone_kernel(const struct kernel *kernel) {
  const struct kernel *found =
      find_kernel(&(struct kernel_need){.kind = kernel->kind,
                                        .architecture = kernel->architecture,
                                        .dtype = (fa3_dtype)kernel->dtype,
                                        .head_dim = kernel->head_dim,
                                        .value_head_dim = kernel->value_head_dim,
                                        .softcap = kernel->softcap,
                                        .heads = kernel->heads,
                                        .warps = lone_warps,
                                        .tile_q = kernel->tile_q});
  return found ? found : kernel;
}

/* How many blocks use all of the memory where each has a multiprocessor to itself. */
static int64_t lone_blocks_needed(const struct cuda_facts *facts, const struct kernel *kernel) {
  const int64_t each = kernel->kind == &decode_kind || find_lone_kernel(kernel) != kernel
                           ? block_bandwidth
                           : block_bandwidth_of_codes;
  return facts->bandwidth / each;
}

/* Rows of a page; without pages as many as there can be. */
static int64_t page_rows(const struct problem *problem) {
  return problem->features & FA3_FEATURE_PAGE_TABLE ? problem->key.rows : INT32_MAX;
}

/* Long sequences among others are cut finely, and blocks without keys leave; in one round, if that
 * is near. With more row tiles a sequence is less of the whole. */
static int64_t choose_fine_splits(const struct problem *problem, int64_t tiles) {
  const int64_t many = has_codes(problem) ? 2 * many_tiles : 4 * full_grid;
  int64_t splits = tiles < many ? 8 : tiles < 3 * many / 2 ? 4 : tiles < 3 * many ? 2 : 1;
  if (tiles > one_round_by_8 && tiles <= one_round_by_4) splits = 4;
  if (tiles >= many && page_rows(problem) < small_pages) splits = smaller(splits, 2);
  while (splits > 1 && splits * least_keys > problem->max_seqlen_k) splits /= 2;
  return splits;
}

/* Splits of a sequence where they are shares of its keys, in clusters. */
static int64_t choose_splits(const struct problem *problem, int64_t tiles) {
  const int64_t most = most_units(problem);
  const bool codes = has_codes(problem);
  const int64_t grid = codes && problem->max_seqlen_k >= long_keys ? 2 * full_grid : full_grid;
  int64_t splits = largest_cluster;
  while (splits > 1 && splits * tiles > grid) splits /= 2;
  if (tiles > grid && tiles <= many_tiles) splits = 2;
  if (splits < large_cluster && 5 * splits * tiles < 4 * grid)
    splits = 2 * tiles * large_cluster <= 2 * many_tiles ? large_cluster : large_cluster / 2;
  if (lengths_differ(problem)) splits = larger(splits, choose_fine_splits(problem, tiles));
  while (problem->max_seqlen_k >= long_keys && splits * tiles < full_grid &&
         problem->max_seqlen_k / splits > short_split)
    splits *= 2;
  while (splits > 1 && splits > most) splits /= 2;
  return splits;
}

/* Splits of a sequence in pairs of blocks, each of which has a multiprocessor; 0: they would not
 * fill the GPU, or have few keys. */
static int64_t choose_pairs(const struct problem *problem, const struct cuda_facts *facts,
                            const struct kernel *kernel, int64_t tiles) {
  const int64_t most = facts->most_multiprocessors;
  int64_t splits = 2;
  while (2 * splits * tiles <= most) splits *= 2;
  const int64_t blocks = splits * tiles;
  if (blocks > most || 10 * blocks < 9 * most || blocks < lone_blocks_needed(facts, kernel) ||
      lengths_differ(problem))
    return 0;
  if (splits > 2 && (splits / 2 * tiles > partial_tiles || problem->max_seqlen_k < long_keys))
    return 0;
  return problem->max_seqlen_k / splits >= (has_codes(problem) ? 512 : 1024) ? splits : 0;
}

/* Whether row tiles fill the GPU as well as blocks that have as much to do each. */
static bool one_round(const struct cuda_facts *facts, int64_t tiles) {
  return 10 * tiles >= 18 * (int64_t)facts->most_multiprocessors;
}

/* Whether keys are dealt out. */
static bool deals(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel, int64_t tiles, int64_t splits) {
  const int64_t most = facts->most_multiprocessors, blocks = splits * tiles;
  const int64_t units = tiles * most_units(problem);
  const bool codes = has_codes(problem);
  /* As many row tiles as there is always room for, see count_split_rows. */
  if (problem->split_keys || problem->num_splits || tiles > dealt_tiles ||
      problem->heads_k / decode_heads(kernel) > most ||
      row_tiles(problem, longest_query(problem)) > few_rows / FA3_DECODE_ROWS ||
      FA3_DECODE_KEEPS_WORK(kernel->head_dim, codes ? 1 : 2) ||
      tiles * (most_units(problem) + piece_units) > INT32_MAX / 2)
    return false;
  if (!codes && lengths_differ(problem)) {
    /* Few tiles in clusters of 8 use all of the memory, if one sequence's do. */
    const bool in_clusters =
        tiles <= one_round_by_8 && large_cluster * tiles >= full_grid * problem->batch;
    return !in_clusters && tiles < undealt_tiles && units >= dealt_units * most;
  }
  if (units < dealt_units * dealt_blocks * most) return false;
  if (codes && lengths_differ(problem)) return true;
  /* Or if some multiprocessors would have two blocks, and others one. */
  const bool uneven = !codes && 10 * blocks > 11 * most && 10 * blocks < 18 * most;
  return uneven || blocks < blocks_needed(problem, facts) ||
         (kernel->heads > 1 && !one_round(facts, tiles));
}

/* A block for each key head in as many teams as there is room for (decode_deal.cuh): each has a
 * multiprocessor to itself, if so few use all of the memory, and leave few without one. While one
 * block looks up small pages another one loads. */
static void choose_dealt_blocks(const struct problem *problem, const struct cuda_facts *facts,
                                struct decode_plan *plan) {
  const int64_t most = facts->most_multiprocessors;
  const int64_t heads = problem->heads_k / decode_heads(plan->kernel);
  const int64_t blocks = most / heads * heads;
  plan->alone = 10 * blocks >= 9 * most && blocks >= lone_blocks_needed(facts, plan->kernel) &&
                page_rows(problem) >= small_pages;
  plan->blocks = (int32_t)(plan->alone ? blocks : dealt_blocks * most / heads * heads);
}

/* Rows of partial results; 0: there are none, however many queries these keys have. More than the
 * call itself has, so that a larger one never takes less. */
static fa3_status count_split_rows(const struct problem *problem, const struct cuda_facts *facts,
                                   int64_t *rows) {
  const int64_t blocks = dealt_blocks * facts->most_multiprocessors;
  const int64_t tiles = few_rows / FA3_DECODE_ROWS;
  int64_t units;
  *rows = problem->max_seqlen_k < long_keys ? 0 : partial_tiles * FA3_DECODE_ROWS;
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
                                                  const struct cuda_facts *facts) {
  int64_t rows;
  if (!has_codes(problem) || problem->heads_k % 2 || longest_query(problem) > 1 ||
      rows_of(problem, 1) > FA3_DECODE_ROWS / 2 || problem->split_keys || problem->num_splits)
    return NULL;
  if (!__builtin_mul_overflow(problem->batch * problem->heads_k, problem->max_seqlen_k, &rows) &&
      rows < two_heads_rows)
    return NULL;
  return find_kernel(&(struct kernel_need){.kind = &decode_fp8_kind,
                                           .architecture = facts->architecture,
                                           .dtype = problem->key.dtype,
                                           .head_dim = problem->head_dim,
                                           .value_head_dim = problem->value_head_dim,
                                           .softcap = problem->softcap > 0,
                                           .heads = 2,
                                           .tile_q = FA3_DECODE_ROWS});
}

static fa3_status too_many_tiles(const struct problem *problem) {
  return set_error(FA3_UNSUPPORTED,
                   "%" PRId64 " heads of %" PRId64 " sequences of up to %" PRId64
                   " rows: more tiles than the CUDA kernels count",
                   problem->heads_q, problem->batch, problem->max_seqlen_q);
}

static fa3_status find_combine(const struct problem *problem, const struct cuda_facts *facts,
                               struct decode_plan *plan) {
  plan->combine = find_kernel(
      &(struct kernel_need){.kind = &combine_kind, .architecture = facts->architecture});
  if (problem->batch <= MAX_GRID) return FA3_OK;
  return set_error(FA3_UNSUPPORTED,
                   "%" PRId64 " sequences in splits that are combined: the CUDA kernels take %d",
                   problem->batch, MAX_GRID);
}

static fa3_status plan_splits(const struct problem *problem, const struct cuda_facts *facts,
                              struct decode_plan *plan) {
  const bool all = plan->most_queries == INT32_MAX;
  const int64_t tiles = row_tiles(problem, all ? longest_query(problem) : plan->most_queries);
  int64_t all_tiles, grid;
  if (__builtin_mul_overflow(problem->batch, tiles, &all_tiles) ||
      __builtin_mul_overflow(all_tiles, problem->heads_k, &all_tiles) || all_tiles > MAX_TILES)
    return too_many_tiles(problem);
  const struct kernel *two_heads = all ? find_two_heads_kernel(problem, facts) : NULL;
  if (two_heads) {
    plan->kernel = two_heads;
    all_tiles /= 2;
  }
  int64_t splits = choose_splits(problem, all_tiles), cluster = splits;
  if (splits > large_cluster && (splits > largest_cluster || problem->max_seqlen_k > long_keys ||
                                 plan->kernel->head_dim > 128))
    cluster = large_cluster;
  /* Without room for partial results, a cluster is all; so it is where others need that room. */
  if (cluster < splits && (problem->max_seqlen_k < long_keys || !all)) splits = cluster;
  const int64_t pairs =
      all && all_tiles ? choose_pairs(problem, facts, plan->kernel, all_tiles) : 0;
  if (pairs) {
    splits = pairs;
    cluster = 2;
    plan->alone = true;
  } else if (all && deals(problem, facts, plan->kernel, all_tiles, splits)) {
    splits = cluster = 1;
    choose_dealt_blocks(problem, facts, plan);
    plan->most_units = (int32_t)most_units(problem) + 1;
    plan->piece_units = (int32_t)piece_units;
  } else if (two_heads && one_round(facts, all_tiles)) {
    splits = cluster = 1;
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
  if (plan->alone) plan->kernel = find_lone_kernel(plan->kernel);
  plan->row_tiles = (int32_t)tiles;
  plan->splits = (int32_t)splits;
  plan->cluster = (int32_t)cluster;
  return splits > cluster || plan->blocks ? find_combine(problem, facts, plan) : FA3_OK;
}

/* Whether a call has chunks: more rows of codes than a block of decode_fp8 takes, and much to read
 * again for each block. Splits by a fixed number of keys are decode_fp8's, for all queries. */
static bool has_chunks(const struct problem *problem) {
  return has_codes(problem) && !problem->split_keys &&
         row_tiles(problem, longest_query(problem)) > 1 &&
         count_tile_keys(problem) > (double)few_tile_keys_of_codes;
}

static const struct kernel *find_chunk_kernel(const struct problem *problem,
                                              const struct cuda_facts *facts) {
  /* At head dim 256 two blocks of decode_fp8 are as fast. */
  if (!has_chunks(problem) ||
      row_tiles(problem, longest_query(problem)) <= (problem->head_dim > 128 ? 2 : 1))
    return NULL;
  return find_kernel(&(struct kernel_need){.kind = &chunk_fp8_kind,
                                           .architecture = facts->architecture,
                                           .dtype = problem->key.dtype,
                                           .head_dim = problem->head_dim,
                                           .value_head_dim = problem->value_head_dim,
                                           .softcap = problem->softcap > 0});
}

/* Room for partial results, also where this head dim needs none. */
static int64_t chunk_rows(const struct problem *problem, const struct cuda_facts *facts) {
  if (!has_chunks(problem)) return 0;
  return chunk_blocks * (int64_t)facts->most_multiprocessors * FA3_CHUNK_FP8_ROWS;
}

/* The number of splits with the shortest estimate, in tiles of keys: each multiprocessor has one
 * block at a time, a block takes a while beside its keys, and what is split is to be put together.
 */
static int64_t choose_chunk_splits(const struct problem *problem, const struct cuda_facts *facts,
                                   const struct kernel *kernel, int64_t tiles) {
  const int64_t most = facts->most_multiprocessors;
  const int64_t keys = divide_up(larger(problem->max_seqlen_k, 1), kernel->tile_k);
  const int64_t limit = problem->num_splits ? problem->num_splits : most;
  int64_t best = 1, least = divide_up(tiles, most) * (keys + chunk_start);
  for (int64_t splits = 2;
       splits <= limit && splits * tiles <= chunk_blocks * most && splits * chunk_least <= keys;
       splits++) {
    const int64_t time =
        divide_up(splits * tiles, most) * (divide_up(keys, splits) + chunk_start) + chunk_combine;
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

/* Beside the few queries of other sequences, which have a plan already, or for all of them. */
static fa3_status plan_chunk(const struct problem *problem, const struct cuda_facts *facts,
                             struct decode_plan *plan) {
  const int64_t tiles = divide_up(rows_of(problem, longest_query(problem)), plan->chunk->tile_q);
  int64_t all_tiles;
  if (__builtin_mul_overflow(problem->batch, tiles, &all_tiles) ||
      __builtin_mul_overflow(all_tiles, problem->heads_k, &all_tiles) || all_tiles > MAX_TILES)
    return too_many_tiles(problem);
  plan->chunk_tiles = (int32_t)tiles;
  plan->chunk_splits = 1;
  if (plan->kernel) return FA3_OK;
  plan->chunk_splits = (int32_t)choose_chunk_splits(problem, facts, plan->chunk, all_tiles);
  if (plan->chunk_splits > 1) return find_combine(problem, facts, plan);
  return FA3_OK;
}

/* Codes are taken where they lie: a copy would cost more than the call. Strides are counted in 32
 * bits, as units of 16 bytes. */
static fa3_status check_inputs(const struct problem *problem) {
  static const enum tensor inputs[] = {TENSOR_query, TENSOR_key, TENSOR_value};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
    const struct operand *operand = problem_operand(problem, inputs[i]);
    const int64_t extents[] = {operand->batch, operand->rows, operand->heads};
    const int64_t strides[] = {operand->stride_batch, operand->stride_row, operand->stride_head};
    const int64_t unit = 16 / (int64_t)fa3_dtype_size(operand->dtype);
    for (int d = 0; d < 3; d++)
      if (extents[d] > 1 && strides[d] / unit > UINT32_MAX)
        return set_error(FA3_UNSUPPORTED,
                         "%s.strides[%d] is %" PRId64
                         ": the decode kernels take less than 2^32 "
                         "times 16 bytes",
                         tensor_rows[inputs[i]].name, d, strides[d]);
    if (operand->dtype == FA3_FLOAT8_E4M3 && !fits_copy_engine(operand))
      return set_error(FA3_UNSUPPORTED,
                       "%s does not start at a multiple of 16 bytes, or has strides that are no "
                       "multiples of it: the kernel for FP8 caches takes no such tensor of codes",
                       tensor_rows[inputs[i]].name);
  }
  return FA3_OK;
}

fa3_status plan_decode(const struct problem *problem, const struct cuda_facts *facts,
                       struct cuda_plan *plan) {
  static const struct demand demands[] = {{TENSOR_sink, FORM_FLOATS},
                                          {TENSOR_query, FORM_TMA},
                                          {TENSOR_key, FORM_TMA},
                                          {TENSOR_value, FORM_TMA}};
  /* Of these, what is no code. */
  const int count = problem->query.dtype == FA3_FLOAT8_E4M3 ? 1
                    : problem->key.dtype == FA3_FLOAT8_E4M3 ? 2
                                                            : 4;
  *plan = (struct cuda_plan){.decodes = true};
  struct decode_plan *decode = &plan->decode;
  decode->most_queries = INT32_MAX;
  decode->chunk = find_chunk_kernel(problem, facts);
  const bool mixed = decode->chunk && queries_vary(problem) && problem->batch > 1;
  if (mixed) decode->most_queries = few_queries(problem);
  if (mixed || !decode->chunk)
    decode->kernel = find_decode_kernel(facts->architecture, problem->key.dtype, problem->head_dim,
                                        problem->value_head_dim, problem->softcap > 0,
                                        rows_of(problem, longest_query(problem)));
  if (!decode->kernel && !decode->chunk)
    return no_kernel(problem->head_dim, problem->value_head_dim);
  TRY(check_lengths(problem));
  TRY(check_scale(problem));
  TRY(check_inputs(problem));
  if (decode->kernel) TRY(plan_splits(problem, facts, decode));
  if (decode->chunk) TRY(plan_chunk(problem, facts, decode));
  TRY(reserve_splits(problem, facts, chunk_rows(problem, facts), &decode->room,
                     &plan->workspace_size));
  return plan_staging(problem, demands, count, &plan->staging, &plan->workspace_size);
}

fa3_status plan_few_queries(const struct problem *problem, const struct cuda_facts *facts,
                            struct decode_plan *decode) {
  *decode = (struct decode_plan){0};
  /* Packed keys are prompts' own. Of a negative scale the forward kernel has minus the query. */
  if (!queries_vary(problem) || problem->cu_seqlens_k || problem->batch < 2 ||
      problem->max_seqlen_k < few_keys || problem->scale < 0)
    return FA3_OK;
  const struct kernel *kernel =
      find_decode_kernel(facts->architecture, problem->key.dtype, problem->head_dim,
                         problem->value_head_dim, problem->softcap > 0, FA3_DECODE_ROWS);
  const struct error_message before = error_keep();
  if (!kernel || check_inputs(problem)) {
    error_put_back(&before);
    return FA3_OK;
  }
  decode->kernel = kernel;
  decode->most_queries = few_queries(problem);
  return plan_splits(problem, facts, decode);
}
