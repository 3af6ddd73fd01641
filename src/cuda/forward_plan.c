#include "cuda/forward_plan.h"

#include <inttypes.h>

#include "cuda/decode_splits.h"
#include "cuda/forward_fp8_plan.h"
#include "cuda/forward_splits.h"
#include "cuda/forward_steps.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/mask.h"

enum { ROWS = 64 };

/* Bytes of key and value that stay in the L2 cache while other tiles of the same heads use them: a
 * part of Hopper's 50 MB. */
static const double cache_bytes = 10e6;

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_FORWARD_SHARED_BYTES(kernel->head_dim, kernel->value_head_dim, kernel->tile_q,
                                  kernel->tile_k, kernel->unpacked == UNPACKED_ROWS);
}

const struct kernel_kind forward_kind = {
    .phase = FA3_FORWARD, .entries = {"forward"}, .shared_bytes = shared_bytes};

fa3_status find_forward_kernel(const char *architecture, fa3_dtype dtype, int64_t head_dim,
                               int64_t value_head_dim, fa3_features features, bool head_scales,
                               const struct kernel **kernel) {
  *kernel = find_kernel(
      &(struct kernel_need){.kind = dtype == FA3_FLOAT8_E4M3 ? &forward_fp8_kind : &forward_kind,
                            .architecture = architecture,
                            .dtype = dtype,
                            .head_dim = head_dim,
                            .value_head_dim = value_head_dim,
                            .softcap = features & FA3_FEATURE_SOFTCAP,
                            .head_scales = head_scales,
                            .pages = features & FA3_FEATURE_PAGE_TABLE});
  return *kernel ? FA3_OK : no_kernel(head_dim, value_head_dim);
}

fa3_status supports_forward(const fa3_capability *capability) {
  const struct kernel *kernel;
  const bool softcap = capability->features & FA3_FEATURE_SOFTCAP;
  const bool paged = capability->features & FA3_FEATURE_PAGE_TABLE;
  const bool codes = capability->query_dtype == FA3_FLOAT8_E4M3;
  if (codes)
    TRY(check_fp8(capability));
  else if (capability->key_dtype == FA3_FLOAT8_E4M3)
    TRY(check_fp8_cache(capability));
  else
    TRY(check_half_precision(capability));
  if (capability->key_dtype == FA3_FLOAT8_E4M3 && (paged || !codes))
    return find_decode_kernel(NULL, capability->key_dtype, capability->head_dim,
                              capability->value_head_dim, softcap, 0)
               ? FA3_OK
               : no_kernel(capability->head_dim, capability->value_head_dim);
  return find_forward_kernel(NULL, capability->query_dtype, capability->head_dim,
                             capability->value_head_dim, capability->features, false, &kernel);
}

/* Of short sequences the heads of as many groups as they have row blocks are under way together.
 * The last heads, a tile for each multiprocessor, stand outside, for the end to be even. Long ones
 * whose keys and values fit into the cache are under way all together, longest tiles first; so are
 * those so long that a section is one head, if each has several tiles under way, which read the
 * same keys. That has not been tried with codes. */
static void plan_groups(double head_bytes, bool codes, const struct cuda_facts *facts,
                        fa3_tile_space *tiles) {
  enum { MOST_BLOCKS = 8, LEAST_TILES = 8 };
  if (!tiles->uneven || tiles->blocks < 2 || tiles->packed) return;
  const int32_t heads = tiles->heads * tiles->batches;
  if (tiles->blocks > MOST_BLOCKS) {
    const bool few = heads <= facts->multiprocessors / LEAST_TILES;
    if (head_bytes * heads <= KEPT_BYTES || (tiles->section == 1 && few && !codes))
      tiles->group = heads;
    return;
  }
  const int32_t last = facts->multiprocessors / tiles->blocks;
  const double group = cache_bytes / ((head_bytes > 1 ? head_bytes : 1) * tiles->blocks);
  if (heads <= last) {
    tiles->group = heads;
    return;
  }
  tiles->group = group >= heads ? heads : (int32_t)larger((int64_t)group, 1);
  tiles->grouped = (heads - last) / tiles->group * tiles->group;
}

/* Where tiles are fewer than multiprocessors, or leave many without work at the end, smaller ones
 * are faster: some warpgroups stand by. No result depends on it. */
static void plan_tile_size(const struct problem *problem, const struct cuda_facts *facts,
                           int64_t longest, int64_t all_heads, struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const int64_t rows = ROWS / plan->tile_heads;
  if (counts_tile_size(problem, kernel)) {
    const int64_t warpgroups = find_tile_size(problem, facts, kernel, plan->tile_heads).warpgroups;
    plan->tile_queries = (int32_t)(warpgroups * rows);
    plan->tiles.blocks = (int32_t)divide_up(longest, plan->tile_queries);
    return;
  }
  const bool grid = has_grid_steps(kernel);
  const int64_t all = grid && are_two(problem, kernel, rows, longest) ? 2 : kernel->tile_q / ROWS;
  const bool wide_codes = kernel->dtype == FA3_FLOAT8_E4M3 && kernel->tile_q == 2 * ROWS;
  const double gain = kernel->head_scales ? 0.98 : 0.95; /* or better, to be taken */
  double best = 0;
  for (int64_t warpgroups = all; warpgroups >= 1; warpgroups--) {
    const int64_t blocks = divide_up(longest, warpgroups * rows);
    const double time =
        grid ? grid_steps(problem, facts, kernel, warpgroups, plan->tile_heads)
             : grid_time(problem, facts, kernel, warpgroups, warpgroups * rows, blocks * all_heads);
    /* Side by side. One warpgroup of two has else been slower with codes. */
    const bool even = blocks > 1 && blocks * all_heads <= facts->multiprocessors;
    if (warpgroups < all && wide_codes &&
        !(even && kernel->head_scales && !kernel->most_keys && counts_tiles(problem)))
      return;
    /* As many tiles: a gain only where they run side by side, and the last was the shorter one, or
     * where all are full. */
    const bool full =
        grid && blocks > 1 && !plan->tiles.uneven && longest % (warpgroups * rows) == 0;
    const bool small = grid && warpgroups == 2 && small_tiles_pay(problem, kernel);
    if (warpgroups < all &&
        ((blocks == plan->tiles.blocks && !even && !full && !small) || time > gain * best))
      continue;
    best = time;
    plan->tiles.blocks = (int32_t)blocks;
    plan->tile_queries = (int32_t)(warpgroups * rows);
  }
}

/* Cuts the tiles of the last round into the rows of their warpgroups, where there is a
 * multiprocessor for each part, and a kernel that can (kCutTiles). All tiles then store row by row
 * where a sequence ends in the midst of a warp's rows: those of few keys would lose by it. */
static void cut_last_tiles(const struct problem *problem, const struct cuda_facts *facts,
                           struct forward_plan *plan) {
  const int64_t least_steps = 4;
  const struct kernel *kernel = plan->kernel;
  const int32_t tiles = fa3_tile_count(&plan->tiles), last = tiles % facts->multiprocessors;
  const int32_t parts = plan->tile_queries / (ROWS / plan->tile_heads);
  if (problem->window_right < MASK_UNBOUNDED || queries_vary(problem) || keys_vary(problem) ||
      problem->max_seqlen_k < least_steps * kernel->tile_k || kernel->dtype == FA3_FLOAT8_E4M3 ||
      ((kernel->pages || kernel->unpacked) && kernel->tile_q > 2 * ROWS) || parts == 1 ||
      tiles < facts->multiprocessors || last * parts > facts->multiprocessors)
    return;
  plan->tiles.cut = last;
  plan->tiles.parts = parts;
}

/* Where tiles are of two warpgroups, a kernel of two may be faster than one of three. */
static void take_small_tiles(const struct problem *problem, struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const int64_t rows = ROWS / plan->tile_heads; /* of a warpgroup */
  if (!kernel->head_scales || kernel->most_keys || plan->tile_queries != 2 * rows ||
      !small_tiles_pay(problem, kernel))
    return;
  const struct kernel *small = find_like(kernel, (struct kernel_need){.softcap = kernel->softcap,
                                                                      .head_scales = true,
                                                                      .small_tiles = true,
                                                                      .pages = has_pages(problem)});
  if (small) plan->kernel = small;
}

/* Whether a packed batch has so many fewer rows than its longest sequence would make that tiles
 * that are not there would cost more to pass over than to leave out. */
static bool lengths_differ(const struct problem *problem, int64_t blocks) {
  return problem->query.dtype != FA3_FLOAT8_E4M3 && blocks > 2 && filled_share(problem) < 0.75;
}

/* Whether the copy engine can step over all heads of a group: less than 2^40 bytes. */
static bool may_step(const struct operand *operand, int64_t group) {
  return operand->stride_head <
         (INT64_C(1) << 40) / (int64_t)fa3_dtype_size(operand->dtype) / group;
}

/* Whether the query heads of a group can. */
static bool may_share_tiles(const struct problem *problem) {
  const int64_t group = problem->heads_q / problem->heads_k;
  return group > 1 && group <= ROWS && may_step(&problem->query, group) &&
         may_step(&problem->output, group);
}

/* Whether query heads share tiles, and the grid. */
static fa3_status plan_tiles(const struct problem *problem, const struct cuda_facts *facts,
                             struct forward_plan *plan) {
  int64_t blocks_of = plan->kernel->tile_q / ROWS;
  int64_t group = problem->heads_q / problem->heads_k;
  int64_t longest = longest_query(problem);
  int64_t blocks = divide_up(longest, blocks_of * ROWS);
  int64_t heads = problem->heads_q;
  plan->tile_heads = 1;
  if (may_share_tiles(problem) && sharing_pays(problem, facts, plan->kernel)) {
    plan->tile_heads = (int32_t)group;
    blocks = divide_up(longest, blocks_of * (ROWS / group));
    heads = problem->heads_k;
  }
  int64_t all_heads, tiles;
  if (__builtin_mul_overflow(heads, problem->batch, &all_heads) ||
      __builtin_mul_overflow(blocks, all_heads, &tiles) || all_heads > MAX_TILES ||
      tiles > MAX_TILES || problem->heads_q > MAX_TILES)
    return set_error(FA3_UNSUPPORTED,
                     "%" PRId64 " heads of %" PRId64 " sequences of up to %" PRId64
                     " rows: more tiles than the CUDA kernels count",
                     problem->heads_q, problem->batch, longest);
  double head_bytes = (double)fa3_dtype_size(problem->key.dtype) * (double)problem->max_seqlen_k *
                      (double)(problem->head_dim + problem->value_head_dim) *
                      (double)problem->heads_k / (double)heads;
  double section = cache_bytes / (head_bytes > 1 ? head_bytes : 1);
  plan->tiles = (fa3_tile_space){.blocks = (int32_t)blocks,
                                 .heads = (int32_t)heads,
                                 .batches = (int32_t)problem->batch,
                                 .section = section >= (double)all_heads
                                                ? (int32_t)larger(all_heads, 1)
                                                : (int32_t)larger((int64_t)section, 1),
                                 .uneven = problem->window_right < MASK_UNBOUNDED,
                                 .packed = lengths_differ(problem, blocks)};
  plan_tile_size(problem, facts, longest, all_heads, plan);
  cut_last_tiles(problem, facts, plan);
  take_small_tiles(problem, plan);
  plan_groups(head_bytes, problem->query.dtype == FA3_FLOAT8_E4M3, facts, &plan->tiles);
  return FA3_OK;
}

fa3_status make_paged_tensor(const struct operand *operand, const char *name,
                             fa3_paged_tensor *tensor) {
  const int64_t element = (int64_t)fa3_dtype_size(operand->dtype);
  const uint64_t page = operand->batch > 1 ? (uint64_t)(operand->stride_batch * element) : 0;
  const uint64_t row = operand->rows > 1 ? (uint64_t)(operand->stride_row * element) : 0;
  const uint64_t head = operand->heads > 1 ? (uint64_t)(operand->stride_head * element) : 0;
  /* The largest power of two that divides them all, at most 64 KiB. */
  const uint64_t bits = page | row | head | 65536, step = bits & -bits;
  const double last = (double)(operand->batch - 1) * (double)page +
                      (double)(operand->rows - 1) * (double)row +
                      (double)(operand->heads - 1) * (double)head;
  if (last / (double)step >= (double)(UINT32_MAX - 1))
    return set_error(FA3_UNSUPPORTED,
                     "%s has pages whose rows are copied one by one, over %.0f GiB in steps of "
                     "%" PRIu64 " bytes: more than 2^32 steps",
                     name, last / (1 << 30), step);
  *tensor = (fa3_paged_tensor){.data = operand->data,
                               .step = (uint32_t)step,
                               .page_steps = (uint32_t)(page / step),
                               .row_steps = (uint32_t)(row / step),
                               .head_steps = (uint32_t)(head / step),
                               .head_dim = (int)operand->dim};
  return FA3_OK;
}

/* Rows that are in one page wherever a tile of keys begins. So few are copied faster by threads,
 * and a tile that begins anywhere, behind left padding, by them alone. */
static fa3_status plan_pages(const struct problem *problem, struct forward_plan *plan) {
  enum { LEAST_BOX = 8 };
  int64_t box = problem->key.rows, rest = plan->kernel->tile_k;
  if (!has_pages(problem)) return FA3_OK;
  while (rest > 0) {
    const int64_t divisor = rest;
    rest = box % rest;
    box = divisor;
  }
  if (!problem->leftpad_k && box >= LEAST_BOX) {
    plan->box = (int32_t)box;
    return FA3_OK;
  }
  fa3_paged_tensor tensor;
  if (fits_copy_engine(&problem->key)) TRY(make_paged_tensor(&problem->key, "key", &tensor));
  if (!fits_copy_engine(&problem->value)) return FA3_OK;
  return make_paged_tensor(&problem->value, "value", &tensor);
}

fa3_status reserve_counter(const struct problem *problem, struct reservation *counter,
                           size_t *workspace_size) {
  if (problem->window_right >= MASK_UNBOUNDED && !queries_vary(problem) && !keys_vary(problem))
    return FA3_OK;
  return reserve(workspace_size, counter, "a counter", 1, 1, sizeof(uint32_t));
}

static fa3_status plan_workspace(const struct problem *problem, const struct cuda_facts *facts,
                                 int64_t split_rows, struct cuda_plan *plan) {
  size_t *size = &plan->workspace_size;
  /* Of a negative scale the kernel takes the size, and minus the query. */
  const struct demand demands[] = {{TENSOR_query, problem->scale < 0 ? FORM_MINUS : FORM_TMA},
                                   {TENSOR_key, FORM_TMA},
                                   {TENSOR_value, FORM_TMA},
                                   {TENSOR_output, FORM_TMA},
                                   {TENSOR_sink, FORM_FLOATS}};
  TRY(reserve_splits(problem, facts, split_rows, &plan->forward.room, size));
  return plan_staging(problem, demands, sizeof demands / sizeof *demands, &plan->staging, size);
}

/* The kernels with code for pages can share keys out, and those for unpacked codes. */
static fa3_status plan_splits(const struct problem *problem, const struct cuda_facts *facts,
                              struct forward_plan *plan) {
  plan_forward_splits(problem, facts, may_share_tiles(problem), plan);
  if (plan->splits == 1 && !plan->shares) return FA3_OK;
  plan->combine = find_kernel(
      &(struct kernel_need){.kind = &combine_kind, .architecture = facts->architecture});
  if (plan->kernel->unpacked) return FA3_OK;
  return find_forward_kernel(facts->architecture, problem->query.dtype, problem->head_dim,
                             problem->value_head_dim, problem->features | FA3_FEATURE_PAGE_TABLE,
                             false, &plan->kernel);
}

/* Takes a kernel like the plan's for what else is needed, if there is one. */
static void take_like(const struct problem *problem, struct kernel_need need,
                      struct forward_plan *plan) {
  need.softcap = problem->features & FA3_FEATURE_SOFTCAP;
  need.pages = has_pages(problem);
  const struct kernel *other = find_like(plan->kernel, need);
  if (other) plan->kernel = other;
}

/* Where no mask hides any key, and all sequences have as many, their last tile may have few. */
static void take_short_tile(const struct problem *problem, struct forward_plan *plan) {
  const int64_t last = problem->max_seqlen_k % plan->kernel->tile_k;
  if (problem->window_left < MASK_UNBOUNDED || problem->window_right < MASK_UNBOUNDED ||
      keys_vary(problem) || problem->leftpad_k || plan->combine || last == 0)
    return;
  take_like(problem, (struct kernel_need){.last_keys = last}, plan);
}

/* Where a causal mask's diagonal begins at a multiple of a warpgroup's rows, it crosses one tile of
 * keys for each warpgroup, and no other tile needs a mask. Such kernels rely on whole tiles and on
 * output that the copy engine stores (store_by_tma, and no clip_output). */
static void take_diagonal(const struct problem *problem, struct forward_plan *plan) {
  if (problem->window_left < MASK_UNBOUNDED || problem->window_right != 0 ||
      queries_vary(problem) || keys_vary(problem) || problem->leftpad_k || problem->diagonal ||
      (problem->max_seqlen_k - problem->max_seqlen_q) % ROWS != 0 || plan->combine ||
      plan->tile_heads > 1 || plan->tile_queries < plan->kernel->tile_q)
    return;
  take_like(problem, (struct kernel_need){.diagonal = true}, plan);
}

/* Blocks stay until the work is done, as many as run at the same time: their shared memory leaves
 * room for one on each multiprocessor. With one tile for each there is nothing to hand out. */
static void plan_grid(const struct cuda_facts *facts, struct forward_plan *plan) {
  const int32_t tiles = fa3_part_count(&plan->tiles) * plan->splits;
  plan->workers = tiles < facts->multiprocessors ? tiles : facts->multiprocessors;
  if (plan->shares) plan->workers = plan->shares;
  plan->counted = plan->next_tile.used && tiles > plan->workers && !plan->shares;
}

/* On unpacked codes, so many key heads at a time. Few queries beside others are for the kernels on
 * codes. */
static fa3_status plan_unpacked(const struct problem *codes, const struct cuda_facts *facts,
                                int64_t heads, struct cuda_plan *plan) {
  struct forward_plan *forward = &plan->forward;
  *plan = (struct cuda_plan){.forward = {.splits = 1}};
  const struct problem all = unpacked_problem(codes, &forward->unpack, NULL);
  const struct problem part = part_of_heads(&all, 0, heads);
  forward->kernel = find_kernel(&(struct kernel_need){.kind = &forward_kind,
                                                      .architecture = facts->architecture,
                                                      .dtype = all.query.dtype,
                                                      .head_dim = all.head_dim,
                                                      .value_head_dim = all.value_head_dim,
                                                      .unpacked = unpacked_form(codes)});
  forward->unpack.heads = heads;
  forward->unpack.kernel =
      find_kernel(&(struct kernel_need){.kind = &unpack_kind, .architecture = facts->architecture});
  if (!forward->kernel || !forward->unpack.kernel)
    return no_kernel(all.head_dim, all.value_head_dim);
  TRY(check_lengths(codes));
  TRY(check_scale(codes));
  TRY(decode_check_inputs(codes));
  TRY(plan_tiles(&part, facts, forward));
  TRY(plan_few_queries(codes, facts, &forward->few));
  TRY(plan_splits(&part, facts, forward));
  TRY(reserve_unpacked(codes, &forward->unpack.room, &plan->workspace_size));
  TRY(reserve_counter(&all, &forward->next_tile, &plan->workspace_size));
  TRY(plan_workspace(&all, facts, larger(chunk_rows(codes, facts), forward_split_rows(&all, facts)),
                     plan));
  plan_grid(facts, forward);
  return FA3_OK;
}

fa3_status plan_forward(const struct problem *problem, const struct cuda_facts *facts,
                        struct cuda_plan *plan) {
  struct forward_plan *forward = &plan->forward;
  const bool fp8 = problem->query.dtype == FA3_FLOAT8_E4M3;
  const int64_t unpacked = unpacked_heads(problem, facts);
  if (unpacked) return plan_unpacked(problem, facts, unpacked, plan);
  if (decode_takes(problem)) return plan_decode(problem, facts, plan);
  *plan = (struct cuda_plan){.forward = {.splits = 1}};
  TRY(find_forward_kernel(
      facts->architecture, problem->query.dtype, problem->head_dim, problem->value_head_dim,
      problem->features,
      scales_of_heads(problem) && problem->max_seqlen_k <= FA3_FORWARD_FP8_HEADS_KEYS,
      &forward->kernel));
  if (fp8) take_transposed(problem, facts, forward);
  TRY(check_lengths(problem));
  TRY(check_scale(problem));
  const struct kernel *largest = forward->kernel;
  if (fp8) take_one_step(problem, facts, forward);
  TRY(plan_tiles(problem, facts, forward));
  TRY(plan_pages(problem, forward));
  TRY(reserve_counter(problem, &forward->next_tile, &plan->workspace_size));
  if (fp8) {
    TRY(plan_codes(problem, facts, largest, plan));
  } else {
    TRY(plan_few_queries(problem, facts, &forward->few));
    TRY(plan_splits(problem, facts, forward));
    take_short_tile(problem, forward);
    take_diagonal(problem, forward);
    TRY(plan_workspace(problem, facts, forward_split_rows(problem, facts), plan));
  }
  plan_grid(facts, forward);
  if (fp8) take_kernels_for_caches(problem, facts, plan);
  return FA3_OK;
}
