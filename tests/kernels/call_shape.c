#include "call_shape.h"

#include "fa3.h"

static int64_t random_length(struct rng *rng) {
  int64_t edge = RNG_PICK(rng, 1, 24, 32, 48, 96, 192, 256, 288, 384, 512);
  int64_t length = edge + rng_between(rng, -1, 1);
  return length > 0 ? length : 1;
}

struct call_shape random_call_shape(struct rng *rng) {
  struct call_shape shape = {.batch = 1,
                             .seqlen_q = random_length(rng),
                             .seqlen_k = random_length(rng),
                             .heads_k = 1,
                             .group = RNG_PICK(rng, 1, 1, 3, 4),
                             .head_dim = 8 * rng_between(rng, 1, 32),
                             .value_head_dim = 8 * rng_between(rng, 1, 32),
                             .flags = rng_chance(rng, 0.5) ? FA3_CAUSAL : 0};
  /* Several sequences and heads of keys go the same way whatever the lengths: of short ones alone,
   * as the references take most of the time. */
  if (shape.seqlen_q + shape.seqlen_k < 300) {
    shape.batch = rng_between(rng, 1, 2);
    shape.heads_k = rng_between(rng, 1, 2);
  }
  if (rng_chance(rng, 0.3)) {
    shape.flags |= FA3_WINDOW;
    shape.window_left = rng_between(rng, 0, 300);
    shape.window_right = rng_between(rng, -1, 300);
  }
  if (rng_chance(rng, 0.2)) shape.softcap = 20;
  return shape;
}

struct call_shape timed_call_shape(int64_t head_dim) {
  return (struct call_shape){.batch = 1,
                             .seqlen_q = 1024,
                             .seqlen_k = 1024,
                             .heads_k = 8,
                             .group = 1,
                             .head_dim = head_dim,
                             .value_head_dim = head_dim};
}
