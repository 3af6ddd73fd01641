#include "tensor.h"

#include <inttypes.h>
#include <stdlib.h>

#include "float8.h"
#include "half.h"
#include "test.h"

void tensor_store(const fa3_tensor *tensor, int64_t index, double value) {
  if (tensor->dtype == FA3_FLOAT32)
    ((float *)tensor->data)[index] = (float)value;
  else if (tensor->dtype == FA3_FLOAT8_E4M3)
    ((uint8_t *)tensor->data)[index] = e4m3_from_float((float)value);
  else if (tensor->dtype == FA3_FLOAT16)
    ((uint16_t *)tensor->data)[index] = half_from_float((float)value);
  else
    ((uint16_t *)tensor->data)[index] = bfloat_from_float((float)value);
}

void tensor_layout(fa3_tensor *tensor, int heads, enum layout layout, bool input, struct rng *rng) {
  int last = tensor->rank - 1;
  int order[4]; /* from the innermost dimension outwards */
  for (int d = 0; d <= last; d++) order[d] = last - d;
  if (layout == LAYOUT_HEADS_FIRST && heads > 0 && heads < last) {
    order[last - heads] = heads - 1;
    order[last - heads + 1] = heads;
  }
  if (layout >= LAYOUT_PADDED) {
    for (int d = last; d > 1; d--) {
      int other = (int)rng_between(rng, 1, d);
      int swap = order[d];
      order[d] = order[other];
      order[other] = swap;
    }
  }
  int64_t stride = 1;
  for (int n = 0; n <= last; n++) {
    int d = order[n];
    tensor->strides[d] = stride;
    if (n > 0 && layout >= LAYOUT_PADDED) {
      if (tensor->shape[d] == 1) {
        tensor->strides[d] = RNG_PICK(rng, 0, 1, 7, INT64_C(1) << 40, INT64_MAX);
        continue;
      }
      if (input && layout == LAYOUT_EXPANDED && rng_chance(rng, 0.3)) {
        tensor->strides[d] = 0;
        continue;
      }
      tensor->strides[d] += RNG_PICK(rng, 0, 0, 1, 3, 8, stride);
    }
    stride = tensor->strides[d] * (tensor->shape[d] > 0 ? tensor->shape[d] : 1);
  }
}

int64_t tensor_reach(const fa3_tensor *tensor) {
  int64_t last = 0;
  if (tensor->rank == 0) return 0;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] == 0) return 0;
    last += (tensor->shape[d] - 1) * tensor->strides[d];
  }
  return last + 1;
}

void tensor_allocate(struct buffer *buffer, fa3_tensor *tensor, struct rng *rng) {
  size_t element = fa3_dtype_size(tensor->dtype);
  size_t size = (size_t)tensor_reach(tensor) * element;
  if (size == 0 && rng_chance(rng, 0.5)) return;
  *buffer = rng_chance(rng, 0.5) ? buffer_at_end(size)
                                 : buffer_at_start(size, element * (size_t)rng_between(rng, 0, 32));
  tensor->data = buffer->data;
}

bool *tensor_marks(const fa3_tensor *tensor) {
  bool *marks = calloc((size_t)tensor_reach(tensor) + 1, sizeof *marks);
  assert_non_null(marks);
  return marks;
}

void tensor_check_unmarked(const fa3_tensor *tensor, bool *marks, const char *name) {
  size_t element = fa3_dtype_size(tensor->dtype);
  const unsigned char *bytes = tensor->data;
  for (int64_t i = 0; i < tensor_reach(tensor); i++) {
    if (marks[i]) continue;
    for (size_t byte = 0; byte < element; byte++)
      if (bytes[(size_t)i * element + byte] != 0xff)
        fail_msg("%s: element %" PRId64 " belongs to no row, but was written", name, i);
  }
  free(marks);
}
