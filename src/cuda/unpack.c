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

/* Of the workspace, at most: 512 MiB are 131,072 keys and values of 8 heads of 128, and 8 their
 * scales. Of more, heads are unpacked one part after the other, at most so many. */
static const int64_t most_bytes = INT64_C(544) << 20, most_parts = 16;
static const double least_part_tiles = 60; /* of rows, in each */

int64_t unpacked_scale_rows(const struct problem *problem) {
  return round_up(longest_key(problem), FA3_UNPACK_KEYS);
}

/* Bytes of a key head of all sequences, multiples of what memory is aligned to. */
struct head_bytes {
  int64_t key, value, scales;
};

static struct head_bytes bytes_of_head(const struct problem *problem) {
  const int64_t alignment = 128, batch = larger(problem->batch, 1);
  const int64_t rows = multiply(batch, longest_key(problem));
  const int64_t scales =
      unpacked_form(problem) == UNPACKED_HEADS
          ? multiply(batch, sizeof(fa3_head_scales))
          : multiply(multiply(batch, unpacked_scale_rows(problem)), 2 * sizeof(float));
  return (struct head_bytes){round_up(multiply(rows, 2 * problem->head_dim), alignment),
                             round_up(multiply(rows, 2 * problem->value_head_dim), alignment),
                             round_up(scales, alignment)};
}

static int64_t bytes_of_heads(const struct problem *problem, int64_t heads) {
  const struct head_bytes head = bytes_of_head(problem);
  return multiply(head.key + head.value + head.scales, heads);
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
         problem->output.dtype == query && problem->softcap == 0 && problem->scale >= 0 &&
         !problem->cu_seqlens_k && !problem->leftpad_k;
}

/* What the forward kernel takes less than the kernels on codes for each FLOP, and a launch. */
static const double seconds_saved = 1.1e-15, launch_seconds = 2.5e-6;

/* To unpack codes: they are read, and what has twice their size is written, and read again. */
static double unpacking_seconds(const struct cuda_facts *facts, double codes) {
  return reading_seconds(facts, 4 * codes);
}

bool may_unpack(const struct problem *problem, const struct cuda_facts *facts) {
  /* A code has two FLOPs with each row that reads it. */
  const double rows = (double)decode_rows(problem, longest_query(problem));
  return can_unpack(problem) && 2 * rows * seconds_saved > unpacking_seconds(facts, 1);
}

/* As many as the workspace has room for. */
static int64_t heads_at_once(const struct problem *problem) {
  const int64_t tiles = divide_up(longest_key(problem), FA3_UNPACK_KEYS);
  if (problem->batch > MAX_GRID) return 0;
  for (int64_t parts = 1; parts <= most_parts; parts++) {
    const int64_t heads = problem->heads_k / parts;
    if (heads * parts == problem->heads_k && bytes_of_heads(problem, heads) <= most_bytes &&
        multiply(tiles, heads) <= INT32_MAX)
      return heads;
  }
  return 0;
}

/* Of packed queries the host does not know whose they are: as many sequences as can be are taken to
 * have all they may, and others few, for the kernels on codes. */
int64_t unpacked_heads(const struct problem *problem, const struct cuda_facts *facts) {
  if (!may_unpack(problem, facts)) return 0;
  const int64_t heads = heads_at_once(problem);
  if (!heads) return 0;
  const double longest = (double)longest_query(problem), all = (double)longest_key(problem);
  double sequences = (double)problem->batch;
  if (problem->cu_seqlens_q) sequences = fmin(sequences, (double)problem->rows_q / longest);
  /* Else multiprocessors would be idle in each part. */
  const double rows = (double)decode_rows(problem, longest_query(problem));
  const double tiles = sequences * (double)heads * rows / FA3_CHUNK_FP8_ROWS;
  if (heads < problem->heads_k && tiles < least_part_tiles) return 0;
  const double columns = (double)(problem->head_dim + problem->value_head_dim);
  /* By any query: others are not unpacked. */
  const double keys = fmin(all, longest + (double)problem->window_left);
  const double seen = keys_seen(problem, longest, all);
  const double flops = 2 * columns * sequences * (double)problem->heads_q * longest * seen;
  const double codes = columns * sequences * (double)problem->heads_k * keys;
  const double launches = (double)problem->heads_k / (double)heads * launch_seconds;
  return seconds_saved * flops > launches + unpacking_seconds(facts, codes) ? heads : 0;
}

static void keep_heads(struct operand *operand, int64_t first, int64_t heads) {
  if (operand->data)
    operand->data += first * operand->stride_head * (int64_t)fa3_dtype_size(operand->dtype);
  operand->heads = heads;
}

struct problem part_of_heads(const struct problem *problem, int64_t first, int64_t heads) {
  const int64_t group = problem->heads_q / problem->heads_k;
  struct problem part = *problem;
  part.heads_k = heads;
  part.heads_q = heads * group;
  keep_heads(&part.key, first, heads);
  keep_heads(&part.value, first, heads);
  keep_heads(&part.query, first * group, heads * group);
  keep_heads(&part.output, first * group, heads * group);
  keep_heads(&part.lse, first * group, heads * group);
  keep_heads(&part.sink, first * group, heads * group);
  if (part.key_scale.heads > 1) keep_heads(&part.key_scale, first, heads);
  if (part.value_scale.heads > 1) keep_heads(&part.value_scale, first, heads);
  return part;
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
  char *const room = workspace ? workspace + plan->room.offset : NULL;
  char *const values = room ? room + problem->heads_k * bytes_of_head(problem).key : NULL;
  unpacked.key = unpacked_operand(problem, &problem->key, room);
  unpacked.value = unpacked_operand(problem, &problem->value, values);
  return unpacked;
}

fa3_status reserve_unpacked(const struct problem *problem, struct reservation *room,
                            size_t *workspace_size) {
  const int64_t bytes = smaller(bytes_of_heads(problem, problem->heads_k), most_bytes);
  return reserve(workspace_size, room, "unpacked keys and values", 1, bytes, 1);
}

void *unpacked_scales(const struct problem *problem, const struct unpack_plan *plan,
                      char *workspace) {
  const struct head_bytes head = bytes_of_head(problem);
  return workspace + plan->room.offset + problem->heads_k * (head.key + head.value);
}

fa3_status launch_unpack(const struct cuda_scope *scope, const struct problem *problem,
                         const struct unpack_plan *plan, int32_t few_queries, char *workspace) {
  const int64_t columns = larger(problem->head_dim, problem->value_head_dim);
  const struct problem unpacked = unpacked_problem(problem, plan, workspace);
  fa3_unpack_params params = {.cache = make_cache_params(problem, problem->heads_k),
                              .key = (uint16_t *)(void *)unpacked.key.data,
                              .value = (uint16_t *)(void *)unpacked.value.data,
                              .rows = (int)longest_key(problem),
                              .scale_rows = (int)unpacked_scale_rows(problem),
                              .row_threads = 1};
  if (unpacked_form(problem) == UNPACKED_HEADS)
    params.head_scales = unpacked_scales(problem, plan, workspace);
  else
    params.row_scales = unpacked_scales(problem, plan, workspace);
  params.cache.few_queries = few_queries;
  while (params.row_threads < divide_up(columns, 8)) params.row_threads *= 2;
  const int64_t tiles = divide_up(longest_key(problem), FA3_UNPACK_KEYS);
  const struct grid grid = {.x = (unsigned)(tiles * problem->heads_k),
                            .y = (unsigned)problem->batch,
                            .z = 1,
                            .threads = FA3_UNPACK_THREADS,
                            .dependent = true};
  return launch_kernel(scope, plan->kernel, 0, &grid, &params);
}
