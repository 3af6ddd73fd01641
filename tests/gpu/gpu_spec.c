#include "gpu_spec.h"

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
  if (spec->packed_k) trial.args.max_seqlen_k = spec->max_seqlen_k;
  return trial;
}
