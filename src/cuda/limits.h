/* What every kernel counts in 32 bits, and how far that goes. */
#ifndef FA3_SRC_CUDA_LIMITS_H
#define FA3_SRC_CUDA_LIMITS_H

#include "problem.h"

/* Tiles of a grid; with room for a round of tiles beyond the end. */
#define MAX_TILES (INT32_MAX / 2)

/* Where a grid's second and third dimension end. */
#define MAX_GRID 65535

/* That all tensors have one dtype of 16 bits, and head dims are multiples of 8. */
fa3_status check_half_precision(const fa3_capability *capability);

/* The same of a call with FP8 inputs: whose output is wider, and head dims are multiples of 16. */
fa3_status check_fp8(const fa3_capability *capability);

/* Of a cache of codes under wider queries: that these have 16 bits, and output their dtype or
 * float32. */
fa3_status check_fp8_cache(const fa3_capability *capability);

/* That rows and sequences are not too long and a cache's entries not too many, and that the caller
 * of a GPU has bounded them. */
fa3_status check_lengths(const struct problem *problem);

/* That the scale is a float in units of the exponents of 2, too. */
fa3_status check_scale(const struct problem *problem);

#endif
