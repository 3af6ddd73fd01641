/* One query row and the keys of its sequence, and what roundings cost: what the forward and the
 * backward pass share. */
#ifndef FA3_REFERENCE_ROW_H
#define FA3_REFERENCE_ROW_H

#include <stdbool.h>

#include "fa3.h"

enum { MAX_HEAD_DIM = 256 };

/* Half the unit in the last place of 1, in float32. */
#define UNIT_ROUNDOFF 0x1p-24

struct row {
  const fa3_forward_args *args;
  int64_t query; /* index of its first element */
  int64_t batch;
  int64_t batch_k; /* where key and value rows are */
  int64_t head_k;
  int64_t row_k;
  int64_t seqlen_k;
  long double center; /* i + diagonal; a long double holds every int64 and their sums */
  double scale;
  double query_scale; /* of codes */
};

struct row row_of(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t i);
bool row_sees(const struct row *row, int64_t j);

/* The scaled score of key j before the cap; *magnitude is the same sum over absolute values. */
double row_score(const struct row *row, int64_t j, double *magnitude);
double row_cap(const struct row *row, double score);

/* Key j, or its value: codes times their scale. */
void load_key(const struct row *row, int64_t j, bool value, double *elements);

/* The index of (batch, row, head, 0), where `row` counts from the sequence's first. */
int64_t sequence_element(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens, int64_t batch,
                         int64_t row, int64_t head);
int64_t sequence_leftpad(const fa3_tensor *leftpad, int64_t batch);
int64_t row_value_index(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens, int64_t batch,
                        int64_t row, int64_t head);

/* -infinity without a sink. */
double sink_of(const fa3_forward_args *args, int64_t head);

/* `count` elements from `index` on as doubles. */
void load_elements(const fa3_tensor *tensor, int64_t index, int64_t count, double *elements);

/* The sum of a[i] b[i], and of its terms' magnitudes. */
double dot(const double *a, const double *b, int64_t count, double *magnitude);

/* Unit roundoff, and half the distance between subnormal numbers. */
struct rounding {
  double relative;
  double absolute;
};
struct rounding rounding_of(fa3_dtype dtype);
/* Of probabilities before they enter a product with values of the dtype: none for float32; for
 * codes two factors in float32. */
struct rounding weight_rounding(fa3_dtype dtype);
/* Whether a GPU multiplies them by the scales of codes first, and rounds the product to float16: in
 * units of the row's greatest, which is at most its greatest scale. */
bool rounds_scaled_weights(const fa3_forward_args *args);
/* Whether a GPU's FP8 matrix unit has both products: weights become codes, in the same units, and
 * sums keep 13 bits. */
bool multiplies_codes(const fa3_forward_args *args);
/* Relative error of a sum of that many products there, of the sum of their magnitudes. */
double code_sum_error(double products);
double value_scale(const struct row *row, int64_t j);

/* Relative error of a chain of n float32 roundings: the smaller of the certain bound and the
 * probabilistic one with lambda = 8 (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). */
double chain(double n);

#endif
