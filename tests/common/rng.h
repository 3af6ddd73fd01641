/* Random numbers for tests: the seed comes from FA3_TEST_SEED or the system, and is printed. */
#ifndef FA3_TESTS_RNG_H
#define FA3_TESTS_RNG_H

#include <stdbool.h>
#include <stdint.h>

struct rng {
  uint64_t state;
};

/* The run's seed; the first call prints it with what repeats the run. */
uint64_t rng_run_seed(void);

/* A generator of its own for every number, so that one trial can be repeated alone. */
struct rng rng_for(uint64_t number);

uint64_t rng_bits(struct rng *rng);
/* Both ends included. */
int64_t rng_between(struct rng *rng, int64_t low, int64_t high);
bool rng_chance(struct rng *rng, double probability);
double rng_uniform(struct rng *rng); /* in [0, 1) */
double rng_normal(struct rng *rng);

/* The numbers from 0 on in random order. */
void rng_order(struct rng *rng, int32_t *order, int64_t count);

/* One of the listed integers. */
#define RNG_PICK(rng, ...)                     \
  ((const int64_t[]){__VA_ARGS__}[rng_between( \
      rng, 0, (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)) - 1)])

#endif
