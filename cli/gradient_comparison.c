#include "gradient_comparison.h"

#include "reference.h"
#include "sampling.h"

/* What one row of a gradient is to be, and how far it may be off before it is stored. */
struct expected {
  double values[COMPARISON_MAX_HEAD_DIM];
  double bounds[COMPARISON_MAX_HEAD_DIM];
};

static void compare_row(struct error_statistics *statistics, const fa3_tensor *tensor,
                        int64_t first, const struct expected *expected, int64_t batch, int64_t head,
                        int64_t row) {
  if (!tensor->rank) return;
  for (int64_t d = 0; d < tensor->shape[tensor->rank - 1]; d++)
    comparison_add(statistics, reference_load(tensor, first + d), expected->values[d],
                   reference_stored_bound(tensor->dtype, expected->values[d], expected->bounds[d]),
                   tensor->dtype, (int64_t[]){batch, row, head, d});
}

static int64_t query_rows(const void *context, int64_t batch) {
  const struct gradient_comparison *comparison = context;
  const fa3_forward_args forward = reference_forward_args(comparison->args);
  return reference_seqlen_q(&forward, batch);
}

static void compare_query(void *context, int64_t batch, int64_t head, int64_t row) {
  struct gradient_comparison *comparison = context;
  const fa3_backward_args *args = comparison->args;
  struct expected query;
  reference_grad_query(args, batch, head, row, query.values, query.bounds);
  compare_row(&comparison->statistics[TENSOR_grad_query], &args->grad_query,
              reference_grad_query_index(args, batch, head, row), &query, batch, head, row);
}

static int64_t key_rows(const void *context, int64_t batch) {
  const struct gradient_comparison *comparison = context;
  return reference_seqlen_k(comparison->args, batch);
}

static void compare_key_value(void *context, int64_t batch, int64_t head, int64_t row) {
  struct gradient_comparison *comparison = context;
  const fa3_backward_args *args = comparison->args;
  struct expected key;
  struct expected value;
  reference_grad_key_value(args, batch, head, row, key.values, value.values, key.bounds,
                           value.bounds);
  compare_row(&comparison->statistics[TENSOR_grad_key], &args->grad_key,
              reference_grad_key_index(args, batch, head, row), &key, batch, head, row);
  compare_row(&comparison->statistics[TENSOR_grad_value], &args->grad_value,
              reference_grad_value_index(args, batch, head, row), &value, batch, head, row);
}

static void compare_sink(struct gradient_comparison *comparison) {
  const fa3_backward_args *args = comparison->args;
  const fa3_tensor *sink = &args->grad_sink;
  for (int64_t head = 0; head < sink->shape[0]; head++) {
    double value = 0;
    double bound = 0;
    reference_grad_sink(args, head, &value, &bound);
    comparison_add(&comparison->statistics[TENSOR_grad_sink],
                   reference_load(sink, head * sink->strides[0]), value,
                   reference_stored_bound(sink->dtype, value, bound), sink->dtype,
                   (int64_t[]){0, 0, head, 0});
  }
}

void gradient_comparison_sample(struct gradient_comparison *comparison, int64_t count,
                                uint64_t seed, const char *label) {
  const fa3_backward_args *args = comparison->args;
  const fa3_forward_args forward = reference_forward_args(args);
  const struct sampling query = {.batch = reference_batch(&forward),
                                 .heads = args->query.shape[args->query.rank - 2],
                                 .context = comparison,
                                 .rows = query_rows,
                                 .visit = compare_query};
  const struct sampling key = {.batch = reference_batch(&forward),
                               .heads = args->key.shape[args->key.rank - 2],
                               .context = comparison,
                               .rows = key_rows,
                               .visit = compare_key_value};
  if (args->grad_query.rank) sampling_visit(&query, count, seed, label);
  if (args->grad_key.rank || args->grad_value.rank) sampling_visit(&key, count, seed, label);
  compare_sink(comparison);
}
