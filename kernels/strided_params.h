/* The launch contract of kernels/strided.cu, shared by host and device. */
#ifndef FA3_STRIDED_PARAMS_H
#define FA3_STRIDED_PARAMS_H

#include <stdint.h>

enum { FA3_STRIDED_THREADS = 256 };

/* A view (batch, row, head, dim) of elements of 16 bits; the last dimension is contiguous. */
typedef struct {
  uint16_t *data;
  int64_t stride_batch, stride_row, stride_head;
} fa3_view;

/* copy_strided: a grid of (any, batches). Without lengths all rows are copied; with them only the
 * rows of the sequences: cu_seqlens has batches + 1 entries and its rows count from batch 0's
 * first, used has `batches`. */
typedef struct {
  fa3_view from, to;
  int64_t rows; /* of each batch; with cu_seqlens the longest sequence */
  int heads, dims;
  const int *cu_seqlens, *used; /* may be null */
  unsigned flip;                /* exclusive or with every element: 0x8000 changes the sign */
} fa3_copy_params;

/* sinks_to_float: a grid of one block. */
typedef struct {
  const void *from;
  int64_t stride;
  float *to;
  int heads;
  int kind; /* 0 float32, 1 float16, 2 bfloat16 */
} fa3_sink_params;

#endif
