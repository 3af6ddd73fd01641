#include "cuda/forward.h"

#include <math.h>
#include <string.h>

#include "cuda/launch.h"
#include "cuda/scales.h"
#include "cuda/tensor_map.h"
#include "cuda/tile_counter.h"
#include "error.h"

/* One call under way. */
struct call {
  const struct cuda_scope *scope;
  const struct problem *problem;
  const struct forward_plan *plan;
  char *workspace; /* aligned */
};

static fa3_status set_tensor_maps(const struct call *call, fa3_forward_params *params) {
  const struct cuda_driver *driver = call->scope->device->driver;
  const struct kernel *kernel = call->plan->kernel;
  const int32_t chunk = FA3_FORWARD_CHUNK(kernel->head_dim, kernel->value_head_dim);
  int tile_heads = call->plan->tile_heads;
  const struct operand *query = &call->problem->query, *output = &call->problem->output;
  const struct map_dimension query_map[] = {
      {query->dim, 1, chunk},
      {tile_heads, query->stride_head, tile_heads},
      {query->rows, query->stride_row, 64 / tile_heads},
      {query->heads / tile_heads, query->stride_head * tile_heads, 1},
      {query->batch, query->stride_batch, 1}};
  const struct map_dimension output_map[] = {{output->dim, 1, chunk},
                                             {output->rows, output->stride_row, 16},
                                             {output->heads, output->stride_head, 1},
                                             {output->batch, output->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel->dtype, chunk, "query", query->data, 5, query_map,
                      &params->query));
  TRY(make_tensor_map(driver, kernel->dtype, chunk, "output", output->data, 4, output_map,
                      &params->out));

  /* Without keys nothing is read; the maps only have to be valid. */
  const struct operand *key = &call->problem->key, *value = &call->problem->value;
  const bool keys = has_elements(key);
  const struct map_dimension key_map[] = {{key->dim, 1, chunk},
                                          {key->rows, key->stride_row, kernel->tile_k},
                                          {key->heads, key->stride_head, 1},
                                          {key->batch, key->stride_batch, 1}};
  const struct map_dimension value_map[] = {{value->dim, 1, chunk},
                                            {value->rows, value->stride_row, kernel->tile_k},
                                            {value->heads, value->stride_head, 1},
                                            {value->batch, value->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel->dtype, chunk, "key", keys ? key->data : query->data, 4,
                      key_map, &params->key));
  return make_tensor_map(driver, kernel->dtype, chunk, "value", keys ? value->data : query->data, 4,
                         value_map, &params->value);
}

/* What blocks take their tiles from: the stream's counter, or one in the workspace, cleared. */
static fa3_status set_tile_counter(const struct call *call, fa3_forward_params *params) {
  const struct cuda_scope *scope = call->scope;
  params->next_tile = cuda_tile_counter(scope, call->plan->kernel);
  if (params->next_tile) return FA3_OK;
  params->next_tile = (unsigned *)(void *)(call->workspace + call->plan->next_tile.offset);
  TRY_CUDA(scope->device->driver, cuMemsetD32Async, (CUdeviceptr)params->next_tile, 0, 1,
           scope->stream);
  return FA3_OK;
}

static fa3_status launch_attention(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct forward_plan *plan = call->plan;
  fa3_forward_params params;
  memset(&params, 0, sizeof params);
  TRY(set_tensor_maps(call, &params));
  const struct scales scales = make_scales(fabs((double)problem->scale), (double)problem->softcap);
  params.scale_log2 = scales.scale_log2;
  params.softcap_log2 = scales.softcap_log2;
  params.out_pointer = problem->output.data;
  params.out_stride_batch = problem->output.stride_batch;
  params.out_stride_row = problem->output.stride_row;
  params.out_stride_head = problem->output.stride_head;
  params.cu_seqlens_q = problem->cu_seqlens_q;
  params.cu_seqlens_k = problem->cu_seqlens_k;
  params.used_q = problem->seqused_q;
  params.used_k = problem->seqused_k;
  params.leftpad_k = problem->leftpad_k;
  params.batch_index_k = problem->cache_batch_index;
  params.diagonal = problem->diagonal;
  params.seqlen_q = (int)problem->max_seqlen_q;
  params.seqlen_k = (int)problem->max_seqlen_k;
  params.window_left = problem->window_left;
  params.window_right = problem->window_right;
  params.lse = (float *)(void *)problem->lse.data;
  params.lse_stride_batch = problem->lse.stride_batch;
  params.lse_stride_head = problem->lse.stride_head;
  params.sink = (const float *)(void *)problem->sink.data;
  params.tiles = plan->tiles;
  params.queries_per_key = (int)(problem->heads_q / problem->heads_k);
  params.packed = plan->tile_heads;
  params.packed_inverse = 65536 / plan->tile_heads + 1;
  params.queries_per_warpgroup = 64 / plan->tile_heads;
  params.head_dim_v = (int)problem->value_head_dim;
  params.store_by_tma = plan->tile_heads == 1;
  params.clear_value =
      problem->cu_seqlens_q || problem->cu_seqlens_k || problem->seqused_q || problem->seqused_k;
  if (plan->counted) TRY(set_tile_counter(call, &params));
  struct grid grid = {.x = (unsigned)plan->workers,
                      .y = 1,
                      .z = 1,
                      .threads = FA3_FORWARD_THREADS((unsigned)plan->kernel->tile_q),
                      .dependent = true};
  return launch_kernel(call->scope, plan->kernel, 0, &grid, &params);
}

fa3_status launch_forward(const struct cuda_scope *scope, const struct problem *problem,
                          const struct cuda_plan *cuda_plan, char *workspace) {
  const struct forward_plan *plan = &cuda_plan->forward;
  struct call call = {.scope = scope, .problem = problem, .plan = plan};
  call.workspace = workspace;
  return plan->workers ? launch_attention(&call) : FA3_OK;
}
