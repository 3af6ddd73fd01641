/* Random calls of the kinds that a GPU takes, on the GPU. */
#ifndef FA3_TESTS_GPU_TRIAL_H
#define FA3_TESTS_GPU_TRIAL_H

#include "mirror.h"

struct gpu_trial {
  bool backward;
  struct gradient_trial gradient; /* a forward call's trial is gradient.forward */
  struct mirror mirror;
};

struct gradient_spec gpu_spec_random(bool backward, struct rng *rng);

/* A packed batch of many sequences, one of them the longest and the others short. */
struct gradient_spec gpu_spec_many(bool backward, int64_t batch, int64_t longest, bool causal,
                                   struct rng *rng);

/* Whether the CUDA engine takes calls of such dtypes, head dims and features: FA3_UNSUPPORTED and
 * its reason if not. */
fa3_status gpu_spec_supported(const struct gradient_spec *spec, bool backward);

/* Laid out on the host and on the GPU; for a backward call the CPU has made the forward call.
 * `trial` stays where it is. */
void gpu_trial_new(struct gpu_trial *trial, const struct gradient_spec *spec, bool backward,
                   struct gpu_arena *arena, gpu_stream stream, struct rng *rng);
void gpu_trial_free(struct gpu_trial *trial);

/* Other numbers in its inputs, where they are not NaN, and packed sequences in the opposite order;
 * shapes and totals stay. */
void gpu_trial_refill(struct gpu_trial *trial, struct rng *rng);

/* Of what mirror_download has brought: as trial_check. */
double gpu_trial_check(const struct gpu_trial *trial, struct rng *rng, double pairs);

#endif
