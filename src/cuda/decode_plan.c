#include "cuda/decode_plan.h"

#include <inttypes.h>

#include "cuda/decode_splits.h"
#include "cuda/forward_splits.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/decode_params.h"

/* docs/notes/hopper-decode.md says why these. Keys, each counted once for each row tile that reads
 * it: where there are more, and more than one row tile, the forward kernel is faster, and of codes
 * chunk_fp8. */
static const int64_t few_tile_keys = 1 << 15, few_tile_keys_of_codes = 1 << 16;
/* Of chunks of few rows: where there are more, speculative_fp8 is faster than chunk_fp8. */
static const int64_t few_speculative_tile_keys = 1 << 19;
static const int64_t few_keys = 1280; /* that the forward kernel's tiles hold without loss */
/* Chunks: in tiles of keys, what a block takes beside them, what it takes to put splits together,
 * and the least of a split; blocks of a multiprocessor that have room for partial results. */
static const int64_t chunk_start = 9, chunk_combine = 3, chunk_least = 4;
static const int64_t chunk_blocks = 2;
/* Rounds of blocks, at most: each costs a beginning. */
static const int64_t chunk_rounds = 10;

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_DECODE_SHARED_BYTES(kernel->tile_q, kernel->head_dim, kernel->stages);
}

const struct kernel_kind decode_kind = {.phase = FA3_FORWARD,
                                        .entries = {"decode", "decode_dealt", "decode_append"},
                                        .others_with_shared = 2,
                                        .shared_bytes = shared_bytes,
                                        .large_clusters = true,
                                        .may_be_alone = true};

int64_t decode_heads(const struct kernel *kernel) {
  return larger(kernel->heads, 1);
}

static int32_t decode_warps(const struct kernel *kernel) {
  return kernel->warps ? kernel->warps : FA3_DECODE_WARPS;
}

int64_t decode_loads(const struct kernel *kernel) {
  return larger(kernel->loads, 1);
}

int32_t decode_threads(const struct kernel *kernel) {
  return 32 * decode_warps(kernel);
}

static int32_t fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_DECODE_FP8_SHARED_BYTES(
      decode_warps(kernel), kernel->tile_q, kernel->head_dim,
      (int32_t)(decode_heads(kernel) * decode_loads(kernel)) * kernel->stages);
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

static int32_t speculative_fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_SPECULATIVE_FP8_SHARED_BYTES(kernel->tile_q, kernel->head_dim, kernel->stages);
}

const struct kernel_kind speculative_fp8_kind = {
    .phase = FA3_FORWARD,
    .entries = {"speculative_fp8", "speculative_fp8_dealt"},
    .others_with_shared = 1,
    .shared_bytes = speculative_fp8_shared_bytes};

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

/* Of a sequence, where others may have many. */
static int32_t few_queries(const struct problem *problem) {
  return (int32_t)larger(FA3_DECODE_ROWS / (problem->heads_q / problem->heads_k), 1);
}

/* Of sequences that are full. */
static double count_tile_keys(const struct problem *problem) {
  return (double)decode_row_tiles(problem, longest_query(problem)) * (double)problem->batch *
         (double)problem->heads_k * (double)problem->max_seqlen_k;
}

/* Whether the forward kernel for codes would take a cache in pages: of one scale for all of a head,
 * and in pages whose boxes of rows the copy engine takes. It can't split keys, so there have to be
 * tiles for half of the multiprocessors. Lengths of queries on the device alone have no test on a
 * GPU there. */
static bool forward_may_take_pages(const struct problem *problem) {
  static const enum tensor tensors[] = {TENSOR_query, TENSOR_key, TENSOR_value, TENSOR_output};
  enum { LEAST_BOX = 16, LEAST_TILES = 66 };
  const double queries = problem->cu_seqlens_q
                             ? (double)problem->rows_q
                             : (double)problem->batch * (double)problem->max_seqlen_q;
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
    if (!fits_copy_engine(problem_operand(problem, tensors[i]))) return false;
  return !problem->seqused_q &&
         queries * (double)problem->heads_q >= LEAST_TILES * FA3_CHUNK_FP8_ROWS &&
         problem->key.rows % LEAST_BOX == 0 && !problem->leftpad_k && problem->scale >= 0 &&
         problem->key_scale_rows == 0 && problem->key_scale.stride_batch == 0 &&
         problem->value_scale_rows == 0 && problem->value_scale.stride_batch == 0;
}

bool decode_has_chunks(const struct problem *problem) {
  return decode_has_codes(problem) && !problem->split_keys &&
         decode_row_tiles(problem, longest_query(problem)) > 1 &&
         count_tile_keys(problem) > (double)few_tile_keys_of_codes;
}

/* Whether its blocks all begin at once, each with a row tile of few keys: they begin sooner than
 * the forward kernel's. At head dim 256 a cluster of two has a tile. */
static bool is_one_short_round(const struct problem *problem, int64_t tiles) {
  enum { MOST_KEYS = 128 };
  const int64_t most = (problem->head_dim > 128 ? 1 : 2) * (int64_t)DECODE_FULL_GRID;
  return problem->max_seqlen_k <= MOST_KEYS && longest_query(problem) <= MOST_KEYS &&
         tiles * problem->batch <= most && tiles * problem->batch * problem->heads_k <= most;
}

bool decode_takes(const struct problem *problem) {
  const int64_t tiles = decode_row_tiles(problem, longest_query(problem));
  const bool paged = has_pages(problem);
  if (problem->query.dtype == FA3_FLOAT8_E4M3)
    return paged ? !decode_has_chunks(problem) || !forward_may_take_pages(problem)
                 : problem->split_keys || tiles <= 1;
  /* There is no forward kernel for codes under wider queries. */
  if (problem->key.dtype == FA3_FLOAT8_E4M3) return true;
  if (problem->split_keys || problem->output.dtype != problem->query.dtype) return true;
  if (tiles <= 1 || is_one_short_round(problem, tiles)) return true;
  return tiles * FA3_DECODE_ROWS <= DECODE_FEW_ROWS &&
         tiles * problem->batch <= 2 * (int64_t)DECODE_FULL_GRID &&
         tiles * problem->batch * problem->heads_k <= 2 * (int64_t)DECODE_FULL_GRID &&
         count_tile_keys(problem) <= (double)few_tile_keys;
}

static const struct kernel *find_chunk_kernel(const struct problem *problem,
                                              const struct cuda_facts *facts) {
  if (!decode_has_chunks(problem)) return NULL;
  const bool few = decode_rows(problem, longest_query(problem)) <= FA3_SPECULATIVE_FP8_ROWS;
  /* At head dim 256 two blocks of decode_fp8 are as fast. */
  if (few && problem->head_dim > 128) return NULL;
  const bool speculative = few && problem->value_head_dim <= 128 &&
                           count_tile_keys(problem) > (double)few_speculative_tile_keys;
  return find_kernel(
      &(struct kernel_need){.kind = speculative ? &speculative_fp8_kind : &chunk_fp8_kind,
                            .architecture = facts->architecture,
                            .dtype = problem->key.dtype,
                            .head_dim = problem->head_dim,
                            .value_head_dim = problem->value_head_dim,
                            .softcap = problem->softcap > 0});
}

int64_t chunk_rows(const struct problem *problem, const struct cuda_facts *facts) {
  if (!decode_has_chunks(problem)) return 0;
  return chunk_blocks * (int64_t)facts->most_multiprocessors * FA3_CHUNK_FP8_ROWS;
}

/* Blocks of the kernel that a multiprocessor has at a time. */
static int64_t blocks_at_once(const struct kernel *kernel) {
  return kernel->kind == &speculative_fp8_kind ? FA3_SPECULATIVE_FP8_BLOCKS : 1;
}

int32_t chunk_threads(const struct kernel *kernel) {
  return kernel->kind == &speculative_fp8_kind ? 128 * FA3_SPECULATIVE_FP8_GROUPS
                                               : FA3_CHUNK_FP8_THREADS(kernel->head_dim);
}

/* How long a chunk's splits take, in tiles of keys: `most` blocks run at a time, a block takes a
 * while beside its keys, and what is split is to be put together. */
struct chunk_time {
  int64_t alike;  /* of sequences of one length */
  int64_t differ; /* the longest twice the mean, its last block the last to begin */
};

static struct chunk_time time_chunk_splits(int64_t most, int64_t tiles, int64_t keys,
                                           int64_t splits) {
  const int64_t of_block = divide_up(keys, splits) + chunk_start;
  const int64_t combine = splits > 1 ? chunk_combine : 0;
  return (struct chunk_time){divide_up(splits * tiles, most) * of_block + combine,
                             tiles * (keys / 2 + chunk_start * splits) / most + of_block + combine};
}

/* The number of splits with the shortest time, of those that fill so many rounds of blocks: few
 * are tried, as this is on the way of every launch. Lengths that may differ may also be alike: so
 * splits for lengths that do are taken only if they save a tenth of both times together. */
static int64_t choose_chunk_splits(const struct problem *problem, const struct cuda_facts *facts,
                                   const struct kernel *kernel, int64_t tiles) {
  const int64_t most = facts->most_multiprocessors * blocks_at_once(kernel);
  const int64_t keys = divide_up(larger(problem->max_seqlen_k, 1), kernel->tile_k);
  const int64_t rows = larger(problem->batch * problem->heads_q * longest_query(problem), 1);
  const int64_t limit = smaller(problem->num_splits ? problem->num_splits : most,
                                smaller(chunk_rows(problem, facts) / rows, keys / chunk_least));
  struct chunk_time time = time_chunk_splits(most, tiles, keys, 1);
  int64_t best = 1, least = time.alike, sum = time.alike + time.differ;
  int64_t best_of_both = 1, least_sum = sum;
  for (int64_t round = 1; round <= chunk_rounds; round++) {
    int64_t splits = smaller(round * most / larger(tiles, 1), limit);
    if (splits < 2) continue;
    splits = divide_up(keys, divide_up(keys, splits)); /* no more than shares that long take */
    time = time_chunk_splits(most, tiles, keys, splits);
    if (time.alike < least) {
      best = splits;
      least = time.alike;
      sum = time.alike + time.differ;
    }
    if (time.alike + time.differ < least_sum) {
      best_of_both = splits;
      least_sum = time.alike + time.differ;
    }
  }
  return decode_lengths_differ(problem) && 10 * least_sum < 9 * sum ? best_of_both : best;
}

/* Beside the few queries of other sequences, which have a plan already, or for all of them. */
static fa3_status plan_chunk(const struct problem *problem, const struct cuda_facts *facts,
                             struct decode_plan *plan) {
  const int64_t tiles =
      divide_up(decode_rows(problem, longest_query(problem)), plan->chunk->tile_q);
  int64_t all_tiles;
  if (__builtin_mul_overflow(problem->batch, tiles, &all_tiles) ||
      __builtin_mul_overflow(all_tiles, problem->heads_k, &all_tiles) || all_tiles > MAX_TILES)
    return decode_too_many_tiles(problem);
  plan->chunk_tiles = (int32_t)tiles;
  plan->chunk_splits = 1;
  if (plan->kernel) return FA3_OK;
  const bool may_deal = plan->chunk->kind == &speculative_fp8_kind;
  if (may_deal && decode_deal_chunks(problem, facts, all_tiles, plan))
    return decode_find_combine(problem, facts, plan);
  plan->chunk_splits = (int32_t)choose_chunk_splits(problem, facts, plan->chunk, all_tiles);
  if (plan->chunk_splits > 1) return decode_find_combine(problem, facts, plan);
  return FA3_OK;
}

fa3_status decode_check_inputs(const struct problem *problem) {
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

/* Room for parts of rows, and for what calls have whose codes are unpacked. */
static fa3_status reserve_chunks(const struct problem *problem, const struct cuda_facts *facts,
                                 struct cuda_plan *plan) {
  size_t *size = &plan->workspace_size;
  int64_t rows = chunk_rows(problem, facts);
  if (may_unpack(problem, facts)) {
    const struct unpack_plan none = {0};
    const struct problem unpacked = unpacked_problem(problem, &none, NULL);
    struct reservation room, counter;
    rows = larger(rows, forward_split_rows(&unpacked, facts));
    TRY(reserve_counter(problem, &counter, size));
    TRY(reserve_unpacked(problem, &room, size));
  }
  return reserve_splits(problem, facts, rows, &plan->decode.room, size);
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
                                        decode_rows(problem, longest_query(problem)));
  if (!decode->kernel && !decode->chunk)
    return no_kernel(problem->head_dim, problem->value_head_dim);
  TRY(check_lengths(problem));
  TRY(check_scale(problem));
  TRY(decode_check_inputs(problem));
  /* Kernels count the rows of a head of keys in 32 bits. */
  if (decode_rows(problem, longest_query(problem)) > MAX_TILES)
    return decode_too_many_tiles(problem);
  if (decode->kernel) TRY(plan_decode_splits(problem, facts, decode));
  if (decode->chunk) TRY(plan_chunk(problem, facts, decode));
  TRY(reserve_chunks(problem, facts, plan));
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
  if (!kernel || decode_check_inputs(problem)) {
    error_put_back(&before);
    return FA3_OK;
  }
  decode->kernel = kernel;
  decode->most_queries = few_queries(problem);
  return plan_decode_splits(problem, facts, decode);
}
