/* The softmax step of one level: after vector_*.h, and after STORE_PROBABILITIES(words, a, b),
 * which stores two vectors of floats as words. */
#ifndef FA3_CPU_SOFTMAX_H
#define FA3_CPU_SOFTMAX_H

#include <math.h>

#include "exp2.h"
#include "routines.h"

static void cap(float *scores, int64_t columns, float scale, float softcap) {
  for (int64_t i = 0; i < columns; i += VECTOR) {
    vec scaled = vec_mul(vec_load(scores + i), vec_set(scale));
    vec bent = vec_tanh(vec_div(scaled, vec_set(softcap)));
    vec_store(scores + i, vec_mul(bent, vec_set(softcap)));
  }
}

static inline float row_maximum(const float *scores, int64_t columns) {
  vec even = vec_load(scores), odd = vec_load(scores + VECTOR);
  for (int64_t i = 2 * VECTOR; i < columns; i += 2 * VECTOR) {
    even = vec_max(even, vec_load(scores + i));
    odd = vec_max(odd, vec_load(scores + i + VECTOR));
  }
  return vec_reduce_max(vec_max(even, odd));
}

/* Scores become 2^((score - maximum) * scale), arranged; returns their sum. The difference comes
 * first: in score * scale - maximum * scale the last product's rounding error is an exponent, and a
 * large one where scores are large. In place: what is stored never passes what is still to be read.
 */
static inline float row_exponentials(float *scores, int64_t columns, float scale, float maximum) {
  vec factor = vec_set(scale), shift = vec_set(maximum);
  vec even = vec_set(0), odd = vec_set(0);
  float *arranged = scores;
  for (int64_t i = 0; i < columns; i += 2 * VECTOR) {
    vec a = vec_exp2(vec_mul(vec_sub(vec_load(scores + i), shift), factor));
    vec b = vec_exp2(vec_mul(vec_sub(vec_load(scores + i + VECTOR), shift), factor));
    even = vec_add(even, a);
    odd = vec_add(odd, b);
    arranged = STORE_PROBABILITIES(arranged, a, b);
  }
  return vec_reduce_add(vec_add(even, odd));
}

static void softmax(const struct softmax_step *s) {
  for (int64_t r = 0; r < s->rows; r++) {
    float *scores = s->scores + r * s->score_stride;
    float tile = row_maximum(scores, s->columns);
    float before = s->maximum[r];
    float now = tile > before ? tile : before;
    if (now > before) {
      float rescale = exp2f((before - now) * s->scale);
      s->maximum[r] = now;
      s->sum[r] *= rescale;
      float *output = s->output + r * s->output_stride;
      for (int64_t i = 0; i < s->output_width; i += VECTOR)
        vec_store(output + i, vec_mul(vec_load(output + i), vec_set(rescale)));
    }
    /* With nothing seen yet the differences are -infinity - 0. */
    float shift = now == -INFINITY ? 0 : now;
    s->sum[r] += row_exponentials(scores, s->columns, s->scale, shift);
  }
}

#endif
