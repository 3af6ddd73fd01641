#include "rng.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

uint64_t rng_run_seed(void) {
  static uint64_t seed;
  static bool chosen;
  if (chosen) return seed;
  const char *text = getenv("FA3_TEST_SEED");
  if (text) {
    seed = strtoull(text, NULL, 0);
  } else if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) {
    perror("getrandom");
    exit(1);
  }
  chosen = true;
  printf("FA3_TEST_SEED=%" PRIu64 "\n", seed);
  (void)fflush(stdout);
  return seed;
}

/* SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
uint64_t rng_bits(struct rng *rng) {
  uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

struct rng rng_for(uint64_t number) {
  struct rng rng = {rng_run_seed() ^ number * UINT64_C(0xd1342543de82ef95)};
  rng.state = rng_bits(&rng);
  return rng;
}

int64_t rng_between(struct rng *rng, int64_t low, int64_t high) {
  return low + (int64_t)(rng_bits(rng) % ((uint64_t)(high - low) + 1));
}

double rng_uniform(struct rng *rng) {
  return (double)(rng_bits(rng) >> 11) * 0x1p-53;
}

bool rng_chance(struct rng *rng, double probability) {
  return rng_uniform(rng) < probability;
}

double rng_normal(struct rng *rng) {
  double radius = sqrt(-2 * log(1 - rng_uniform(rng)));
  return radius * cos(6.283185307179586 * rng_uniform(rng));
}

void rng_order(struct rng *rng, int32_t *order, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t other = rng_between(rng, 0, i);
    order[i] = order[other];
    order[other] = (int32_t)i;
  }
}
