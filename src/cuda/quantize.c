#include "cuda/quantize.h"

#include <inttypes.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/operands.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/quantize_params.h"
#include "signs.h"
#include "validate.h"

enum { QUANTIZE, QUANTIZE_CLEAR };
enum { LARGEST_HEAD_DIM = 256, LARGEST_CLUSTER = 16, CLEAR_THREADS = 256 };

static int32_t shared_bytes(const struct kernel *kernel) {
  (void)kernel;
  return FA3_QUANTIZE_SHARED_BYTES;
}

const struct kernel_kind quantize_kind = {
    .entries = {[QUANTIZE] = "quantize", [QUANTIZE_CLEAR] = "quantize_clear"},
    .shared_bytes = shared_bytes,
    .large_clusters = true};

fa3_status supports_quantize(const fa3_capability *capability) {
  const fa3_dtype from = capability->query_dtype, to = capability->output_dtype;
  if (!dtype_is_wide(from) || to != FA3_FLOAT8_E4M3)
    return set_error(FA3_UNSUPPORTED,
                     "input's dtype is %s and codes' %s: expected FA3_FLOAT32, FA3_FLOAT16 or "
                     "FA3_BFLOAT16, and FA3_FLOAT8_E4M3",
                     dtype_name(from), dtype_name(to));
  if (capability->head_dim < 1 || capability->head_dim > LARGEST_HEAD_DIM)
    return set_error(FA3_UNSUPPORTED, "head_dim is %" PRId32 ": expected 1 to %d",
                     capability->head_dim, LARGEST_HEAD_DIM);
  return FA3_OK;
}

/* Rows that a block of so many threads holds, and how many threads hold all rows that a tile may
 * have: more would have no place for theirs. */
static int64_t rows_of_block(int64_t threads, int64_t lanes) {
  return threads / lanes * FA3_QUANTIZE_ROWS;
}

static int64_t threads_for_rows(int64_t lanes) {
  return FA3_QUANTIZE_TILE_ROWS / FA3_QUANTIZE_ROWS * lanes;
}

/* Tiles of one scale or several, if a block holds so many rows; else several of one. */
static void deal_rows(const struct problem *problem, const struct kernel *kernel, int64_t longest,
                      struct quantize_plan *plan) {
  const int64_t rows = problem->codes_scale_rows;
  const struct operand *scale = &problem->codes_scale;
  const bool of_all = !rows && scale->batch * scale->heads < problem->batch * problem->heads_q;
  const int64_t thread_bytes = (int64_t)FA3_QUANTIZE_ROWS * FA3_QUANTIZE_ELEMENTS *
                               (int64_t)fa3_dtype_size(problem->input.dtype);
  int64_t most_threads = FA3_QUANTIZE_STAGE_BYTES / thread_bytes;
  const int64_t shared = rows ? smaller(rows, longest) : longest;
  const int64_t lanes = kernel->head_dim / FA3_QUANTIZE_ELEMENTS;
  most_threads = smaller(most_threads, threads_for_rows(lanes));
  /* Two blocks of a multiprocessor hide each other's waiting. */
  int64_t threads = smaller(FA3_QUANTIZE_THREADS / 2, threads_for_rows(lanes));
  if (shared > rows_of_block(threads, lanes) && shared <= rows_of_block(most_threads, lanes))
    threads = most_threads;
  const int64_t held = rows_of_block(threads, lanes);
  plan->threads = (int32_t)threads;
  plan->apart = of_all || shared > held;
  if (plan->apart)
    plan->tile_rows = (int32_t)held;
  else
    plan->tile_rows = (int32_t)(rows ? held / shared * shared : shared);
  plan->span_rows = plan->apart ? (int32_t)shared : plan->tile_rows;
  plan->span_tiles = (int32_t)divide_up(plan->span_rows, plan->tile_rows);
}

fa3_status plan_quantize(const struct problem *problem, const struct cuda_facts *facts,
                         struct cuda_plan *plan) {
  const int64_t longest = smaller(problem->max_seqlen_q, problem->rows_q);
  struct quantize_plan *ours = &plan->quantize;
  *plan = (struct cuda_plan){
      .helper = find_kernel(&(struct kernel_need){.kind = &quantize_kind,
                                                  .architecture = facts->architecture,
                                                  .dtype = problem->input.dtype,
                                                  .head_dim = problem->head_dim})};
  TRY(check_lengths(problem));
  if (!has_elements(&problem->input) || !problem->batch || !longest) return FA3_OK;
  deal_rows(problem, plan->helper, longest, ours);
  const int64_t tiles = divide_up(longest, ours->span_rows) * ours->span_tiles;
  int64_t heads, all;
  if (__builtin_mul_overflow(problem->batch, problem->heads_q, &heads) ||
      __builtin_mul_overflow(heads, tiles, &all) || all > MAX_TILES || heads > MAX_TILES / 16)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " sequences of %" PRId64 " heads of up to %" PRId64
                     " rows: more than the quantize kernel counts",
                     problem->batch, problem->heads_q, longest);
  const int64_t at_once = (int64_t)facts->multiprocessors * FA3_QUANTIZE_THREADS / ours->threads;
  ours->tiles = (int32_t)tiles;
  ours->blocks = (int32_t)smaller(all, at_once);
  if (!problem->subtract_mean) return FA3_OK;
  /* Clusters of two can be two blocks on a multiprocessor; larger ones then find too few places. */
  int64_t cluster = 1;
  while (cluster < LARGEST_CLUSTER && 2 * cluster <= tiles &&
         (10 * cluster * heads < 9 * (int64_t)facts->multiprocessors ||
          (cluster == 1 && 2 * heads <= at_once)))
    cluster *= 2;
  ours->cluster = (int32_t)cluster;
  ours->blocks = (int32_t)(heads * cluster);
  return FA3_OK;
}

/* Whether a table's angles can be loaded four at a time. */
static bool in_fours(const struct operand *table) {
  const int64_t bytes = 4 * (int64_t)fa3_dtype_size(table->dtype);
  return (intptr_t)table->data % bytes == 0 && table->stride_row % 4 == 0;
}

static bool own_pairs(const struct problem *problem, const struct kernel *kernel) {
  const int64_t pairs = problem->rotary_cos.dim;
  return pairs && in_fours(&problem->rotary_cos) && in_fours(&problem->rotary_sin) &&
         (problem->interleaved ? pairs % 4 == 0 : 2 * pairs == kernel->head_dim);
}

static fa3_quantize_params make_params(const struct problem *problem, const struct kernel *kernel,
                                       const struct quantize_plan *plan) {
  const struct operand *input = &problem->input, *positions = &problem->positions;
  const int64_t vector = 16 / (int64_t)fa3_dtype_size(input->dtype);
  fa3_quantize_params params = {
      .input = make_operand(input),
      .codes = make_operand(&problem->codes),
      .scale = make_operand(&problem->codes_scale),
      .cos = make_operand(&problem->rotary_cos),
      .sin = make_operand(&problem->rotary_sin),
      .positions = (const int *)(void *)positions->data,
      .positions_stride_batch = positions->stride_batch,
      .positions_stride_row = positions->stride_row,
      .sequences = make_sequences(problem),
      .batches = (int)problem->batch,
      .heads = (int)problem->heads_q,
      .head_dim = (int)problem->head_dim,
      .scale_rows = (int)smaller(problem->codes_scale_rows, problem->rows_q + 1),
      .tile_rows = plan->tile_rows,
      .span_rows = plan->span_rows,
      .span_tiles = plan->span_tiles,
      .tiles = plan->tiles,
      .pairs = (int)problem->rotary_cos.dim,
      .table_rows = (int)smaller(problem->rotary_cos.rows, INT32_MAX),
      .own_pairs = own_pairs(problem, kernel),
      .float_tables = problem->rotary_cos.dtype == FA3_FLOAT32,
      .interleaved = problem->interleaved,
      .vector_input = fits_copy_engine(input) && problem->head_dim % vector == 0,
      .vector_codes = fits_copy_engine(&problem->codes) && problem->head_dim % 16 == 0,
      .subtract_mean = problem->subtract_mean,
      .rotate = problem->rotate};
  for (uint64_t i = 0; i < 4; i++) params.signs[i] = random_signs(problem->seed, i);
  return params;
}

/* Tiles that share a scale raise it first, from 0. */
static fa3_status clear_scales(const struct cuda_scope *scope, const struct cuda_plan *plan,
                               fa3_quantize_params *params) {
  const int64_t scales =
      (int64_t)params->batches * params->heads * (params->tiles / params->span_tiles);
  const struct grid grid = {.x = (unsigned)divide_up(scales, CLEAR_THREADS),
                            .y = 1,
                            .z = 1,
                            .threads = CLEAR_THREADS,
                            .dependent = true};
  return launch_kernel(scope, plan->helper, QUANTIZE_CLEAR, &grid, params);
}

static fa3_status launch_tiles(const struct cuda_scope *scope, const struct cuda_plan *plan,
                               fa3_quantize_params *params) {
  const struct quantize_plan *ours = &plan->quantize;
  struct grid grid = {.x = (unsigned)ours->blocks,
                      .y = 1,
                      .z = 1,
                      .threads = (unsigned)ours->threads,
                      .cluster = (unsigned)ours->cluster,
                      .dependent = true};
  const struct error_message before = error_keep();
  const fa3_status status = launch_kernel(scope, plan->helper, QUANTIZE, &grid, params);
  if (!status || ours->cluster <= 1) return status;
  /* A context with few multiprocessors has no room for the cluster: one block does it all. */
  error_put_back(&before);
  grid.x /= grid.cluster;
  grid.cluster = 1;
  return launch_kernel(scope, plan->helper, QUANTIZE, &grid, params);
}

fa3_status launch_quantize(
    const struct cuda_scope *scope, const struct problem *problem, const struct cuda_plan *plan,
    /* NOLINTNEXTLINE(readability-non-const-parameter): as every phase has it */
    char *workspace) {
  (void)workspace;
  if (!plan->quantize.tiles) return FA3_OK;
  fa3_quantize_params params = make_params(problem, plan->helper, &plan->quantize);
  if (!plan->quantize.apart) return launch_tiles(scope, plan, &params);
  params.from = FA3_QUANTIZE_FIND;
  TRY(clear_scales(scope, plan, &params));
  TRY(launch_tiles(scope, plan, &params));
  params.from = FA3_QUANTIZE_USE;
  return launch_tiles(scope, plan, &params);
}
