#include "slice.h"

#include <stdbool.h>

/* A tensor of the call, or null if it was not given. */
static fa3_tensor *find_tensor(const struct call *call, enum tensor which) {
  const struct argument *argument = find_argument(call->phase, which);
  fa3_tensor *tensor = argument ? argument_in(&call->args, argument) : NULL;
  return tensor && tensor->rank ? tensor : NULL;
}

/* Those of a scale, by the forms that fa3.h lists. */
static const enum axis *scale_axes(const fa3_forward_args *args, enum tensor which,
                                   const fa3_tensor *scale) {
  static const enum axis of_query[] = {AXIS_BATCH, AXIS_HEADS_Q, NO_AXIS};
  static const enum axis of_query_by_key[] = {AXIS_BATCH, AXIS_HEADS_K, NO_AXIS};
  static const enum axis of_key[] = {AXIS_BATCH_K, AXIS_HEADS_K, NO_AXIS};
  const bool by_rows = which == TENSOR_query_scale ? args->query_scale_rows
                       : which == TENSOR_key_scale ? args->key_scale_rows
                                                   : args->value_scale_rows;
  const int missing = scale->rank == 1 ? 2 : scale->rank == 2 && by_rows; /* axes, from the first */
  if (which != TENSOR_query_scale) return of_key + missing;
  const bool of_its_own = scale->shape[1 - missing % 2] == args->query.shape[args->query.rank - 2];
  return (of_its_own ? of_query : of_query_by_key) + missing;
}

/* The axes that a tensor of this rank has. */
static const enum axis *axes_of(const struct call *call, const struct argument *argument,
                                const fa3_tensor *tensor) {
  if (tensor_rows[argument->tensor].rule == RULE_SCALE && tensor->rank)
    return scale_axes(&call->args.forward, argument->tensor, tensor);
  const struct shape *shape = tensor_rows[argument->tensor].shape;
  return shape->axes + (shape->rank - tensor->rank);
}

/* Whether every tensor has the batch as an axis of its own, or is needed whole; a sum over the
 * batch can't be cut. */
static bool cuts_between_sequences(const struct call *call) {
  const struct argument_struct *list = arguments_of(call->phase);
  for (int i = 0; i < list->count; i++) {
    const struct argument *argument = &list->arguments[i];
    const fa3_tensor *tensor = argument_in(&call->args, argument);
    if (!tensor->rank) continue;
    const enum axis first = axes_of(call, argument, tensor)[0];
    if (first == AXIS_BATCH_AND_ONE) return false;
    if (argument->output && first != AXIS_BATCH && first != AXIS_BATCH_K) return false;
  }
  return true;
}

struct slice slice_whole(const struct call *call) {
  const fa3_tensor *query = find_tensor(call, TENSOR_query), *key = find_tensor(call, TENSOR_key);
  return (struct slice){.batch_end = cuts_between_sequences(call) ? query->shape[0] : 1,
                        .head_end = key->shape[key->rank - 2]};
}

/* Entries [begin, end) of an axis. */
static void keep(fa3_tensor *tensor, int d, int64_t begin, int64_t end) {
  const size_t step = fa3_dtype_size(tensor->dtype) * (size_t)tensor->strides[d];
  if (tensor->data) tensor->data = (char *)tensor->data + (size_t)begin * step;
  tensor->shape[d] = end - begin;
}

void slice_call(const struct call *call, const struct slice *slice, struct call *cut) {
  const fa3_tensor *query = find_tensor(call, TENSOR_query), *key = find_tensor(call, TENSOR_key);
  const int64_t group = query->shape[query->rank - 2] / key->shape[key->rank - 2];
  const bool by_sequence = cuts_between_sequences(call);
  const bool looked_up =
      find_tensor(call, TENSOR_cache_batch_index) || find_tensor(call, TENSOR_page_table);
  const struct argument_struct *list = arguments_of(call->phase);
  cut->phase = call->phase;
  cut->args = call->args;
  for (int i = 0; i < list->count; i++) {
    fa3_tensor *tensor = argument_in(&cut->args, &list->arguments[i]);
    const enum axis *axes = axes_of(call, &list->arguments[i], tensor);
    for (int d = 0; d < tensor->rank; d++) {
      if (axes[d] == AXIS_HEADS_Q) keep(tensor, d, slice->head * group, slice->head_end * group);
      if (axes[d] == AXIS_HEADS_K) keep(tensor, d, slice->head, slice->head_end);
      if (by_sequence && (axes[d] == AXIS_BATCH || (axes[d] == AXIS_BATCH_K && !looked_up)))
        keep(tensor, d, slice->batch, slice->batch_end);
    }
  }
}
