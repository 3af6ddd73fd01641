/* The quantize kernels' launch contract, shared by host and device: rows become E4M3 codes and
 * scales (fa3_quantize in fa3.h). A head of some rows of a sequence is a tile. A block takes
 * `in_turn` heads of the same rows one after the other, then as many a grid further on; where a
 * mean is subtracted, or a cluster finds a sequence's scale, it has all tiles of a head of a
 * sequence, and its blocks take them in turn, there and back. */
#ifndef FA3_QUANTIZE_PARAMS_H
#define FA3_QUANTIZE_PARAMS_H

#include <stdint.h>

#include "operand.h"
#include "sequence.h"

enum {
  FA3_QUANTIZE_ELEMENTS = 32,     /* of a row, that a thread has */
  FA3_QUANTIZE_THREADS = 1024,    /* at most */
  FA3_QUANTIZE_ANY_THREADS = 512, /* of quantize_any */
  FA3_QUANTIZE_TILE_ROWS = 512,   /* at most */
  FA3_QUANTIZE_PLACE_BYTES = 48,  /* of shared memory for each thread, beside elements and angles */
  FA3_QUANTIZE_SHARED_BYTES = 208 << 10 /* dynamic, of a block at most */
};

/* Where a scale comes from. */
enum {
  FA3_QUANTIZE_OF_TILE, /* a tile has all rows that share one, or more: found, written and used */
  FA3_QUANTIZE_OF_SEQUENCE, /* a cluster has them: it goes over its tiles twice */
  FA3_QUANTIZE_FIND,        /* several tiles share one: it is raised to what each needs */
  FA3_QUANTIZE_USE          /* it is read */
};

/* quantize, for rows that are read and written 16 bytes at a time; quantize_turned and
 * quantize_turned_by_floats, for such rows with rotary embedding, whose tables of the input's dtype
 * or of floats are read likewise; quantize_rotated, quantize_turned_rotated and
 * quantize_turned_rotated_by_floats, for such rows of 16 bits which are rotated, and whose head dim
 * is the kernel's; quantize_any, for any rows and tables: a grid of no more blocks than there are
 * tiles, or of a cluster for each head of a sequence. quantize_clear, before FA3_QUANTIZE_FIND: a
 * thread for each scale. */
typedef struct {
  fa3_operand input, codes, scale;
  fa3_operand cos, sin; /* of `pairs` elements; 0: nothing is turned */
  const int *positions; /* may be null */
  int64_t positions_stride_batch, positions_stride_row;
  fa3_sequences sequences;
  int batches, heads, head_dim;
  int scale_rows; /* that share one; 0: all of a sequence */
  int tile_rows;
  int span_rows, span_tiles; /* tiles begin anew after so many rows: so many tiles later */
  int span_scales;           /* in these */
  int tiles;                 /* of a head of the longest sequence */
  int in_turn;               /* heads of the same rows, that a block takes one after the other */
  int from;                  /* where a scale comes from */
  int pairs, table_rows, interleaved;
  int float_tables; /* or as the input */
  int subtract_mean, rotate;
  uint64_t signs[4]; /* of the rotation: an element's bit */
} fa3_quantize_params;

#endif
