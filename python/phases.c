#include "phases.h"

#define NUMBERS(args)                                          \
  {"max_seqlen_q", INT64, offsetof(args, max_seqlen_q)},       \
      {"max_seqlen_k", INT64, offsetof(args, max_seqlen_k)},   \
      {"flags", UINT32, offsetof(args, flags)},                \
      {"softmax_scale", FLOAT, offsetof(args, softmax_scale)}, \
      {"softcap", FLOAT, offsetof(args, softcap)},             \
      {"num_threads", INT32, offsetof(args, num_threads)},     \
      {"window_left", INT64, offsetof(args, window_left)},     \
      {"window_right", INT64, offsetof(args, window_right)},   \
      {"reserved_multiprocessors", INT32, offsetof(args, reserved_multiprocessors)},

static const struct field forward_fields[] = {
#define FORWARD(use, name) {#name, use, offsetof(fa3_forward_args, name)},
#include "tensors.def"
    NUMBERS(fa3_forward_args){"num_splits", INT32, offsetof(fa3_forward_args, num_splits)},
    {"split_keys", INT64, offsetof(fa3_forward_args, split_keys)},
    {"query_scale_rows", INT64, offsetof(fa3_forward_args, query_scale_rows)},
    {"key_scale_rows", INT64, offsetof(fa3_forward_args, key_scale_rows)},
    {"value_scale_rows", INT64, offsetof(fa3_forward_args, value_scale_rows)},
};

static const struct field backward_fields[] = {
#define BACKWARD(use, name) {#name, use, offsetof(fa3_backward_args, name)},
#include "tensors.def"
    NUMBERS(fa3_backward_args)};

static const struct field append_fields[] = {
#define APPEND(use, name) {#name, use, offsetof(fa3_append_args, name)},
#include "tensors.def"
    {"max_seqlen_q", INT64, offsetof(fa3_append_args, max_seqlen_q)},
    {"flags", UINT32, offsetof(fa3_append_args, flags)},
    {"key_scale_rows", INT64, offsetof(fa3_append_args, key_scale_rows)},
    {"value_scale_rows", INT64, offsetof(fa3_append_args, value_scale_rows)},
    {"num_threads", INT32, offsetof(fa3_append_args, num_threads)},
};

static const struct field combine_fields[] = {
#define COMBINE(use, name) {#name, use, offsetof(fa3_combine_args, name)},
#include "tensors.def"
    {"num_threads", INT32, offsetof(fa3_combine_args, num_threads)},
};

static const struct field quantize_fields[] = {
#define QUANTIZE(use, name) {#name, use, offsetof(fa3_quantize_args, name)},
#include "tensors.def"
    {"max_seqlen_q", INT64, offsetof(fa3_quantize_args, max_seqlen_q)},
    {"codes_scale_rows", INT64, offsetof(fa3_quantize_args, codes_scale_rows)},
    {"seed", INT64, offsetof(fa3_quantize_args, seed)},
    {"flags", UINT32, offsetof(fa3_quantize_args, flags)},
    {"num_threads", INT32, offsetof(fa3_quantize_args, num_threads)},
};

static fa3_status forward_workspace(const union arguments *args, size_t *bytes) {
  return fa3_forward_workspace(&args->forward, bytes);
}

static fa3_status forward_run(union arguments *args, void *workspace, size_t bytes) {
  args->forward.workspace = workspace;
  args->forward.workspace_size = bytes;
  return fa3_forward(&args->forward);
}

static fa3_status backward_workspace(const union arguments *args, size_t *bytes) {
  return fa3_backward_workspace(&args->backward, bytes);
}

static fa3_status backward_run(union arguments *args, void *workspace, size_t bytes) {
  args->backward.workspace = workspace;
  args->backward.workspace_size = bytes;
  return fa3_backward(&args->backward);
}

/* These need no workspace. */
static fa3_status no_workspace(const union arguments *args, size_t *bytes) {
  (void)args;
  *bytes = 0;
  return FA3_OK;
}

static fa3_status append_run(union arguments *args, void *workspace, size_t bytes) {
  (void)workspace;
  (void)bytes;
  return fa3_append(&args->append);
}

static fa3_status combine_run(union arguments *args, void *workspace, size_t bytes) {
  (void)workspace;
  (void)bytes;
  return fa3_combine(&args->combine);
}

static fa3_status quantize_run(union arguments *args, void *workspace, size_t bytes) {
  (void)workspace;
  (void)bytes;
  return fa3_quantize(&args->quantize);
}

const struct phase phases[NUM_PHASES] = {
    {"forward", sizeof(fa3_forward_args), forward_fields,
     sizeof forward_fields / sizeof *forward_fields, forward_workspace, forward_run},
    {"backward", sizeof(fa3_backward_args), backward_fields,
     sizeof backward_fields / sizeof *backward_fields, backward_workspace, backward_run},
    {"append", sizeof(fa3_append_args), append_fields, sizeof append_fields / sizeof *append_fields,
     no_workspace, append_run},
    {"combine", sizeof(fa3_combine_args), combine_fields,
     sizeof combine_fields / sizeof *combine_fields, no_workspace, combine_run},
    {"quantize", sizeof(fa3_quantize_args), quantize_fields,
     sizeof quantize_fields / sizeof *quantize_fields, no_workspace, quantize_run},
};

int set_integer(union arguments *args, const struct field *field, int64_t number) {
  void *to = (char *)args + field->offset;
  if (field->kind == INT64) *(int64_t *)to = number;
  if (field->kind == INT32) *(int32_t *)to = (int32_t)number;
  if (field->kind == UINT32) *(uint32_t *)to = (uint32_t)number;
  int fits = field->kind == INT64 || (field->kind == INT32 && number == (int32_t)number) ||
             (field->kind == UINT32 && number == (uint32_t)number);
  return fits ? 0 : -1;
}
