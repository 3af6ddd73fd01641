/* The launch contract of kernels/unpack.cu, shared by host and device. A block has FA3_UNPACK_KEYS
 * keys of a head of a sequence, and their values; the grid is (their tiles times key heads,
 * sequences). */
#ifndef FA3_UNPACK_PARAMS_H
#define FA3_UNPACK_PARAMS_H

#include "decode_params.h"
#include "forward_params.h"

enum { FA3_UNPACK_KEYS = 128, FA3_UNPACK_THREADS = 256 };

typedef struct {
  fa3_decode_fp8_params cache; /* of queries only the dtype, and how many a sequence has */
  /* (sequence, head, row, column), dense: `rows` is that of the longest sequence. */
  uint16_t *key, *value;
  int rows;
  fa3_head_scales *head_scales; /* (sequence, head); or null: */
  float *row_scales;            /* (sequence, head, key and value, row), of `scale_rows` rows */
  int scale_rows;
  int row_threads; /* the power of two of threads that a row of codes has: of eight columns each */
} fa3_unpack_params;

#endif
