/* The combine kernel's launch contract, shared by host and device: several averages of each row, of
 * different keys, become one. A block has FA3_COMBINE_ROWS rows of one sequence, row r being query
 * r / heads and head r % heads; the grid is (blocks of the longest sequence, batch). */
#ifndef FA3_COMBINE_PARAMS_H
#define FA3_COMBINE_PARAMS_H

#include <stdint.h>

enum { FA3_COMBINE_ROWS = 4, FA3_COMBINE_THREADS = 32 * FA3_COMBINE_ROWS };

/* What FA3_COMBINE writes. */
enum { FA3_COMBINE_FLOAT32 = 0, FA3_COMBINE_FLOAT16 = 1, FA3_COMBINE_BFLOAT16 = 2 };

/* Strides in elements. */
typedef struct {
  int64_t split, batch, row, head;
} fa3_combine_strides;

typedef struct {
  const float *partial;     /* averages; the last dimension is contiguous */
  const float *partial_lse; /* -inf where a split has no key: its average is not read */
  fa3_combine_strides partial_strides, partial_lse_strides;
  void *output;
  float *lse; /* may be null */
  fa3_combine_strides output_strides, lse_strides;
  const float *sink;       /* one logit per head, or null */
  const int *cu_seqlens_q; /* batch + 1 entries, or null: where sequences are in output and lse */
  const int *used_q;       /* per-sequence lengths, or null */
  int seqlen_q;            /* the length where the arrays are null */
  int splits, heads, head_dim;
  int kind; /* of output */
} fa3_combine_params;

#endif
