/* The lse of a row that one score decides is that score's logit, however large: the product times
 * the scale, rounded once, as the backward pass has it. So a gradient behind any forward kernel has
 * a probability of exactly 1. Random shapes, lengths, splits and scores of up to 10^9; everything
 * is in page-locked memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "float8.h"
#include "gpu.h"
#include "half.h"
#include "rng.h"
#include "test.h"

enum {
  FEW = 3, /* sequences, of so many keys, */
  KEYS = 12000,
  BATCH = 27, /* or these, whose heads are too few for the memory: keys are dealt out */
  DEALT_KEYS = 4000,
  ROWS = BATCH * DEALT_KEYS,
  FEW_QUERIES = 3,
  QUERIES = FEW_QUERIES * BATCH / FEW, /* of a few sequences: as many in all */
  HEADS_K = 2,
  GROUP = 8,
  HEADS_Q = HEADS_K * GROUP,
  MOST_HEAD_DIM = 256,
  DEALT_HEAD_DIM = 128,
  ELEMENTS_K = ROWS * HEADS_K * DEALT_HEAD_DIM,
  ELEMENTS_Q = FEW * QUERIES * HEADS_Q * MOST_HEAD_DIM,
  TRIALS = 100
};

static const fa3_device cuda = {FA3_CUDA, 0};

struct memory {
  uint16_t key[ELEMENTS_K], value[ELEMENTS_K];
  uint16_t grad_key[ELEMENTS_K], grad_value[ELEMENTS_K];
  uint8_t codes[ELEMENTS_K];
  uint16_t query[ELEMENTS_Q], output[ELEMENTS_Q];
  uint16_t grad_output[ELEMENTS_Q], grad_query[ELEMENTS_Q];
  float lse[FEW * QUERIES * HEADS_Q];
  float scale[BATCH * HEADS_K];
  char workspace[256 << 20];
};

static struct memory *memory;

static uint16_t bfloat(double x) {
  return bfloat_from_float((float)x);
}

static double number(uint16_t bits) {
  return (double)float_from_bfloat(bits);
}

/* One call's sizes and where its one large key is. */
struct shape {
  int64_t batch, keys, queries, split_keys;
  int64_t head_dim;
  int64_t large;  /* the key */
  int64_t column; /* of the only element of it, and of queries, that is not 0 */
  float scale;    /* of scores; 0: the header's */
  bool codes;
};

/* Elements of one position. */
static int64_t row_k(const struct shape *shape) {
  return HEADS_K * shape->head_dim;
}

static int64_t row_q(const struct shape *shape) {
  return HEADS_Q * shape->head_dim;
}

static struct shape random_shape(struct rng *rng) {
  static const int head_dims[] = {64, DEALT_HEAD_DIM, MOST_HEAD_DIM};
  const bool dealt = rng_chance(rng, 0.1);
  const bool several = !dealt && rng_chance(rng, 0.1); /* 24 rows on long caches of codes */
  struct shape shape = {.batch = dealt ? BATCH : rng_between(rng, 1, FEW),
                        .keys = dealt                  ? DEALT_KEYS
                                : rng_chance(rng, 0.5) ? rng_between(rng, 1, 300)
                                                       : rng_between(rng, 300, KEYS),
                        .queries = dealt                  ? 1
                                   : rng_chance(rng, 0.5) ? rng_between(rng, 1, FEW_QUERIES)
                                                          : rng_between(rng, 1, QUERIES),
                        .head_dim = dealt ? DEALT_HEAD_DIM : head_dims[rng_between(rng, 0, 2)],
                        .codes = rng_chance(rng, 0.4)};
  if (several) {
    shape.batch = FEW;
    shape.keys = rng_between(rng, 11000, KEYS);
    shape.queries = FEW_QUERIES;
    shape.head_dim = head_dims[rng_between(rng, 0, 1)];
    shape.codes = true;
  }
  shape.large = rng_between(rng, 0, shape.keys - 1);
  shape.column = rng_between(rng, 0, shape.head_dim - 1);
  if (!dealt && !several && rng_chance(rng, 0.3)) shape.split_keys = 64 * rng_between(rng, 1, 20);
  if (rng_chance(rng, 0.5)) shape.scale = (float)(0.01 + rng_uniform(rng));
  return shape;
}

/* Other scores are 0, and what decides is from 10^3 up. Values are what they may be. */
static void fill(const struct shape *shape, struct rng *rng) {
  const double score = pow(10, 3 + 6 * rng_uniform(rng));
  const size_t all = (size_t)(shape->batch * shape->keys * row_k(shape));
  memset(memory->key, 0, all * sizeof *memory->key);
  memset(memory->codes, 0, all);
  for (size_t i = 0; i < all; i++) memory->value[i] = bfloat(rng_normal(rng));
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t head = 0; head < HEADS_K; head++) {
      const int64_t at = ((b * shape->keys + shape->large) * HEADS_K + head) * shape->head_dim;
      memory->key[at + shape->column] = bfloat(1 + rng_uniform(rng));
      memory->codes[at + shape->column] = e4m3_from_float((float)(1 + rng_uniform(rng)));
      memory->scale[b * HEADS_K + head] = (float)(0.5 + rng_uniform(rng));
    }
  for (int64_t i = 0; i < shape->batch * shape->queries * row_q(shape); i++) {
    const double x = score * (1 + rng_uniform(rng));
    memory->query[i] = i % shape->head_dim == shape->column ? bfloat(x / 0.05) : 0;
    memory->grad_output[i] = bfloat(rng_normal(rng));
  }
}

static fa3_tensor keys_of(const struct shape *shape, uint16_t *data) {
  return fa3_dense(data, FA3_BFLOAT16, shape->batch, shape->keys, HEADS_K, shape->head_dim);
}

static fa3_tensor queries_of(const struct shape *shape, uint16_t *data) {
  return fa3_dense(data, FA3_BFLOAT16, shape->batch, shape->queries, HEADS_Q, shape->head_dim);
}

static fa3_forward_args forward_args(const struct shape *shape) {
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = cuda,
                           .query = queries_of(shape, memory->query),
                           .key = keys_of(shape, memory->key),
                           .value = keys_of(shape, memory->value),
                           .output = queries_of(shape, memory->output),
                           .lse = fa3_lse(memory->lse, shape->batch, HEADS_Q, shape->queries),
                           .workspace = memory->workspace,
                           .workspace_size = sizeof memory->workspace,
                           .softmax_scale = shape->scale,
                           .split_keys = shape->split_keys};
  if (shape->scale > 0) args.flags = FA3_SCALE;
  return args;
}

static void run_forward(const struct shape *shape) {
  fa3_forward_args args = forward_args(shape);
  if (shape->codes) {
    args.key.data = memory->codes;
    args.key.dtype = FA3_FLOAT8_E4M3;
    args.value = args.key;
    args.key_scale = make_matrix(memory->scale, FA3_FLOAT32, shape->batch, HEADS_K);
  }
  memset(memory->lse, 0xff, sizeof memory->lse);
  if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
}

/* Every element of a value's gradient is a sum of some of grad_output, or 0. */
static void check_gradients(const struct shape *shape) {
  const fa3_forward_args forward = forward_args(shape);
  fa3_backward_args args = {.struct_size = sizeof args};
  if (fa3_backward_init(&forward, &args)) fail_msg("%s", fa3_last_error());
  args.grad_output = queries_of(shape, memory->grad_output);
  args.grad_query = queries_of(shape, memory->grad_query);
  args.grad_key = keys_of(shape, memory->grad_key);
  args.grad_value = keys_of(shape, memory->grad_value);
  args.workspace = memory->workspace;
  args.workspace_size = sizeof memory->workspace;
  memset(memory->grad_value, 0xff,
         (size_t)(shape->batch * shape->keys * row_k(shape)) * sizeof *memory->grad_value);
  if (fa3_backward(&args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t i = 0; i < shape->keys * row_k(shape); i++) {
      const int64_t head = i % row_k(shape) / shape->head_dim, column = i % shape->head_dim;
      double sum = 0, all = 0;
      for (int64_t q = 0; q < shape->queries * GROUP && i / row_k(shape) == shape->large; q++) {
        const int64_t row = (b * shape->queries + q / GROUP) * HEADS_Q + head * GROUP + q % GROUP;
        const int64_t at = row * shape->head_dim + column;
        const double x = number(memory->grad_output[at]);
        sum += x;
        all += fabs(x);
      }
      const double got = number(memory->grad_value[b * shape->keys * row_k(shape) + i]);
      if (!(fabs(got - sum) <= 0x1p-8 * fabs(sum) + 0x1p-20 * all))
        fail_msg("grad_value %d of sequence %d is %g: expected %g", (int)i, (int)b, got, sum);
    }
}

/* As the kernels multiply, each product rounded. A product of two elements is exact, and scales of
 * codes are part of the scale. */
static void check_lse(const struct shape *shape) {
  const float scale = shape->scale > 0 ? shape->scale : (float)(1 / sqrt((double)shape->head_dim));
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t q = 0; q < shape->queries; q++)
      for (int64_t head = 0; head < HEADS_Q; head++) {
        const int64_t head_k = b * HEADS_K + head / GROUP;
        const int64_t key = (b * shape->keys + shape->large) * row_k(shape) +
                            head / GROUP * shape->head_dim + shape->column;
        const uint16_t element =
            memory->query[((b * shape->queries + q) * HEADS_Q + head) * shape->head_dim +
                          shape->column];
        const float got = memory->lse[(b * HEADS_Q + head) * shape->queries + q];
        double score = number(element) * (double)scale, slack = 0;
        if (shape->codes) {
          score *= (double)float_from_e4m3(memory->codes[key]) * (double)memory->scale[head_k];
          slack = 0x1p-23 * score; /* of three factors and a product */
        } else {
          score = (double)(float)(score * number(memory->key[key]));
        }
        if (!(fabs((double)got - score) <= slack))
          fail_msg("lse of sequence %d, query %d, head %d is %.9g: expected %.9g", (int)b, (int)q,
                   (int)head, (double)got, score);
      }
}

static void test_one_score_decides(void **state) {
  (void)state;
  const int trials = gpu_trials(TRIALS);
  for (int trial = 0; trial < trials; trial++) {
    struct rng rng = rng_for((uint64_t)trial);
    const struct shape shape = random_shape(&rng);
    fill(&shape, &rng);
    run_forward(&shape);
    check_lse(&shape);
    if (!shape.codes) check_gradients(&shape);
  }
}

static int open_memory(void **state) {
  (void)state;
  void *taken;
  GPU(cuMemAllocHost, &taken, sizeof *memory);
  memory = taken;
  return 0;
}

static int close_memory(void **state) {
  (void)state;
  GPU(cuMemFreeHost, memory);
  return 0;
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_score_decides)};
  const int result = cmocka_run_group_tests(tests, open_memory, close_memory);
  if (result == 0) printf("passed: %d trials\n", gpu_trials(TRIALS));
  return result;
}
