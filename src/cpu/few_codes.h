/* Few queries of bfloat16 against E4M3 codes, for a level with AVX512_BF16 and AVX512_VBMI (part of
 * few_rows.h). The two vectors of bfloat16 that 64 codes become (widen.h) are pairs for the scores
 * as they are, and float32 by a shift and a mask for the values. Queries and outputs are in the
 * order of these vectors. With four rows or more the vectors of scores have codes of four keys. */
#ifndef FA3_CPU_FEW_CODES_H
#define FA3_CPU_FEW_CODES_H

enum { LANE = 16 }; /* codes of 128 bits */

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

/* 16 codes of 4 * `sets` keys as pairs: a set is a vector of four keys, a lane of 16 codes each.
 * Key i is in set i % sets. */
INLINE void few_turn(const char *const *rows_of, int64_t at, __m512i words[4][2], code_marks *marks,
                     const int sets) {
#pragma GCC unroll 4
  for (int set = 0; set < sets; set++) {
    __m128i lanes[4];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++)
      lanes[lane] = _mm_loadu_si128((const __m128i *)(rows_of[lane * sets + set] + at));
    __m512i codes = _mm512_castsi128_si512(lanes[0]);
#pragma GCC unroll 4
    for (int lane = 1; lane < 4; lane++)
      codes = _mm512_mask_broadcast_i32x4(codes, (__mmask16)(0xf << 4 * lane), lanes[lane]);
    widen_codes_in(codes, words[set], marks);
  }
}

INLINE void few_turned_products(vec sum[8][4], const float *query, __m512i words[4][2],
                                const int rows, const int sets) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++)
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const vec element = _mm512_broadcast_f32x4(_mm_load_ps(query + r * FEW_STRIDE + v * VECTOR));
#pragma GCC unroll 4
      for (int set = 0; set < sets; set++)
        sum[r][set] = MULTIPLY_ADD(sum[r][set], element, _mm512_castsi512_ps(words[set][v]));
    }
}

/* Of 16 keys' sums a row, or two rows' of 8 keys: four lanes of four vectors are added up. */
INLINE void few_reduce_turned(vec sum[8][4], float *scores, const int rows, const int sets) {
  const int together = 4 / sets;
#pragma GCC unroll 8
  for (int r = 0; r < rows; r += together) {
    const vec *next = sets == 4 ? sum[r] + 2 : sum[r + 1];
    const vec first = vec_add_pairs(sum[r][0], sum[r][1]), second = vec_add_pairs(next[0], next[1]);
    const vec quads =
        vec_add(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
    if (sets == 4) {
      vec_store(scores + r * FEW_KEYS, quads);
    } else {
      const __m512i rows_apart = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
      const __m512d apart = _mm512_permutexvar_pd(rows_apart, _mm512_castps_pd(quads));
      _mm256_storeu_pd((double *)(scores + r * FEW_KEYS), _mm512_castpd512_pd256(apart));
      _mm256_storeu_pd((double *)(scores + (r + 1) * FEW_KEYS), _mm512_extractf64x4_pd(apart, 1));
    }
  }
}

/* Scores of four rows with 16 keys, or eight with 8, whose codes are turned: then four sums are
 * reduced by lanes, and 16 scores in 9 operations where few_scores_block takes 56. With two sets
 * there are registers for the next codes, which are made before the last are multiplied. */
INLINE code_marks few_turned_scores_block(const float *query, int64_t dim,
                                          const char *const *rows_of, const char *const *next_of,
                                          float *scores, const int rows, const int sets) {
  const bool early = sets == 2;
  code_marks marks = _mm512_setzero_si512();
  __m512i words[4][2], next_words[4][2];
  vec sum[8][4];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int set = 0; set < sets; set++) sum[r][set] = vec_set(0);
  if (early) few_turn(rows_of, 0, next_words, &marks, sets);
  for (int64_t at = 0; at < dim; at += LANE) {
    const int64_t line = at / CODES * CODES, lane = at % CODES / LANE;
#pragma GCC unroll 4
    for (int set = 0; set < sets; set++) few_fetch(next_of[lane * sets + set] + line, LINE, rows);
    if (early)
      memcpy(words, next_words, sizeof words);
    else
      few_turn(rows_of, at, words, &marks, sets);
    if (early && at + LANE < dim) few_turn(rows_of, at + LANE, next_words, &marks, sets);
    few_turned_products(sum, query + line / 2 + lane * 4, words, rows, sets);
  }
  few_reduce_turned(sum, scores, rows, sets);
  return marks;
}

INLINE void few_code_scores(const struct few_rows_step *s, struct few_columns *c, fa3_dtype dtype,
                            int64_t row, const int rows) {
  const float *query = s->queries + row * FEW_STRIDE;
  float *scores = s->scores + row * FEW_KEYS + c->first;
  const int64_t dim = s->head_dim, count = c->count;
  const int sets = SUMS / rows, keys = rows >= 4 ? 4 * sets : TOGETHER;
  code_marks marks = c->marks;
  (void)dtype;
  for (int64_t k = 0; k < count; k += keys)
    marks = _mm512_or_si512(
        marks,
        rows >= 4
            ? few_turned_scores_block(query, dim, c->rows + k, c->next + k, scores + k, rows, sets)
            : few_code_scores_block(query, dim, c->rows + k, c->next + k, scores + k, rows));
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
