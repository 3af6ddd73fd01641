/* What kernels on E4M3 codes are told beside tensors, shared by host and device. */
#ifndef FA3_FP8_SCALES_H
#define FA3_FP8_SCALES_H

#include <stdint.h>

/* What the codes of an FP8 operand are multiplied by. */
typedef struct {
  const float *data;                               /* or null: 1 */
  int64_t stride_batch, stride_head, stride_block; /* elements; 0 where they are shared */
  int rows;                                        /* of a block; 0: all of a sequence */
  int heads_per_scale;                             /* heads that share them */
} fa3_scales;

/* What a kernel writes. */
enum { FA3_OUTPUT_BF16, FA3_OUTPUT_FP16, FA3_OUTPUT_FP32 };

#endif
