/* Rotary embedding before a rotation, on the CPU: in the arithmetic of 16 bits, to the bit. */
#include "cpu/rotary.h"

#include <math.h>

#include "nearest.h"
#include "problem.h"
#include "rng.h"
#include "test.h"

/* A pair (a, b) of 16-bit numbers, and what they become by one angle. */
struct turned {
  uint16_t first, second;
};

static struct turned turn(fa3_dtype dtype, uint16_t a, uint16_t b, uint16_t cosine, uint16_t sine) {
  const uint16_t pair[] = {a, b};
  float x[2];
  struct problem problem = {.head_dim = 2};
  problem.rotary_cos = (struct operand){.data = (char *)&cosine, .dtype = dtype, .dim = 1};
  problem.rotary_sin = (struct operand){.data = (char *)&sine, .dtype = dtype, .dim = 1};
  turn_head_before_rotation(&problem, (const char *)pair, dtype, 0, x);
  return (struct turned){bits_of_float(dtype, x[0]), bits_of_float(dtype, x[1])};
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
        x[i] = number_of_bits(dtype, bits[i]);
      }
      const struct turned got = turn(dtype, bits[0], bits[1], bits[2], bits[3]);
      const float a = x[0], b = x[1], c = x[2], s = x[3];
      const float of_b =
          number_of_bits(dtype, nearest_bits(dtype, (long double)b * (long double)s));
      const float of_a =
          number_of_bits(dtype, nearest_bits(dtype, (long double)a * (long double)s));
      const long double first = (long double)a * (long double)c - (long double)of_b;
      const long double second = (long double)b * (long double)c + (long double)of_a;
      /* A zero's sign is in test_limits. */
      if (first == 0 || second == 0) continue;
      assert_int_equal(got.first, nearest_bits(dtype, first));
      assert_int_equal(got.second, nearest_bits(dtype, second));
      twice += got.first != bits_of_float(dtype, (float)first);
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
  assert_true(isnan(number_of_bits(FA3_BFLOAT16, got.first)) &&
              isnan(number_of_bits(FA3_BFLOAT16, got.second)));
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_nearest), cmocka_unit_test(test_limits)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
