#include "cuda/combine.h"

#include <inttypes.h>

#include "cuda/append.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"

enum { COMBINE, COMBINE_ROWS, COMBINE_TILES };
const struct kernel_kind combine_kind = {
    .entries = {
        [COMBINE] = "combine", [COMBINE_ROWS] = "combine_rows", [COMBINE_TILES] = "combine_tiles"}};

static int element_kind(fa3_dtype dtype) {
  return dtype == FA3_FLOAT32   ? FA3_COMBINE_FLOAT32
         : dtype == FA3_FLOAT16 ? FA3_COMBINE_FLOAT16
                                : FA3_COMBINE_BFLOAT16;
}

fa3_combine_params make_combine_params(const struct problem *problem, const struct split_room *room,
                                       const char *workspace, int64_t splits) {
  const int64_t longest = longest_query(problem);
  const int64_t heads = problem->heads_q, dim = problem->value_head_dim;
  const int64_t rows = problem->batch * longest;
  const struct operand *output = &problem->output, *lse = &problem->lse;
  return (fa3_combine_params){
      .partial = (const float *)(const void *)(workspace + room->partial.offset),
      .partial_lse = (const float *)(const void *)(workspace + room->partial_lse.offset),
      .partial_strides = {.split = rows * heads * dim,
                          .batch = longest * heads * dim,
                          .row = heads * dim,
                          .head = dim},
      .partial_lse_strides = {.split = rows * heads,
                              .batch = longest * heads,
                              .row = heads,
                              .head = 1},
      .output = output->data,
      .output_strides = {.batch = output->stride_batch,
                         .row = output->stride_row,
                         .head = output->stride_head},
      .lse = (float *)(void *)lse->data,
      .lse_strides = {.batch = lse->stride_batch, .row = lse->stride_row, .head = lse->stride_head},
      .sink = (const float *)(void *)problem->sink.data,
      .cu_seqlens_q = problem->cu_seqlens_q,
      .used_q = problem->seqused_q,
      .seqlen_q = (int)longest,
      .splits = (int)splits,
      .heads = (int)heads,
      .head_dim = (int)dim,
      .kind = element_kind(output->dtype),
      .warps = FA3_COMBINE_WARPS_OF(splits)};
}

static bool divided_by_four(const fa3_combine_strides *strides) {
  return (strides->split | strides->batch | strides->row | strides->head) % 4 == 0;
}

/* Whether a thread may write four columns of a row together. */
static bool stores_four_columns(const fa3_combine_params *params) {
  return params->kind != FA3_COMBINE_FLOAT32 && (uintptr_t)params->output % 8 == 0 &&
         divided_by_four(&params->output_strides);
}

/* Whether it may have four columns of a row, and read and write them together. */
static bool takes_four_columns(const fa3_combine_params *params) {
  return params->warps == 1 && !params->parts && params->head_dim % 4 == 0 &&
         (uintptr_t)params->partial % 16 == 0 && divided_by_four(&params->partial_strides) &&
         stores_four_columns(params) &&
         /* It counts threads in 32 bits. */
         (int64_t)params->seqlen_q * params->heads * FA3_COMBINE_ROW_THREADS(params->head_dim) <=
             UINT32_MAX - FA3_COMBINE_THREADS;
}

fa3_status combine_splits(const struct cuda_scope *scope, const struct problem *problem,
                          const struct kernel *kernel, fa3_combine_params *params) {
  const bool rows = takes_four_columns(params);
  const int rows_of_block = rows ? FA3_COMBINE_THREADS / FA3_COMBINE_ROW_THREADS(params->head_dim)
                                 : FA3_COMBINE_WARPS / params->warps;
  const struct grid grid = {
      .x = (unsigned)divide_up((int64_t)params->seqlen_q * params->heads, rows_of_block),
      .y = (unsigned)problem->batch,
      .z = 1,
      .threads = FA3_COMBINE_THREADS,
      .dependent = true};
  return launch_kernel(scope, kernel, rows ? COMBINE_ROWS : COMBINE, &grid, params);
}

fa3_status combine_tiles(const struct cuda_scope *scope, const struct kernel *kernel, int shares,
                         fa3_combine_params *params) {
  const int rows_of_block = FA3_COMBINE_THREADS / FA3_COMBINE_ROW_THREADS(params->head_dim);
  params->by_four = stores_four_columns(params);
  const struct grid grid = {.x = (unsigned)divide_up(params->tile_rows, rows_of_block),
                            .y = (unsigned)shares,
                            .z = 1,
                            .threads = FA3_COMBINE_THREADS,
                            .dependent = true};
  return launch_kernel(scope, kernel, COMBINE_TILES, &grid, params);
}

fa3_status plan_combine(const struct problem *problem, const struct cuda_facts *facts,
                        struct cuda_plan *plan) {
  *plan = (struct cuda_plan){.helper = find_kernel(&(struct kernel_need){
                                 .kind = &combine_kind, .architecture = facts->architecture})};
  int64_t rows;
  if (problem->batch > MAX_GRID || problem->heads_q > MAX_TILES || problem->rows_q > MAX_TILES ||
      __builtin_mul_overflow(problem->heads_q, problem->rows_q, &rows) || rows > MAX_TILES ||
      problem->value_head_dim > MAX_TILES || problem->partial_output.batch > MAX_TILES)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " sequences of %" PRId64 " rows of %" PRId64
                     " heads: more than the combine kernel counts",
                     problem->batch, problem->rows_q, problem->heads_q);
  return FA3_OK;
}

static fa3_combine_strides make_strides(const struct operand *operand, int64_t batch) {
  return (fa3_combine_strides){.split = batch * operand->stride_batch,
                               .batch = operand->stride_batch,
                               .row = operand->stride_row,
                               .head = operand->stride_head};
}

fa3_status launch_combine(
    const struct cuda_scope *scope, const struct problem *problem, const struct cuda_plan *plan,
    /* NOLINTNEXTLINE(readability-non-const-parameter): as every phase has it */
    char *workspace) {
  (void)workspace;
  const struct operand *partial = &problem->partial_output, *output = &problem->output;
  if (!has_elements(output)) return FA3_OK;
  fa3_combine_params params = {
      .partial = (const float *)(void *)partial->data,
      .partial_lse = (const float *)(void *)problem->partial_lse.data,
      .partial_strides = make_strides(partial, output->batch),
      .partial_lse_strides = make_strides(&problem->partial_lse, output->batch),
      .output = output->data,
      .lse = (float *)(void *)problem->lse.data,
      .output_strides = make_strides(output, 0),
      .lse_strides = make_strides(&problem->lse, 0),
      .seqlen_q = (int)problem->rows_q,
      .splits = (int)(partial->batch / output->batch),
      .heads = (int)problem->heads_q,
      .head_dim = (int)problem->value_head_dim,
      .kind = element_kind(output->dtype),
      .warps = FA3_COMBINE_WARPS_OF(partial->batch / output->batch)};
  return combine_splits(scope, problem, plan->helper, &params);
}
