/* Rotary embedding before a rotation, on the CPU: in the arithmetic of 16 bits, to the bit. */
#include "cpu/rotary.h"

#include <math.h>

#include "half.h"
#include "problem.h"
#include "rng.h"
#include "test.h"

/* A pair (a, b) of 16-bit numbers, and what they become by one angle. */
struct turned {
  uint16_t first, second;
};

static float number(fa3_dtype dtype, uint16_t bits) {
  return dtype == FA3_FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits);
}

static struct turned turn(fa3_dtype dtype, uint16_t a, uint16_t b, uint16_t cosine, uint16_t sine) {
  const uint16_t pair[] = {a, b};
  float x[2];
  struct problem problem = {.head_dim = 2};
  problem.rotary_cos = (struct operand){.data = (char *)&cosine, .dtype = dtype, .dim = 1};
  problem.rotary_sin = (struct operand){.data = (char *)&sine, .dtype = dtype, .dim = 1};
  turn_head_before_rotation(&problem, (const char *)pair, dtype, 0, x);
  if (dtype == FA3_FLOAT16) return (struct turned){half_from_float(x[0]), half_from_float(x[1])};
  return (struct turned){bfloat_from_float(x[0]), bfloat_from_float(x[1])};
}

/* The 16-bit number that is nearest to a sum, of two the even one: of the neighbours of any that is
 * near, by exact differences, as the exponents that are drawn are close together. */
static uint16_t nearest(fa3_dtype dtype, long double sum) {
  const float rounded = (float)sum;
  const uint16_t middle =
      dtype == FA3_FLOAT16 ? half_from_float(rounded) : bfloat_from_float(rounded);
  uint16_t best = middle;
  for (int step = -1; step <= 1; step += 2) {
    const uint16_t other = (uint16_t)(middle + step);
    const long double nearer = fabsl(sum - (long double)number(dtype, best)) -
                               fabsl(sum - (long double)number(dtype, other));
    if (nearer > 0 || (nearer == 0 && best % 2)) best = other;
  }
  return best;
}

static void test_nearest(void **state) {
  (void)state;
  static const fa3_dtype dtypes[] = {FA3_FLOAT16, FA3_BFLOAT16};
  int twice = 0; /* sums that float32 and then 16 bits would round to another number */
  for (int d = 0; d < 2; d++) {
    const fa3_dtype dtype = dtypes[d];
    struct rng rng = rng_for((uint64_t)d);
    for (int trial = 0; trial < 400000; trial++) {
      uint16_t bits[4];
      float x[4];
      for (int i = 0; i < 4; i++) {
        /* Exponents from 2^-6 to 2^1. */
        const int64_t exponent = rng_between(&rng, -6, 1) + (dtype == FA3_FLOAT16 ? 15 : 127);
        const int mantissa = dtype == FA3_FLOAT16 ? 10 : 7;
        bits[i] = (uint16_t)(rng_between(&rng, 0, 1) << 15 | exponent << mantissa |
                             rng_between(&rng, 0, (1 << mantissa) - 1));
        x[i] = number(dtype, bits[i]);
      }
      const struct turned got = turn(dtype, bits[0], bits[1], bits[2], bits[3]);
      const float a = x[0], b = x[1], c = x[2], s = x[3];
      const float of_b = number(dtype, nearest(dtype, (long double)b * (long double)s));
      const float of_a = number(dtype, nearest(dtype, (long double)a * (long double)s));
      const long double first = (long double)a * (long double)c - (long double)of_b;
      const long double second = (long double)b * (long double)c + (long double)of_a;
      /* A zero's sign is in test_limits. */
      if (first == 0 || second == 0) continue;
      assert_int_equal(got.first, nearest(dtype, first));
      assert_int_equal(got.second, nearest(dtype, second));
      const float once = (float)first;
      twice +=
          got.first != (dtype == FA3_FLOAT16 ? half_from_float(once) : bfloat_from_float(once));
    }
  }
  assert_true(twice > 0);
}

static void test_limits(void **state) {
  (void)state;
  static const struct {
    fa3_dtype dtype;
    uint16_t a, b, cosine, sine, first, second;
  } cases[] = {
      /* Halfway between 0x3fc1 and 0x3fc2; with 2^-133 less, and more. */
      {FA3_BFLOAT16, 0x3f81, 0x0000, 0x3fc0, 0x0000, 0x3fc2, 0x0000},
      {FA3_BFLOAT16, 0x3f81, 0x0d80, 0x3fc0, 0x2f00, 0x3fc1, 0x2f01},
      {FA3_BFLOAT16, 0x3f81, 0x0d80, 0x3fc0, 0xaf00, 0x3fc2, 0xaf01},
      /* 2^127 2 - 2^127: the product alone is too large. */
      {FA3_BFLOAT16, 0x7f00, 0x7f00, 0x4000, 0x3f80, 0x7f00, 0x7f80},
      /* -2^-200 - 0 is -0. */
      {FA3_BFLOAT16, 0x8d80, 0x0000, 0x0d80, 0x0000, 0x8000, 0x0000},
      /* The least number is a half of 2^-132, and stays. */
      {FA3_BFLOAT16, 0x0001, 0x0001, 0x3f80, 0x0000, 0x0001, 0x0001},
      {FA3_FLOAT16, 0x0001, 0x0001, 0x3c00, 0x0000, 0x0001, 0x0001},
      /* 65504 + 65504 is infinite. */
      {FA3_FLOAT16, 0x7bff, 0xfbff, 0x3c00, 0x3c00, 0x7c00, 0x0000},
      {FA3_FLOAT16, 0x7c00, 0x3c00, 0x3c00, 0x3c00, 0x7c00, 0x7c00},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct turned got =
        turn(cases[i].dtype, cases[i].a, cases[i].b, cases[i].cosine, cases[i].sine);
    if (got.first != cases[i].first || got.second != cases[i].second)
      fail_msg("case %d: 0x%04x, 0x%04x: expected 0x%04x, 0x%04x", (int)i, (unsigned)got.first,
               (unsigned)got.second, (unsigned)cases[i].first, (unsigned)cases[i].second);
  }
  const uint16_t infinite = 0x7f80;
  const struct turned got = turn(FA3_BFLOAT16, infinite, infinite, 0, 0);
  assert_true(isnan(number(FA3_BFLOAT16, got.first)) && isnan(number(FA3_BFLOAT16, got.second)));
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_nearest), cmocka_unit_test(test_limits)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
