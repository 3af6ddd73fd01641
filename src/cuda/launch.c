#include "cuda/launch.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "cuda/kernels.h"
#include "cuda/tensor_map.h"
#include "error.h"
#include "kernels/mask.h"
#include "kernels/strided_params.h"

/* One call under way. */
struct launch {
  const struct cuda_device *device;
  const struct cuda_scope *scope;
  const struct problem *problem;
  const struct cuda_plan *plan;
  int64_t batch_q; /* batch entries of query, output and lse; 1 if packed */
  char *workspace; /* aligned */
  /* Where the attention kernel finds them. */
  struct operand query;
  struct operand key;
  struct operand value;
  struct operand output;
  struct operand lse;
  const float *sink;
};

static char *align(void *workspace) {
  return workspace ? (char *)(((uintptr_t)workspace + 127) & ~(uintptr_t)127) : NULL;
}

static void set_operands(struct launch *launch) {
  const struct problem *problem = launch->problem;
  const struct cuda_plan *plan = launch->plan;
  char *workspace = launch->workspace;
  int64_t rows_q = problem->rows_q, rows_k = problem->rows_k;
  launch->query = staged_operand(&problem->query, &plan->query, workspace, rows_q, problem->heads_q,
                                 problem->head_dim);
  launch->key = staged_operand(&problem->key, &plan->key, workspace, rows_k, problem->heads_k,
                               problem->head_dim);
  launch->value = staged_operand(&problem->value, &plan->value, workspace, rows_k, problem->heads_k,
                                 problem->value_head_dim);
  launch->output = staged_operand(&problem->output, &plan->output, workspace, rows_q,
                                  problem->heads_q, problem->value_head_dim);
  launch->lse = problem->lse;
  if (plan->lse.used)
    launch->lse = (struct operand){.data = workspace + plan->lse.offset,
                                   .stride_batch = problem->heads_q * rows_q,
                                   .stride_head = rows_q,
                                   .stride_row = 1};
  launch->sink = plan->sink.used ? (const float *)(void *)(workspace + plan->sink.offset)
                                 : (const float *)(void *)problem->sink.data;
}

static fa3_status launch_kernel(const struct launch *launch, CUkernel kernel, unsigned grid_x,
                                unsigned grid_y, unsigned threads, unsigned shared_bytes,
                                void *params) {
  struct CUlaunchConfig config = {.grid_x = grid_x,
                                  .grid_y = grid_y,
                                  .grid_z = 1,
                                  .block_x = threads,
                                  .block_y = 1,
                                  .block_z = 1,
                                  .shared_bytes = shared_bytes,
                                  .stream = launch->scope->stream};
  void *parameters[] = {params};
  TRY_CUDA(launch->device->driver, cuLaunchKernelEx, &config, kernel, parameters, NULL);
  return FA3_OK;
}

/* What a copy moves: a float is two elements of 16 bits. */
static fa3_view make_view(const struct operand *operand, int64_t elements) {
  return (fa3_view){.data = (uint16_t *)(void *)operand->data,
                    .stride_batch = operand->stride_batch * elements,
                    .stride_row = operand->stride_row * elements,
                    .stride_head = operand->stride_head * elements};
}

static fa3_status copy(const struct launch *launch, fa3_copy_params *params, int64_t batches) {
  /* A grid's second dimension ends at 65535, so batches beyond it are copied in parts. */
  const int64_t most = 65535;
  int64_t elements = params->rows * params->heads * params->dims;
  int64_t blocks = (elements + FA3_STRIDED_THREADS - 1) / FA3_STRIDED_THREADS;
  int64_t enough = 16 * (int64_t)launch->scope->multiprocessors;
  if (elements == 0) return FA3_OK;
  for (int64_t first = 0; first < batches; first += most) {
    fa3_copy_params part = *params;
    int64_t count = batches - first < most ? batches - first : most;
    if (part.cu_seqlens) {
      part.cu_seqlens += first;
    } else {
      part.from.data += first * part.from.stride_batch;
      part.to.data += first * part.to.stride_batch;
    }
    if (part.used) part.used += first;
    TRY(launch_kernel(launch, launch->device->copy_strided,
                      (unsigned)(blocks < enough ? blocks : enough), (unsigned)count,
                      FA3_STRIDED_THREADS, 0, &part));
  }
  return FA3_OK;
}

static fa3_status copy_input(const struct launch *launch, const struct staged *staged,
                             const struct operand *from, const struct operand *to, int64_t batch,
                             int64_t rows, int64_t heads, int64_t dim, bool negate) {
  if (!staged->used) return FA3_OK;
  fa3_copy_params params = {.from = make_view(from, 1),
                            .to = make_view(to, 1),
                            .rows = rows,
                            .heads = (int)heads,
                            .dims = (int)dim,
                            .flip = negate ? 0x8000 : 0};
  return copy(launch, &params, batch);
}

/* Only rows of a sequence are written. */
static fa3_status copy_output(const struct launch *launch, const struct staged *staged,
                              const struct operand *from, const struct operand *to, int64_t dim,
                              int64_t elements) {
  if (!staged->used) return FA3_OK;
  const struct problem *problem = launch->problem;
  fa3_copy_params params = {
      .from = make_view(from, elements),
      .to = make_view(to, elements),
      .rows = problem->max_seqlen_q < problem->rows_q ? problem->max_seqlen_q : problem->rows_q,
      .heads = (int)problem->heads_q,
      .dims = (int)(dim * elements),
      .cu_seqlens = problem->cu_seqlens_q,
      .used = problem->seqused_q};
  return copy(launch, &params, problem->batch);
}

static fa3_status convert_sink(const struct launch *launch) {
  const struct problem *problem = launch->problem;
  if (!launch->plan->sink.used) return FA3_OK;
  fa3_sink_params params = {.from = problem->sink.data,
                            .stride = problem->sink.stride_head,
                            .to = (float *)(void *)(launch->workspace + launch->plan->sink.offset),
                            .heads = (int)problem->heads_q,
                            .kind = problem->sink.dtype == FA3_FLOAT32   ? 0
                                    : problem->sink.dtype == FA3_FLOAT16 ? 1
                                                                         : 2};
  return launch_kernel(launch, launch->device->sinks_to_float, 1, 1, FA3_STRIDED_THREADS, 0,
                       &params);
}

static fa3_status set_tensor_maps(const struct launch *launch, fa3_forward_params *params) {
  const struct problem *problem = launch->problem;
  const struct cuda_driver *driver = launch->device->driver;
  const struct forward_kernel *kernel = &forward_kernels[launch->plan->kernel];
  int packed = launch->plan->packed;
  int64_t rows_q = problem->rows_q, heads_q = problem->heads_q, batch_q = launch->batch_q;
  const struct operand *query = &launch->query, *output = &launch->output;
  const struct map_dimension query_map[] = {{problem->head_dim, 1, kernel->chunk},
                                            {packed, query->stride_head, packed},
                                            {rows_q, query->stride_row, 64 / packed},
                                            {heads_q / packed, query->stride_head * packed, 1},
                                            {batch_q, query->stride_batch, 1}};
  const struct map_dimension output_map[] = {{problem->value_head_dim, 1, kernel->chunk},
                                             {rows_q, output->stride_row, 16},
                                             {heads_q, output->stride_head, 1},
                                             {batch_q, output->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel, "query", query->data, 5, query_map, &params->query));
  TRY(make_tensor_map(driver, kernel, "output", output->data, 4, output_map, &params->out));

  /* Without keys nothing is read; the maps only have to be valid. */
  bool keys = problem->rows_k > 0 && problem->batch_k > 0;
  const struct operand *key = &launch->key, *value = &launch->value;
  const struct map_dimension key_map[] = {{problem->head_dim, 1, kernel->chunk},
                                          {problem->rows_k, key->stride_row, kernel->tile_k},
                                          {problem->heads_k, key->stride_head, 1},
                                          {problem->batch_k, key->stride_batch, 1}};
  const struct map_dimension value_map[] = {{problem->value_head_dim, 1, kernel->chunk},
                                            {problem->rows_k, value->stride_row, kernel->tile_k},
                                            {problem->heads_k, value->stride_head, 1},
                                            {problem->batch_k, value->stride_batch, 1}};
  TRY(make_tensor_map(driver, kernel, "key", keys ? key->data : query->data, 4, key_map,
                      &params->key));
  return make_tensor_map(driver, kernel, "value", keys ? value->data : query->data, 4, value_map,
                         &params->value);
}

/* The scores' factor in powers of two; never 0, which would make NaN of a masked score. */
static float nonzero(double factor) {
  float rounded = (float)factor;
  return rounded != 0 ? rounded : FLT_TRUE_MIN;
}

static void set_scales(const struct problem *problem, fa3_forward_params *params) {
  const double log2e = 1.4426950408889634;
  double scale = fabs((double)problem->scale);
  if (problem->softcap > 0) {
    params->scale_log2 = nonzero((double)problem->softcap * log2e);
    params->softcap_log2 = nonzero(2 * log2e * scale / (double)problem->softcap);
  } else {
    params->scale_log2 = nonzero(scale * log2e);
  }
}

static fa3_status launch_attention(const struct launch *launch) {
  const struct problem *problem = launch->problem;
  const struct cuda_plan *plan = launch->plan;
  const struct cuda_device *device = launch->device;
  const struct forward_kernel *kernel = &forward_kernels[plan->kernel];
  fa3_forward_params params;
  memset(&params, 0, sizeof params);
  TRY(set_tensor_maps(launch, &params));
  set_scales(problem, &params);
  params.out_pointer = launch->output.data;
  params.out_stride_batch = launch->output.stride_batch;
  params.out_stride_row = launch->output.stride_row;
  params.out_stride_head = launch->output.stride_head;
  params.lse = (float *)(void *)launch->lse.data;
  params.lse_stride_batch = launch->lse.stride_batch;
  params.lse_stride_head = launch->lse.stride_head;
  params.sink = launch->sink;
  params.cu_seqlens_q = problem->cu_seqlens_q;
  params.cu_seqlens_k = problem->cu_seqlens_k;
  params.used_q = problem->seqused_q;
  params.used_k = problem->seqused_k;
  params.leftpad_k = problem->leftpad_k;
  params.batch_index_k = problem->cache_batch_index;
  params.diagonal = problem->diagonal;
  params.seqlen_q = (int)problem->max_seqlen_q;
  params.seqlen_k = (int)problem->max_seqlen_k;
  params.tiles = plan->tiles;
  params.packed = plan->packed;
  params.packed_inverse = 65536 / plan->packed + 1;
  params.queries_per_warpgroup = 64 / plan->packed;
  params.queries_per_key = (int)(problem->heads_q / problem->heads_k);
  params.head_dim_v = (int)problem->value_head_dim;
  params.window_left = problem->window_left;
  params.window_right = problem->window_right;
  params.store_by_tma = plan->packed == 1;
  params.clear_value =
      problem->cu_seqlens_q || problem->cu_seqlens_k || problem->seqused_q || problem->seqused_k;
  /* Blocks stay until the work is done, as many as run at the same time:
   * their shared memory leaves room for one on each multiprocessor. */
  int64_t workers = launch->scope->multiprocessors;
  int64_t tiles = fa3_tile_count(&plan->tiles);
  if (tiles < workers) workers = tiles;
  /* With one tile for each there is nothing to hand out. */
  if (plan->next_tile.used && tiles > workers) {
    params.next_tile = (unsigned *)(void *)(launch->workspace + plan->next_tile.offset);
    TRY_CUDA(device->driver, cuMemsetD32Async, (CUdeviceptr)params.next_tile, 0, 1,
             launch->scope->stream);
  }
  return launch_kernel(launch, device->forward[plan->kernel], (unsigned)workers, 1,
                       (unsigned)kernel->threads, (unsigned)kernel->shared_bytes, &params);
}

fa3_status cuda_launch_forward(const struct cuda_device *device, const struct cuda_scope *scope,
                               const struct problem *problem, const struct cuda_plan *plan,
                               void *workspace) {
  struct launch launch = {.device = device,
                          .scope = scope,
                          .problem = problem,
                          .plan = plan,
                          .batch_q = problem->cu_seqlens_q ? 1 : problem->batch,
                          .workspace = align(workspace)};
  set_operands(&launch);
  TRY(copy_input(&launch, &plan->query, &problem->query, &launch.query, launch.batch_q,
                 problem->rows_q, problem->heads_q, problem->head_dim, plan->negate));
  TRY(copy_input(&launch, &plan->key, &problem->key, &launch.key, problem->batch_k, problem->rows_k,
                 problem->heads_k, problem->head_dim, false));
  TRY(copy_input(&launch, &plan->value, &problem->value, &launch.value, problem->batch_k,
                 problem->rows_k, problem->heads_k, problem->value_head_dim, false));
  TRY(convert_sink(&launch));
  TRY(launch_attention(&launch));
  TRY(copy_output(&launch, &plan->output, &launch.output, &problem->output, problem->value_head_dim,
                  1));
  return copy_output(&launch, &plan->lse, &launch.lse, &problem->lse, 1, 2);
}
