#include "cuda/append.h"

#include <inttypes.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/operands.h"
#include "cuda/scales.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/append_params.h"

const struct kernel_kind append_kind = {.entries = {"append"}};

enum { MOST_HEADS = MAX_GRID * FA3_APPEND_WARPS };

/* Of a row: of the new key, of the new value and of the query. */
static int64_t row_heads(const struct problem *problem) {
  return 2 * problem->heads_k + problem->query.heads;
}

fa3_status plan_append(const struct problem *problem, const struct cuda_facts *facts,
                       struct cuda_plan *plan) {
  *plan = (struct cuda_plan){.helper = find_kernel(&(struct kernel_need){
                                 .kind = &append_kind, .architecture = facts->architecture})};
  TRY(check_lengths(problem));
  if (problem->batch > MAX_GRID)
    return set_error(FA3_UNSUPPORTED, "%" PRId64 " sequences: the append kernel takes up to %d",
                     problem->batch, MAX_GRID);
  const int64_t dims[] = {problem->head_dim, problem->value_head_dim};
  for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
    if (dims[i] > MAX_TILES)
      return set_error(FA3_UNSUPPORTED,
                       "%" PRId64 " elements of a head: the append kernel takes %d", dims[i],
                       MAX_TILES);
  if (row_heads(problem) > MOST_HEADS)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " heads of key, value and query: the append kernel takes %d",
                     row_heads(problem), MOST_HEADS);
  return FA3_OK;
}

static int element_kind(fa3_dtype dtype) {
  return dtype == FA3_FLOAT32       ? FA3_APPEND_FLOAT32
         : dtype == FA3_FLOAT16     ? FA3_APPEND_FLOAT16
         : dtype == FA3_FLOAT8_E4M3 ? FA3_APPEND_E4M3
                                    : FA3_APPEND_BFLOAT16;
}

/* Whether neighbours of a row, which have 16 bits, lie at multiples of 4 bytes. */
static bool in_words(const struct operand *operand) {
  return !has_elements(operand) ||
         (fa3_dtype_size(operand->dtype) == 2 && (uintptr_t)operand->data % 4 == 0 &&
          operand->stride_batch % 2 == 0 && operand->stride_row % 2 == 0 &&
          operand->stride_head % 2 == 0);
}

bool append_takes_words(const struct problem *problem) {
  static const enum tensor read[] = {TENSOR_new_key, TENSOR_new_value, TENSOR_query,
                                     TENSOR_rotary_cos, TENSOR_rotary_sin};
  static const enum tensor written[] = {TENSOR_key, TENSOR_value, TENSOR_rotated_query};
  for (size_t i = 0; i < sizeof read / sizeof *read; i++)
    if (!in_words(problem_operand(problem, read[i]))) return false;
  for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
    const struct operand *operand = problem_operand(problem, written[i]);
    if (operand->dtype != FA3_FLOAT8_E4M3 && !in_words(operand)) return false;
  }
  return problem->rotary_cos.dim % 2 == 0 && problem->head_dim % 4 == 0 &&
         problem->value_head_dim % 4 == 0;
}

fa3_append_params make_append_params(const struct problem *problem) {
  const bool paged = has_pages(problem);
  const struct operand *positions = &problem->positions;
  return (fa3_append_params){
      .new_key = make_operand(&problem->new_key),
      .new_value = make_operand(&problem->new_value),
      .key = make_operand(&problem->key),
      .value = make_operand(&problem->value),
      .query = make_operand(&problem->query),
      .rotated_query = make_operand(&problem->rotated_query),
      .cos = make_operand(&problem->rotary_cos),
      .sin = make_operand(&problem->rotary_sin),
      .positions = (const int *)(void *)positions->data,
      .positions_stride_batch = positions->stride_batch,
      .positions_stride_row = positions->stride_row,
      .sequences = make_sequences(problem),
      .page_table = paged ? (const int *)(void *)problem->page_table.data : NULL,
      .page_table_stride = problem->page_table.stride_batch,
      .page_size = (int)larger(paged ? problem->key.rows : 1, 1),
      .pages = (int)problem->batch_k,
      .rows_k = (int)problem->rows_k,
      .heads_q = (int)problem->query.heads,
      .heads_k = (int)problem->heads_k,
      .head_dim = (int)problem->head_dim,
      .head_dim_v = (int)problem->value_head_dim,
      .pairs = (int)problem->rotary_cos.dim,
      .table_rows = (int)smaller(problem->rotary_cos.rows, INT32_MAX),
      .interleaved = problem->interleaved,
      .kind = element_kind(problem->new_key.dtype),
      .table_kind = element_kind(problem->rotary_cos.dtype),
      .words = append_takes_words(problem),
      .quantised = problem->key.dtype != problem->new_key.dtype,
      .key_scale = make_fp8_scales(&problem->key_scale, problem->key_scale_rows, problem->heads_k),
      .value_scale =
          make_fp8_scales(&problem->value_scale, problem->value_scale_rows, problem->heads_k)};
}

fa3_status launch_append(
    const struct cuda_scope *scope, const struct problem *problem, const struct cuda_plan *plan,
    /* NOLINTNEXTLINE(readability-non-const-parameter): as every phase has it */
    char *workspace) {
  (void)workspace;
  const int64_t longest = longest_query(problem);
  fa3_append_params params = make_append_params(problem);
  if (longest == 0 || problem->batch == 0) return FA3_OK;
  const struct grid grid = {.x = (unsigned)longest,
                            .y = (unsigned)problem->batch,
                            .z = (unsigned)divide_up(row_heads(problem), FA3_APPEND_WARPS),
                            .threads = FA3_APPEND_THREADS,
                            .dependent = true};
  return launch_kernel(scope, plan->helper, 0, &grid, &params);
}
