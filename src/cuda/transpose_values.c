#include "cuda/transpose_values.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sequences.h"
#include "integer.h"
#include "kernels/forward_fp8_params.h"

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_TRANSPOSE_VALUES_SHARED_BYTES(kernel->tile_k);
}

const struct kernel_kind transpose_values_kind = {.entries = {"transpose_values"},
                                                  .shared_bytes = shared_bytes};

/* Of each head: those of a sequence or, where sequences are packed, of all. Of sequences that are
 * too long for the forward kernel, as many as of the longest that are not. */
static int64_t tiles_of_head(const struct problem *problem, const struct kernel *kernel) {
  const int64_t longest = FA3_FORWARD_FP8_HEADS_KEYS;
  if (!problem->cu_seqlens_k)
    return divide_up(smaller(problem->max_seqlen_k, longest), kernel->tile_k);
  int64_t most;
  if (__builtin_mul_overflow(problem->batch, longest, &most)) most = INT64_MAX;
  return smaller(problem->key.rows, most) / kernel->tile_k + problem->batch;
}

void take_transpose(const struct problem *problem, const struct kernel *kernel,
                    struct transpose_plan *plan) {
  enum { MOST_BLOCKS = 65535 /* of a grid's second and third dimension */ };
  const int64_t tiles = tiles_of_head(problem, kernel);
  if (problem->heads_k > MOST_BLOCKS || problem->batch > MOST_BLOCKS ||
      tiles > INT32_MAX / (problem->cu_seqlens_k ? 2 : 2 * larger(problem->batch, 1)))
    return;
  plan->kernel = kernel;
  plan->tiles = (int32_t)tiles;
}

fa3_status reserve_transposed(const struct problem *problem, const struct kernel *kernel,
                              struct transpose_plan *plan, size_t *workspace_size) {
  int64_t heads;
  if (__builtin_mul_overflow(problem->heads_k, problem->cu_seqlens_k ? 1 : problem->batch, &heads))
    heads = INT64_MAX;
  return reserve(workspace_size, &plan->room, "transposed values", tiles_of_head(problem, kernel),
                 heads, (int64_t)kernel->tile_k * kernel->value_head_dim);
}

fa3_transposed_values transposed_values(const struct problem *problem,
                                        const struct transpose_plan *plan, char *workspace) {
  const bool packed = problem->cu_seqlens_k != NULL;
  return (fa3_transposed_values){.data = (unsigned char *)workspace + plan->room.offset,
                                 .heads = (int)problem->heads_k,
                                 .per_sequence = packed ? 0 : plan->tiles,
                                 .count = packed ? plan->tiles : plan->tiles * (int)problem->batch};
}

fa3_status launch_transpose(const struct cuda_scope *scope, const struct problem *problem,
                            const struct transpose_plan *plan, const fa3_tensor_map *value,
                            char *workspace) {
  const struct kernel *kernel = plan->kernel;
  const int32_t chunks = kernel->value_head_dim / FA3_FORWARD_FP8_CHUNK(kernel->value_head_dim);
  fa3_transpose_values_params params = {.value = *value,
                                        .sequences = make_sequences(problem),
                                        .to = transposed_values(problem, plan, workspace)};
  const struct grid grid = {
      .x = (unsigned)(divide_up(problem->max_seqlen_k, kernel->tile_k) * chunks),
      .y = (unsigned)problem->heads_k,
      .z = (unsigned)problem->batch,
      .threads = FA3_TRANSPOSE_VALUES_THREADS,
      .dependent = true};
  return launch_kernel(scope, kernel, 0, &grid, &params);
}
