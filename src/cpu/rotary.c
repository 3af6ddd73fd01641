#include "rotary.h"

#include <string.h>

#include "element.h"

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
