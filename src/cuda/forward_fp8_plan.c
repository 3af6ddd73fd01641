#include "cuda/forward_fp8_plan.h"

#include <math.h>

#include "cuda/decode_plan.h"
#include "cuda/decode_splits.h"
#include "cuda/forward_steps.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "kernels/decode_params.h"
#include "kernels/mask.h"

enum { MOST_MULTIPROCESSORS = 144 /* that a Hopper GPU can have */ };

static int32_t fp8_shared_bytes(const struct kernel *kernel) {
  return FA3_FORWARD_FP8_SHARED_BYTES(kernel->head_dim, kernel->tile_q, kernel->tile_k,
                                      kernel->transposed);
}

const struct kernel_kind forward_fp8_kind = {
    .phase = FA3_FORWARD, .entries = {"forward_fp8"}, .shared_bytes = fp8_shared_bytes};

bool scales_of_heads(const struct problem *problem) {
  return problem->key_scale_rows == 0 && problem->value_scale_rows == 0;
}

/* What transposes values ahead of an FP8 kernel; null: there is none for its head dim. */
static const struct kernel *find_transposing(const struct problem *problem,
                                             const struct kernel *forward) {
  if (!scales_of_heads(problem) || has_pages(problem)) return NULL;
  return find_like(forward, (struct kernel_need){.kind = &transpose_values_kind});
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

void take_transposed(const struct problem *problem, const struct cuda_facts *facts,
                     struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel, *transposing = find_transposing(problem, kernel);
  if (!transposing || problem->max_seqlen_k > FA3_FORWARD_FP8_HEADS_KEYS ||
      !transposing_pays(problem, facts))
    return;
  take_transpose(problem, transposing, &plan->transpose);
  if (plan->transpose.kernel)
    plan->kernel = find_like(
        kernel,
        (struct kernel_need){.softcap = kernel->softcap, .head_scales = true, .transposed = true});
}

void take_one_step(const struct problem *problem, const struct cuda_facts *facts,
                   struct forward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const bool wide = kernel->head_dim > 64;
  if (!kernel->head_scales || has_pages(problem) ||
      problem->max_seqlen_k <= (int64_t)kernel->tile_k * (wide ? 2 : 1))
    return;
  const struct kernel *other =
      find_like(kernel, (struct kernel_need){.softcap = problem->features & FA3_FEATURE_SOFTCAP,
                                             .head_scales = true,
                                             .most_keys = problem->max_seqlen_k});
  if (!other) return;
  const double tiles = (double)divide_up(longest_query(problem), other->tile_q) *
                       (double)problem->heads_q * (double)problem->batch;
  if (wide && problem->window_right < MASK_UNBOUNDED && tiles > facts->multiprocessors) return;
  plan->kernel = other;
}

/* Whether a call of codes may be one for caches_are_faster: all sequences have the same number of
 * queries, keys are not packed, and num_splits does not forbid splits. */
static bool may_split_codes(const struct problem *problem) {
  return !queries_vary(problem) && !problem->cu_seqlens_k && problem->num_splits != 1;
}

/* The FP8 kernel takes tensors where they lie: copies would cost what FP8 gains. */
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

static fa3_status plan_codes_workspace(const struct problem *problem,
                                       const struct cuda_facts *facts, const struct kernel *kernel,
                                       struct cuda_plan *plan) {
  struct forward_plan *forward = &plan->forward;
  const struct demand demands[] = {{TENSOR_sink, FORM_FLOATS}};
  size_t *size = &plan->workspace_size;
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

fa3_status plan_codes(const struct problem *problem, const struct cuda_facts *facts,
                      const struct kernel *largest, struct cuda_plan *plan) {
  TRY(check_fp8_operands(problem));
  if (has_pages(problem)) TRY(plan_few_queries(problem, facts, &plan->forward.few));
  return plan_codes_workspace(problem, facts, largest, plan);
}

/* Whether a packed batch of codes lacks so many tiles that the kernels for caches, which pass over
 * none, are faster: the forward kernel for codes numbers them all. It is the faster one where 15 of
 * 16 lack, as measured. */
static bool lacks_most_tiles(const struct problem *problem) {
  return filled_share(problem) < 1.0 / 16;
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

void take_kernels_for_caches(const struct problem *problem, const struct cuda_facts *facts,
                             struct cuda_plan *plan) {
  const bool faster = has_pages(problem) ? lacks_most_tiles(problem)
                                         : caches_are_faster(problem, facts, &plan->forward);
  if (!faster) return;
  struct cuda_plan decode;
  const struct error_message before = error_keep();
  if (plan_decode(problem, facts, &decode)) {
    error_put_back(&before);
    return;
  }
  const size_t size = plan->workspace_size; /* it never falls when a dimension grows */
  *plan = decode;
  if (plan->workspace_size < size) plan->workspace_size = size;
}
