#include "cuda/unpack.h"

#include <math.h>

#include "cuda/decode.h"
#include "cuda/decode_plan.h"
#include "cuda/decode_splits.h"
#include "cuda/forward_steps.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"

const struct kernel_kind unpack_kind = {.entries = {"unpack"}};

/* Of the workspace, at most: 131,072 keys of 8 heads of 128. */
static const int64_t most_bytes = INT64_C(512) << 20;

/* Of unpacked keys and values. */
static int64_t unpacked_bytes(const struct problem *problem) {
  const int64_t rows = multiply(multiply(problem->batch, longest_key(problem)), problem->heads_k);
  return multiply(rows, 2 * (problem->head_dim + problem->value_head_dim));
}

static bool is_of_heads(const struct problem *problem, const struct operand *scale, int64_t rows) {
  return rows == 0 && !(has_pages(problem) && scale->stride_batch != 0);
}

int32_t unpacked_form(const struct problem *problem) {
  return is_of_heads(problem, &problem->key_scale, problem->key_scale_rows) &&
                 is_of_heads(problem, &problem->value_scale, problem->value_scale_rows)
             ? UNPACKED_HEADS
             : UNPACKED_ROWS;
}

/* Whether the kernels can do it at all. */
static bool can_unpack(const struct problem *problem) {
  const fa3_dtype query = problem->query.dtype;
  return decode_has_chunks(problem) && (query == FA3_BFLOAT16 || query == FA3_FLOAT16) &&
         problem->output.dtype == query && fits_copy_engine(&problem->output) &&
         problem->softcap == 0 && problem->scale >= 0 && !problem->cu_seqlens_k &&
         !problem->leftpad_k;
}

/* What the kernels on codes take longer for each FLOP, in seconds; a launch. */
static const double saved = 1.1e-15, launch = 2.5e-6;

/* To unpack codes: they are read, and what has twice their size is written, and read again. */
static double unpacking_seconds(const struct cuda_facts *facts, double codes) {
  return reading_seconds(facts, 4 * codes);
}

bool may_unpack(const struct problem *problem, const struct cuda_facts *facts) {
  /* A code has two FLOPs with each row that reads it. */
  const double rows = (double)decode_rows(problem, longest_query(problem));
  return can_unpack(problem) && 2 * rows * saved > unpacking_seconds(facts, 1);
}

static bool grid_fits(const struct problem *problem) {
  const int64_t tiles = divide_up(longest_key(problem), FA3_UNPACK_KEYS);
  return problem->batch <= MAX_GRID && multiply(tiles, problem->heads_k) <= INT32_MAX;
}

/* Of packed queries the host does not know whose they are: as many sequences as can be are taken to
 * have all they may, and others few, for the kernels on codes. */
bool unpacking_pays(const struct problem *problem, const struct cuda_facts *facts) {
  if (!may_unpack(problem, facts) || unpacked_bytes(problem) > most_bytes || !grid_fits(problem))
    return false;
  const double longest = (double)longest_query(problem), all = (double)longest_key(problem);
  double sequences = (double)problem->batch;
  if (problem->cu_seqlens_q) sequences = fmin(sequences, (double)problem->rows_q / longest);
  const double columns = (double)(problem->head_dim + problem->value_head_dim);
  /* By any query: others are not unpacked. */
  const double keys = fmin(all, longest + (double)problem->window_left);
  const double seen = keys_seen(problem, longest, all);
  const double flops = 2 * columns * sequences * (double)problem->heads_q * longest * seen;
  const double codes = columns * sequences * (double)problem->heads_k * keys;
  return saved * flops > launch + unpacking_seconds(facts, codes);
}

static struct operand unpacked_operand(const struct problem *problem, const struct operand *codes,
                                       char *data) {
  const int64_t rows = longest_key(problem);
  return (struct operand){.data = data,
                          .dtype = problem->query.dtype,
                          .batch = problem->batch,
                          .rows = rows,
                          .heads = codes->heads,
                          .dim = codes->dim,
                          .stride_batch = codes->heads * rows * codes->dim,
                          .stride_row = codes->dim,
                          .stride_head = rows * codes->dim};
}

struct problem unpacked_problem(const struct problem *problem, const struct unpack_plan *plan,
                                char *workspace) {
  struct problem unpacked = *problem;
  unpacked.features &= ~(uint64_t)(FA3_FEATURE_PAGE_TABLE | FA3_FEATURE_BATCH_INDEX);
  unpacked.page_table = (struct operand){0};
  unpacked.cache_batch_index = NULL;
  unpacked.batch_k = problem->batch;
  unpacked.rows_k = longest_key(problem);
  unpacked.key =
      unpacked_operand(problem, &problem->key, workspace ? workspace + plan->key.offset : NULL);
  unpacked.value =
      unpacked_operand(problem, &problem->value, workspace ? workspace + plan->value.offset : NULL);
  return unpacked;
}

/* Rows of scales of a head. */
static int64_t scale_rows(const struct problem *problem) {
  return round_up(longest_key(problem), FA3_UNPACK_KEYS);
}

/* So many rows of each head, but no more than of calls whose codes are unpacked. */
static fa3_status reserve_rows(const struct problem *problem, const char *name, int64_t head_rows,
                               int64_t row_bytes, struct reservation *room,
                               size_t *workspace_size) {
  const int64_t rows = multiply(multiply(problem->batch, head_rows), problem->heads_k);
  return reserve(workspace_size, room, name, 1, smaller(multiply(rows, row_bytes), most_bytes), 1);
}

fa3_status reserve_unpacked(const struct problem *problem, const struct cuda_facts *facts,
                            struct unpack_plan *plan, size_t *workspace_size) {
  *plan = (struct unpack_plan){0};
  if (!may_unpack(problem, facts)) return FA3_OK;
  const int64_t rows = longest_key(problem);
  TRY(reserve_rows(problem, "unpacked keys", rows, 2 * problem->head_dim, &plan->key,
                   workspace_size));
  TRY(reserve_rows(problem, "unpacked values", rows, 2 * problem->value_head_dim, &plan->value,
                   workspace_size));
  if (unpacked_form(problem) == UNPACKED_HEADS)
    TRY(reserve_rows(problem, "scales", 1, sizeof(fa3_head_scales), &plan->scales, workspace_size));
  else
    TRY(reserve_rows(problem, "scales", scale_rows(problem), 2 * sizeof(float), &plan->scales,
                     workspace_size));
  if (unpacking_pays(problem, facts))
    plan->kernel = find_kernel(
        &(struct kernel_need){.kind = &unpack_kind, .architecture = facts->architecture});
  return FA3_OK;
}

fa3_status launch_unpack(const struct cuda_scope *scope, const struct problem *problem,
                         const struct unpack_plan *plan, int32_t few_queries, char *workspace) {
  const int64_t columns = larger(problem->head_dim, problem->value_head_dim);
  fa3_unpack_params params = {.cache = make_cache_params(problem, problem->heads_k),
                              .key = (uint16_t *)(void *)(workspace + plan->key.offset),
                              .value = (uint16_t *)(void *)(workspace + plan->value.offset),
                              .rows = (int)longest_key(problem),
                              .scale_rows = (int)scale_rows(problem),
                              .row_threads = 1};
  void *const scales = workspace + plan->scales.offset;
  if (unpacked_form(problem) == UNPACKED_HEADS)
    params.head_scales = scales;
  else
    params.row_scales = scales;
  params.cache.few_queries = few_queries;
  while (8 * params.row_threads < columns) params.row_threads *= 2;
  const int64_t tiles = divide_up(longest_key(problem), FA3_UNPACK_KEYS);
  const struct grid grid = {.x = (unsigned)(tiles * problem->heads_k),
                            .y = (unsigned)problem->batch,
                            .z = 1,
                            .threads = FA3_UNPACK_THREADS,
                            .dependent = true};
  return launch_kernel(scope, plan->kernel, 0, &grid, &params);
}
