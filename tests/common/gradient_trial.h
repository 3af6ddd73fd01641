/* One backward call in guarded memory, on the outputs of a forward trial, and its comparison with
 * the float64 reference. Memory starts as it does for a forward trial; where gradients are added
 * to, the rows in use hold numbers. */
#ifndef FA3_TESTS_GRADIENT_TRIAL_H
#define FA3_TESTS_GRADIENT_TRIAL_H

#include "trial.h"

struct gradient_spec {
  struct spec forward;
  fa3_dtype grad_query_dtype;
  fa3_dtype grad_key_dtype;
  fa3_dtype grad_value_dtype;
  fa3_dtype grad_sink_dtype; /* 0: not wanted */
  bool grad_lse;
  uint32_t flags; /* FA3_ACCUMULATE, FA3_DETERMINISTIC */
};

/* Of a forward call that has gradients: `forward` with what the backward pass lacks taken away. */
struct gradient_spec gradient_spec_random(const struct spec *forward, struct rng *rng);
void gradient_spec_print(const struct gradient_spec *spec, char *text, size_t size);

struct gradient_trial {
  struct gradient_spec spec;
  struct trial forward; /* its output and lse are inputs here */
  fa3_backward_args args;
  struct buffer buffers[TENSORS]; /* of what the forward call lacks */
  struct buffer workspace;
  char *before[TENSORS]; /* what the gradients hold before a call */
};

/* Lays out and fills everything but the workspace, and runs the forward call. */
struct gradient_trial gradient_trial_new(const struct gradient_spec *spec, struct rng *rng);
void gradient_trial_free(struct gradient_trial *trial);

/* Puts the gradients back to what they were before a call. */
void gradient_trial_reset(struct gradient_trial *trial);

/* Makes all inputs read-only, gives the call a workspace of exactly the size it asks for, and calls
 * fa3_backward, which must succeed. */
void gradient_trial_run(struct gradient_trial *trial, struct rng *rng);

/* The gradients' bytes, to be freed, and whether they are those. */
char *gradient_trial_copy(const struct gradient_trial *trial);
bool gradient_trial_equals(const struct gradient_trial *trial, const char *copy);

/* As trial_check, for the gradients. */
double gradient_trial_check(const struct gradient_trial *trial, struct rng *rng, double pairs);

#endif
