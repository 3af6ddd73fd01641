#include "cuda/backward_plan.h"

#include <inttypes.h>

#include "cuda/backward_deal.h"
#include "cuda/backward_parts.h"
#include "cuda/backward_sums.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"

/* The workspace is measured by this one and the largest, so that its size does not fall where a
 * larger head dim takes a kernel with another tile. */
enum { MIDDLE_TILE_Q = 80 };

/* Where steps of 80 queries are taken without a mask: queries, and tiles of a head. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { LONG_STEPS_FROM = 640, LEAST_TILES_OF_HEAD = 4 };

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_BACKWARD_SHARED_BYTES(kernel->head_dim, kernel->value_head_dim, kernel->tile_q,
                                   kernel->tile_k);
}

static int32_t wide_shared_bytes(const struct kernel *kernel) {
  return FA3_BACKWARD_WIDE_SHARED_BYTES(kernel->head_dim, kernel->value_head_dim,
                                        kernel->do_stages);
}

const struct kernel_kind backward_kind = {
    .phase = FA3_BACKWARD,
    .entries = {[BACKWARD_MAIN] = "backward",
                [BACKWARD_FINISH] = "backward_finish",
                [BACKWARD_FINISH_NARROW] = "backward_finish_narrow"},
    .shared_bytes = shared_bytes};
const struct kernel_kind backward_wide_kind = {
    .phase = FA3_BACKWARD,
    .entries = {[BACKWARD_MAIN] = "backward",
                [BACKWARD_FINISH] = "backward_finish",
                [BACKWARD_FINISH_NARROW] = "backward_finish_narrow"},
    .shared_bytes = wide_shared_bytes};
const struct kernel_kind backward_prepare_kind = {
    .entries = {[BACKWARD_PREPARE] = "backward_prepare",
                [BACKWARD_PREPARE_LONG] = "backward_prepare_long",
                [BACKWARD_SUM] = "backward_sum",
                [BACKWARD_SINK] = "backward_sink"}};

fa3_status find_backward_kernel(const char *architecture, fa3_dtype dtype, int64_t head_dim,
                                int64_t value_head_dim, bool small_steps, int64_t queries,
                                const struct kernel **kernel) {
  struct kernel_need need = {.kind = &backward_kind,
                             .architecture = architecture,
                             .dtype = dtype,
                             .head_dim = head_dim,
                             .value_head_dim = value_head_dim,
                             .softcap = small_steps,
                             .queries = queries};
  *kernel = find_kernel(&need);
  need.kind = &backward_wide_kind;
  if (!*kernel) *kernel = find_kernel(&need);
  return *kernel ? FA3_OK : no_kernel(head_dim, value_head_dim);
}

fa3_status supports_backward(const fa3_capability *capability) {
  const struct kernel *kernel;
  TRY(check_half_precision(capability));
  /* A kernel that takes any number of queries takes all calls of its kind. */
  return find_backward_kernel(NULL, capability->query_dtype, capability->head_dim,
                              capability->value_head_dim,
                              capability->features & FA3_FEATURE_SOFTCAP, 0, &kernel);
}

static int64_t slots(const struct problem *problem, int64_t tile_q) {
  return FA3_BACKWARD_SLOTS(problem->cu_seqlens_q, problem->batch, problem->rows_q, tile_q);
}

static fa3_status plan_tiles(const struct problem *problem, struct backward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  int64_t longest_q = longest_query(problem);
  int64_t longest_k = longest_key(problem);
  int64_t blocks = divide_up(longest_k, kernel->tile_k);
  int64_t all_heads, tiles;
  if (problem->batch > MAX_GRID || problem->heads_q > MAX_GRID)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " heads of %" PRId64
                     " sequences: the backward kernels take up to %d of each",
                     problem->heads_q, problem->batch, MAX_GRID);
  if (__builtin_mul_overflow(problem->heads_k, problem->batch, &all_heads) ||
      __builtin_mul_overflow(blocks, all_heads, &tiles) || tiles > MAX_TILES ||
      all_heads > MAX_TILES || slots(problem, kernel->tile_q) > MAX_TILES)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " key heads of %" PRId64 " sequences of up to %" PRId64
                     " rows: more tiles than the CUDA kernels count",
                     problem->heads_k, problem->batch, longest_k);
  const int64_t unseen = count_unseen_tiles(problem, kernel->tile_k);
  plan->tiles = (fa3_key_tiles){.tiles = (int32_t)(blocks - unseen),
                                .first = (int32_t)unseen,
                                .heads = (int32_t)problem->heads_k,
                                .batches = (int32_t)problem->batch};
  plan->blocks_q = (int32_t)divide_up(longest_q, kernel->tile_q);
  plan->slots = (int32_t)slots(problem, kernel->tile_q);
  plan->key_slots = (int32_t)count_key_slots(problem);
  return FA3_OK;
}

/* Rows of all slots together, whatever the kernel's tile. */
static int64_t padded_rows(const struct problem *problem) {
  if (problem->cu_seqlens_q)
    return problem->rows_q + (problem->batch + 1) * (int64_t)LARGEST_TILE_Q;
  return problem->batch * larger(round_up(problem->rows_q, LARGEST_TILE_Q),
                                 round_up(problem->rows_q, MIDDLE_TILE_Q));
}

/* Whether steps of 80 queries are faster than those of 64, without a mask: they have fewer empty
 * rows, or not many more, and heads have some tiles, so that it pays to store dQ later; and half of
 * the multiprocessors have a tile, or tiles would be dealt out by rows, of which blocks of 80 make
 * fewer parts. */
static bool gains_by_long_steps(const struct problem *problem) {
  const int64_t queries = longest_query(problem);
  const int64_t middle = round_up(queries, MIDDLE_TILE_Q);
  const int64_t smallest = round_up(queries, SMALLEST_TILE_Q);
  const int64_t blocks = divide_up(longest_key(problem), TILE_K);
  if (queries_vary(problem)) return false;
  return middle < smallest ||
         (queries >= LONG_STEPS_FROM && 20 * middle <= 21 * smallest &&
          blocks >= LEAST_TILES_OF_HEAD &&
          2 * (double)blocks * (double)problem->heads_k * (double)problem->batch >=
              MULTIPROCESSORS);
}

/* How many queries of a head a tile of keys meets, for the choice of a kernel; as many as any
 * kernel asks for, where longer steps are faster. With a mask on both sides no more than its width;
 * on one side half of all in the mean, which count for a little less where few heads share keys, as
 * measured (docs/notes/hopper-backward.md). */
static int64_t queries_of_tile(const struct problem *problem) {
  const int64_t left = problem->window_left, right = problem->window_right;
  const int64_t longest = longest_query(problem);
  if (left >= MASK_UNBOUNDED && right >= MASK_UNBOUNDED)
    return gains_by_long_steps(problem) ? INT64_MAX : longest;
  const bool grouped = problem->heads_q >= 4 * problem->heads_k;
  return smaller(longest * (grouped ? 6 : 5) / 12, left + right + 1);
}

static fa3_status plan_workspace(const struct problem *problem, struct cuda_plan *cuda_plan) {
  struct backward_plan *plan = &cuda_plan->backward;
  size_t *size = &cuda_plan->workspace_size;
  const struct kernel *kernel = plan->kernel;
  const int64_t heads = problem->heads_q, rows = padded_rows(problem);
  const int64_t blocks = slots(problem, SMALLEST_TILE_Q);
  struct reservation more; /* follows `partial` */
  TRY(reserve(size, &plan->next_tile, "a counter", 1, 1, sizeof(int32_t)));
  const int64_t row_bytes = (int64_t)sizeof(float) * kernel->head_dim;
  const int64_t sum_bytes = multiply(heads, multiply(rows, row_bytes));
  const int64_t least_bytes = multiply(heads, multiply(blocks, SMALLEST_TILE_Q * row_bytes));
  plan->most_sums = (int32_t)most_sums(least_bytes);
  TRY(reserve(size, &plan->counters, "counters", 2,
              most_counters(multiply(heads, blocks), SMALLEST_TILE_Q * row_bytes),
              sizeof(int32_t)));
  TRY(reserve(size, &plan->rows, "a copy of lse", heads, 2 * rows + 8 * blocks, sizeof(float)));
  TRY(reserve(size, &plan->partial, "grad_query in float32", heads, rows, row_bytes));
  TRY(reserve(size, &more, "grad_query in more sums", 1, 1, bytes_of_more_sums(sum_bytes)));
  plan->part_bytes = bytes_of_parts(problem, plan, sum_bytes);
  TRY(reserve(size, &plan->parts, "grad_key and grad_value in parts", 1, 1, plan->part_bytes));
  TRY(reserve(size, &plan->arrivals, "arrivals of parts", 1, count_arrivals(problem),
              sizeof(int32_t)));
  const struct demand demands[] = {{TENSOR_query, FORM_TMA},
                                   {TENSOR_key, FORM_TMA},
                                   {TENSOR_value, FORM_TMA},
                                   {TENSOR_grad_output, FORM_TMA},
                                   {TENSOR_sink, FORM_FLOATS}};
  int count = sizeof demands / sizeof *demands;
  if (has_elements(&problem->grad_sink))
    TRY(reserve(size, &plan->sinks, "grad_sink in parts", heads, blocks, sizeof(float)));
  else
    count--; /* the sink itself is in lse */
  return plan_staging(problem, demands, count, &cuda_plan->staging, size);
}

/* Blocks stay until the work is done, one on each multiprocessor; more than fit come later, and
 * find none left. */
static void plan_grid(const struct problem *problem, const struct cuda_facts *facts,
                      struct backward_plan *plan) {
  const int64_t cluster = plan->cluster, clusters = larger(facts->multiprocessors / cluster, 1);
  deal_tiles(problem, clusters, plan);
  plan->workers = (int32_t)(cluster * smaller(fa3_key_tile_count(&plan->tiles), clusters));
  const bool parts = fa3_key_tile_parts(&plan->tiles) > 1;
  plan->summed_later = parts && plan->cluster > 1;
  plan->arrival_words = parts && plan->cluster == 1
                            ? plan->tiles.heads * plan->key_slots * FA3_BACKWARD_PART_WARPS
                            : 0;
}

fa3_status plan_backward(const struct problem *problem, const struct cuda_facts *facts,
                         struct cuda_plan *plan) {
  struct backward_plan *backward = &plan->backward;
  *plan = (struct cuda_plan){.backward = {0}};
  TRY(find_backward_kernel(facts->architecture, problem->query.dtype, problem->head_dim,
                           problem->value_head_dim,
                           problem->softcap > 0 || takes_short_steps(problem),
                           queries_of_tile(problem), &backward->kernel));
  backward->prepare = find_kernel(&(struct kernel_need){.kind = &backward_prepare_kind,
                                                        .architecture = facts->architecture,
                                                        .dtype = problem->query.dtype});
  backward->cluster = backward->kernel->kind == &backward_wide_kind ? 2 : 1;
  TRY(check_lengths(problem));
  TRY(check_scale(problem));
  TRY(plan_tiles(problem, backward));
  TRY(plan_workspace(problem, plan));
  plan_grid(problem, facts, backward);
  return FA3_OK;
}
