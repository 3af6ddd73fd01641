/* The quantize kernels' launch contract, shared by host and device: rows become E4M3 codes and
 * scales (fa3_quantize in fa3.h). A head of some rows of a sequence is a tile. A block takes tiles
 * in turn, from its own number on, in steps of the grid; where a mean is subtracted, a cluster has
 * all tiles of a head of a sequence, and its blocks take them in turn. */
#ifndef FA3_QUANTIZE_PARAMS_H
#define FA3_QUANTIZE_PARAMS_H

#include <stdint.h>

#include "operand.h"
#include "sequence.h"

enum {
  FA3_QUANTIZE_ELEMENTS = 16,   /* of a row, that a thread has */
  FA3_QUANTIZE_ROWS = 4,        /* that a thread has */
  FA3_QUANTIZE_THREADS = 512,   /* at most */
  FA3_QUANTIZE_TILE_ROWS = 512, /* at most */
  /* Of the next tile as it is loaded, at most; and a turned row of each thread. */
  FA3_QUANTIZE_STAGE_BYTES = 64 << 10,
  FA3_QUANTIZE_SHARED_BYTES =
      FA3_QUANTIZE_STAGE_BYTES + FA3_QUANTIZE_THREADS * FA3_QUANTIZE_ELEMENTS * 4
};

/* Where a scale comes from. */
enum {
  FA3_QUANTIZE_OF_TILE, /* a tile has all rows that share one, or more: found, written and used */
  FA3_QUANTIZE_FIND,    /* several tiles share one: it is raised to what each needs */
  FA3_QUANTIZE_USE      /* it is read */
};

/* quantize: a grid of no more blocks than there are tiles, or of a cluster for each head of a
 * sequence. quantize_clear, before FA3_QUANTIZE_FIND: a thread for each scale. */
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
  int tiles;                 /* of a head of the longest sequence */
  int from;                  /* where a scale comes from */
  int pairs, table_rows, interleaved;
  int own_pairs;                  /* a thread has both elements of each, and four angles at once */
  int float_tables;               /* or as the input */
  int vector_input, vector_codes; /* whether 16 elements are loaded and stored 16 bytes at a time */
  int subtract_mean, rotate;
  uint64_t signs[4]; /* of the rotation: an element's bit */
} fa3_quantize_params;

#endif
