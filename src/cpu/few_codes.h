/* Few queries of bfloat16 against E4M3 codes, for a level with AVX512_BF16 and AVX512_VBMI (part of
 * few_rows.h). The two vectors of bfloat16 that 64 codes become (widen.h) are pairs for the scores
 * as they are, and float32 by a shift and a mask for the values. Queries and outputs are in the
 * order of these vectors. */
#ifndef FA3_CPU_FEW_CODES_H
#define FA3_CPU_FEW_CODES_H

/* Where a row's element is in an output. */
static inline int64_t few_code_place(int64_t i) {
  const int64_t n = i % CODES;
  return i - n + (n % 16 / 8 * 2 + n % 2) * VECTOR + n / 16 * 4 + n % 8 / 2;
}

static inline void few_order_code_outputs(float *row, int64_t width) {
  for (int64_t i = 0; i < width; i += CODES) {
    float codes[CODES];
    memcpy(codes, row + i, sizeof codes);
#pragma GCC unroll 64
    for (int n = 0; n < CODES; n++) row[i + n] = codes[few_code_place(n)];
  }
}

/* A query's words, zeros up to a multiple of CODES, eight by eight. */
static inline void few_order_code_queries(float *query, const uint16_t *words, int64_t width) {
  enum { EIGHT = 8 * sizeof *words, EIGHTS = CODES / 8 };
  for (int64_t i = 0; i < width; i += CODES)
#pragma GCC unroll 8
    for (int n = 0; n < EIGHTS; n++)
      memcpy((char *)(query + i / 2) + (n % 2 * (EIGHTS / 2) + n / 2) * EIGHT, words + i + n * 8,
             EIGHT);
}

/* As few_scores_block. */
INLINE code_marks few_code_scores_block(const float *query, int64_t dim,
                                        const char *const rows_of[TOGETHER],
                                        const char *const next_of[TOGETHER], float *scores,
                                        const int rows) {
  const char *const from[TOGETHER] = {rows_of[0], rows_of[1], rows_of[2], rows_of[3]};
  const char *const next[TOGETHER] = {next_of[0], next_of[1], next_of[2], next_of[3]};
  code_marks marks = _mm512_setzero_si512();
  vec sum[4][TOGETHER];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++) sum[r][k] = vec_set(0);
  for (int64_t i = 0; i < dim; i += CODES) {
    const __mmask64 mask = first_codes(dim - i);
    __m512i words[TOGETHER][2];
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++) {
      few_fetch(next[k] + i, CODES, rows);
      widen_vector(from[k] + i, mask, words[k], &marks);
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const vec element = vec_load(query + r * FEW_STRIDE + i / 2 + v * VECTOR);
#pragma GCC unroll 4
        for (int k = 0; k < TOGETHER; k++)
          sum[r][k] = MULTIPLY_ADD(sum[r][k], element, _mm512_castsi512_ps(words[k][v]));
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) vec_reduce_add_quad(sum[r], scores + r * FEW_KEYS);
  return marks;
}

INLINE void few_code_scores(const struct few_rows_step *s, struct few_columns *c, fa3_dtype dtype,
                            int64_t row, const int rows) {
  const float *query = s->queries + row * FEW_STRIDE;
  float *scores = s->scores + row * FEW_KEYS + c->first;
  const int64_t dim = s->head_dim, count = c->count;
  code_marks marks = c->marks;
  (void)dtype;
  for (int64_t k = 0; k < count; k += TOGETHER)
    marks = _mm512_or_si512(
        marks, few_code_scores_block(query, dim, c->rows + k, c->next + k, scores + k, rows));
  c->marks = marks;
}

/* As few_values_block, 4 or 8 vectors: one or two of codes. */
INLINE void few_code_values_block(struct few_columns *c, const float *weights, float *output,
                                  int64_t width, int64_t i, const int rows, const int vectors) {
  const __mmask64 mask = first_codes(width - i - (vectors - 4) * VECTOR);
  code_marks marks = c->marks;
  vec sum[4][8];
  few_load_sums(sum, output + i, rows, vectors);
  for (int64_t k = 0; k < c->count; k++) {
    const char *from = c->rows[k] + i;
    few_fetch(c->next[k] + i, vectors * VECTOR, rows);
    vec weight[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) weight[r] = vec_set(weights[r * FEW_KEYS + k]);
    __m512i words[2];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
      if (v % 4 == 0)
        widen_vector(from + v * VECTOR, v == vectors - 4 ? mask : first_codes(CODES), words,
                     &marks);
      const vec column = v % 2 ? vec_odd(words[v / 2 % 2]) : vec_even(words[v / 2 % 2]);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][v] = vec_fma(weight[r], column, sum[r][v]);
    }
  }
  few_store_sums(sum, output + i, rows, vectors);
  c->marks = marks;
}

INLINE void few_code_values(const struct few_rows_step *s, struct few_columns *c, fa3_dtype dtype,
                            int64_t row, const int rows) {
  const int64_t width = s->value_head_dim;
  const float *weights = s->scores + row * FEW_KEYS + c->first;
  float *output = s->output + row * FEW_STRIDE;
  int64_t i = 0;
  (void)dtype;
  for (; rows <= 2 && i + CODES < width; i += 2 * CODES)
    few_code_values_block(c, weights, output, width, i, rows, 8);
  for (; i < width; i += CODES) few_code_values_block(c, weights, output, width, i, rows, 4);
}

#endif
