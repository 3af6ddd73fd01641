#include "problem.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "error.h"
#include "gradients.h"
#include "operand.h"
#include "validate.h"

/* A contiguous vector of integers. */
static fa3_status check_vector(const char *name, const fa3_tensor *tensor, fa3_dtype dtype,
                               int64_t extent, const char *what) {
  TRY(check_dtype(name, tensor, dtype));
  TRY(check_tensor(name, tensor, 1));
  return check_extent(name, tensor, 0, extent, what);
}

static fa3_status check_device_fields(const fa3_forward_args *args) {
  bool cpu = args->device.type == FA3_CPU;
  if (!cpu && args->device.type != FA3_CUDA)
    return set_error(FA3_INVALID_DEVICE,
                     "device.type is %" PRId32 ": expected FA3_CPU (0) or FA3_CUDA (1)",
                     args->device.type);
  if (args->device.index < 0 || (cpu && args->device.index != 0))
    return set_error(FA3_INVALID_DEVICE, "device.index is %" PRId32 ": expected %s",
                     args->device.index, cpu ? "0 for the CPU" : "0 or more");
  if (cpu && args->stream)
    return set_error(FA3_INVALID_STREAM, "stream is %p: expected null, the CPU has no streams",
                     args->stream);
  if (args->num_threads < 0 || (!cpu && args->num_threads))
    return set_error(FA3_INVALID_THREADS, "num_threads is %" PRId32 ": expected %s",
                     args->num_threads, cpu ? "0 or more" : "0 for a GPU");
  return FA3_OK;
}

static fa3_status check_flags(const fa3_forward_args *args, fa3_phase phase) {
  uint32_t known = FA3_CAUSAL | FA3_WINDOW | FA3_SCALE;
  if (phase == FA3_BACKWARD) known |= FA3_ACCUMULATE | FA3_DETERMINISTIC;
  const uint32_t backward = args->flags & (FA3_ACCUMULATE | FA3_DETERMINISTIC) & ~known;
  if (backward)
    return set_error(FA3_INVALID_FLAGS,
                     "flags is 0x%" PRIx32 ": bits 0x%" PRIx32 " are for the backward pass alone",
                     args->flags, backward);
  if (args->flags & ~known)
    return set_error(FA3_INVALID_FLAGS, "flags is 0x%" PRIx32 ": bits 0x%" PRIx32 " are unknown",
                     args->flags, args->flags & ~known);
  if (args->flags & FA3_SCALE) {
    if (!isfinite(args->softmax_scale))
      return set_error(FA3_INVALID_SCALE, "softmax_scale is %g: expected a finite number",
                       (double)args->softmax_scale);
  } else if (args->softmax_scale != 0) {
    return set_error(FA3_INVALID_FLAGS, "softmax_scale is %g, but flags lack FA3_SCALE",
                     (double)args->softmax_scale);
  }
  if (!(args->softcap >= 0) || !isfinite(args->softcap))
    return set_error(FA3_INVALID_SOFTCAP, "softcap is %g: expected 0 or a positive finite number",
                     (double)args->softcap);
  if (args->flags & FA3_WINDOW) {
    if (args->window_left < -1)
      return set_error(FA3_INVALID_WINDOW, "window_left is %" PRId64 ": expected -1 or more",
                       args->window_left);
    if (args->window_right < -1)
      return set_error(FA3_INVALID_WINDOW, "window_right is %" PRId64 ": expected -1 or more",
                       args->window_right);
  } else if (args->window_left || args->window_right) {
    return set_error(FA3_INVALID_FLAGS, "window_%s is %" PRId64 ", but flags lack FA3_WINDOW",
                     args->window_left ? "left" : "right",
                     args->window_left ? args->window_left : args->window_right);
  }
  return FA3_OK;
}

static void set_mask(const fa3_forward_args *args, struct problem *problem) {
  problem->window_left = MASK_UNBOUNDED;
  problem->window_right = MASK_UNBOUNDED;
  if (args->flags & FA3_WINDOW) {
    if (args->window_left >= 0 && args->window_left < MASK_UNBOUNDED)
      problem->window_left = args->window_left;
    if (args->window_right >= 0 && args->window_right < MASK_UNBOUNDED)
      problem->window_right = args->window_right;
    problem->features |= FA3_FEATURE_WINDOW;
  }
  if (args->flags & FA3_CAUSAL) {
    problem->window_right = 0;
    problem->features |= FA3_FEATURE_CAUSAL;
  }
}

/* Query, key, value and output: their shapes against each other. */
static fa3_status set_operands(const fa3_forward_args *args, struct problem *problem) {
  bool packed_q = problem->features & FA3_FEATURE_VARLEN_QUERY;
  bool packed_k = problem->features & FA3_FEATURE_VARLEN_KEY;
  TRY(check_operand("query", &args->query, packed_q, "cu_seqlens_q"));
  TRY(check_operand("key", &args->key, packed_k, "cu_seqlens_k"));
  TRY(check_operand("value", &args->value, packed_k, "cu_seqlens_k"));
  TRY(check_operand("output", &args->output, packed_q, "cu_seqlens_q"));
  TRY(check_same_dtype("key", &args->key, "query's", args->query.dtype));
  TRY(check_same_dtype("value", &args->value, "query's", args->query.dtype));
  TRY(check_computed_dtype("output", &args->output, "query's", args->query.dtype));

  int row_q = packed_q ? 0 : 1;
  int row_k = packed_k ? 0 : 1;
  const int64_t *shape_q = args->query.shape + row_q;
  const int64_t *shape_k = args->key.shape + row_k;
  const int64_t *shape_v = args->value.shape + row_k;
  TRY(check_extent("key", &args->key, row_k + 2, shape_q[2], "query's head dim"));
  TRY(check_extent("value", &args->value, row_k, shape_k[0], "key's rows"));
  TRY(check_extent("value", &args->value, row_k + 1, shape_k[1], "key's heads"));
  TRY(check_extent("output", &args->output, row_q, shape_q[0], "query's rows"));
  TRY(check_extent("output", &args->output, row_q + 1, shape_q[1], "query's heads"));
  TRY(check_extent("output", &args->output, row_q + 2, shape_v[2], "value's head dim"));
  if (!packed_q)
    TRY(check_extent("output", &args->output, 0, args->query.shape[0], "query's batch"));
  if (!packed_k) TRY(check_extent("value", &args->value, 0, args->key.shape[0], "key's batch"));
  if (shape_q[1] % shape_k[1])
    return set_error(FA3_INVALID_SHAPE,
                     "query.shape[%d] is %" PRId64 ": expected a multiple of key's %" PRId64
                     " heads",
                     row_q + 1, shape_q[1], shape_k[1]);
  if (problem->phase == FA3_FORWARD) TRY(check_output_strides("output", &args->output));

  problem->rows_q = shape_q[0];
  problem->heads_q = shape_q[1];
  problem->head_dim = shape_q[2];
  problem->rows_k = shape_k[0];
  problem->heads_k = shape_k[1];
  problem->value_head_dim = shape_v[2];
  problem->batch_k = packed_k ? 1 : args->key.shape[0];
  if (problem->heads_q != problem->heads_k) problem->features |= FA3_FEATURE_GROUPED_HEADS;
  problem->query = make_operand(&args->query);
  problem->key = make_operand(&args->key);
  problem->value = make_operand(&args->value);
  problem->output = make_operand(&args->output);
  return FA3_OK;
}

/* How many sequences there are, and the vectors that describe them. */
static fa3_status set_lengths(const fa3_forward_args *args, struct problem *problem) {
  bool packed_q = problem->features & FA3_FEATURE_VARLEN_QUERY;
  bool packed_k = problem->features & FA3_FEATURE_VARLEN_KEY;
  problem->batch = args->query.shape[0];
  if (packed_q) {
    if (args->cu_seqlens_q.shape[0] < 1)
      return set_error(FA3_INVALID_SHAPE,
                       "cu_seqlens_q.shape[0] is %" PRId64 ": expected batch + 1",
                       args->cu_seqlens_q.shape[0]);
    problem->batch = args->cu_seqlens_q.shape[0] - 1;
    TRY(check_vector("cu_seqlens_q", &args->cu_seqlens_q, FA3_INT32, problem->batch + 1,
                     "batch + 1"));
    problem->cu_seqlens_q = args->cu_seqlens_q.data;
  }
  if (packed_k) {
    TRY(check_vector("cu_seqlens_k", &args->cu_seqlens_k, FA3_INT32, problem->batch + 1,
                     "batch + 1"));
    problem->cu_seqlens_k = args->cu_seqlens_k.data;
  }
  const struct {
    const char *name;
    const fa3_tensor *tensor;
    fa3_features feature;
    const int32_t **target;
  } vectors[] = {
      {"seqused_q", &args->seqused_q, FA3_FEATURE_SEQUSED_QUERY, &problem->seqused_q},
      {"seqused_k", &args->seqused_k, FA3_FEATURE_SEQUSED_KEY, &problem->seqused_k},
      {"leftpad_k", &args->leftpad_k, FA3_FEATURE_LEFTPAD_KEY, &problem->leftpad_k},
      {"cache_batch_index", &args->cache_batch_index, FA3_FEATURE_BATCH_INDEX,
       &problem->cache_batch_index},
  };
  for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
    if (tensor_absent(vectors[i].tensor)) continue;
    TRY(check_vector(vectors[i].name, vectors[i].tensor, FA3_INT32, problem->batch, "batch"));
    *vectors[i].target = vectors[i].tensor->data;
    problem->features |= vectors[i].feature;
  }
  if (problem->features & FA3_FEATURE_BATCH_INDEX) {
    if (packed_k)
      return set_error(FA3_INVALID_FLAGS,
                       "cache_batch_index is given with cu_seqlens_k: it picks entries of a dense "
                       "key and value");
  } else if (!packed_k) {
    TRY(check_extent("key", &args->key, 0, problem->batch, "the batch"));
  }
  if (!tensor_absent(&args->diagonal)) {
    TRY(check_vector("diagonal", &args->diagonal, FA3_INT64, problem->batch, "batch"));
    if (!(problem->features & (FA3_FEATURE_CAUSAL | FA3_FEATURE_WINDOW)))
      return set_error(FA3_INVALID_FLAGS,
                       "diagonal is given, but flags lack FA3_CAUSAL and FA3_WINDOW");
    problem->diagonal = args->diagonal.data;
    problem->features |= FA3_FEATURE_DIAGONAL;
  }

  if (args->max_seqlen_q < 0 || args->max_seqlen_k < 0)
    return set_error(FA3_INVALID_LENGTHS, "max_seqlen_%s is %" PRId64 ": expected 0 or more",
                     args->max_seqlen_q < 0 ? "q" : "k",
                     args->max_seqlen_q < 0 ? args->max_seqlen_q : args->max_seqlen_k);
  problem->max_seqlen_q = packed_q ? args->max_seqlen_q : problem->rows_q;
  problem->max_seqlen_k = packed_k ? args->max_seqlen_k : problem->rows_k;
  return FA3_OK;
}

static fa3_status set_lse(const fa3_forward_args *args, struct problem *problem) {
  if (tensor_absent(&args->lse)) return FA3_OK;
  TRY(read_row_values("lse", &args->lse, problem, &problem->lse));
  if (problem->phase == FA3_FORWARD) TRY(check_output_strides("lse", &args->lse));
  problem->features |= FA3_FEATURE_LSE;
  return FA3_OK;
}

static fa3_status set_sink(const fa3_forward_args *args, struct problem *problem) {
  if (tensor_absent(&args->sink)) return FA3_OK;
  TRY(read_head_values("sink", &args->sink, problem, &problem->sink));
  problem->features |= FA3_FEATURE_SINK;
  return FA3_OK;
}

fa3_status read_attention(const fa3_forward_args *args, fa3_phase phase, struct problem *problem) {
  *problem = (struct problem){.phase = phase,
                              .device = args->device,
                              .stream = args->stream,
                              .workspace = args->workspace,
                              .workspace_size = args->workspace_size};
  TRY(check_device_fields(args));
  TRY(check_flags(args, phase));
  set_mask(args, problem);
  if (!tensor_absent(&args->cu_seqlens_q)) problem->features |= FA3_FEATURE_VARLEN_QUERY;
  if (!tensor_absent(&args->cu_seqlens_k)) problem->features |= FA3_FEATURE_VARLEN_KEY;
  TRY(set_operands(args, problem));
  TRY(set_lengths(args, problem));
  TRY(set_lse(args, problem));
  TRY(set_sink(args, problem));
  problem->scale =
      args->flags & FA3_SCALE ? args->softmax_scale : (float)(1 / sqrt((double)problem->head_dim));
  problem->softcap = args->softcap;
  if (problem->softcap > 0) problem->features |= FA3_FEATURE_SOFTCAP;
  problem->num_threads = args->num_threads;
  return FA3_OK;
}

fa3_status problem_from_args(fa3_phase phase, const void *args, struct problem *problem) {
  return phase == FA3_FORWARD ? read_attention(args, phase, problem)
                              : read_gradients(args, problem);
}

fa3_capability problem_capability(const struct problem *problem) {
  /* Extents beyond int32 are beyond every table; saturating keeps them so. */
  int64_t head_dim = problem->head_dim < INT32_MAX ? problem->head_dim : INT32_MAX;
  int64_t value_head_dim =
      problem->value_head_dim < INT32_MAX ? problem->value_head_dim : INT32_MAX;
  return (fa3_capability){.struct_size = sizeof(fa3_capability),
                          .device = problem->device,
                          .phase = problem->phase,
                          .query_dtype = problem->query.dtype,
                          .key_dtype = problem->key.dtype,
                          .value_dtype = problem->value.dtype,
                          .output_dtype = problem->output.dtype,
                          .head_dim = (int32_t)head_dim,
                          .value_head_dim = (int32_t)value_head_dim,
                          .features = problem->features};
}
