#include "gpu_spec.h"

#include <math.h>

#include "reference.h"

struct spec gpu_spec_random(struct rng *rng) {
  struct spec spec = spec_random(rng);
  spec.dtype = rng_chance(rng, 0.5) ? FA3_FLOAT16 : FA3_BFLOAT16;
  spec.output_dtype = spec.dtype;
  if (spec.sink_dtype != 0 && spec.sink_dtype != FA3_FLOAT32) spec.sink_dtype = spec.dtype;
  spec.num_threads = 0;
  /* The pairs of head dims that kernels are made for, more often than chance would. */
  if (rng_chance(rng, 0.5)) {
    spec.head_dim = RNG_PICK(rng, 64, 96, 128, 192, 256);
    spec.value_head_dim = spec.head_dim == 192 && rng_chance(rng, 0.5) ? 128 : spec.head_dim;
  }
  /* Long enough for many tiles of keys, which a GPU takes and the host's reference samples. */
  if (rng_chance(rng, 0.15)) {
    spec.batch = 1;
    spec.heads_k = 1;
    spec.max_seqlen_k = rng_between(rng, 500, 5000);
    if (rng_chance(rng, 0.3)) spec.max_seqlen_q = rng_between(rng, 500, 3000) / spec.group + 1;
  }
  return spec;
}

struct trial gpu_trial_new(const struct spec *spec, struct rng *rng) {
  struct trial trial = trial_new(spec, rng);
  /* Rows that no sequence uses may lie behind sequences that are all empty. */
  if (spec->packed_q && trial.args.max_seqlen_q == 0) trial.args.max_seqlen_q = 1;
  if (spec->packed_k) trial.args.max_seqlen_k = spec->max_seqlen_k > 0 ? spec->max_seqlen_k : 1;
  return trial;
}

static void refill(const fa3_tensor *tensor, const struct buffer *buffer, double spread,
                   struct rng *rng) {
  int64_t count = (int64_t)(buffer->size / fa3_dtype_size(tensor->dtype));
  for (int64_t i = 0; i < count; i++)
    if (!isnan(reference_load(tensor, i))) tensor_store(tensor, i, spread * rng_normal(rng));
}

/* The sequences in the opposite order, where every row belongs to one. */
static void reverse_lengths(const fa3_tensor *cu_seqlens, int64_t batch) {
  int32_t *starts = cu_seqlens->data;
  if (!starts) return;
  int32_t total = starts[batch];
  for (int64_t b = 0; 2 * b <= batch; b++) {
    int32_t start = starts[b];
    starts[b] = total - starts[batch - b];
    starts[batch - b] = total - start;
  }
}

void gpu_trial_refill(struct trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  double spread = spec->spread;
  if (!spec->seqused_q) reverse_lengths(&trial->args.cu_seqlens_q, spec->batch);
  if (!spec->seqused_k && !spec->leftpad_k) reverse_lengths(&trial->args.cu_seqlens_k, spec->batch);
  refill(&trial->args.query, &trial->buffers[TRIAL_QUERY], spread, rng);
  refill(&trial->args.key, &trial->buffers[TRIAL_KEY], spread, rng);
  refill(&trial->args.value, &trial->buffers[TRIAL_VALUE], 1, rng);
}
