#include "cuda/decode.h"

#include "cuda/append.h"
#include "cuda/combine.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/scales.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/combine_params.h"
#include "kernels/decode_params.h"

static fa3_divisor make_divisor(int64_t divisor) {
  uint32_t shift = 0;
  while ((INT64_C(1) << shift) < divisor) shift++;
  const uint64_t scaled = UINT64_C(1) << (32 + shift);
  const uint64_t factor = (scaled + (uint64_t)divisor - 1) / (uint64_t)divisor;
  return (fa3_divisor){.divisor = (uint32_t)divisor,
                       .factor = (uint32_t)(factor - (UINT64_C(1) << 32)),
                       .shift = shift};
}

/* A single entry's stride counts for nothing. */
static uint32_t units(const struct operand *operand, int64_t extent, int64_t stride) {
  const int64_t unit = 16 / (int64_t)fa3_dtype_size(operand->dtype);
  return extent > 1 ? (uint32_t)(stride / unit) : 0;
}

static fa3_decode_input make_input(const struct operand *operand) {
  return (fa3_decode_input){.data = operand->data,
                            .stride_batch = units(operand, operand->batch, operand->stride_batch),
                            .stride_row = units(operand, operand->rows, operand->stride_row),
                            .stride_head = units(operand, operand->heads, operand->stride_head)};
}

static int output_kind(fa3_dtype dtype) {
  return dtype == FA3_FLOAT32   ? FA3_OUTPUT_FP32
         : dtype == FA3_FLOAT16 ? FA3_OUTPUT_FP16
                                : FA3_OUTPUT_BF16;
}

/* Of what splits have left. */
static fa3_status combine_parts(const struct cuda_scope *scope, const struct problem *problem,
                                const struct decode_plan *plan, const char *workspace,
                                int64_t splits) {
  fa3_combine_params params = make_combine_params(problem, &plan->room, workspace, splits);
  return combine_splits(scope, problem, plan->combine, &params);
}

/* Keys that are dealt out: to so many blocks of that kernel, for so many row tiles of a sequence.
 */
struct dealing {
  const struct kernel *kernel;
  int32_t row_tiles, blocks;
};

static int64_t heads_of(const struct problem *problem, const struct dealing *dealing) {
  return problem->heads_k / decode_heads(dealing->kernel);
}

/* Parts of a tile, in the mean. */
static int64_t parts_of_tile(const struct problem *problem, const struct dealing *dealing) {
  return dealing->blocks / (problem->batch * heads_of(problem, dealing) * dealing->row_tiles);
}

/* Whether few of a call's rows have parts, and those few each: then combine_tiles puts them
 * together, for which a sequence has one tile of rows. Else combine does, a warp or all of a block
 * for each row of the call. */
static bool have_few_parts(const struct problem *problem, const struct dealing *dealing) {
  return dealing->row_tiles == 1 && FA3_COMBINE_WARPS_OF(parts_of_tile(problem, dealing)) == 1;
}

/* Of what those blocks have left. */
static fa3_status combine_dealt(const struct cuda_scope *scope, const struct problem *problem,
                                const struct decode_plan *plan, const struct dealing *dealing,
                                const char *workspace) {
  fa3_combine_params params = make_combine_params(problem, &plan->room, workspace, 1);
  params.parts = (const fa3_combine_parts *)(const void *)(workspace + plan->room.parts.offset);
  params.tile_rows = dealing->kernel->tile_q;
  params.row_tiles = dealing->row_tiles;
  params.group = (int)(problem->heads_q / heads_of(problem, dealing));
  params.warps = FA3_COMBINE_WARPS_OF(parts_of_tile(problem, dealing));
  return combine_splits(scope, problem, plan->combine, &params);
}

/* Likewise where have_few_parts says so, of chunks alone. */
static fa3_status combine_dealt_tiles(const struct cuda_scope *scope, const struct problem *problem,
                                      const struct decode_plan *plan, const char *workspace) {
  fa3_combine_params params = make_combine_params(problem, &plan->room, workspace, 1);
  params.tiles = (const fa3_combine_tile *)(const void *)(workspace + plan->room.parts.offset);
  params.team = (int)problem->heads_k;
  params.tile_rows = plan->chunk->tile_q;
  params.group = (int)(problem->heads_q / problem->heads_k);
  return combine_tiles(scope, plan->combine, plan->chunk_blocks, &params);
}

static int64_t rows_of_scale(int64_t rows) {
  return smaller(larger(rows, 1), INT32_MAX);
}

fa3_decode_fp8_params make_cache_params(const struct problem *problem, int64_t heads_k) {
  const struct scales scales = make_scales((double)problem->scale, (double)problem->softcap);
  const struct operand *output = &problem->output, *lse = &problem->lse;
  const bool paged = has_pages(problem);
  return (fa3_decode_fp8_params){
      .query_scale =
          make_fp8_scales(&problem->query_scale, problem->query_scale_rows, problem->heads_q),
      .key_scale = make_fp8_scales(&problem->key_scale, problem->key_scale_rows, problem->heads_k),
      .value_scale =
          make_fp8_scales(&problem->value_scale, problem->value_scale_rows, problem->heads_k),
      .key_scale_rows = make_divisor(rows_of_scale(problem->key_scale_rows)),
      .value_scale_rows = make_divisor(rows_of_scale(problem->value_scale_rows)),
      .query = problem->query.dtype == FA3_BFLOAT16  ? FA3_QUERY_BF16
               : problem->query.dtype == FA3_FLOAT16 ? FA3_QUERY_FP16
                                                     : FA3_QUERY_E4M3,
      .decode = {.query = make_input(&problem->query),
                 .key = make_input(&problem->key),
                 .value = make_input(&problem->value),
                 .output = output->data,
                 .output_stride_batch = output->stride_batch,
                 .output_stride_row = output->stride_row,
                 .output_stride_head = output->stride_head,
                 .lse = (float *)(void *)lse->data,
                 .lse_stride_batch = lse->stride_batch,
                 .lse_stride_row = lse->stride_row,
                 .lse_stride_head = lse->stride_head,
                 .sink = (const float *)(void *)problem->sink.data,
                 .lengths_known = lengths_known(problem),
                 .sequences = make_sequences(problem),
                 .page_size = make_divisor(paged ? larger(problem->key.rows, 1) : INT32_MAX),
                 .pages = (int)problem->batch_k,
                 .rows_k = (int)problem->rows_k,
                 .appended = (int)smaller(problem->appended, INT32_MAX / 2),
                 .heads_k = make_divisor(heads_k),
                 .group = make_divisor(problem->heads_q / heads_k),
                 .head_dim = (int)problem->head_dim,
                 .head_dim_v = (int)problem->value_head_dim,
                 .scale = scales.scale,
                 .softcap_log2 = scales.softcap_log2,
                 .output_kind = output_kind(output->dtype),
                 .batch = (int)problem->batch}};
}

/* Of what is left by clusters, by the blocks that keys are dealt out to, or by splits of chunks. */
static void set_partial(fa3_decode_params *params, const struct split_room *room,
                        const char *workspace) {
  params->partial = (float *)(void *)(workspace + room->partial.offset);
  params->partial_lse = (float *)(void *)(workspace + room->partial_lse.offset);
}

/* What the kernel that appends too takes. Queries that the append leaves alone are the call's. */
static fa3_decode_append_params join_append(const struct problem *problem,
                                            const fa3_decode_params *decode) {
  const struct problem *append = problem->append;
  fa3_decode_append_params params = {.decode = *decode,
                                     .append = make_append_params(append),
                                     .query_pairs = (int)append->rotary_cos.dim};
  if (append->query.dtype) return params;
  params.append.query = make_operand(&problem->query);
  params.query_pairs = 0;
  return params;
}

static fa3_status launch_few(const struct cuda_scope *scope, const struct problem *problem,
                             const struct decode_plan *plan, char *workspace) {
  const int64_t heads_k = problem->heads_k / decode_heads(plan->kernel);
  fa3_decode_fp8_params fp8 = make_cache_params(problem, heads_k);
  fa3_decode_params *params = &fp8.decode; /* what the kernel for 16 bits takes */
  params->most_queries = plan->most_queries;
  params->row_tiles = make_divisor(larger(plan->row_tiles, 1));
  params->splits = make_divisor(plan->splits);
  params->cluster = plan->cluster;
  params->split_units = plan->split_units;
  params->most_units = plan->most_units;
  params->piece_units = plan->piece_units;
  params->early_blocks =
      params->appended ? (int)smaller(2 * (int64_t)scope->multiprocessors, INT32_MAX / 2) : 0;
  if (plan->combine) set_partial(params, &plan->room, workspace);
  if (plan->blocks)
    params->parts = (fa3_combine_parts *)(void *)(workspace + plan->room.parts.offset);
  const int64_t blocks = plan->blocks
                             ? plan->blocks
                             : problem->batch * heads_k * (int64_t)plan->row_tiles * plan->splits;
  if (blocks == 0) return FA3_OK;
  const unsigned threads =
      problem->append ? FA3_DECODE_APPEND_THREADS : (unsigned)decode_threads(plan->kernel);
  const struct grid grid = {.x = (unsigned)blocks,
                            .y = 1,
                            .z = 1,
                            .threads = threads,
                            .cluster = plan->blocks ? 0 : (unsigned)plan->cluster,
                            .alone = plan->alone,
                            .dependent = true};
  fa3_decode_append_params joined;
  void *all = &fp8;
  if (problem->append) {
    joined = join_append(problem, params);
    params = &joined.decode;
    all = &joined;
  }
  const int entry = problem->append ? DECODE_APPEND : plan->blocks ? DECODE_DEALT : DECODE_ALONE;
  const struct error_message before = error_keep();
  fa3_status status = launch_kernel(scope, plan->kernel, entry, &grid, all);
  const struct dealing dealing = {plan->kernel, plan->row_tiles, plan->blocks};
  if (!status && plan->blocks) return combine_dealt(scope, problem, plan, &dealing, workspace);
  if (!status)
    return plan->combine
               ? combine_parts(scope, problem, plan, workspace, plan->splits / plan->cluster)
               : FA3_OK;
  if (plan->cluster == 1) return status;
  /* A context with few multiprocessors has no room for the cluster: one block does it all. */
  error_put_back(&before);
  const struct grid alone = {.x = (unsigned)(blocks / plan->splits),
                             .y = 1,
                             .z = 1,
                             .threads = threads,
                             .cluster = 1,
                             .dependent = true};
  params->splits = make_divisor(1);
  params->cluster = 1;
  params->partial = NULL;
  params->partial_lse = NULL;
  return launch_kernel(scope, plan->kernel, entry, &alone, all);
}

static fa3_status launch_chunk(const struct cuda_scope *scope, const struct problem *problem,
                               const struct decode_plan *plan, char *workspace) {
  fa3_decode_fp8_params fp8 = make_cache_params(problem, problem->heads_k);
  fp8.few_queries = plan->kernel ? plan->most_queries : 0;
  fp8.decode.most_queries = INT32_MAX;
  fp8.decode.row_tiles = make_divisor(larger(plan->chunk_tiles, 1));
  fp8.decode.splits = make_divisor(plan->chunk_splits);
  fp8.decode.cluster = 1;
  fp8.decode.most_units = plan->most_units;
  fp8.decode.piece_units = plan->piece_units;
  const int32_t dealt = plan->chunk_blocks;
  const struct dealing dealing = {plan->chunk, plan->chunk_tiles, dealt};
  const bool few_parts = dealt && have_few_parts(problem, &dealing);
  if (plan->chunk_splits > 1 || dealt) set_partial(&fp8.decode, &plan->room, workspace);
  if (dealt) {
    void *const parts = workspace + plan->room.parts.offset;
    if (few_parts)
      fp8.decode.begun = (fa3_combine_tile *)parts;
    else
      fp8.decode.parts = (fa3_combine_parts *)parts;
  }
  const int64_t blocks =
      dealt ? dealt : problem->batch * problem->heads_k * plan->chunk_tiles * plan->chunk_splits;
  if (blocks == 0) return FA3_OK;
  const struct grid grid = {.x = (unsigned)blocks,
                            .y = 1,
                            .z = 1,
                            .threads = (unsigned)chunk_threads(plan->chunk),
                            .dependent = true};
  TRY(launch_kernel(scope, plan->chunk, dealt ? DECODE_DEALT : DECODE_ALONE, &grid, &fp8));
  if (few_parts) return combine_dealt_tiles(scope, problem, plan, workspace);
  if (dealt) return combine_dealt(scope, problem, plan, &dealing, workspace);
  if (plan->chunk_splits == 1) return FA3_OK;
  return combine_parts(scope, problem, plan, workspace, plan->chunk_splits);
}

fa3_status launch_decode(const struct cuda_scope *scope, const struct problem *problem,
                         const struct decode_plan *plan, char *workspace) {
  if (plan->kernel) TRY(launch_few(scope, problem, plan, workspace));
  return plan->chunk ? launch_chunk(scope, problem, plan, workspace) : FA3_OK;
}
