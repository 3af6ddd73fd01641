#include "cuda/backward.h"

#include <string.h>

#include "cuda/backward_sums.h"
#include "cuda/launch.h"
#include "cuda/scales.h"
#include "cuda/sequences.h"
#include "cuda/tensor_map.h"
#include "error.h"
#include "integer.h"

/* One call under way. */
struct call {
  const struct cuda_scope *scope;
  const struct problem *problem;
  const struct backward_plan *plan;
  const struct kernel *kernel;
  char *workspace; /* aligned */
  fa3_sequences sequences;
  fa3_query_blocks blocks;
  fa3_gradient grad_query;
  fa3_gradient grad_key;
  fa3_gradient grad_value;
  unsigned *next_tile; /* as in fa3_backward_params */
  bool early;
};

static void *in_workspace(const struct call *call, const struct reservation *staged) {
  return staged->used ? call->workspace + staged->offset : NULL;
}

/* Whether rows can be read and written 16 bytes at a time. */
static bool takes_vectors(const struct operand *operand) {
  const int64_t elements = operand->dtype == FA3_FLOAT32 ? 4 : 8;
  return (uintptr_t)operand->data % 16 == 0 &&
         (operand->batch <= 1 || operand->stride_batch % elements == 0) &&
         (operand->rows <= 1 || operand->stride_row % elements == 0) &&
         (operand->heads <= 1 || operand->stride_head % elements == 0);
}

static fa3_gradient make_gradient(const struct operand *operand, bool accumulate) {
  return (fa3_gradient){.data = operand->data,
                        .stride_batch = operand->stride_batch,
                        .stride_row = operand->stride_row,
                        .stride_head = operand->stride_head,
                        .head_dim = (int)operand->dim,
                        .is_float = operand->dtype == FA3_FLOAT32,
                        .accumulate = accumulate,
                        .vectors = takes_vectors(operand)};
}

static void set_up(struct call *call) {
  const struct problem *problem = call->problem;
  call->sequences = make_sequences(problem);
  call->blocks = (fa3_query_blocks){.tile_q = call->kernel->tile_q,
                                    .tile_k = call->kernel->tile_k,
                                    .blocks_q = call->plan->blocks_q};
  call->grad_query = make_gradient(&problem->grad_query, problem->accumulate);
  call->grad_key = make_gradient(&problem->grad_key, problem->accumulate);
  call->grad_value = make_gradient(&problem->grad_value, problem->accumulate);
  const struct backward_plan *plan = call->plan;
  const bool counted = fa3_key_tile_count(&plan->tiles) > plan->workers / plan->cluster;
  call->next_tile = counted ? in_workspace(call, &plan->next_tile) : NULL;
  call->early = !counted && plan->cluster > 1 && lengths_known(problem);
}

static fa3_status launch_prepare(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct backward_plan *plan = call->plan;
  const struct operand *output = &problem->output, *grad_output = &problem->grad_output;
  fa3_backward_prepare_params params = {
      .sequences = call->sequences,
      .blocks = call->blocks,
      .output = output->data,
      .grad_output = grad_output->data,
      .output_stride_batch = output->stride_batch,
      .output_stride_row = output->stride_row,
      .output_stride_head = output->stride_head,
      .grad_output_stride_batch = grad_output->stride_batch,
      .grad_output_stride_row = grad_output->stride_row,
      .grad_output_stride_head = grad_output->stride_head,
      .head_dim_v = (int)problem->value_head_dim,
      .vectors = takes_vectors(output) && takes_vectors(grad_output),
      .lse = (const float *)(void *)problem->lse.data,
      .grad_lse = (const float *)(void *)problem->grad_lse.data,
      .lse_stride_batch = problem->lse.stride_batch,
      .lse_stride_row = problem->lse.stride_row,
      .lse_stride_head = problem->lse.stride_head,
      .grad_lse_stride_batch = problem->grad_lse.stride_batch,
      .grad_lse_stride_row = problem->grad_lse.stride_row,
      .grad_lse_stride_head = problem->grad_lse.stride_head,
      .sink = has_elements(&problem->grad_sink) ? (const float *)(void *)problem->sink.data : NULL,
      .grad_query = call->grad_query,
      .grad_key = call->grad_key,
      .grad_value = call->grad_value,
      .unseen = problem->accumulate ? 0 : plan->tiles.first,
      .queries_per_key = (int)(problem->heads_q / problem->heads_k),
      .slots = plan->slots,
      .sums = fa3_sum_count(&plan->tiles),
      .counters = in_workspace(call, &plan->counters),
      .rows = in_workspace(call, &plan->rows),
      .sinks = in_workspace(call, &plan->sinks),
      .arrivals = in_workspace(call, &plan->arrivals),
      .arrival_words = plan->arrival_words,
      .lengths_known = lengths_known(problem),
      .early = call->early,
      .next_tile = call->next_tile};
  const struct grid grid = {.x = (unsigned)larger(plan->blocks_q + params.unseen, 1),
                            .y = (unsigned)problem->heads_q,
                            .z = (unsigned)problem->batch,
                            .threads = FA3_BACKWARD_PREPARE_THREADS,
                            .dependent = true};
  const int function = problem->value_head_dim > FA3_BACKWARD_PREPARE_COLUMNS
                           ? BACKWARD_PREPARE_LONG
                           : BACKWARD_PREPARE;
  return launch_kernel(call->scope, plan->prepare, function, &grid, &params);
}

static fa3_status set_tensor_maps(const struct call *call, fa3_backward_params *params) {
  const struct kernel *kernel = call->kernel;
  const int32_t chunk = FA3_BACKWARD_CHUNK(kernel->head_dim, kernel->value_head_dim);
  const int32_t cluster = call->plan->cluster;
  const struct problem *problem = call->problem;
  /* An empty query is not read, but its map has to be valid; a call without keys has no tiles. */
  void *const any = problem->key.data;
  const struct {
    const char *name;
    const struct operand *operand;
    int32_t rows;
    fa3_tensor_map *map;
  } tensors[] = {
      {"query", &problem->query, kernel->tile_q, &params->query},
      {"grad_output", &problem->grad_output, kernel->tile_q, &params->grad_output},
      {"key", &problem->key, kernel->tile_k / cluster, &params->key},
      {"value", &problem->value, kernel->tile_k / cluster, &params->value},
  };
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
    const struct operand *operand = tensors[i].operand;
    const struct map_dimension dimensions[] = {
        {operand->dim, 1, chunk},
        {operand->rows, operand->stride_row, tensors[i].rows},
        {operand->heads, operand->stride_head, 1},
        {operand->batch, operand->stride_batch, 1}};
    TRY(make_tensor_map(call->scope->device->driver, kernel->dtype, chunk, tensors[i].name,
                        has_elements(operand) ? operand->data : any, 4, dimensions,
                        tensors[i].map));
  }
  return FA3_OK;
}

/* What the parts of tiles make of a gradient, in float32 from `at` on. */
static fa3_gradient make_parts(const struct operand *operand, int parts, float *at) {
  return (fa3_gradient){.data = at,
                        .stride_batch = operand->heads * parts * operand->rows * operand->dim,
                        .stride_row = operand->dim,
                        .stride_head = operand->rows * operand->dim,
                        .head_dim = (int)operand->dim,
                        .is_float = true,
                        .vectors = true};
}

static void set_parts(const struct call *call, fa3_gradient *key, fa3_gradient *value) {
  const int parts = fa3_key_tile_parts(&call->plan->tiles);
  float *at = in_workspace(call, &call->plan->parts);
  *key = make_parts(&call->problem->grad_key, parts, at);
  *value = make_parts(&call->problem->grad_value, parts,
                      at + call->problem->grad_key.batch * key->stride_batch);
}

static fa3_status launch_gradients(const struct call *call) {
  const struct problem *problem = call->problem;
  const struct backward_plan *plan = call->plan;
  const struct scales scales = make_scales((double)problem->scale, (double)problem->softcap);
  fa3_backward_params params;
  memset(&params, 0, sizeof params);
  TRY(set_tensor_maps(call, &params));
  params.sequences = call->sequences;
  params.blocks = call->blocks;
  params.grad_query = call->grad_query;
  params.grad_key = call->grad_key;
  params.grad_value = call->grad_value;
  if (plan->summed_later) set_parts(call, &params.grad_key, &params.grad_value);
  params.tiles = plan->tiles;
  params.queries_per_key = (int)(problem->heads_q / problem->heads_k);
  params.heads = (int)problem->heads_q;
  params.slots = plan->slots;
  params.counters = in_workspace(call, &plan->counters);
  params.sums_apart = problem->heads_q * plan->slots;
  params.counters_apart = fa3_sum_count(&plan->tiles) * params.sums_apart;
  params.rows = in_workspace(call, &plan->rows);
  params.partial = in_workspace(call, &plan->partial);
  params.key_slots = plan->key_slots;
  params.parts = in_workspace(call, &plan->parts);
  params.arrivals = in_workspace(call, &plan->arrivals);
  params.next_tile = call->next_tile;
  params.early = call->early;
  params.scale = problem->scale;
  params.scale_log2 = scales.scale_log2;
  params.softcap_log2 = scales.softcap_log2;
  params.natural = problem->softcap > 0 ? problem->softcap : problem->scale;
  params.clear_query = queries_vary(problem);
  params.clear_key = keys_vary(problem);
  const struct grid grid = {
      .x = (unsigned)plan->workers,
      .y = 1,
      .z = 1,
      .threads = plan->cluster > 1 ? FA3_BACKWARD_WIDE_THREADS : FA3_BACKWARD_THREADS,
      .dependent = true};
  params.finished_later = plan->finished_later;
  TRY(launch_kernel(call->scope, plan->kernel, BACKWARD_MAIN, &grid, &params));
  if (!plan->finished_later) return FA3_OK;
  /* Each of these blocks has 2 KB of the workspace or more, so their number fits. */
  const bool narrow = takes_narrow_slices(problem, plan);
  const int64_t slices =
      FA3_BACKWARD_FINISH_SLICES(call->kernel->head_dim, call->kernel->tile_q, narrow);
  const struct grid finish = {
      .x = (unsigned)(plan->blocks_q * problem->heads_q * slices),
      .y = (unsigned)problem->batch,
      .z = 1,
      .threads = FA3_BACKWARD_FINISH_THREADS,
      /* It waits for the main kernel, and would take what is to stay free. */
      .dependent = problem->reserved_multiprocessors == 0};
  return launch_kernel(call->scope, plan->kernel, narrow ? BACKWARD_FINISH_NARROW : BACKWARD_FINISH,
                       &finish, &params);
}

static fa3_status launch_sum(const struct call *call) {
  const struct problem *problem = call->problem;
  const fa3_key_tiles *tiles = &call->plan->tiles;
  const int64_t first = (int64_t)tiles->first * call->kernel->tile_k;
  const int64_t rows = longest_key(problem) - first;
  fa3_backward_sum_params params = {.sequences = call->sequences,
                                    .grad_key = call->grad_key,
                                    .grad_value = call->grad_value,
                                    .parts = fa3_key_tile_parts(tiles),
                                    .first = (int)first};
  if (!call->plan->summed_later) return FA3_OK;
  set_parts(call, &params.part_key, &params.part_value);
  const int64_t threads = rows * (params.grad_key.head_dim + params.grad_value.head_dim) / 8;
  const struct grid grid = {.x = (unsigned)divide_up(threads, FA3_BACKWARD_SUM_THREADS),
                            .y = (unsigned)problem->heads_k,
                            .z = (unsigned)problem->batch,
                            .threads = FA3_BACKWARD_SUM_THREADS,
                            .dependent = true};
  return launch_kernel(call->scope, call->plan->prepare, BACKWARD_SUM, &grid, &params);
}

static fa3_status launch_sink(const struct call *call) {
  const struct problem *problem = call->problem;
  if (!has_elements(&problem->grad_sink)) return FA3_OK;
  const fa3_dtype dtype = problem->grad_sink.dtype;
  fa3_backward_sink_params params = {.sequences = call->sequences,
                                     .blocks = call->blocks,
                                     .sinks = in_workspace(call, &call->plan->sinks),
                                     .slots = call->plan->slots,
                                     .batches = (int)problem->batch,
                                     .grad_sink = problem->grad_sink.data,
                                     .stride = problem->grad_sink.stride_head,
                                     .kind = dtype == FA3_FLOAT32   ? 0
                                             : dtype == FA3_FLOAT16 ? 1
                                                                    : 2,
                                     .accumulate = problem->accumulate};
  const struct grid grid = {
      .x = (unsigned)problem->heads_q, .y = 1, .z = 1, .threads = FA3_BACKWARD_SINK_THREADS};
  return launch_kernel(call->scope, call->plan->prepare, BACKWARD_SINK, &grid, &params);
}

fa3_status launch_backward(const struct cuda_scope *scope, const struct problem *problem,
                           const struct cuda_plan *cuda_plan, char *workspace) {
  const struct backward_plan *plan = &cuda_plan->backward;
  struct call call = {.scope = scope, .problem = problem, .plan = plan, .kernel = plan->kernel};
  call.workspace = workspace;
  set_up(&call);
  if (problem->batch > 0) TRY(launch_prepare(&call));
  if (plan->workers > 0) {
    TRY(launch_gradients(&call));
    TRY(launch_sum(&call));
  }
  return launch_sink(&call);
}
