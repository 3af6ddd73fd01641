/* The gradient of the whole model against finite differences, 64 parameters at a time. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "test.h"

enum { BATCH = 2, SEQLEN = 11, ROWS = BATCH * SEQLEN, CHUNK = 64 };

static const struct sizes tiny = {
    .layers = 2,
    .width = 16,
    .heads = 4,
    .heads_k = 2,
    .head_dim = 8,
    .hidden = 24,
    .window = 5,
};

struct trial {
  struct model model, gradient;
  struct activations activations;
  uint8_t tokens[ROWS], next[ROWS];
};

static double loss(struct trial *trial) {
  forward(&trial->model, &trial->activations, trial->tokens, BATCH, SEQLEN);
  return cross_entropy(trial->activations.logits, trial->next, ROWS);
}

/* The loss where `count` parameters from `first` on have gone `step` along a direction. */
static double loss_along(struct trial *trial, int64_t first, int64_t count, const float *direction,
                         float step) {
  float before[CHUNK];
  float *parameters = trial->model.parameters + first;
  for (int64_t i = 0; i < count; i++) {
    before[i] = parameters[i];
    parameters[i] += step * direction[i];
  }
  const double moved = loss(trial);
  for (int64_t i = 0; i < count; i++) parameters[i] = before[i];
  return moved;
}

/* Central differences of two steps, extrapolated to none. What is left of truncation is below a
 * tenth of what the extrapolation changes, since steps are small; float32 logits put some four
 * roundings of 2^-24 into a loss of about 6. */
static void check(struct trial *trial, int64_t first, int64_t count, const float *direction) {
  const float step = 0x1p-6F;
  double slopes[2], expected = 0;
  for (int i = 0; i < 2; i++) {
    const float h = step * (float)(i + 1);
    slopes[i] = (loss_along(trial, first, count, direction, h) -
                 loss_along(trial, first, count, direction, -h)) /
                (2 * (double)h);
  }
  for (int64_t i = 0; i < count; i++)
    expected += (double)direction[i] * (double)trial->gradient.parameters[first + i];
  const double correction = (slopes[0] - slopes[1]) / 3;
  const double measured = slopes[0] + correction;
  const double bound = fabs(correction) / 10 + 4 * 0x1p-24 * 6 / (double)step;
  if (!(fabs(measured - expected) <= bound))
    fail_msg("parameters from %lld: slope %.6g, by differences %.6g, off by more than %.2g",
             (long long)first, expected, measured, bound);
}

/* Along the gradient, and along a random direction, both of length 1. */
static void test_gradient(void **state) {
  (void)state;
  struct trial trial = {.model = model_random(&tiny, 1), .gradient = model_new(&tiny)};
  trial.activations = activations_new(&trial.model, ROWS, SEQLEN);
  uint64_t random = 2;
  for (int i = 0; i < ROWS; i++) {
    trial.tokens[i] = (uint8_t)(random_uniform(&random) * BYTES);
    trial.next[i] = (uint8_t)(random_uniform(&random) * BYTES);
  }
  (void)loss(&trial);
  backward(&trial.model, &trial.gradient, &trial.activations, trial.tokens, BATCH, SEQLEN);
  for (int64_t first = 0; first < trial.model.count; first += CHUNK) {
    const int64_t rest = trial.model.count - first, count = rest < CHUNK ? rest : CHUNK;
    float along[CHUNK], across[CHUNK];
    double squares_along = 0, squares_across = 0;
    for (int64_t i = 0; i < count; i++) {
      along[i] = trial.gradient.parameters[first + i];
      across[i] = (float)(2 * random_uniform(&random) - 1);
      squares_along += (double)(along[i] * along[i]);
      squares_across += (double)(across[i] * across[i]);
    }
    for (int64_t i = 0; i < count; i++) {
      if (squares_along > 0) along[i] /= (float)sqrt(squares_along);
      across[i] /= (float)sqrt(squares_across);
    }
    check(&trial, first, count, along);
    check(&trial, first, count, across);
  }
  model_free(&trial.model);
  model_free(&trial.gradient);
  activations_free(&trial.activations);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradient)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
