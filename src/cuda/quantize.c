#include "cuda/quantize.h"

#include <inttypes.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/operands.h"
#include "cuda/sequences.h"
#include "error.h"
#include "head_dim.h"
#include "integer.h"
#include "kernels/quantize_params.h"
#include "signs.h"
#include "validate.h"

/* Functions of both kernels: for rows by vectors, without rotary embedding, or with tables of the
 * input's dtype or of floats; those of quantize_rotated have them rotated by tensor cores. Of
 * quantize alone: for rows of any kind, and what comes before. */
enum { BY_VECTORS, TURNED, TURNED_BY_FLOATS, OF_ANY_ROWS, CLEAR };
enum { LARGEST_CLUSTER = 16, CLEAR_THREADS = 256, USUAL_ROWS = 128 };
enum { SMALL_THREADS = 256 }; /* of a block, of few heads */
/* Of a multiprocessor, which has 228 KB: what the functions have of their own, and the driver. */
enum { SHARED_BYTES = 228 << 10, BLOCK_BYTES = 12 << 10 };

static int32_t shared_bytes(const struct kernel *kernel) {
  (void)kernel;
  return FA3_QUANTIZE_SHARED_BYTES;
}

const struct kernel_kind quantize_kind = {
    .entries = {[BY_VECTORS] = "quantize",
                [TURNED] = "quantize_turned",
                [TURNED_BY_FLOATS] = "quantize_turned_by_floats",
                [OF_ANY_ROWS] = "quantize_any",
                [CLEAR] = "quantize_clear"},
    .shared_bytes = shared_bytes,
    .others_with_shared = OF_ANY_ROWS,
    .large_clusters = true};

const struct kernel_kind quantize_rotated_kind = {
    .entries = {[BY_VECTORS] = "quantize_rotated",
                [TURNED] = "quantize_turned_rotated",
                [TURNED_BY_FLOATS] = "quantize_turned_rotated_by_floats"},
    .shared_bytes = shared_bytes,
    .others_with_shared = TURNED_BY_FLOATS,
    .large_clusters = true};

/* Whether a table is read 16 bytes at a time. */
static bool by_vectors(const struct operand *table) {
  const int64_t bytes = (int64_t)fa3_dtype_size(table->dtype);
  return (intptr_t)table->data % 16 == 0 && table->stride_row * bytes % 16 == 0 &&
         table->dim * bytes % 16 == 0;
}

static int32_t choose_entry(const struct problem *problem) {
  const struct operand *input = &problem->input, *cos = &problem->rotary_cos;
  const int64_t vector = 16 / (int64_t)fa3_dtype_size(input->dtype);
  if (problem->head_dim % 16 || !fits_copy_engine(input) || !fits_copy_engine(&problem->codes))
    return OF_ANY_ROWS;
  if (!cos->dim) return BY_VECTORS;
  if (!by_vectors(cos) || !by_vectors(&problem->rotary_sin) || cos->dim % vector)
    return OF_ANY_ROWS;
  return cos->dtype == input->dtype ? TURNED : TURNED_BY_FLOATS;
}

/* Whole rows of 16 bits are rotated by tensor cores, and by nothing else. */
static const struct kernel *choose_kernel(const struct problem *problem,
                                          const struct kernel *quantize, int32_t entry) {
  if (!problem->rotate || problem->input.dtype == FA3_FLOAT32 || entry == OF_ANY_ROWS ||
      problem->head_dim != quantize->head_dim)
    return quantize;
  return find_like(quantize, (struct kernel_need){.kind = &quantize_rotated_kind});
}

/* Dynamic shared memory of a thread: its elements as they are loaded, and its row's angles. */
static int64_t bytes_of_thread(const struct problem *problem, int32_t entry) {
  const int64_t element = entry == OF_ANY_ROWS ? 4 : (int64_t)fa3_dtype_size(problem->input.dtype);
  const bool turned = entry == TURNED || entry == TURNED_BY_FLOATS;
  const int64_t angle = turned ? (int64_t)fa3_dtype_size(problem->rotary_cos.dtype) : 0;
  return FA3_QUANTIZE_ELEMENTS * (element + angle) + FA3_QUANTIZE_PLACE_BYTES;
}

/* Whether sequences, or heads, share a scale. */
static bool of_all(const struct problem *problem) {
  const struct operand *scale = &problem->codes_scale;
  return !problem->codes_scale_rows &&
         scale->batch * scale->heads < problem->batch * problem->heads_q;
}

/* Whether heads are so few that clusters of small blocks have them, two blocks a multiprocessor:
 * one of them works where the other waits for its cluster. Still fewer, which 16 blocks each don't
 * fill, have no clusters, unless a mean is taken off. */
static bool few_heads(const struct problem *problem, const struct cuda_facts *facts, int64_t heads,
                      int32_t entry) {
  const int64_t multiprocessors = facts->multiprocessors;
  return entry == BY_VECTORS && 4 * heads <= multiprocessors &&
         LARGEST_CLUSTER * heads >= multiprocessors && !of_all(problem);
}

/* Tiles of one scale or several, if a block holds so many rows; else several of one. */
static void deal_rows(const struct problem *problem, const struct cuda_facts *facts, int64_t heads,
                      int64_t longest, struct quantize_plan *plan) {
  const int64_t rows = problem->codes_scale_rows;
  const int64_t shared = rows ? smaller(rows, longest) : longest;
  const int64_t lanes = plan->kernel->head_dim / FA3_QUANTIZE_ELEMENTS;
  const int64_t thread_bytes = bytes_of_thread(problem, plan->entry);
  int64_t most = plan->entry == OF_ANY_ROWS ? FA3_QUANTIZE_ANY_THREADS : FA3_QUANTIZE_THREADS;
  while (most * thread_bytes > FA3_QUANTIZE_SHARED_BYTES || most / lanes > FA3_QUANTIZE_TILE_ROWS)
    most /= 2;
  const bool whole_heads = problem->subtract_mean || (shared == longest && shared > most / lanes);
  /* Where much is computed, blocks that share a multiprocessor hide each other's waits. */
  const bool turned_rotated =
      plan->kernel->kind == &quantize_rotated_kind && plan->entry != BY_VECTORS;
  if (turned_rotated && lanes > 2 && !whole_heads && shared <= most / 2 / lanes) most /= 2;
  int64_t threads = smaller(USUAL_ROWS * lanes, most);
  while (shared > threads / lanes && shared <= most / lanes) threads *= 2;
  /* Larger tiles wait less often for all of a block, where that leaves every multiprocessor some;
   * but blocks that take whole heads, of which there are many, hide each other's ends. */
  const bool few = few_heads(problem, facts, heads, plan->entry);
  if (few && shared == longest && shared > most / lanes) threads = most = SMALL_THREADS;
  while (threads < most && longest >= 2 * threads / lanes &&
         heads * divide_up(longest, 2 * threads / lanes) >= 4 * (int64_t)facts->multiprocessors &&
         !(whole_heads && heads > 2 * (int64_t)facts->multiprocessors))
    threads *= 2;
  const int64_t held = threads / lanes;
  plan->threads = (int32_t)threads;
  plan->shared_bytes = (int32_t)(threads * thread_bytes);
  if (of_all(problem) || shared > held) {
    plan->from = FA3_QUANTIZE_FIND;
    plan->tile_rows = (int32_t)held;
    plan->span_rows = (int32_t)shared;
  } else {
    plan->from = FA3_QUANTIZE_OF_TILE;
    plan->tile_rows = (int32_t)(rows ? held / shared * shared : shared);
    plan->span_rows = plan->tile_rows;
  }
  plan->span_tiles = (int32_t)divide_up(plan->span_rows, plan->tile_rows);
}

/* Heads of the same rows that a block takes in turn, where that keeps no block waiting for others.
 * Their angles are loaded once; but what blocks then read at a time lies further apart, so it pays
 * where rows are short, or with much to compute. */
static int64_t heads_in_turn(const struct problem *problem, int64_t all, int64_t at_once) {
  int64_t heads = problem->head_dim <= 64 ? 8 : problem->rotate ? 4 : 1;
  if (!problem->rotary_cos.dim) heads = 1;
  while (problem->heads_q % heads ||
         divide_up(all / heads, at_once) * heads > divide_up(all, at_once))
    heads /= 2;
  return heads;
}

fa3_status plan_quantize(const struct problem *problem, const struct cuda_facts *facts,
                         struct cuda_plan *plan) {
  const int64_t longest = longest_query(problem);
  struct quantize_plan *ours = &plan->quantize;
  *plan = (struct cuda_plan){
      .helper = find_kernel(&(struct kernel_need){.kind = &quantize_kind,
                                                  .architecture = facts->architecture,
                                                  .dtype = problem->input.dtype,
                                                  .head_dim = problem->head_dim})};
  TRY(check_lengths(problem));
  if (!has_elements(&problem->input) || !problem->batch || !longest) return FA3_OK;
  ours->entry = choose_entry(problem);
  ours->kernel = choose_kernel(problem, plan->helper, ours->entry);
  if (!ours->kernel) return no_kernel(problem->head_dim, problem->head_dim);
  int64_t heads, all, tiles = 0;
  bool counted = !__builtin_mul_overflow(problem->batch, problem->heads_q, &heads) &&
                 heads <= MAX_TILES / LARGEST_CLUSTER;
  if (counted) {
    deal_rows(problem, facts, heads, longest, ours);
    tiles = divide_up(longest, ours->span_rows) * ours->span_tiles;
    counted = !__builtin_mul_overflow(heads, tiles, &all) && all <= MAX_TILES;
  }
  if (!counted)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " sequences of %" PRId64 " heads of up to %" PRId64
                     " rows: more than the quantize kernel counts",
                     problem->batch, problem->heads_q, longest);
  const int64_t at_once =
      facts->multiprocessors * smaller(FA3_QUANTIZE_THREADS / ours->threads,
                                       SHARED_BYTES / (ours->shared_bytes + BLOCK_BYTES));
  ours->tiles = (int32_t)tiles;
  ours->in_turn = (int32_t)heads_in_turn(problem, all, at_once);
  ours->blocks = (int32_t)smaller(all / ours->in_turn, at_once);
  if (ours->from == FA3_QUANTIZE_FIND && !of_all(problem) && ours->span_rows == longest &&
      (problem->subtract_mean || LARGEST_CLUSTER * heads >= facts->multiprocessors))
    ours->from = FA3_QUANTIZE_OF_SEQUENCE;
  if (!problem->subtract_mean && ours->from != FA3_QUANTIZE_OF_SEQUENCE) return FA3_OK;
  ours->in_turn = 1;
  /* Clusters of two can be two blocks on a multiprocessor; larger ones then find too few places. */
  int64_t cluster = 1;
  while (cluster < LARGEST_CLUSTER && 2 * cluster <= tiles &&
         (10 * cluster * heads < 9 * (int64_t)facts->multiprocessors ||
          (cluster == 1 && 2 * heads <= at_once)))
    cluster *= 2;
  while (few_heads(problem, facts, heads, ours->entry) && ours->threads <= SMALL_THREADS &&
         cluster < LARGEST_CLUSTER && 2 * cluster <= tiles &&
         cluster * heads <= (int64_t)facts->multiprocessors)
    cluster *= 2;
  ours->cluster = (int32_t)cluster;
  ours->blocks = (int32_t)(heads * cluster);
  return FA3_OK;
}

static fa3_quantize_params make_params(const struct problem *problem,
                                       const struct quantize_plan *plan) {
  const struct operand *input = &problem->input, *positions = &problem->positions;
  fa3_quantize_params params = {
      .input = make_operand(input),
      .codes = make_operand(&problem->codes),
      .scale = make_operand(&problem->codes_scale),
      .cos = make_operand(&problem->rotary_cos),
      .sin = make_operand(&problem->rotary_sin),
      .positions = (const int *)(void *)positions->data,
      .positions_stride_batch = positions->stride_batch,
      .positions_stride_row = positions->stride_row,
      .sequences = make_sequences(problem),
      .batches = (int)problem->batch,
      .heads = (int)problem->heads_q,
      .head_dim = (int)problem->head_dim,
      .scale_rows = (int)smaller(problem->codes_scale_rows, problem->rows_q + 1),
      .tile_rows = plan->tile_rows,
      .span_rows = plan->span_rows,
      .span_tiles = plan->span_tiles,
      .span_scales =
          (int)(problem->codes_scale_rows ? divide_up(plan->span_rows, problem->codes_scale_rows)
                                          : 1),
      .tiles = plan->tiles,
      .in_turn = plan->in_turn,
      .pairs = (int)problem->rotary_cos.dim,
      .table_rows = (int)smaller(problem->rotary_cos.rows, INT32_MAX),
      .float_tables = problem->rotary_cos.dtype == FA3_FLOAT32,
      .interleaved = problem->interleaved,
      .subtract_mean = problem->subtract_mean,
      .rotate = problem->rotate};
  for (uint64_t i = 0; i < 4; i++) params.signs[i] = random_signs(problem->seed, i);
  return params;
}

/* Tiles that share a scale raise it first, from 0. */
static fa3_status clear_scales(const struct cuda_scope *scope, const struct cuda_plan *plan,
                               fa3_quantize_params *params) {
  const int64_t scales =
      (int64_t)params->batches * params->heads * (params->tiles / params->span_tiles);
  const struct grid grid = {.x = (unsigned)divide_up(scales, CLEAR_THREADS),
                            .y = 1,
                            .z = 1,
                            .threads = CLEAR_THREADS,
                            .dependent = true};
  return launch_kernel(scope, plan->helper, CLEAR, &grid, params);
}

static fa3_status launch_tiles(const struct cuda_scope *scope, const struct cuda_plan *plan,
                               fa3_quantize_params *params) {
  const struct quantize_plan *ours = &plan->quantize;
  struct grid grid = {.x = (unsigned)ours->blocks,
                      .y = 1,
                      .z = 1,
                      .threads = (unsigned)ours->threads,
                      .shared_bytes = (unsigned)ours->shared_bytes,
                      .cluster = (unsigned)ours->cluster,
                      .dependent = true};
  const struct error_message before = error_keep();
  const fa3_status status = launch_kernel(scope, ours->kernel, ours->entry, &grid, params);
  if (!status || ours->cluster <= 1) return status;
  /* A context with few multiprocessors has no room for the cluster: one block does it all. */
  error_put_back(&before);
  grid.x /= grid.cluster;
  grid.cluster = 1;
  return launch_kernel(scope, ours->kernel, ours->entry, &grid, params);
}

fa3_status launch_quantize(
    const struct cuda_scope *scope, const struct problem *problem, const struct cuda_plan *plan,
    /* NOLINTNEXTLINE(readability-non-const-parameter): as every phase has it */
    char *workspace) {
  (void)workspace;
  if (!plan->quantize.tiles) return FA3_OK;
  fa3_quantize_params params = make_params(problem, &plan->quantize);
  params.from = plan->quantize.from;
  if (params.from != FA3_QUANTIZE_FIND) return launch_tiles(scope, plan, &params);
  TRY(clear_scales(scope, plan, &params));
  TRY(launch_tiles(scope, plan, &params));
  params.from = FA3_QUANTIZE_USE;
  return launch_tiles(scope, plan, &params);
}
