#include "cuda/check.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "integer.h"

/* Bytes of a tensor that says where others are, as far as its last element; 0 of any other. */
static size_t bytes_to_read(const struct problem *problem, enum tensor tensor) {
  const struct tensor_row *row = &tensor_rows[tensor];
  const size_t size = fa3_dtype_size(row->dtype);
  if (problem_tensor(problem, tensor).empty) return 0;
  if (row->vector)
    return size * ((size_t)problem->batch + (row->shape->axes[0] == AXIS_BATCH_AND_ONE));
  if (tensor != TENSOR_page_table && tensor != TENSOR_positions) return 0;
  const struct operand *operand = problem_operand(problem, tensor);
  return size * (size_t)((operand->batch - 1) * operand->stride_batch +
                         (operand->rows - 1) * operand->stride_row + 1);
}

/* Every copy begins where an integer of any size may. */
static size_t room_for(size_t bytes) {
  return (size_t)round_up((int64_t)bytes, sizeof(int64_t));
}

/* `seen` becomes the problem with copies in place of what is on the GPU. */
static fa3_status read_contents(const struct cuda_scope *scope, char *memory,
                                struct problem *seen) {
  const struct cuda_driver *driver = scope->device->driver;
  for (int t = 0; t < TENSORS; t++) {
    const size_t bytes = bytes_to_read(seen, (enum tensor)t);
    if (!bytes) continue;
    const void *from = problem_tensor(seen, (enum tensor)t).data;
    TRY_CUDA(driver, cuMemcpyDtoHAsync, memory, (CUdeviceptr)from, bytes, scope->stream);
    problem_set_data(seen, (enum tensor)t, memory);
    memory += room_for(bytes);
  }
  TRY_CUDA(driver, cuStreamSynchronize, scope->stream);
  return FA3_OK;
}

fa3_status cuda_check_contents(const struct cuda_scope *scope, const struct problem *problem) {
  size_t room = 0;
  int capturing = 0;
  for (int t = 0; t < TENSORS; t++) room += room_for(bytes_to_read(problem, (enum tensor)t));
  if (!room) return FA3_OK;
  TRY_CUDA(scope->device->driver, cuStreamIsCapturing, scope->stream, &capturing);
  if (capturing)
    return set_error(FA3_UNSUPPORTED,
                     "FA3_CHECK_DEVICE is 1 and the stream is being captured: lengths can't be "
                     "checked before the graph runs");
  char *memory = malloc(room);
  if (!memory)
    return set_error(FA3_OUT_OF_MEMORY, "no %zu bytes for the lengths that FA3_CHECK_DEVICE reads",
                     room);
  struct problem seen = *problem;
  fa3_status status = read_contents(scope, memory, &seen);
  if (!status) status = problem_check_lengths(&seen);
  free(memory);
  return status;
}
