#include "operands.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "failure.h"
#include "lengths.h"
#include "library.h"

static const struct {
  const char *field; /* of fa3_forward_args, and in the library's messages */
  const char *option;
  size_t offset;
  const char *names[4]; /* in a .safetensors file that is given without one */
} kinds[OPERANDS] = {
#define KIND(field, option, ...)                         \
  {                                                      \
#field, option, offsetof(fa3_forward_args, field), { \
      __VA_ARGS__                                        \
    }                                                    \
  }
    [QUERY] = KIND(query, "--q", "query", "q"),
    [KEY] = KIND(key, "--k", "key", "k"),
    [VALUE] = KIND(value, "--v", "value", "v"),
    [SINK] = KIND(sink, "--sink", "sink"),
    [CU_SEQLENS_Q] = KIND(cu_seqlens_q, "--cu-seqlens-q", "cu_seqlens_q"),
    [CU_SEQLENS_K] = KIND(cu_seqlens_k, "--cu-seqlens-k", "cu_seqlens_k"),
    [SEQUSED_Q] = KIND(seqused_q, "--seqused-q", "seqused_q"),
    [SEQUSED_K] = KIND(seqused_k, "--seqused-k", "seqused_k"),
    [LEFTPAD_K] = KIND(leftpad_k, "--leftpad-k", "leftpad_k"),
    [CACHE_BATCH_INDEX] = KIND(cache_batch_index, "--cache-batch-index", "cache_batch_index"),
    [DIAGONAL] = KIND(diagonal, "--diagonal", "diagonal"),
#undef KIND
};

static fa3_tensor *field_of(fa3_forward_args *args, enum operand operand) {
  return (fa3_tensor *)((char *)args + kinds[operand].offset);
}

fa3_tensor operands_view(const struct operands *operands, const struct loaded_tensor *tensor,
                         bool packed) {
  const bool heads_first = operands->heads_first;
  static char nothing[8]; /* where a tensor has no elements; null would make lengths absent */
  const int64_t *shape = tensor->shape + (tensor->rank == 4);
  int64_t batch = tensor->rank == 4 ? tensor->shape[0] : 1;
  void *data = tensor->data ? tensor->data : nothing;
  int64_t rows = shape[heads_first ? 1 : 0];
  int64_t heads = shape[heads_first ? 0 : 1];
  fa3_tensor dense = packed ? fa3_packed(data, tensor->dtype, rows, heads, shape[2])
                            : fa3_dense(data, tensor->dtype, batch, rows, heads, shape[2]);
  if (heads_first) {
    dense.strides[dense.rank - 3] = shape[2];
    dense.strides[dense.rank - 2] = rows * shape[2];
  }
  return dense;
}

static int check_rank(const struct loaded_tensor *tensor, bool packed, const char *option) {
  if (packed && tensor->rank != 3)
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected 3, because of %s", tensor->origin,
                tensor->rank, option);
  if (tensor->rank != 3 && tensor->rank != 4)
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected 3 or 4", tensor->origin, tensor->rank);
  return 0;
}

/* Two extents that must be one. */
static int check_same(const char *what, const struct loaded_tensor *tensor, int64_t extent,
                      const struct loaded_tensor *other, int64_t expected) {
  if (extent == expected) return 0;
  return fail(EXIT_INPUT, "%s: its %s is %" PRId64 ": expected %" PRId64 ", as in %s",
              tensor->origin, what, extent, expected, other->origin);
}

static int check_against_query(const struct operands *operands) {
  const struct loaded_tensor *loaded = operands->loaded;
  const fa3_forward_args *args = &operands->args;
  const int64_t *query = args->query.shape + args->query.rank - 3;
  const int64_t *key = args->key.shape + args->key.rank - 3;
  const int64_t *value = args->value.shape + args->value.rank - 3;
  for (int i = KEY; i <= VALUE; i++) {
    if (loaded[i].dtype != loaded[QUERY].dtype)
      return fail(EXIT_INPUT, "%s: its elements are %s: expected %s, as in %s", loaded[i].origin,
                  dtype_name(loaded[i].dtype), dtype_name(loaded[QUERY].dtype),
                  loaded[QUERY].origin);
  }
  TRY(check_same("head_dim", &loaded[KEY], key[2], &loaded[QUERY], query[2]));
  if (key[1] < 1 || query[1] % key[1])
    return fail(EXIT_INPUT,
                "%s: has %" PRId64 " heads: expected a divisor of the %" PRId64 " in %s",
                loaded[KEY].origin, key[1], query[1], loaded[QUERY].origin);
  TRY(check_same("number of heads", &loaded[VALUE], value[1], &loaded[KEY], key[1]));
  TRY(check_same("seqlen", &loaded[VALUE], value[0], &loaded[KEY], key[0]));
  if (args->key.rank == 3) return 0;
  TRY(check_same("batch", &loaded[VALUE], args->value.shape[0], &loaded[KEY], args->key.shape[0]));
  if (args->query.rank == 3 || loaded[CACHE_BATCH_INDEX].rank) return 0;
  return check_same("batch", &loaded[KEY], args->key.shape[0], &loaded[QUERY],
                    args->query.shape[0]);
}

static int read_matrices(struct operands *operands) {
  fa3_forward_args *args = &operands->args;
  for (int i = QUERY; i <= VALUE; i++) {
    enum operand lengths = i == QUERY ? CU_SEQLENS_Q : CU_SEQLENS_K;
    bool packed = operands->loaded[lengths].rank != 0;
    TRY(loaded_tensor_check_float(&operands->loaded[i]));
    TRY(check_rank(&operands->loaded[i], packed, kinds[lengths].option));
    *field_of(args, (enum operand)i) = operands_view(operands, &operands->loaded[i], packed);
  }
  return check_against_query(operands);
}

static int check_count(const struct loaded_tensor *vector, int64_t expected, const char *what) {
  if (vector->rank != 1)
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected 1", vector->origin, vector->rank);
  if (vector->shape[0] == expected) return 0;
  return fail(EXIT_INPUT, "%s: has %" PRId64 " elements: expected %" PRId64 ", %s", vector->origin,
              vector->shape[0], expected, what);
}

static int check_sink(const struct operands *operands) {
  const struct loaded_tensor *sink = &operands->loaded[SINK];
  const struct loaded_tensor *query = &operands->loaded[QUERY];
  const fa3_tensor *view = &operands->args.query;
  TRY(loaded_tensor_check_float(sink));
  TRY(loaded_tensor_check_dtype(sink, query));
  return check_count(sink, view->shape[view->rank - 2], "one for each query head");
}

/* Without its starts a tensor of three dimensions is one sequence: not what the other side's
 * starts say. */
static int check_starts_missing(const struct operands *operands, enum operand tensor,
                                enum operand own, enum operand other) {
  const struct loaded_tensor *starts = &operands->loaded[other];
  if (operands->loaded[own].rank || operands->loaded[tensor].rank == 4) return 0;
  if (starts->rank != 1 || starts->shape[0] <= 2) return 0;
  return fail(EXIT_INPUT,
              "%s: has 3 dimensions, and %s is missing: expected %" PRId64 " sequences, as in %s",
              operands->loaded[tensor].origin, kinds[own].option, starts->shape[0] - 1,
              starts->origin);
}

static int read_vectors(struct operands *operands) {
  const struct loaded_tensor *starts_q = &operands->loaded[CU_SEQLENS_Q];
  const fa3_tensor *query = &operands->args.query;
  if (starts_q->rank && (starts_q->rank != 1 || starts_q->shape[0] < 1))
    return fail(EXIT_INPUT, "%s: expected where each sequence begins, and the total",
                starts_q->origin);
  TRY(check_starts_missing(operands, QUERY, CU_SEQLENS_Q, CU_SEQLENS_K));
  if (!operands->loaded[CACHE_BATCH_INDEX].rank)
    TRY(check_starts_missing(operands, KEY, CU_SEQLENS_K, CU_SEQLENS_Q));
  int64_t batch = starts_q->rank ? starts_q->shape[0] - 1 : query->shape[0];
  for (int i = SINK; i < OPERANDS; i++) {
    const struct loaded_tensor *loaded = &operands->loaded[i];
    if (!loaded->rank) continue;
    if (i == SINK)
      TRY(check_sink(operands));
    else if (i == CU_SEQLENS_Q || i == CU_SEQLENS_K)
      TRY(check_count(loaded, batch + 1, "one more than there are sequences"));
    else
      TRY(check_count(loaded, batch, "one for each sequence"));
    *field_of(&operands->args, (enum operand)i) =
        fa3_vector(loaded->data, loaded->dtype, loaded->shape[0]);
  }
  return 0;
}

static int read_all(const struct attention_options *options, struct operands *operands) {
  for (int i = 0; i < OPERANDS; i++) {
    if (i > VALUE && !options->sources[i]) continue;
    if (i >= CU_SEQLENS_Q)
      TRY(lengths_read(options->sources[i], &options->rules, kinds[i].names, kinds[i].option,
                       i == DIAGONAL ? FA3_INT64 : FA3_INT32, &operands->loaded[i]));
    else
      TRY(loaded_tensor_read(options->sources[i], &options->rules, kinds[i].names,
                             floating_point_elements, &operands->loaded[i]));
  }
  return 0;
}

/* A contiguous tensor of query's shape with value's head_dim. */
static fa3_tensor output_like(const fa3_forward_args *args) {
  const int64_t *query = args->query.shape;
  int64_t head_dim = args->value.shape[args->value.rank - 1];
  void *data = args->query.data;
  return args->query.rank == 3
             ? fa3_packed(data, args->query.dtype, query[0], query[1], head_dim)
             : fa3_dense(data, args->query.dtype, query[0], query[1], query[2], head_dim);
}

/* Passes on why the library refused, naming the file that it is about. */
static int name_file(const struct operands *operands, fa3_status status) {
  const char *message = library_message();
  int code = library_exit_code(status);
  for (int i = 0; i < OPERANDS; i++) {
    size_t length = strlen(kinds[i].field);
    if (strncmp(message, kinds[i].field, length) == 0 && operands->loaded[i].rank &&
        (message[length] == '.' || message[length] == '[' || message[length] == ' '))
      return fail(code, "%s: %s", operands->loaded[i].origin, message);
  }
  if (strncmp(message, "head_dim ", 9) == 0)
    return fail(code, "%s: %s", operands->loaded[QUERY].origin, message);
  if (strncmp(message, "value_head_dim ", 15) == 0)
    return fail(code, "%s: %s", operands->loaded[VALUE].origin, message);
  return fail(code, "%s", message);
}

/* Everything but the contents of the lengths is the library's to check, on the CPU, which takes
 * all that is valid. */
static int check_with_library(const struct operands *operands) {
  fa3_forward_args args = operands->args;
  size_t bytes;
  args.output = output_like(&args);
  fa3_status status = fa3_forward_workspace(&args, &bytes);
  return status ? name_file(operands, status) : 0;
}

int operands_read(const struct attention_options *options, struct operands *operands) {
  memset(operands, 0, sizeof *operands);
  operands->heads_first = options->heads_first;
  operands->args = (fa3_forward_args){.struct_size = sizeof operands->args,
                                      .flags = options->flags,
                                      .softmax_scale = options->softmax_scale,
                                      .softcap = options->softcap,
                                      .window_left = options->window_left,
                                      .window_right = options->window_right};
  TRY(read_all(options, operands));
  TRY(read_matrices(operands));
  TRY(read_vectors(operands));
  TRY(check_with_library(operands));
  TRY(lengths_check(&operands->args, operands->loaded));
  operands->args.max_seqlen_q = lengths_longest(&operands->loaded[CU_SEQLENS_Q]);
  operands->args.max_seqlen_k = lengths_longest(&operands->loaded[CU_SEQLENS_K]);
  return 0;
}

struct loaded_tensor operands_output_shape(const struct operands *operands) {
  struct loaded_tensor output = operands->loaded[QUERY];
  output.data = NULL;
  output.shape[output.rank - 1] = operands->args.value.shape[operands->args.value.rank - 1];
  return output;
}

/* (batch, heads, seqlen), without batch where query has none. */
struct loaded_tensor operands_lse_shape(const struct operands *operands) {
  const struct loaded_tensor *query = &operands->loaded[QUERY];
  const int64_t *view_shape = operands->args.query.shape + operands->args.query.rank - 3;
  struct loaded_tensor lse = {.dtype = FA3_FLOAT32, .rank = query->rank - 1};
  lse.shape[0] = query->shape[0];
  lse.shape[lse.rank - 2] = view_shape[1];
  lse.shape[lse.rank - 1] = view_shape[0];
  return lse;
}

static void set_output_view(struct operands *operands) {
  operands->args.output =
      operands_view(operands, &operands->output, operands->args.query.rank == 3);
}

fa3_tensor operands_lse_view(const struct operands *operands, const struct loaded_tensor *tensor) {
  const fa3_tensor *query = &operands->args.query;
  int64_t rows = query->shape[query->rank - 3];
  int64_t heads = query->shape[query->rank - 2];
  fa3_tensor lse = {.data = tensor->data, .dtype = FA3_FLOAT32, .rank = query->rank - 1};
  lse.shape[0] = query->shape[0];
  lse.strides[0] = heads * rows;
  lse.shape[lse.rank - 2] = heads;
  lse.strides[lse.rank - 2] = rows;
  lse.shape[lse.rank - 1] = rows;
  lse.strides[lse.rank - 1] = 1;
  return lse;
}

int operands_make_output(struct operands *operands, fa3_dtype dtype, bool with_lse) {
  operands->output = operands_output_shape(operands);
  if (dtype) operands->output.dtype = dtype;
  TRY(loaded_tensor_make(&operands->output, "output"));
  set_output_view(operands);
  if (!with_lse) return 0;
  operands->lse = operands_lse_shape(operands);
  TRY(loaded_tensor_make(&operands->lse, "lse"));
  operands->args.lse = operands_lse_view(operands, &operands->lse);
  return 0;
}

int operands_check_output(struct operands *operands) {
  struct loaded_tensor expected = operands_output_shape(operands);
  TRY(loaded_tensor_check_float(&operands->output));
  TRY(loaded_tensor_check_shape(&operands->output, &expected));
  set_output_view(operands);
  return 0;
}

int operands_check_lse(struct operands *operands) {
  struct loaded_tensor expected = operands_lse_shape(operands);
  if (operands->lse.dtype != FA3_FLOAT32)
    return fail(EXIT_INPUT, "%s: its elements are not fp32", operands->lse.origin);
  TRY(loaded_tensor_check_shape(&operands->lse, &expected));
  operands->args.lse = operands_lse_view(operands, &operands->lse);
  return 0;
}

static fa3_status takes(fa3_device device, const void *call) {
  fa3_forward_args args = *(const fa3_forward_args *)call;
  size_t bytes;
  args.device = device;
  return fa3_forward_workspace(&args, &bytes);
}

int operands_choose_device(struct operands *operands, const struct device_options *options) {
  operands->args.num_threads = options->num_threads;
  return device_choose(options, takes, &operands->args, &operands->args.device);
}

void operands_free(struct operands *operands) {
  for (int i = 0; i < OPERANDS; i++) loaded_tensor_free(&operands->loaded[i]);
  loaded_tensor_free(&operands->output);
  loaded_tensor_free(&operands->lse);
}
