/* Tensors as the kernels for appending and quantising take them. */
#ifndef FA3_SRC_CUDA_OPERANDS_H
#define FA3_SRC_CUDA_OPERANDS_H

#include "kernels/operand.h"
#include "problem.h"

static inline fa3_operand make_operand(const struct operand *operand) {
  return (fa3_operand){.data = operand->data,
                       .stride_batch = operand->stride_batch,
                       .stride_row = operand->stride_row,
                       .stride_head = operand->stride_head};
}

#endif
