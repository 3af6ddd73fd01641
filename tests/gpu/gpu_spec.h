/* Random requests of the kinds that a GPU takes. */
#ifndef FA3_TESTS_GPU_SPEC_H
#define FA3_TESTS_GPU_SPEC_H

#include "trial.h"

struct spec gpu_spec_random(struct rng *rng);

/* The trial with what a GPU's caller has to give: bounds of the lengths. */
struct trial gpu_trial_new(const struct spec *spec, struct rng *rng);

/* Other numbers in its inputs, where they are not NaN, and packed sequences in the opposite order;
 * shapes and totals stay. */
void gpu_trial_refill(struct trial *trial, struct rng *rng);

#endif
