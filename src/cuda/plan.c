#include "cuda/plan.h"

#include <inttypes.h>

#include "cuda/kernels.h"
#include "error.h"
#include "kernels/mask.h"

enum { ROWS = 64, ALIGNMENT = 128 };

/* Rows of a tensor and tiles of a grid are counted in 32 bits, with room for a tile beyond the
 * end. */
#define MAX_ROWS (INT32_MAX - 65536)
#define MAX_TILES (INT32_MAX / 2)

/* Bytes of key and value that stay in the L2 cache while other tiles of the same heads use them: a
 * part of Hopper's 50 MB. */
static const double cache_bytes = 20e6;

static int64_t min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* The copy engine's strides: multiples of 16 bytes below 2^40, 0 as well. That of a single entry
 * does not matter. */
static bool stride_fits(int64_t extent, int64_t stride) {
  return extent <= 1 || (stride % 8 == 0 && stride < (INT64_C(1) << 39));
}

static bool needs_staging(const struct operand *operand, int64_t batch, int64_t rows,
                          int64_t heads) {
  return (uintptr_t)operand->data % 16 || !stride_fits(batch, operand->stride_batch) ||
         !stride_fits(rows, operand->stride_row) || !stride_fits(heads, operand->stride_head);
}

static fa3_status reserve(struct cuda_plan *plan, struct staged *staged, const char *name,
                          int64_t batch, int64_t rows, int64_t row_bytes) {
  int64_t bytes;
  staged->used = true;
  staged->offset = plan->workspace_size;
  if (__builtin_mul_overflow(max(batch, 1), max(rows, 1), &bytes) ||
      __builtin_mul_overflow(bytes, row_bytes, &bytes) || bytes > INT64_MAX / 16)
    return set_error(FA3_UNSUPPORTED, "%s is too large to be made contiguous in the workspace",
                     name);
  plan->workspace_size += (size_t)divide_up(bytes, ALIGNMENT) * ALIGNMENT;
  return FA3_OK;
}

static fa3_status check_lengths(const struct problem *problem) {
  const struct {
    const char *name;
    char letter;
    bool packed;
    int64_t rows;
    int64_t longest;
  } sides[] = {{"query", 'q', problem->features & FA3_FEATURE_VARLEN_QUERY, problem->rows_q,
                problem->max_seqlen_q},
               {"key", 'k', problem->features & FA3_FEATURE_VARLEN_KEY, problem->rows_k,
                problem->max_seqlen_k}};
  for (int i = 0; i < 2; i++) {
    if (sides[i].packed && sides[i].longest == 0 && sides[i].rows > 0)
      return set_error(FA3_INVALID_LENGTHS,
                       "max_seqlen_%c is 0 with cu_seqlens_%c: expected the longest sequence, "
                       "whose length a GPU's caller has to give",
                       sides[i].letter, sides[i].letter);
    if (sides[i].rows > MAX_ROWS)
      return set_error(FA3_UNSUPPORTED, "%s has %" PRId64 " rows: the CUDA kernels take %d",
                       sides[i].name, sides[i].rows, MAX_ROWS);
    if (sides[i].longest > FA3_MAX_SEQLEN)
      return set_error(FA3_UNSUPPORTED,
                       "%s has sequences of up to %" PRId64 " rows: the CUDA kernels take %d",
                       sides[i].name, sides[i].longest, FA3_MAX_SEQLEN);
  }
  return FA3_OK;
}

/* Whether query heads share tiles, and the grid. */
static fa3_status plan_tiles(const struct problem *problem, struct cuda_plan *plan) {
  const struct forward_kernel *kernel = &forward_kernels[plan->kernel];
  int64_t blocks_of = kernel->warpgroups;
  int64_t group = problem->heads_q / problem->heads_k;
  int64_t longest = min(problem->max_seqlen_q, problem->rows_q);
  int64_t blocks = divide_up(longest, blocks_of * ROWS);
  int64_t heads = problem->heads_q;
  plan->packed = 1;
  if (group > 1 && group <= ROWS) {
    int64_t packed_blocks = divide_up(longest, blocks_of * (ROWS / group));
    if (packed_blocks * problem->heads_k < blocks * heads) {
      plan->packed = (int32_t)group;
      blocks = packed_blocks;
      heads = problem->heads_k;
    }
  }
  int64_t all_heads, tiles;
  if (__builtin_mul_overflow(heads, problem->batch, &all_heads) ||
      __builtin_mul_overflow(blocks, all_heads, &tiles) || all_heads > MAX_TILES ||
      tiles > MAX_TILES || problem->heads_q > MAX_TILES || problem->batch_k > MAX_TILES)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " heads of %" PRId64 " sequences of up to %" PRId64
                     " rows: more tiles than the CUDA kernels count",
                     problem->heads_q, problem->batch, longest);
  double head_bytes = 2.0 * (double)problem->max_seqlen_k *
                      (double)(problem->head_dim + problem->value_head_dim) *
                      (double)problem->heads_k / (double)heads;
  double section = cache_bytes / (head_bytes > 1 ? head_bytes : 1);
  plan->tiles =
      (fa3_tile_space){.blocks = (int32_t)blocks,
                       .heads = (int32_t)heads,
                       .batches = (int32_t)problem->batch,
                       .section = section >= (double)all_heads ? (int32_t)max(all_heads, 1)
                                                               : (int32_t)max((int64_t)section, 1),
                       .descending = problem->window_right < MASK_UNBOUNDED};
  return FA3_OK;
}

static fa3_status plan_staging(const struct problem *problem, struct cuda_plan *plan) {
  int64_t batch_q = problem->features & FA3_FEATURE_VARLEN_QUERY ? 1 : problem->batch;
  int64_t heads_q = problem->heads_q, heads_k = problem->heads_k;
  plan->negate = problem->scale < 0;
  /* Tiles of unequal length go to whoever is free. */
  if (plan->tiles.descending)
    TRY(reserve(plan, &plan->next_tile, "a counter", 1, 1, sizeof(uint32_t)));
  if (plan->negate || needs_staging(&problem->query, batch_q, problem->rows_q, heads_q))
    TRY(reserve(plan, &plan->query, "query", batch_q, problem->rows_q,
                2 * heads_q * problem->head_dim));
  if (needs_staging(&problem->key, problem->batch_k, problem->rows_k, heads_k))
    TRY(reserve(plan, &plan->key, "key", problem->batch_k, problem->rows_k,
                2 * heads_k * problem->head_dim));
  if (needs_staging(&problem->value, problem->batch_k, problem->rows_k, heads_k))
    TRY(reserve(plan, &plan->value, "value", problem->batch_k, problem->rows_k,
                2 * heads_k * problem->value_head_dim));
  if (needs_staging(&problem->output, batch_q, problem->rows_q, heads_q))
    TRY(reserve(plan, &plan->output, "output", batch_q, problem->rows_q,
                2 * heads_q * problem->value_head_dim));
  if (problem->features & FA3_FEATURE_LSE && problem->rows_q > 1 && problem->lse.stride_row != 1)
    TRY(reserve(plan, &plan->lse, "lse", batch_q, problem->rows_q,
                (int64_t)sizeof(float) * heads_q));
  if (problem->features & FA3_FEATURE_SINK &&
      (problem->sink.dtype != FA3_FLOAT32 || (heads_q > 1 && problem->sink.stride_head != 1)))
    TRY(reserve(plan, &plan->sink, "sink", 1, heads_q, sizeof(float)));
  /* The workspace may start anywhere. */
  if (plan->workspace_size > 0) plan->workspace_size += ALIGNMENT - 1;
  return FA3_OK;
}

fa3_status cuda_plan_forward(const struct problem *problem, struct cuda_plan *plan) {
  *plan = (struct cuda_plan){0};
  TRY(find_forward_kernel(problem->query.dtype, problem->head_dim, problem->value_head_dim,
                          problem->softcap > 0, &plan->kernel));
  TRY(check_lengths(problem));
  TRY(plan_tiles(problem, plan));
  return plan_staging(problem, plan);
}

struct operand staged_operand(const struct operand *operand, const struct staged *staged,
                              char *workspace, int64_t rows, int64_t heads, int64_t dim) {
  if (!staged->used) return *operand;
  return (struct operand){.data = workspace + staged->offset,
                          .dtype = operand->dtype,
                          .stride_batch = rows * heads * dim,
                          .stride_row = heads * dim,
                          .stride_head = dim};
}
