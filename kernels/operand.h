/* A tensor as kernels are handed it. */
#ifndef FA3_OPERAND_H
#define FA3_OPERAND_H

#include <stdint.h>

/* Strides in elements. */
typedef struct {
  void *data;
  int64_t stride_batch; /* of a cache in pages: of a page */
  int64_t stride_row;   /* of scales: from a block of rows to the next one */
  int64_t stride_head;
} fa3_operand;

#endif
