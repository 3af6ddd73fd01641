#include "problem.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "error.h"
#include "integer.h"
#include "operand.h"
#include "scale.h"

/* A part of the keys that every engine can begin with. */
enum { SPLIT_KEYS_STEP = 64 };

/* What the argument structs of all passes have beside tensors. */
struct options {
  fa3_device device;
  void *stream;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  uint32_t flags;
  float softmax_scale;
  float softcap;
  int32_t num_threads;
  int64_t window_left;
  int64_t window_right;
  void *workspace;
  size_t workspace_size;
  int32_t reserved_multiprocessors;
  int32_t num_splits;
  int64_t split_keys;
  uint64_t seed;
};
#define OPTIONS_OF(args)                                                                      \
  {                                                                                           \
    .device = (args)->device, .stream = (args)->stream, .max_seqlen_q = (args)->max_seqlen_q, \
    .max_seqlen_k = (args)->max_seqlen_k, .flags = (args)->flags,                             \
    .softmax_scale = (args)->softmax_scale, .softcap = (args)->softcap,                       \
    .num_threads = (args)->num_threads, .window_left = (args)->window_left,                   \
    .window_right = (args)->window_right, .workspace = (args)->workspace,                     \
    .workspace_size = (args)->workspace_size,                                                 \
    .reserved_multiprocessors = (args)->reserved_multiprocessors                              \
  }

static struct options options_of(fa3_phase phase, const void *args) {
  if (phase == FA3_BACKWARD) return (struct options)OPTIONS_OF((const fa3_backward_args *)args);
  if (phase == FA3_APPEND) {
    const fa3_append_args *append = args;
    return (struct options){.device = append->device,
                            .stream = append->stream,
                            .max_seqlen_q = append->max_seqlen_q,
                            .flags = append->flags,
                            .num_threads = append->num_threads};
  }
  if (phase == FA3_COMBINE) {
    const fa3_combine_args *combine = args;
    return (struct options){
        .device = combine->device, .stream = combine->stream, .num_threads = combine->num_threads};
  }
  if (phase == FA3_QUANTIZE) {
    const fa3_quantize_args *quantize = args;
    return (struct options){.device = quantize->device,
                            .stream = quantize->stream,
                            .max_seqlen_q = quantize->max_seqlen_q,
                            .flags = quantize->flags,
                            .num_threads = quantize->num_threads,
                            .seed = quantize->seed};
  }
  const fa3_forward_args *forward = args;
  struct options options = OPTIONS_OF(forward);
  options.num_splits = forward->num_splits;
  options.split_keys = forward->split_keys;
  return options;
}

static fa3_status check_device_fields(const struct options *options) {
  bool cpu = options->device.type == FA3_CPU;
  if (!cpu && options->device.type != FA3_CUDA)
    return set_error(FA3_INVALID_DEVICE,
                     "device.type is %" PRId32 ": expected FA3_CPU (0) or FA3_CUDA (1)",
                     options->device.type);
  if (options->device.index < 0 || (cpu && options->device.index != 0))
    return set_error(FA3_INVALID_DEVICE, "device.index is %" PRId32 ": expected %s",
                     options->device.index, cpu ? "0 for the CPU" : "0 or more");
  if (cpu && options->stream)
    return set_error(FA3_INVALID_STREAM, "stream is %p: expected null, the CPU has no streams",
                     options->stream);
  if (options->num_threads < 0 || (!cpu && options->num_threads))
    return set_error(FA3_INVALID_THREADS, "num_threads is %" PRId32 ": expected %s",
                     options->num_threads, cpu ? "0 or more" : "0 for a GPU");
  if (options->reserved_multiprocessors < 0 || (cpu && options->reserved_multiprocessors))
    return set_error(FA3_INVALID_THREADS, "reserved_multiprocessors is %" PRId32 ": expected %s",
                     options->reserved_multiprocessors, cpu ? "0 for the CPU" : "0 or more");
  return FA3_OK;
}

static fa3_status check_flags(const struct options *options, fa3_phase phase) {
  uint32_t known = FA3_CAUSAL | FA3_WINDOW | FA3_SCALE;
  if (phase == FA3_BACKWARD) known |= FA3_ACCUMULATE | FA3_DETERMINISTIC;
  if (phase == FA3_APPEND) known = FA3_ROTARY_INTERLEAVED | FA3_SEPARATE_SEQUENCES;
  if (phase == FA3_QUANTIZE) known = FA3_ROTARY_INTERLEAVED | FA3_SUBTRACT_MEAN | FA3_ROTATE;
  const uint32_t refused = options->flags & ~known, first = refused & -refused;
  if (first > FA3_SEPARATE_SEQUENCES)
    return set_error(FA3_INVALID_FLAGS, "flags is 0x%" PRIx32 ": 0x%" PRIx32 " is unknown",
                     options->flags, first);
  if (first)
    return set_error(FA3_INVALID_FLAGS, "flags is 0x%" PRIx32 ": 0x%" PRIx32 " is not for fa3_%s",
                     options->flags, first, arguments_of(phase)->name);
  if (options->flags & FA3_SCALE) {
    if (!isfinite(options->softmax_scale))
      return set_error(FA3_INVALID_SCALE, "softmax_scale is %g: expected a finite number",
                       (double)options->softmax_scale);
  } else if (options->softmax_scale != 0) {
    return set_error(FA3_INVALID_FLAGS, "softmax_scale is %g, but flags lack FA3_SCALE",
                     (double)options->softmax_scale);
  }
  if (options->seed && !(options->flags & FA3_ROTATE))
    return set_error(FA3_INVALID_FLAGS, "seed is %" PRIu64 ", but flags lack FA3_ROTATE",
                     options->seed);
  /* The inverse of a smaller one is no float. */
  if (options->softcap != 0 && (!(options->softcap >= FLT_MIN) || !isfinite(options->softcap)))
    return set_error(FA3_INVALID_SOFTCAP, "softcap is %g: expected 0 or a finite number from %g on",
                     (double)options->softcap, (double)FLT_MIN);
  if (options->flags & FA3_WINDOW) {
    if (options->window_left < -1)
      return set_error(FA3_INVALID_WINDOW, "window_left is %" PRId64 ": expected -1 or more",
                       options->window_left);
    if (options->window_right < -1)
      return set_error(FA3_INVALID_WINDOW, "window_right is %" PRId64 ": expected -1 or more",
                       options->window_right);
  } else if (options->window_left || options->window_right) {
    return set_error(FA3_INVALID_FLAGS, "window_%s is %" PRId64 ", but flags lack FA3_WINDOW",
                     options->window_left ? "left" : "right",
                     options->window_left ? options->window_left : options->window_right);
  }
  return FA3_OK;
}

static fa3_status check_splits(const struct options *options) {
  if (options->num_splits < 0)
    return set_error(FA3_INVALID_SPLITS, "num_splits is %" PRId32 ": expected 0 or more",
                     options->num_splits);
  if (options->split_keys < 0 || options->split_keys % SPLIT_KEYS_STEP)
    return set_error(FA3_INVALID_SPLITS, "split_keys is %" PRId64 ": expected a multiple of %d",
                     options->split_keys, SPLIT_KEYS_STEP);
  if (options->num_splits && options->split_keys)
    return set_error(FA3_INVALID_SPLITS,
                     "num_splits is %" PRId32 ", but split_keys is %" PRId64
                     ": expected one of them",
                     options->num_splits, options->split_keys);
  return FA3_OK;
}

static void set_mask(const struct options *options, struct problem *problem) {
  problem->window_left = MASK_UNBOUNDED;
  problem->window_right = MASK_UNBOUNDED;
  if (options->flags & FA3_WINDOW) {
    if (options->window_left >= 0 && options->window_left < MASK_UNBOUNDED)
      problem->window_left = options->window_left;
    if (options->window_right >= 0 && options->window_right < MASK_UNBOUNDED)
      problem->window_right = options->window_right;
    problem->features |= FA3_FEATURE_WINDOW;
  }
  if (options->flags & FA3_CAUSAL) {
    problem->window_right = 0;
    problem->features |= FA3_FEATURE_CAUSAL;
  }
}

/* Tensors that do not go together, or not with the flags. */
static fa3_status check_combinations(const struct problem *problem) {
  const fa3_features features = problem->features;
  if (features & FA3_FEATURE_BATCH_INDEX && features & FA3_FEATURE_VARLEN_KEY)
    return set_error(FA3_INVALID_FLAGS,
                     "cache_batch_index is given with cu_seqlens_k: it picks entries of a dense "
                     "key and value");
  if (features & FA3_FEATURE_PAGE_TABLE &&
      features & (FA3_FEATURE_VARLEN_KEY | FA3_FEATURE_BATCH_INDEX))
    return set_error(FA3_INVALID_FLAGS, "page_table is given with %s",
                     features & FA3_FEATURE_VARLEN_KEY ? "cu_seqlens_k" : "cache_batch_index");
  if (features & FA3_FEATURE_DIAGONAL && !(features & (FA3_FEATURE_CAUSAL | FA3_FEATURE_WINDOW)))
    return set_error(FA3_INVALID_FLAGS,
                     "diagonal is given, but flags lack FA3_CAUSAL and FA3_WINDOW");
  return FA3_OK;
}

/* What goes together in rotary embedding of a tensor. */
static fa3_status check_rotary(const struct options *options, const struct problem *problem,
                               const char *turned) {
  const struct operand *cos = &problem->rotary_cos, *sin = &problem->rotary_sin;
  if (!cos->dtype != !sin->dtype)
    return set_error(FA3_INVALID_FLAGS, "rotary_%s is given without rotary_%s",
                     cos->dtype ? "cos" : "sin", cos->dtype ? "sin" : "cos");
  if (!cos->dtype && (problem->positions.dtype || options->flags & FA3_ROTARY_INTERLEAVED))
    return set_error(
        FA3_INVALID_FLAGS, "%s without rotary_cos",
        problem->positions.dtype ? "positions is given" : "flags have FA3_ROTARY_INTERLEAVED");
  if (2 * cos->dim > problem->head_dim)
    return set_error(FA3_INVALID_SHAPE,
                     "rotary_cos.shape[1] is %" PRId64 ": expected at most half of %" PRId64
                     ", %s's head dim",
                     cos->dim, problem->head_dim, turned);
  return FA3_OK;
}

/* And in an append. */
static fa3_status check_append(const struct options *options, const struct problem *problem) {
  const struct operand *query = &problem->query, *rotated = &problem->rotated_query;
  TRY(check_rotary(options, problem, "new_key"));
  if (!query->dtype != !rotated->dtype)
    return set_error(FA3_INVALID_FLAGS, "%s is given without %s",
                     query->dtype ? "query" : "rotated_query",
                     query->dtype ? "rotated_query" : "query");
  if (query->dtype && !problem->rotary_cos.dtype)
    return set_error(FA3_INVALID_FLAGS, "query is given without rotary_cos");
  if (problem->rotary_cos.dtype && problem->new_key.dtype == FA3_FLOAT8_E4M3)
    return set_error(FA3_INVALID_DTYPE,
                     "rotary_cos is given, but new_key.dtype is FA3_FLOAT8_E4M3: codes are copied "
                     "as they are");
  if (problem->query.dtype && problem->query.dtype != problem->new_key.dtype)
    return set_error(FA3_INVALID_DTYPE, "query.dtype is %" PRId32 ": expected new_key's, %" PRId32,
                     problem->query.dtype, problem->new_key.dtype);
  return FA3_OK;
}

static fa3_status check_combine(const struct problem *problem) {
  const int64_t batch = problem->output.batch, parts = problem->partial_output.batch;
  if (batch ? parts % batch == 0 : parts == 0) return FA3_OK;
  return set_error(FA3_INVALID_SHAPE,
                   "partial_output.shape[0] is %" PRId64 ": expected a multiple of %" PRId64
                   ", output's batch",
                   parts, batch);
}

static fa3_status set_longest(const struct options *options, struct problem *problem) {
  const bool packed_q = problem->features & FA3_FEATURE_VARLEN_QUERY;
  const bool packed_k = problem->features & FA3_FEATURE_VARLEN_KEY;
  if (options->max_seqlen_q < 0 || options->max_seqlen_k < 0)
    return set_error(FA3_INVALID_LENGTHS, "max_seqlen_%s is %" PRId64 ": expected 0 or more",
                     options->max_seqlen_q < 0 ? "q" : "k",
                     options->max_seqlen_q < 0 ? options->max_seqlen_q : options->max_seqlen_k);
  const bool paged = problem->features & FA3_FEATURE_PAGE_TABLE;
  if ((options->max_seqlen_q && !packed_q) || (options->max_seqlen_k && !packed_k && !paged)) {
    const char side = options->max_seqlen_q && !packed_q ? 'q' : 'k';
    return set_error(
        FA3_INVALID_FLAGS, "max_seqlen_%c is %" PRId64 " without cu_seqlens_%c%s", side,
        side == 'q' ? options->max_seqlen_q : options->max_seqlen_k, side,
        side == 'k' && find_argument(problem->phase, TENSOR_page_table) ? " or page_table" : "");
  }
  problem->max_seqlen_q = packed_q ? options->max_seqlen_q : problem->rows_q;
  problem->max_seqlen_k = packed_k ? options->max_seqlen_k : problem->rows_k;
  if (paged && options->max_seqlen_k)
    problem->max_seqlen_k = smaller(problem->rows_k, options->max_seqlen_k);
  return FA3_OK;
}

/* A side of a window that is as wide as the longest sequence, if that is known, hides nothing.
 * Fixed splits do not depend on how long that is. */
static void drop_idle_limits(struct problem *problem) {
  const int64_t queries = problem->max_seqlen_q, keys = problem->max_seqlen_k;
  if (!(problem->features & FA3_FEATURE_WINDOW) || problem->diagonal || problem->split_keys) return;
  if (keys > 0 && problem->window_left >= keys - 1) problem->window_left = MASK_UNBOUNDED;
  if (queries > 0 && problem->window_right >= queries - 1) problem->window_right = MASK_UNBOUNDED;
}

fa3_status problem_from_args(fa3_phase phase, const void *args, struct problem *problem) {
  const struct options options = options_of(phase, args);
  *problem = (struct problem){.phase = phase,
                              .device = options.device,
                              .stream = options.stream,
                              .accumulate = options.flags & FA3_ACCUMULATE,
                              .softcap = options.softcap,
                              .num_threads = options.num_threads,
                              .reserved_multiprocessors = options.reserved_multiprocessors,
                              .num_splits = options.num_splits,
                              .split_keys = options.split_keys,
                              .subtract_mean = options.flags & FA3_SUBTRACT_MEAN,
                              .rotate = options.flags & FA3_ROTATE,
                              .seed = options.seed,
                              .workspace = options.workspace,
                              .workspace_size = options.workspace_size};
  TRY(check_device_fields(&options));
  TRY(check_flags(&options, phase));
  TRY(check_splits(&options));
  set_mask(&options, problem);
  TRY(read_tensors(args, problem));
  TRY(read_scales(args, problem));
  TRY(check_combinations(problem));
  if (phase == FA3_APPEND) TRY(check_append(&options, problem));
  if (phase == FA3_COMBINE) TRY(check_combine(problem));
  if (phase == FA3_QUANTIZE) TRY(check_rotary(&options, problem, "input"));
  problem->interleaved = options.flags & FA3_ROTARY_INTERLEAVED;
  problem->separate_sequences = options.flags & FA3_SEPARATE_SEQUENCES;
  TRY(set_longest(&options, problem));
  drop_idle_limits(problem);
  problem->scale = options.flags & FA3_SCALE ? options.softmax_scale
                                             : (float)(1 / sqrt((double)problem->head_dim));
  if (problem->heads_q && problem->heads_k && problem->heads_q != problem->heads_k)
    problem->features |= FA3_FEATURE_GROUPED_HEADS;
  if (problem->softcap > 0) problem->features |= FA3_FEATURE_SOFTCAP;
  if (problem->accumulate) problem->features |= FA3_FEATURE_ACCUMULATE;
  if (options.flags & FA3_DETERMINISTIC) problem->features |= FA3_FEATURE_DETERMINISTIC;
  return FA3_OK;
}

fa3_capability problem_capability(const struct problem *problem) {
  /* Extents beyond int32 are beyond every table; saturating keeps them so. */
  int64_t head_dim = problem->head_dim < INT32_MAX ? problem->head_dim : INT32_MAX;
  int64_t value_head_dim =
      problem->value_head_dim < INT32_MAX ? problem->value_head_dim : INT32_MAX;
  return (fa3_capability){
      .struct_size = sizeof(fa3_capability),
      .device = problem->device,
      .phase = problem->phase,
      .query_dtype = problem->query.dtype     ? problem->query.dtype
                     : problem->new_key.dtype ? problem->new_key.dtype
                                              : problem->input.dtype,
      .key_dtype = problem->key.dtype,
      .value_dtype = problem->value.dtype,
      .output_dtype = problem->output.dtype ? problem->output.dtype : problem->codes.dtype,
      .head_dim = (int32_t)head_dim,
      .value_head_dim = (int32_t)value_head_dim,
      .features = problem->features};
}
