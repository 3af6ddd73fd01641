#include "cuda/forward_plan.h"

#include <inttypes.h>
#include <math.h>

#include "cuda/decode_splits.h"
#include "cuda/forward_splits.h"
#include "cuda/forward_steps.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/decode_params.h"
#include "kernels/mask.h"

enum { ROWS = 64, MOST_MULTIPROCESSORS = 144 /* that a Hopper GPU can have */ };

/* Bytes of key and value that stay in the L2 cache while other tiles of the same heads use them: a
 * part of Hopper's 50 MB. */
static const double cache_bytes = 10e6;

static bool has_pages(const struct problem *problem) {
  return problem->features & FA3_FEATURE_PAGE_TABLE;
}

static int32_t shared_bytes(const struct kernel *kernel) {
  return FA3_FORWARD_SHARED_BYTES(kernel->head_dim, kernel->value_head_dim, kernel->tile_q,
                                  kernel->tile_k);
}

const struct kernel_kind forward_kind = {
    .phase = FA3_FORWARD, .entries = {"forward"}, .shared_bytes = shared_bytes};

static int32_t fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_FORWARD_FP8_SHARED_BYTES(kernel->head_dim, kernel->tile_q, kernel->tile_k,
                                      kernel->transposed);
}

const struct kernel_kind forward_fp8_kind = {
    .phase = FA3_FORWARD, .entries = {"forward_fp8"}, .shared_bytes = fp8_shared_bytes};

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
      (kernel->pages && kernel->tile_q > 2 * ROWS) || parts == 1 ||
      tiles < facts->multiprocessors || last * parts > facts->multiprocessors)
    return;
  plan->tiles.cut = last;
  plan->tiles.parts = parts;
}

/* A kernel of the same head dim for what else the call needs; null: there is none. */
static const struct kernel *find_like(const struct kernel *kernel, const struct problem *problem,
                                      const struct cuda_facts *facts, struct kernel_need need) {
  need.kind = kernel->kind;
  need.architecture = facts->architecture;
  need.dtype = problem->query.dtype;
  need.head_dim = kernel->head_dim;
  need.value_head_dim = kernel->value_head_dim;
  const struct kernel *other = find_kernel(&need);
  return other && other->head_dim == kernel->head_dim ? other : NULL;
}

/* Where tiles are of two warpgroups, a kernel of two may be faster than one of three. */
static void take_small_tiles(const struct problem *problem, const struct cuda_facts *facts,
                             struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const int64_t rows = ROWS / plan->tile_heads; /* of a warpgroup */
  if (!kernel->head_scales || kernel->most_keys || plan->tile_queries != 2 * rows ||
      !small_tiles_pay(problem, kernel))
    return;
  const struct kernel *small = find_like(kernel, problem, facts,
                                         (struct kernel_need){.softcap = kernel->softcap,
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

/* Whether a packed batch of codes lacks so many tiles that the kernels for caches, which pass over
 * none, are faster: the forward kernel for codes numbers them all. It is the faster one where 15 of
 * 16 lack, as measured. */
static bool lacks_most_tiles(const struct problem *problem) {
  return filled_share(problem) < 1.0 / 16;
}

/* Whether a call of codes may be one for caches_are_faster: all sequences have the same number of
 * queries, keys are not packed, and num_splits does not forbid splits. */
static bool may_split_codes(const struct problem *problem) {
  return !queries_vary(problem) && !problem->cu_seqlens_k && problem->num_splits != 1;
}

/* Whether the kernels for caches are faster than the forward kernel for codes, because that has
 * fewer tiles than multiprocessors. They split keys, but take longer for each, and leave no
 * multiprocessor free. Times in microseconds, as measured (docs/notes/hopper-fp8.md); those of
 * chunk_fp8 stand for all kernels of many keys. */
static bool caches_are_faster(const struct problem *problem, const struct cuda_facts *facts,
                              const struct forward_plan *plan) {
  enum { LEAST_SPLIT_KEYS = 256 };
  static const struct {
    double key;                    /* of a round of the forward kernel's tiles */
    double few_keys;               /* of a call without chunks, by the library's own splits */
    double split_start, split_key; /* of a tile of chunk_fp8; and for each key, if it is alone */
  } times[] = {{5.6e-3, 10.5, 12, 15.5e-3}, {6.9e-3, 10.5, 12, 18.8e-3}, {11.8e-3, 14, 25, 41e-3}};
  const int64_t head_dim = plan->kernel->head_dim, queries = longest_query(problem);
  const int i = head_dim > 128 ? 2 : head_dim > 64;
  const double start = 6, gain = 0.95;
  if (!may_split_codes(problem) || problem->window_left < MASK_UNBOUNDED || queries == 0 ||
      facts->multiprocessors < facts->most_multiprocessors)
    return false;
  const double most = facts->most_multiprocessors, keys = (double)problem->max_seqlen_k;
  const double rounds = ceil(fa3_tile_count(&plan->tiles) / most);
  const double limit = gain * (start + times[i].key * keys * rounds);
  if (chunk_rows(problem, facts) == 0) return !problem->num_splits && times[i].few_keys < limit;
  const double tiles = (double)divide_up(decode_rows(problem, queries), FA3_CHUNK_FP8_ROWS) *
                       (double)problem->heads_k * (double)problem->batch;
  double splits = keys / LEAST_SPLIT_KEYS;
  if (problem->num_splits) splits = fmin(splits, (double)problem->num_splits);
  const double share = fmax(tiles / most, 1 / fmax(splits, 1));
  const double seen = keys_seen(problem, (double)queries, keys) * share;
  return times[i].split_start + times[i].split_key * seen < limit;
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
  take_small_tiles(problem, facts, plan);
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

/* Tiles of unequal length go to whoever is free. */
static fa3_status reserve_counter(const struct problem *problem, struct forward_plan *plan,
                                  size_t *size) {
  if (!plan->tiles.uneven && !queries_vary(problem) && !keys_vary(problem)) return FA3_OK;
  return reserve(size, &plan->next_tile, "a counter", 1, 1, sizeof(uint32_t));
}

static fa3_status plan_workspace(const struct problem *problem, const struct cuda_facts *facts,
                                 struct cuda_plan *plan) {
  size_t *size = &plan->workspace_size;
  /* Of a negative scale the kernel takes the size, and minus the query. */
  const struct demand demands[] = {{TENSOR_query, problem->scale < 0 ? FORM_MINUS : FORM_TMA},
                                   {TENSOR_key, FORM_TMA},
                                   {TENSOR_value, FORM_TMA},
                                   {TENSOR_output, FORM_TMA},
                                   {TENSOR_sink, FORM_FLOATS}};
  TRY(reserve_counter(problem, &plan->forward, size));
  TRY(reserve_splits(problem, facts, forward_split_rows(problem, facts), &plan->forward.room,
                     size));
  return plan_staging(problem, demands, sizeof demands / sizeof *demands, &plan->staging, size);
}

/* Whether keys and values have no scale of fewer rows than a sequence's. */
static bool scales_of_heads(const struct problem *problem) {
  return problem->key_scale_rows == 0 && problem->value_scale_rows == 0;
}

/* What transposes values ahead of an FP8 kernel; null: there is none for its head dim. */
static const struct kernel *find_transposing(const struct problem *problem,
                                             const struct kernel *forward) {
  if (!scales_of_heads(problem) || has_pages(problem)) return NULL;
  const struct kernel *kernel =
      find_kernel(&(struct kernel_need){.kind = &transpose_values_kind,
                                        .architecture = forward->architecture,
                                        .dtype = problem->value.dtype,
                                        .head_dim = forward->head_dim,
                                        .value_head_dim = forward->value_head_dim});
  return kernel && kernel->head_dim == forward->head_dim ? kernel : NULL;
}

/* The FP8 kernel takes tensors where they lie: they are small, and copies would cost what FP8
 * gains.
 */
static fa3_status check_fp8_operands(const struct problem *problem) {
  static const enum tensor tensors[] = {TENSOR_query, TENSOR_key, TENSOR_value, TENSOR_output};
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
    if (!fits_copy_engine(problem_operand(problem, tensors[i])))
      return set_error(FA3_UNSUPPORTED,
                       "%s does not start at a multiple of 16 bytes, or has strides that are no "
                       "multiples of it: the FP8 kernel takes no such tensor",
                       tensor_rows[tensors[i]].name);
  if (problem->scale >= 0) return FA3_OK;
  return set_error(FA3_UNSUPPORTED, "softmax_scale is %g: the FP8 kernel takes none below 0",
                   (double)problem->scale);
}

/* `kernel` has the largest tiles: calls with fewer queries, which take others, need no more room,
 * nor do those that the decode kernels take.
 */
static fa3_status plan_fp8_workspace(const struct problem *problem, const struct cuda_facts *facts,
                                     const struct kernel *kernel, struct cuda_plan *plan) {
  struct forward_plan *forward = &plan->forward;
  const struct demand demands[] = {{TENSOR_sink, FORM_FLOATS}};
  size_t *size = &plan->workspace_size;
  TRY(reserve_counter(problem, forward, size));
  const int64_t sums = FA3_FORWARD_FP8_SUMS(kernel->head_dim, kernel->tile_q);
  const bool splits = has_pages(problem) || may_split_codes(problem);
  TRY(reserve_splits(problem, facts, splits ? chunk_rows(problem, facts) : 0, &forward->room,
                     size));
  if (sums && problem->max_seqlen_k > FA3_FORWARD_FP8_PERIOD)
    TRY(reserve(size, &forward->sums, "sums", MOST_MULTIPROCESSORS, sums, sizeof(float)));
  const struct kernel *transposing = find_transposing(problem, kernel);
  if (transposing) TRY(reserve_transposed(problem, transposing, &forward->transpose, size));
  return plan_staging(problem, demands, sizeof demands / sizeof *demands, &plan->staging, size);
}

/* The kernels with code for pages can share keys out. */
static fa3_status plan_splits(const struct problem *problem, const struct cuda_facts *facts,
                              struct forward_plan *plan) {
  plan_forward_splits(problem, facts, may_share_tiles(problem), plan);
  if (plan->splits == 1 && !plan->shares) return FA3_OK;
  plan->combine = find_kernel(
      &(struct kernel_need){.kind = &combine_kind, .architecture = facts->architecture});
  return find_forward_kernel(facts->architecture, problem->query.dtype, problem->head_dim,
                             problem->value_head_dim, problem->features | FA3_FEATURE_PAGE_TABLE,
                             false, &plan->kernel);
}

/* Where no mask hides any key, and all sequences have as many, their last tile may have few. */
static void take_short_tile(const struct problem *problem, const struct cuda_facts *facts,
                            struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const int64_t keys = problem->max_seqlen_k, last = keys % kernel->tile_k;
  if (problem->window_left < MASK_UNBOUNDED || problem->window_right < MASK_UNBOUNDED ||
      keys_vary(problem) || problem->leftpad_k || plan->combine || last == 0)
    return;
  const struct kernel *other =
      find_like(kernel, problem, facts,
                (struct kernel_need){.softcap = problem->features & FA3_FEATURE_SOFTCAP,
                                     .pages = has_pages(problem),
                                     .last_keys = last});
  if (other) plan->kernel = other;
}

/* Blocks stay until the work is done, as many as run at the same time: their shared memory leaves
 * room for one on each multiprocessor. With one tile for each there is nothing to hand out. */
static void plan_grid(const struct cuda_facts *facts, struct forward_plan *plan) {
  const int32_t tiles = fa3_part_count(&plan->tiles) * plan->splits;
  plan->workers = tiles < facts->multiprocessors ? tiles : facts->multiprocessors;
  if (plan->shares) plan->workers = plan->shares;
  plan->counted = plan->next_tile.used && tiles > plan->workers && !plan->shares;
}

/* Whether V^T is made before the kernel of head dim 256, which then takes some 6% less time than
 * one that makes its own: it pays where V is used often enough (docs/notes/hopper-fp8.md). */
static bool transposing_pays(const struct problem *problem, const struct cuda_facts *facts) {
  const double saved = 0.065 / 900e12 /* of a FLOP */, launch = 2.5e-6;
  const double batch = (double)larger(problem->batch, 1), heads = (double)problem->heads_q;
  double queries = (double)problem->max_seqlen_q, keys = (double)problem->max_seqlen_k;
  if (problem->cu_seqlens_q) queries = (double)problem->rows_q / batch;
  if (problem->cu_seqlens_k) keys = (double)problem->key.rows / batch;
  const double flops = 4.0 * 256 * batch * heads * queries * keys_seen(problem, queries, keys);
  const double bytes = 2.0 * 256 * batch * (double)problem->heads_k * keys;
  return saved * flops > launch + reading_seconds(facts, bytes);
}

/* Takes the kernel whose values are transposed ahead, if there is one and it is faster. */
static void take_transposed(const struct problem *problem, const struct cuda_facts *facts,
                            struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel, *transposing = find_transposing(problem, kernel);
  if (!transposing || problem->max_seqlen_k > FA3_FORWARD_FP8_HEADS_KEYS ||
      !transposing_pays(problem, facts))
    return;
  take_transpose(problem, transposing, &plan->transpose);
  if (plan->transpose.kernel)
    plan->kernel = find_like(
        kernel, problem, facts,
        (struct kernel_need){.softcap = kernel->softcap, .head_scales = true, .transposed = true});
}

/* Takes the kernel that sees all keys of a sequence in one step, if there is one and they would be
 * more of another's. At head dim 128 it has two warpgroups: under a mask several rounds of tiles of
 * three are faster. */
static void take_one_step(const struct problem *problem, const struct cuda_facts *facts,
                          struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const bool wide = kernel->head_dim > 64;
  if (!kernel->head_scales || has_pages(problem) ||
      problem->max_seqlen_k <= (int64_t)kernel->tile_k * (wide ? 2 : 1))
    return;
  const struct kernel *other =
      find_like(kernel, problem, facts,
                (struct kernel_need){.softcap = problem->features & FA3_FEATURE_SOFTCAP,
                                     .head_scales = true,
                                     .most_keys = problem->max_seqlen_k});
  if (!other) return;
  const double tiles = (double)divide_up(longest_query(problem), other->tile_q) *
                       (double)problem->heads_q * (double)problem->batch;
  if (wide && problem->window_right < MASK_UNBOUNDED && tiles > facts->multiprocessors) return;
  plan->kernel = other;
}

fa3_status plan_forward(const struct problem *problem, const struct cuda_facts *facts,
                        struct cuda_plan *plan) {
  struct forward_plan *forward = &plan->forward;
  const bool fp8 = problem->query.dtype == FA3_FLOAT8_E4M3;
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
  if (fp8) {
    TRY(check_fp8_operands(problem));
    if (has_pages(problem)) TRY(plan_few_queries(problem, facts, &forward->few));
    TRY(plan_fp8_workspace(problem, facts, largest, plan));
    if (has_pages(problem) ? lacks_most_tiles(problem)
                           : caches_are_faster(problem, facts, forward)) {
      struct cuda_plan decode;
      const struct error_message before = error_keep();
      if (!plan_decode(problem, facts, &decode)) {
        const size_t size = plan->workspace_size; /* it never falls when a dimension grows */
        *plan = decode;
        if (plan->workspace_size < size) plan->workspace_size = size;
        return FA3_OK;
      }
      error_put_back(&before);
    }
  } else {
    TRY(plan_few_queries(problem, facts, &forward->few));
    TRY(plan_splits(problem, facts, forward));
    take_short_tile(problem, facts, forward);
    TRY(plan_workspace(problem, facts, plan));
  }
  plan_grid(facts, forward);
  return FA3_OK;
}
