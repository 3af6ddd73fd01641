/* Attention in float64, one row at a time, straight from the definition in fa3.h: what every
 * engine is compared with. Shares no code with them but the number conversions, and the table of
 * tensors (src/tensors.def). */
#ifndef FA3_REFERENCE_H
#define FA3_REFERENCE_H

#include "fa3.h"

/* Element `index` (in elements from tensor->data) as a double. */
double reference_load(const fa3_tensor *tensor, int64_t index);

/* Sequences of a call. */
int64_t reference_batch(const fa3_forward_args *args);

/* Rows of query, and keys, that count of sequence `batch`. */
int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch);
int64_t reference_seqlen_k(const fa3_forward_args *args, int64_t batch);

/* One output row (value_head_dim doubles) and its lse, for valid args in host memory.
 * `row` counts within the sequence. */
void reference_row(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                   double *output, double *lse);

/* How far a correct engine may be from that row, element by element: a bound derived in
 * docs/numerics.md, not a tuned tolerance. `output` and `lse` are reference_row's; where they are
 * not finite the bound means nothing. */
void reference_bound(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                     const double *output, double lse, double *output_bound, double *lse_bound);

/* Where that row starts, in elements: of args->output, and of args->lse. */
int64_t reference_output_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                               int64_t row);
int64_t reference_lse_index(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row);

/* The backward pass, for valid args in host memory: the gradient of one row, and how far a correct
 * engine may be from it before it stores it (reference_stored_bound says what it may store). Output
 * and lse are taken as they are given. */

/* The forward call that gave output and lse: for the functions above. */
fa3_forward_args reference_forward_args(const fa3_backward_args *args);

/* grad_query: head_dim doubles. */
void reference_grad_query(const fa3_backward_args *args, int64_t batch, int64_t head, int64_t row,
                          double *gradient, double *bound);

/* grad_key and grad_value of a key head's row: head_dim and value_head_dim doubles. */
void reference_grad_key_value(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                              int64_t row, double *grad_key, double *grad_value, double *key_bound,
                              double *value_bound);

/* grad_sink of a query head. */
void reference_grad_sink(const fa3_backward_args *args, int64_t head, double *gradient,
                         double *bound);

/* How far a stored value may be off that is `bound` off before it is rounded to `dtype`. With
 * FA3_ACCUMULATE `value` is the gradient added to what was there. */
double reference_stored_bound(fa3_dtype dtype, double value, double bound);

/* Where rows of the gradients start, in elements. */
int64_t reference_grad_query_index(const fa3_backward_args *args, int64_t batch, int64_t head,
                                   int64_t row);
int64_t reference_grad_key_index(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                                 int64_t row);
int64_t reference_grad_value_index(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                                   int64_t row);

#endif
