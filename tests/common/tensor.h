/* Tensors in guarded memory, as trials have them: laid out in every way that the API takes, and
 * compared element by element. */
#ifndef FA3_TESTS_TENSOR_H
#define FA3_TESTS_TENSOR_H

#include "buffer.h"
#include "fa3.h"
#include "spec.h"

/* Stores `value` as element `index` of a float tensor. */
void tensor_store(const fa3_tensor *tensor, int64_t index, double value);

/* Gives `tensor` strides for its shape; `heads` is its head dimension. */
void tensor_layout(fa3_tensor *tensor, int heads, enum layout layout, bool input, struct rng *rng);

/* Elements from the first to the last, gaps included. */
int64_t tensor_reach(const fa3_tensor *tensor);

/* Memory for all that it reaches, NaN at first. */
void tensor_allocate(struct buffer *buffer, fa3_tensor *tensor, struct rng *rng);

/* Which elements of an output a call has to write: a flag for each, false at first. */
bool *tensor_marks(const fa3_tensor *tensor);

/* Fails the test if an element without a mark is not as it was allocated; frees the marks. */
void tensor_check_unmarked(const fa3_tensor *tensor, bool *marks, const char *name);

#endif
