/* What the backward pass needs of one level beside the forward pass's routines: after vector_*.h,
 * and after STORE_PROBABILITIES(words, a, b), which stores two vectors of floats as words.
 */
#ifndef FA3_CPU_GRADIENT_H
#define FA3_CPU_GRADIENT_H

#include "exp2.h"
#include "product.h"

/* Both in place, as in row_exponentials. The product is rounded before lse is subtracted, as it was
 * in the lse of a row that one score decides: such a row's P is then 1 however large the score. The
 * cap's derivative comes from the capped score; -1 takes the place of a masked one. */
INLINE void gradient_row(const struct gradient_step *s, float *scores, float *gradients,
                         const bool capped) {
  vec scale = vec_set(s->scale), inverse_cap = vec_set(capped ? 1 / s->softcap : 0);
  float *probabilities = scores, *arranged = gradients;
  for (int64_t i = 0; i < s->columns; i += 2 * VECTOR) {
    vec p[2], g[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      int64_t at = i + v * VECTOR;
      vec score = vec_load(scores + at);
      vec exponent = vec_sub(vec_mul(score, scale), vec_load(s->lse + at));
      p[v] = vec_exp2(vec_mul(exponent, vec_set(1.44269504f)));
      g[v] = vec_mul(p[v], vec_sub(vec_load(gradients + at), vec_load(s->delta + at)));
      if (capped) {
        vec bent = vec_max(vec_set(-1), vec_mul(score, inverse_cap));
        g[v] = vec_mul(g[v], vec_sub(vec_set(1), vec_mul(bent, bent)));
      }
    }
    probabilities = STORE_PROBABILITIES(probabilities, p[0], p[1]);
    arranged = STORE_PROBABILITIES(arranged, g[0], g[1]);
  }
}

static void gradient(const struct gradient_step *s) {
  for (int64_t r = 0; r < s->rows; r++) {
    float *scores = s->scores + r * s->stride, *gradients = s->gradients + r * s->stride;
    if (s->softcap > 0)
      gradient_row(s, scores, gradients, true);
    else
      gradient_row(s, scores, gradients, false);
  }
}

INLINE float dot_as(fa3_dtype dtype, const char *a, const char *b, int64_t width) {
  const int64_t step = VECTOR * size_of(dtype);
  vec sum = vec_set(0);
  for (int64_t i = 0; i < width; i += VECTOR, a += step, b += step)
    sum = vec_fma(vec_load_as(dtype, a, width - i), vec_load_as(dtype, b, width - i), sum);
  return vec_reduce_add(sum);
}

static float dot(const void *a, const void *b, int64_t width, fa3_dtype dtype) {
  return BY_DTYPE(dtype, dot_as, a, b, width);
}

#endif
