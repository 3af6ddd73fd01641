/* The FP8 forward kernel's launch contract, shared by host and device: that of forward_params.h,
 * and the scales. */
#ifndef FA3_FORWARD_FP8_PARAMS_H
#define FA3_FORWARD_FP8_PARAMS_H

#include "forward_params.h"
#include "fp8_scales.h"
#include "transpose_values_params.h"

/* The FP8 forward kernel takes query, key and value in maps of bytes with boxes of
 * FA3_FORWARD_FP8_CHUNK columns, and `output` in one of 16-bit elements with boxes of 64. */
typedef struct {
  fa3_forward_params forward;
  fa3_scales query_scale, key_scale, value_scale;
  int warpgroups_have_scales;       /* all queries of a warpgroup have one scale */
  int output;                       /* FA3_OUTPUT_...; the map counts but for float32 */
  fa3_transposed_values transposed; /* in a kernel that takes values so */
  float *sums; /* FA3_FORWARD_FP8_SUMS for each block, where shared memory has no room for them */
} fa3_forward_fp8_params;

/* The most keys of a sequence for the loop that has less room below a row's greatest probability
 * (forward_fp8_heads.cuh): what is less than 2^-15 of that becomes 0, and of more keys such ones
 * may be a part of the sum that matters. */
#define FA3_FORWARD_FP8_HEADS_KEYS 32768

/* What a compiled variant needs of the host, as in forward_params.h. Keys of FA3_FORWARD_FP8_PERIOD
 * are summed by the matrix unit alone, with about 13 bits; those sums are kept in shared memory,
 * or, of head dims above 64, in the workspace. */
#define FA3_FORWARD_FP8_PERIOD 4096
#define FA3_FORWARD_FP8_SUMS(head_dim, tile_q) ((head_dim) > 64 ? (tile_q) * (head_dim) : 0)
#define FA3_FORWARD_FP8_CHUNK(head_dim) ((head_dim) % 128 == 0 ? 128 : 64)
#define FA3_FORWARD_FP8_OUTPUT_CHUNKS(head_dim, tile_k) \
  ((head_dim) == 128 && (tile_k) <= 192 ? 2 : 1)
#define FA3_FORWARD_FP8_TRANSPOSED_STAGES(head_dim, tile_k, transposed) \
  ((transposed) ? 3 : (head_dim) == 128 && (tile_k) <= 128 ? 4 : 2)
#define FA3_FORWARD_FP8_SHARED_BYTES(head_dim, tile_q, tile_k, transposed)                        \
  ((tile_q) * ((head_dim) + 48 + 128 * FA3_FORWARD_FP8_OUTPUT_CHUNKS(head_dim, tile_k)) +         \
   FA3_FORWARD_STAGES * (tile_k) *                                                                \
       ((head_dim) + ((transposed) ? 0 : FA3_FORWARD_FP8_CHUNK(head_dim))) +                      \
   FA3_FORWARD_FP8_TRANSPOSED_STAGES(head_dim, tile_k, transposed) * (tile_k) * (head_dim) +      \
   ((head_dim) > 64 ? 0 : 4 * (tile_q) * (head_dim)) + 16 * FA3_FORWARD_STAGES * ((tile_k) + 1) + \
   1024)

#endif
