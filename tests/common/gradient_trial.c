#include "gradient_trial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "reference.h"
#include "test.h"

struct gradient_spec gradient_spec_random(const struct spec *forward, struct rng *rng) {
  struct gradient_spec spec = {.forward = *forward};
  fa3_dtype *dtypes[] = {&spec.grad_query_dtype, &spec.grad_key_dtype, &spec.grad_value_dtype};
  spec.forward.lse = true;
  spec.forward.batch_index = false;
  spec.forward.page_size = 0;
  spec.forward.codes = false;
  for (int i = 0; i < 3; i++) *dtypes[i] = rng_chance(rng, 0.4) ? FA3_FLOAT32 : forward->dtype;
  if (forward->sink_dtype && rng_chance(rng, 0.8))
    spec.grad_sink_dtype = rng_chance(rng, 0.5) ? FA3_FLOAT32 : forward->sink_dtype;
  spec.grad_lse = rng_chance(rng, 0.3);
  if (rng_chance(rng, 0.3)) spec.flags |= FA3_ACCUMULATE;
  if (rng_chance(rng, 0.5)) spec.flags |= FA3_DETERMINISTIC;
  return spec;
}

void gradient_spec_print(const struct gradient_spec *spec, char *text, size_t size) {
  int length = snprintf(text, size, "gradients %d %d %d sink %d lse %d flags 0x%x of ",
                        spec->grad_query_dtype, spec->grad_key_dtype, spec->grad_value_dtype,
                        spec->grad_sink_dtype, spec->grad_lse, (unsigned)spec->flags);
  if (length >= 0 && (size_t)length < size)
    spec_print(&spec->forward, text + length, size - (size_t)length);
}

/* What a backward call writes. */
static const enum tensor gradients[] = {TENSOR_grad_query, TENSOR_grad_key, TENSOR_grad_value,
                                        TENSOR_grad_sink};
enum { GRADIENTS = sizeof gradients / sizeof *gradients };

static fa3_tensor *tensor_of(const fa3_backward_args *args, enum tensor which) {
  return argument_in(args, find_argument(FA3_BACKWARD, which));
}

/* A tensor of another one's shape, in a layout of its own. */
static void make_like(struct gradient_trial *trial, enum tensor which, const fa3_tensor *model,
                      fa3_dtype dtype, struct rng *rng) {
  fa3_tensor *tensor = tensor_of(&trial->args, which);
  *tensor = (fa3_tensor){.dtype = dtype, .rank = model->rank};
  memcpy(tensor->shape, model->shape, sizeof tensor->shape);
  int heads = which == TENSOR_grad_lse ? -1 : model->rank - 2;
  tensor_layout(tensor, heads, trial->spec.forward.layout, !trial_is_output(FA3_BACKWARD, which),
                rng);
  tensor_allocate(&trial->buffers[which], tensor, rng);
}

static void fill_row_values(const struct gradient_trial *trial, int64_t batch, struct rng *rng) {
  const fa3_tensor *tensor = &trial->args.grad_lse;
  const int64_t *stride = tensor->strides;
  const struct rows rows = trial_query_rows(&trial->forward, batch);
  for (int64_t head = 0; head < tensor->shape[tensor->rank - 2]; head++)
    for (int64_t row = rows.first; row < rows.first + rows.count; row++)
      tensor_store(tensor,
                   tensor->rank == 2 ? head * stride[0] + row * stride[1]
                                     : rows.batch * stride[0] + head * stride[1] + row * stride[2],
                   rng_normal(rng));
}

static void fill(const struct gradient_trial *trial, struct rng *rng) {
  const fa3_backward_args *args = &trial->args;
  for (int64_t b = 0; b < trial->spec.forward.batch; b++) {
    const struct rows queries = trial_query_rows(&trial->forward, b);
    const struct rows keys = trial_key_rows(&trial->forward, b);
    trial_fill_rows(&args->grad_output, queries, 1, 0, rng);
    if (trial->spec.grad_lse) fill_row_values(trial, b, rng);
    if (!(args->flags & FA3_ACCUMULATE)) continue;
    trial_fill_rows(&args->grad_query, queries, 1, 0, rng);
    trial_fill_rows(&args->grad_key, keys, 1, 0, rng);
    trial_fill_rows(&args->grad_value, keys, 1, 0, rng);
  }
  if (trial->spec.grad_sink_dtype && (args->flags & FA3_ACCUMULATE))
    for (int64_t h = 0; h < args->grad_sink.shape[0]; h++)
      tensor_store(&args->grad_sink, h, rng_normal(rng));
}

struct gradient_trial gradient_trial_new(const struct gradient_spec *spec, struct rng *rng) {
  struct gradient_trial trial = {.spec = *spec, .forward = trial_new(&spec->forward, rng)};
  trial_run(&trial.forward, rng);
  fa3_backward_args *args = &trial.args;
  args->struct_size = sizeof *args;
  if (fa3_backward_init(&trial.forward.args, args)) fail_msg("%s", fa3_last_error());
  args->flags |= spec->flags;
  make_like(&trial, TENSOR_grad_output, &args->output, args->output.dtype, rng);
  make_like(&trial, TENSOR_grad_query, &args->query, spec->grad_query_dtype, rng);
  make_like(&trial, TENSOR_grad_key, &args->key, spec->grad_key_dtype, rng);
  make_like(&trial, TENSOR_grad_value, &args->value, spec->grad_value_dtype, rng);
  if (spec->grad_lse) make_like(&trial, TENSOR_grad_lse, &args->lse, FA3_FLOAT32, rng);
  if (spec->grad_sink_dtype) {
    args->grad_sink = fa3_vector(NULL, spec->grad_sink_dtype, args->sink.shape[0]);
    tensor_allocate(&trial.buffers[TENSOR_grad_sink], &args->grad_sink, rng);
  }
  fill(&trial, rng);
  for (int i = 0; i < GRADIENTS; i++) {
    const struct buffer *buffer = &trial.buffers[gradients[i]];
    trial.before[gradients[i]] = malloc(buffer->size + 1);
    assert_non_null(trial.before[gradients[i]]);
    if (buffer->size) memcpy(trial.before[gradients[i]], buffer->data, buffer->size);
  }
  return trial;
}

void gradient_trial_free(struct gradient_trial *trial) {
  for (int i = 0; i < TENSORS; i++) {
    buffer_free(&trial->buffers[i]);
    free(trial->before[i]);
  }
  buffer_free(&trial->workspace);
  trial_free(&trial->forward);
}

void gradient_trial_reset(struct gradient_trial *trial) {
  for (int i = 0; i < GRADIENTS; i++)
    if (trial->buffers[gradients[i]].size)
      memcpy(trial->buffers[gradients[i]].data, trial->before[gradients[i]],
             trial->buffers[gradients[i]].size);
}

void gradient_trial_run(struct gradient_trial *trial, struct rng *rng) {
  for (enum tensor i = 0; i < TENSORS; i++) {
    if (!trial_is_output(FA3_BACKWARD, i)) buffer_make_read_only(&trial->buffers[i]);
    buffer_make_read_only(&trial->forward.buffers[i]);
  }
  size_t bytes = 0;
  if (fa3_backward_workspace(&trial->args, &bytes))
    fail_msg("fa3_backward_workspace: %s", fa3_last_error());
  trial->args.workspace = trial_make_workspace(bytes, &trial->workspace, rng);
  trial->args.workspace_size = bytes;
  if (fa3_backward(&trial->args)) fail_msg("fa3_backward: %s", fa3_last_error());
}

char *gradient_trial_copy(const struct gradient_trial *trial) {
  size_t size = 1;
  for (int i = 0; i < GRADIENTS; i++) size += trial->buffers[gradients[i]].size;
  char *copy = malloc(size), *to = copy;
  assert_non_null(copy);
  for (int i = 0; i < GRADIENTS; i++) {
    const struct buffer *buffer = &trial->buffers[gradients[i]];
    if (buffer->size) memcpy(to, buffer->data, buffer->size);
    to += buffer->size;
  }
  return copy;
}

bool gradient_trial_equals(const struct gradient_trial *trial, const char *copy) {
  for (int i = 0; i < GRADIENTS; i++) {
    const struct buffer *buffer = &trial->buffers[gradients[i]];
    if (buffer->size && memcmp(copy, buffer->data, buffer->size) != 0) return false;
    copy += buffer->size;
  }
  return true;
}

/* How a trial's gradients are compared: what they were, where, and which elements belong to a row.
 */
struct check {
  const struct gradient_trial *trial;
  struct comparison at;
  bool *marks[TENSORS];
};

static void mark(struct check *check, enum tensor which, int64_t index, int64_t count) {
  memset(check->marks[which] + index, true, (size_t)count);
}

static void check_query_row(struct check *check, bool computed) {
  const fa3_backward_args *args = &check->trial->args;
  struct comparison *at = &check->at;
  mark(check, TENSOR_grad_query, reference_grad_query_index(args, at->batch, at->head, at->row),
       check->trial->spec.forward.head_dim);
  if (computed) compare_grad_query(at, args, check->trial->before[TENSOR_grad_query]);
}

static void check_key_row(struct check *check, bool computed) {
  const fa3_backward_args *args = &check->trial->args;
  struct comparison *at = &check->at;
  mark(check, TENSOR_grad_key, reference_grad_key_index(args, at->batch, at->head, at->row),
       check->trial->spec.forward.head_dim);
  mark(check, TENSOR_grad_value, reference_grad_value_index(args, at->batch, at->head, at->row),
       check->trial->spec.forward.value_head_dim);
  if (computed)
    compare_grad_key_value(at, args, check->trial->before[TENSOR_grad_key],
                           check->trial->before[TENSOR_grad_value]);
}

static void check_sinks(struct check *check) {
  const fa3_backward_args *args = &check->trial->args;
  check->at = (struct comparison){.worst = check->at.worst};
  for (int64_t head = 0; args->grad_sink.data && head < args->grad_sink.shape[0]; head++) {
    const int64_t index = head * args->grad_sink.strides[0];
    double gradient, bound;
    check->at.head = head;
    mark(check, TENSOR_grad_sink, index, 1);
    reference_grad_sink(args, head, &gradient, &bound);
    compare_gradient(&check->at, args, "grad_sink", &args->grad_sink,
                     check->trial->before[TENSOR_grad_sink], index, 1, &gradient, &bound);
  }
}

double gradient_trial_check(const struct gradient_trial *trial, struct rng *rng, double pairs) {
  const struct spec *spec = &trial->spec.forward;
  struct check check = {.trial = trial};
  const fa3_backward_args *args = &trial->args;
  for (int i = 0; i < TENSORS; i++) buffer_check(&trial->buffers[i], tensor_rows[i].name);
  buffer_check(&trial->workspace, "workspace");
  for (int i = 0; i < GRADIENTS; i++)
    check.marks[gradients[i]] = tensor_marks(tensor_of(args, gradients[i]));

  double all = 0; /* each pair counts for its query and for its key */
  for (int64_t b = 0; b < spec->batch; b++)
    all += 2 * (double)(spec->heads_k * spec->group * trial_query_rows(&trial->forward, b).count *
                        trial_key_rows(&trial->forward, b).count);
  const double part = all > pairs ? pairs / all : 2;

  struct comparison *at = &check.at;
  for (at->batch = 0; at->batch < spec->batch; at->batch++) {
    const struct rows queries = trial_query_rows(&trial->forward, at->batch);
    const struct rows keys = trial_key_rows(&trial->forward, at->batch);
    for (at->head = 0; at->head < spec->heads_k * spec->group; at->head++)
      for (at->row = 0; at->row < queries.count; at->row++)
        check_query_row(&check, rng_chance(rng, part));
    for (at->head = 0; at->head < spec->heads_k; at->head++)
      for (at->row = 0; at->row < keys.count; at->row++)
        check_key_row(&check, rng_chance(rng, part));
  }
  check_sinks(&check);
  for (int i = 0; i < GRADIENTS; i++)
    tensor_check_unmarked(tensor_of(args, gradients[i]), check.marks[gradients[i]],
                          tensor_rows[gradients[i]].name);
  return check.at.worst;
}
