/* The append kernel's launch contract, shared by host and device: new rows of keys and values go
 * into a cache, turned by rotary embedding. A warp has a head of one new row of a
 * sequence: keys' heads, then values', then queries'. The grid is (rows of the longest sequence,
 * batch, warps of a row / FA3_APPEND_WARPS). */
#ifndef FA3_APPEND_PARAMS_H
#define FA3_APPEND_PARAMS_H

#include <stdint.h>

#include "fp8_scales.h"
#include "operand.h"
#include "sequence.h"

enum { FA3_APPEND_WARPS = 4, FA3_APPEND_THREADS = 32 * FA3_APPEND_WARPS };

/* What elements are. */
enum {
  FA3_APPEND_FLOAT32 = 0,
  FA3_APPEND_FLOAT16 = 1,
  FA3_APPEND_BFLOAT16 = 2,
  FA3_APPEND_E4M3 = 3
};

typedef struct {
  fa3_operand new_key, new_value, key, value;
  fa3_operand query, rotated_query; /* of heads_q heads; 0: none */
  fa3_operand cos, sin;             /* of `pairs` elements; 0: nothing is turned */
  const int *positions;             /* may be null */
  int64_t positions_stride_batch, positions_stride_row;
  fa3_sequences sequences; /* used_k: before the call */
  const int *page_table;   /* (batch, pages of a sequence), or null */
  int64_t page_table_stride;
  int page_size, pages; /* pages: or entries of the batch */
  int rows_k;           /* that a sequence has room for */
  int heads_q, heads_k, head_dim, head_dim_v;
  int pairs, table_rows, interleaved;
  int kind, table_kind;
  int words; /* what is read has 16 bits and is read by twos, and written so, but for codes; heads'
              * elements are multiples of 4, pairs are even */
  /* With `quantised` the cache is of E4M3 codes, and what goes into it is not. A page, of a cache
   * in pages, stands for a sequence. Scales of one row are written, others read. */
  int quantised;
  fa3_scales key_scale, value_scale;
} fa3_append_params;

#endif
