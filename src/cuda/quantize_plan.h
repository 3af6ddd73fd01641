/* How rows are dealt out that become E4M3 codes. */
#ifndef FA3_SRC_CUDA_QUANTIZE_PLAN_H
#define FA3_SRC_CUDA_QUANTIZE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda/kernels.h"

struct quantize_plan {
  const struct kernel *kernel; /* that rows go through */
  int32_t entry;               /* its function that takes such rows */
  int32_t threads;
  int32_t shared_bytes; /* of a block */
  int32_t tile_rows;    /* of a head, that a block works on at a time */
  int32_t span_rows;    /* after so many tiles begin anew: those of a scale, or of a tile */
  int32_t span_tiles;   /* in each of these */
  int32_t tiles;        /* of a head of the longest sequence; 0: there is nothing to do */
  int32_t in_turn;      /* heads of the same rows, that a block takes one after the other */
  int32_t blocks;       /* of the grid */
  int32_t cluster;      /* blocks that share a head of a sequence, or 0: tiles belong to no block */
  int32_t from;         /* where scales come from: FA3_QUANTIZE_OF_TILE, _OF_SEQUENCE, or _FIND and
                           then _USE */
};

#endif
