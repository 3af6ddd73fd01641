/* Calls cut into smaller calls, each a view of the same tensors, so that long work can show how
 * far it is. Diagonals of the whole stay within 2^59. */
#ifndef FA3_CLI_SLICE_H
#define FA3_CLI_SLICE_H

#include "fa3.h"

/* Sequences that a call has. */
int64_t slice_batch(const fa3_forward_args *args);

/* One sequence of a call, its lengths read. */
struct slice_sequence {
  int64_t rows;      /* of query that are used */
  int64_t first_row; /* of query, in its batch entry or packed tensor */
  int64_t batch_q;
  int64_t keys; /* that are used */
  int64_t first_key;
  int64_t batch_k;
  int64_t diagonal;
};
struct slice_sequence slice_sequence(const fa3_forward_args *args, int64_t batch);

/* Arithmetic of rows [begin, end) of one query head of a sequence: both products. */
double slice_flops(const fa3_forward_args *args, const struct slice_sequence *sequence,
                   int64_t begin, int64_t end);

/* What a slice's arguments point to, beside the whole call's tensors. */
struct slice {
  fa3_forward_args args;
  int64_t diagonal;
};

/* Rows [row_begin, row_end) of a sequence, for the query heads of key heads [head_begin,
 * head_end): a dense batch of one. */
void slice_rows(const fa3_forward_args *args, const struct slice_sequence *sequence,
                int64_t head_begin, int64_t head_end, int64_t row_begin, int64_t row_end,
                struct slice *slice);

/* The query heads of key heads [begin, end), in all sequences. */
void slice_heads(const fa3_backward_args *args, int64_t begin, int64_t end, fa3_backward_args *cut);

/* Sequences [begin, end) of a call; the starts have room for one more than that. */
void slice_sequences(const fa3_forward_args *args, int64_t begin, int64_t end, int32_t *starts_q,
                     int32_t *starts_k, fa3_forward_args *cut);

#endif
