#include "rotary.h"

#include <math.h>
#include <string.h>

#include "element.h"
#include "half.h"
#include "head_dim.h"

void turn_head(const struct problem *problem, const char *from, fa3_dtype from_dtype,
               int64_t position, char *to, fa3_dtype to_dtype) {
  const int64_t pairs = problem->rotary_cos.dim, size = (int64_t)fa3_dtype_size(from_dtype);
  const char *const cos = element(&problem->rotary_cos, 0, position, 0);
  const char *const sin = element(&problem->rotary_sin, 0, position, 0);
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t first = problem->interleaved ? 2 * i : i;
    const int64_t second = problem->interleaved ? first + 1 : i + pairs;
    const float x = load_element(from, from_dtype, first);
    const float y = load_element(from, from_dtype, second);
    const float c = load_element(cos, problem->rotary_cos.dtype, i);
    const float s = load_element(sin, problem->rotary_sin.dtype, i);
    store_element(to, to_dtype, first, x * c - y * s);
    store_element(to, to_dtype, second, x * s + y * c);
  }
  if (from_dtype == to_dtype) {
    memmove(to + 2 * pairs * size, from + 2 * pairs * size,
            (size_t)((problem->head_dim - 2 * pairs) * size));
    return;
  }
  for (int64_t d = 2 * pairs; d < problem->head_dim; d++)
    store_element(to, to_dtype, d, load_element(from, from_dtype, d));
}

/* To the numbers of a dtype. */
static void round_row(fa3_dtype dtype, float *x, int64_t count) {
  if (dtype == FA3_BFLOAT16)
    for (int64_t d = 0; d < count; d++) x[d] = float_from_bfloat(bfloat_from_float(x[d]));
  if (dtype == FA3_FLOAT16)
    for (int64_t d = 0; d < count; d++) x[d] = float_from_half(half_from_float(x[d]));
}

/* The sum, as a float that 16 bits round to what they would round the sum to: if it is inexact its
 * last bit is 1 (rounding to odd: Boldo and Melquiond, "Emulation of a FMA and correctly rounded
 * sums", 2008). */
static float add_to_odd(double a, double b) {
  const double sum = a + b, of_b = sum - a;
  const float near = (float)sum;
  const double left = (sum - (double)near) + ((a - (sum - of_b)) + (b - of_b));
  if (left == 0 || !isfinite(near)) return near;
  uint32_t bits;
  memcpy(&bits, &near, sizeof bits);
  if (near != 0 && (left < 0) == (near > 0)) bits--; /* towards zero */
  bits |= 1;
  float odd;
  memcpy(&odd, &bits, sizeof odd);
  return odd;
}

void turn_head_before_rotation(const struct problem *problem, const char *from, fa3_dtype dtype,
                               int64_t position, float *to) {
  const int64_t pairs = problem->rotary_cos.dim, step = problem->interleaved ? 2 : 1;
  const int64_t other = problem->interleaved ? 1 : pairs;
  if (problem->rotary_cos.dtype == FA3_FLOAT32) {
    turn_head(problem, from, dtype, position, (char *)to, FA3_FLOAT32);
    round_row(dtype, to, problem->head_dim);
    return;
  }
  const char *const cos = element(&problem->rotary_cos, 0, position, 0);
  const char *const sin = element(&problem->rotary_sin, 0, position, 0);
  float products[LARGEST_HEAD_DIM] = {0};
  for (int64_t d = 0; d < problem->head_dim; d++) to[d] = load_element(from, dtype, d);
  for (int64_t i = 0; i < pairs; i++) {
    const float s = load_element(sin, dtype, i);
    products[i * step] = -to[i * step + other] * s;
    products[i * step + other] = to[i * step] * s;
  }
  round_row(dtype, products, 2 * pairs);
  for (int64_t i = 0; i < pairs; i++) {
    const double c = (double)load_element(cos, dtype, i); /* times 16 bits it is exact */
    float *const first = to + i * step, *const second = first + other;
    *first = add_to_odd((double)*first * c, (double)products[i * step]);
    *second = add_to_odd((double)*second * c, (double)products[i * step + other]);
  }
  round_row(dtype, to, problem->head_dim);
}
