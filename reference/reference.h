/* Attention in float64, one row at a time, straight from the definition in fa3.h: what every
 * engine is compared with. Shares no code with them but the number conversions. */
#ifndef FA3_REFERENCE_H
#define FA3_REFERENCE_H

#include "fa3.h"

/* Element `index` (in elements from tensor->data) as a double. */
double reference_load(const fa3_tensor *tensor, int64_t index);

/* Rows of query that sequence `batch` has (seqused_q applied). */
int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch);

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

#endif
