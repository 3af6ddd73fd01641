/* What one processor level supplies to the tile loops (forward.c, backward.c): arranging
 * operands, the matrix product and the softmax step of one tile.
 *
 * Arranged operands are made of 32-bit words: one float, or two bfloat16 that follow each other
 * along the dimension that the product sums over (its depth). A left operand (queries,
 * probabilities) is arranged by rows. A right operand (keys, values) is arranged in panels of
 * `panel` columns: panel after panel, in each word after word of the depth, `panel` columns. */
#ifndef FA3_CPU_ROUTINES_H
#define FA3_CPU_ROUTINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fa3.h"
#include "head_dim.h"
#include "mask.h"

/* output[row][column] (+)= sum over depth of left[row][.] * right[.][column]. */
struct product {
  int64_t rows;
  int64_t columns; /* a multiple of the routines' `vector` */
  int64_t depth;   /* in words, a multiple of the routines' `depth_step` */
  const float *left;
  int64_t left_stride; /* words from row to row */
  const float *right;
  int64_t right_stride; /* words from panel to panel */
  float *output;
  int64_t output_stride;
  bool accumulate;
};

/* One tile's step of the online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1).
 * Running maxima are scores. */
struct softmax_step {
  int64_t rows;
  int64_t columns; /* a multiple of the routines' `panel` */
  float *scores;   /* become the probabilities, arranged by rows with the same stride */
  int64_t score_stride;
  float scale; /* from score to exponent of 2, above 0 and finite */
  float *maximum;
  float *sum;
  float *output; /* rescaled where the maximum moves */
  int64_t output_stride;
  int64_t output_width; /* a multiple of the routines' `vector` */
};

/* One tile's step of the backward pass (FlashAttention-2, algorithm 2), keys by rows and queries by
 * columns: P = exp(score * scale - lse) and dS = P * (dP - delta), with a softcap c times
 * 1 - (score / c)^2. */
struct gradient_step {
  int64_t rows;
  int64_t columns; /* a multiple of the routines' `panel` */
  float *scores; /* capped if softcap is above 0; become P, arranged by rows with the same stride */
  float *gradients; /* dP; become dS, arranged likewise */
  int64_t stride;
  float scale;
  float softcap;      /* 0: none */
  const float *lse;   /* of each column; infinity makes P and dS 0 */
  const float *delta; /* likewise */
};

/* Rows in the caller's memory. */
struct rows {
  const char *data;
  fa3_dtype dtype;
  int64_t stride; /* bytes from row to row */
  int64_t count;
  int64_t width; /* elements of a row, a multiple of 8 */
};

/* Some keys' step of the online softmax for few rows of some heads, on keys and values as they lie.
 * What is of a row comes head by head: row r of head h is h * rows + r. */
enum {
  MOST_ROWS = 64, /* of all heads */
  FEW_KEYS = 64,
  FEW_GROUP = 32,                    /* of keys that are asked for early, at most */
  FEW_STRIDE = LARGEST_HEAD_DIM + 16 /* floats from row to row of queries and outputs; not a power
                                      * of two, as their rows should not share sets of a cache */
};
struct few_rows_step {
  int64_t heads; /* of keys */
  int64_t rows;  /* of each head */
  int64_t count; /* of keys, 1 to FEW_KEYS */
  int64_t head_dim;
  int64_t value_head_dim;
  fa3_dtype dtype; /* of keys and values */
  /* Where each row is of the first head. There are FEW_GROUP more: of keys those that are needed
   * next, or any that are seen. */
  const char *const *keys;
  const char *const *values;
  int64_t key_head_stride; /* bytes from head to head */
  int64_t value_head_stride;
  const float *queries; /* zeros up to a multiple of the routines' `vector` */
  /* Of FP8 codes alone: what scores of each row are multiplied by, and, heads x FEW_KEYS,
   * CODE_FACTOR times what the codes of keys and values are multiplied by. */
  const float *query_scales;
  const float *key_scales;
  const float *value_scales;
  const struct key_range *seen; /* of each row of a head, among these keys */
  float scale;                  /* above 0 */
  float softcap;                /* 0: none */
  float *scores;                /* FEW_KEYS of each row, scratch */
  float *maximum;
  float *sum;
  float *output;
};

/* Codes are computed with as float16 numbers that are so much smaller: a code's bits are then those
 * of the number, moved. */
#define CODE_FACTOR 256

struct routines {
  int32_t elements_per_word;
  int32_t vector;     /* words of a vector register */
  int32_t panel;      /* columns of a panel, a multiple of `vector` */
  int32_t depth_step; /* words */
  int32_t strip;      /* rows that go through product, softmax and product together */

  /* Query rows times `factor`, which is 1, -1 or 0; zeros up to `depth` words. */
  void (*arrange_queries)(const struct rows *queries, float factor, int64_t depth, float *arranged);
  /* Right operand of query * key^T: keys are columns, zeros up to a whole panel and `depth`. */
  void (*arrange_keys)(const struct rows *keys, int64_t depth, float *arranged);
  /* Right operand of probabilities * value: keys are the depth, zeros up to `depth` words. */
  void (*arrange_values)(const struct rows *values, int64_t depth, int64_t panel_stride,
                         float *arranged);

  void (*multiply)(const struct product *product);
  /* score = softcap * tanh(score * scale / softcap); `columns` is a multiple of `vector`. */
  void (*cap)(float *scores, int64_t columns, float scale, float softcap);
  void (*softmax)(const struct softmax_step *step);
  /* One output row, times `factor`. */
  void (*store_row)(const float *row, int64_t width, float factor, fa3_dtype dtype, void *stored);

  void (*few_rows)(const struct few_rows_step *step);
  /* A query or an output of few_rows, whose elements have an order of their own with keys and
   * values of some dtypes: into that order, or back. */
  void (*few_order)(float *row, int64_t width, fa3_dtype dtype, bool back);

  /* What the backward pass needs beside: */
  void (*gradient)(const struct gradient_step *step);
  /* arranged[row][column] to transposed[column][row], both arranged by rows; `columns` is a
   * multiple of `panel`, and the rows are filled up with zeros to a multiple of 8. */
  void (*transpose)(const float *arranged, int64_t rows, int64_t columns, int64_t stride,
                    float *transposed, int64_t transposed_stride);
  /* stored += row * factor, rounded once. */
  void (*add_row)(const float *row, int64_t width, float factor, fa3_dtype dtype, void *stored);
  float (*dot)(const void *a, const void *b, int64_t width, fa3_dtype dtype);

  /* Around each block of rows on its thread; null if there is nothing to do. */
  void (*enter)(void);
  void (*leave)(void);
};

extern const struct routines plain_routines;
extern const struct routines avx2_routines;
extern const struct routines avx512_routines;
extern const struct routines avx512bf16_routines;
extern const struct routines amx_routines;

/* avx512_routines' own, which AMX's level has too: few rows are no product of matrices. */
void avx512_few_rows(const struct few_rows_step *step);
void avx512_few_order(float *row, int64_t width, fa3_dtype dtype, bool back);

#endif
