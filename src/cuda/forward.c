#include "cuda/forward.h"

#include <math.h>
#include <string.h>

#include "cuda/combine.h"
#include "cuda/decode.h"
#include "cuda/forward_splits.h"
#include "cuda/launch.h"
#include "cuda/scales.h"
#include "cuda/sequences.h"
#include "cuda/tensor_map.h"
#include "cuda/tile_counter.h"
#include "error.h"

/* One call under way. */
struct call {
  const struct cuda_scope *scope;
  const struct problem *problem;
  const struct forward_plan *plan;
  char *workspace;     /* aligned */
  unsigned *next_tile; /* find_tile_counter */
};

static fa3_status set_tensor_maps(const struct call *call, fa3_forward_params *params) {
  const struct cuda_driver *driver = call->scope->device->driver;
  const struct kernel *kernel = call->plan->kernel;
  const bool fp8 = kernel->dtype == FA3_FLOAT8_E4M3;
  const int32_t chunk = fp8 ? FA3_FORWARD_FP8_CHUNK(kernel->head_dim)
                            : FA3_FORWARD_CHUNK(kernel->head_dim, kernel->value_head_dim);
  const int32_t output_chunk = fp8 ? 64 : chunk;
  int tile_heads = call->plan->tile_heads;
  const struct operand *query = &call->problem->query, *output = &call->problem->output;
  const struct map_dimension query_map[] = {
      {query->dim, 1, chunk},
      {tile_heads, query->stride_head, tile_heads},
      {query->rows, query->stride_row, 64 / tile_heads},
      {query->heads / tile_heads, query->stride_head * tile_heads, 1},
      {query->batch, query->stride_batch, 1}};
  const struct map_dimension output_map[] = {
      {output->dim, 1, output_chunk},
      {tile_heads, output->stride_head, tile_heads},
      {output->rows, output->stride_row, tile_heads < 16 ? 16 / tile_heads : 1},
      {output->heads / tile_heads, output->stride_head * tile_heads, 1},
      {output->batch, output->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel->dtype, chunk, "query", query->data, 5, query_map,
                      &params->query));
  if (output->dtype != FA3_FLOAT32)
    TRY(make_tensor_map(driver, output->dtype, output_chunk, "output", output->data, 5, output_map,
                        &params->output));

  /* Without keys nothing is read; the maps only have to be valid. */
  const struct operand *key = &call->problem->key, *value = &call->problem->value;
  const bool keys = has_elements(key);
  const int32_t rows = call->plan->box ? call->plan->box : kernel->tile_k;
  const struct map_dimension key_map[] = {{key->dim, 1, chunk},
                                          {key->rows, key->stride_row, rows},
                                          {key->heads, key->stride_head, 1},
                                          {key->batch, key->stride_batch, 1}};
  const struct map_dimension value_map[] = {{value->dim, 1, chunk},
                                            {value->rows, value->stride_row, rows},
                                            {value->heads, value->stride_head, 1},
                                            {value->batch, value->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel->dtype, chunk, "key", keys ? key->data : query->data, 4,
                      key_map, &params->key));
  return make_tensor_map(driver, kernel->dtype, chunk, "value", keys ? value->data : query->data, 4,
                         value_map, &params->value);
}

/* What blocks take their tiles from: the stream's counter, or one in the workspace, cleared.
 * Kernels leave it as they find it. */
static fa3_status find_tile_counter(struct call *call) {
  const struct cuda_scope *scope = call->scope;
  if (!call->plan->counted) return FA3_OK;
  call->next_tile = cuda_tile_counter(scope, call->plan->kernel);
  if (call->next_tile) return FA3_OK;
  call->next_tile = (unsigned *)(void *)(call->workspace + call->plan->next_tile.offset);
  TRY_CUDA(scope->device->driver, cuMemsetD32Async, (CUdeviceptr)call->next_tile, 0, 1,
           scope->stream);
  return FA3_OK;
}

static fa3_status launch_attention(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct forward_plan *plan = call->plan;
  fa3_forward_fp8_params fp8;
  memset(&fp8, 0, sizeof fp8);
  fa3_forward_params params = fp8.forward;
  TRY(set_tensor_maps(call, &params));
  const double scale = fabs((double)problem->scale), softcap = (double)problem->softcap;
  params.scale = make_softmax_scale(softcap > 0 ? softcap : scale);
  params.softcap_log2 = make_scales(scale, softcap).softcap_log2;
  params.sequences = make_sequences(problem);
  if (has_pages(problem)) {
    params.page_size = (unsigned)problem->key.rows;
    params.pages = (unsigned)problem->key.batch;
    params.box = plan->box;
    if (!plan->box) {
      TRY(make_paged_tensor(&problem->key, "key", &params.paged_key));
      TRY(make_paged_tensor(&problem->value, "value", &params.paged_value));
    }
  }
  params.output_data = problem->output.data;
  params.output_stride_batch = problem->output.stride_batch;
  params.output_stride_row = problem->output.stride_row;
  params.output_stride_head = problem->output.stride_head;
  params.lse = (float *)(void *)problem->lse.data;
  params.lse_stride_batch = problem->lse.stride_batch;
  params.lse_stride_head = problem->lse.stride_head;
  params.sink = (const float *)(void *)problem->sink.data;
  params.tiles = plan->tiles;
  params.group = (int)(problem->heads_q / problem->heads_k);
  params.tile_heads = plan->tile_heads;
  params.tile_heads_inverse = 65536 / plan->tile_heads + 1;
  params.queries_per_warpgroup = 64 / plan->tile_heads;
  params.tile_queries = plan->tile_queries;
  params.head_dim_v = (int)problem->value_head_dim;
  params.queries_per_warp = 16 / plan->tile_heads;
  params.store_by_tma = 16 % plan->tile_heads == 0;
  params.clear_value = queries_vary(problem) || keys_vary(problem) || problem->page_table.dtype;
  params.clip_output =
      params.clear_value || plan->tiles.cut > 0 ||
      plan->tile_queries < plan->kernel->tile_q / 64 * params.queries_per_warpgroup;
  if (plan->few.kernel) params.few_queries = plan->few.most_queries;
  params.splits = plan->splits;
  params.longest_query = params.sequences.seqlen_q;
  params.part_stride = plan->shares ? plan->tile_heads : (int)problem->heads_q;
  if (plan->combine) {
    params.partial = (float *)(void *)(call->workspace + plan->room.partial.offset);
    params.partial_lse = (float *)(void *)(call->workspace + plan->room.partial_lse.offset);
  }
  if (plan->shares) {
    params.deal.shares = plan->shares;
    params.deal.team = plan->team;
    params.deal.begun = (fa3_combine_tile *)(void *)(call->workspace + plan->room.parts.offset);
  }
  if (plan->unpack.kernel) {
    const void *const scales = unpacked_scales(problem, &plan->unpack, call->workspace);
    if (plan->kernel->unpacked == UNPACKED_HEADS)
      params.unpacked.of_heads = scales;
    else
      params.unpacked.of_rows = scales;
    params.unpacked.rows = (int)unpacked_scale_rows(problem);
    params.unpacked.heads_k = (int)problem->heads_k;
  }
  params.next_tile = call->next_tile;
  struct grid grid = {.x = (unsigned)plan->workers,
                      .y = 1,
                      .z = 1,
                      .threads = FA3_FORWARD_THREADS((unsigned)plan->kernel->tile_q),
                      .dependent = true};
  if (plan->kernel->dtype != FA3_FLOAT8_E4M3)
    return launch_kernel(call->scope, plan->kernel, 0, &grid, &params);
  fp8.forward = params;
  fp8.query_scale =
      make_fp8_scales(&problem->query_scale, problem->query_scale_rows, problem->heads_q);
  fp8.warpgroups_have_scales =
      !fp8.query_scale.data || (fp8.query_scale.rows % params.queries_per_warpgroup == 0 &&
                                fp8.query_scale.heads_per_scale % plan->tile_heads == 0);
  fp8.key_scale = make_fp8_scales(&problem->key_scale, problem->key_scale_rows, problem->heads_k);
  fp8.value_scale =
      make_fp8_scales(&problem->value_scale, problem->value_scale_rows, problem->heads_k);
  if (plan->transpose.kernel) {
    fp8.transposed = transposed_values(problem, &plan->transpose, call->workspace);
    TRY(launch_transpose(call->scope, problem, &plan->transpose, &params.value, call->workspace));
  }
  fp8.output = problem->output.dtype == FA3_BFLOAT16  ? FA3_OUTPUT_BF16
               : problem->output.dtype == FA3_FLOAT16 ? FA3_OUTPUT_FP16
                                                      : FA3_OUTPUT_FP32;
  if (plan->sums.used) fp8.sums = (float *)(void *)(call->workspace + plan->sums.offset);
  return launch_kernel(call->scope, plan->kernel, 0, &grid, &fp8);
}

static fa3_status combine(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct forward_plan *plan = call->plan;
  if (!plan->combine) return FA3_OK;
  fa3_combine_params params =
      make_combine_params(problem, &plan->room, call->workspace, plan->splits);
  if (plan->shares) {
    params.tiles =
        (const fa3_combine_tile *)(const void *)(call->workspace + plan->room.parts.offset);
    params.team = plan->team;
    params.tile_rows = plan->tile_queries * plan->tile_heads;
    params.group = plan->tile_heads;
    return combine_tiles(call->scope, plan->combine, plan->shares, &params);
  }
  params.warps = forward_combine_warps(problem, plan->splits);
  return combine_splits(call->scope, problem, plan->combine, &params);
}

/* On a cache of codes: a part of the heads after the other. */
static fa3_status launch_unpacked(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct forward_plan *plan = call->plan;
  const int32_t few_queries = plan->few.kernel ? plan->few.most_queries : 0;
  for (int64_t first = 0; first < problem->heads_k; first += plan->unpack.heads) {
    const struct problem part = part_of_heads(problem, first, plan->unpack.heads);
    TRY(launch_unpack(call->scope, &part, &plan->unpack, few_queries, call->workspace));
    const struct problem unpacked = unpacked_problem(&part, &plan->unpack, call->workspace);
    struct call of_part = *call;
    of_part.problem = &unpacked;
    TRY(launch_attention(&of_part));
    TRY(combine(&of_part));
  }
  return FA3_OK;
}

fa3_status launch_forward(const struct cuda_scope *scope, const struct problem *problem,
                          const struct cuda_plan *cuda_plan, char *workspace) {
  const struct forward_plan *plan = &cuda_plan->forward;
  if (cuda_plan->decodes) return launch_decode(scope, problem, &cuda_plan->decode, workspace);
  struct call call = {.scope = scope, .problem = problem, .plan = plan, .workspace = workspace};
  if (!plan->workers) return FA3_OK;
  if (plan->few.kernel) TRY(launch_decode(scope, problem, &plan->few, workspace));
  TRY(find_tile_counter(&call));
  if (plan->unpack.kernel) return launch_unpacked(&call);
  TRY(launch_attention(&call));
  return combine(&call);
}
