#include "operands.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "failure.h"
#include "lengths.h"

/* What else a tensor may be called in a .safetensors file. */
static const char *const other_names[TENSORS][2] = {[TENSOR_query] = {"q"},
                                                    [TENSOR_key] = {"k"},
                                                    [TENSOR_value] = {"v"},
                                                    [TENSOR_output] = {"out", "o"},
                                                    [TENSOR_grad_output] = {"dout", "do"},
                                                    [TENSOR_grad_lse] = {"dlse"},
                                                    [TENSOR_grad_query] = {"dquery", "dq"},
                                                    [TENSOR_grad_key] = {"dkey", "dk"},
                                                    [TENSOR_grad_value] = {"dvalue", "dv"},
                                                    [TENSOR_grad_sink] = {"dsink"}};

/* The axes of a tensor in its file, and how many: without the batch if it is packed or a single
 * sequence, heads before rows if the files have them so. */
static int file_axes(const struct operands *operands, enum tensor tensor, bool batch,
                     enum axis axes[4]) {
  const struct shape *shape = tensor_rows[tensor].shape;
  memcpy(axes, shape->axes, sizeof shape->axes);
  if (operands->heads_first && shape->rank == 4) {
    axes[1] = shape->axes[2];
    axes[2] = shape->axes[1];
  }
  if (!batch) memmove(axes, axes + 1, 3 * sizeof *axes);
  return shape->rank - !batch;
}

static bool is_packed(const struct operands *operands, enum tensor tensor) {
  const enum tensor starts = tensor_rows[tensor].shape->packed_by;
  return starts != TENSOR_nothing && operands->loaded[starts].given;
}

static int check_rank(const struct operands *operands, enum tensor tensor) {
  const struct loaded_tensor *loaded = &operands->loaded[tensor];
  if (tensor_rows[tensor].rule == RULE_SCALE) return 0; /* the library does */
  const struct shape *shape = tensor_rows[tensor].shape;
  const int rank = shape->rank;
  if (is_packed(operands, tensor)) {
    if (loaded->rank == rank - 1) return 0;
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected %d, because of %s", loaded->origin,
                loaded->rank, rank - 1, option_of(shape->packed_by));
  }
  const bool single = shape->packed_by != TENSOR_nothing; /* or a sequence without a batch */
  if (loaded->rank == rank || (single && loaded->rank == rank - 1)) return 0;
  if (single)
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected %d or %d", loaded->origin,
                loaded->rank, rank - 1, rank);
  return fail(EXIT_INPUT, "%s: has %d dimensions: expected %d", loaded->origin, loaded->rank, rank);
}

/* What the API sees: the axes in its order, a sequence without a batch as a batch of one. */
static fa3_tensor view_of(const struct operands *operands, enum tensor tensor,
                          const struct loaded_tensor *loaded) {
  const struct shape *shape = tensor_rows[tensor].shape;
  const bool batch = loaded->rank == shape->rank, packed = is_packed(operands, tensor);
  enum axis axes[4];
  file_axes(operands, tensor, batch, axes);
  const fa3_tensor as_stored = loaded_tensor_view(loaded);
  fa3_tensor view = {
      .data = as_stored.data, .dtype = as_stored.dtype, .rank = shape->rank - packed};
  for (int d = 0; d < loaded->rank; d++) {
    int to = 0;
    while (shape->axes[to + packed] != axes[d]) to++;
    view.shape[to] = as_stored.shape[d];
    view.strides[to] = as_stored.strides[d];
  }
  if (!batch && !packed) view.shape[0] = 1;
  return view;
}

/* A scale is in the API's order, whatever the layout; a single number may have no dimension. */
static fa3_tensor view_of_scale(const struct loaded_tensor *loaded) {
  fa3_tensor view = loaded_tensor_view(loaded);
  if (loaded->rank) return view;
  view.rank = 1;
  view.shape[0] = view.strides[0] = 1;
  return view;
}

int operands_set_view(struct operands *operands, enum tensor tensor) {
  TRY(check_rank(operands, tensor));
  struct call *const calls[] = {&operands->forward, &operands->backward};
  for (int i = 0; i < 2; i++) {
    const struct argument *argument = find_argument(calls[i]->phase, tensor);
    if (argument)
      *argument_in(&calls[i]->args, argument) =
          tensor_rows[tensor].rule == RULE_SCALE
              ? view_of_scale(&operands->loaded[tensor])
              : view_of(operands, tensor, &operands->loaded[tensor]);
  }
  return 0;
}

/* The extent of an axis in the inputs. */
static int64_t extent_of(const struct operands *operands, enum axis axis) {
  for (int i = 0; i < INPUTS; i++) {
    const struct loaded_tensor *loaded = &operands->loaded[inputs[i]];
    enum axis axes[4];
    const int rank = file_axes(operands, inputs[i], loaded->rank == 4, axes);
    for (int d = 0; d < rank; d++)
      if (axes[d] == axis) return loaded->shape[d];
  }
  return 0;
}

/* The shape and the dtype that a tensor has to have, as the files have theirs. */
static struct loaded_tensor shape_of(const struct operands *operands, enum tensor tensor) {
  const struct tensor_row *row = &tensor_rows[tensor];
  const enum tensor model =
      row->shape->packed_by == TENSOR_cu_seqlens_k ? TENSOR_key : TENSOR_query;
  const bool batch = row->shape->packed_by == TENSOR_nothing || operands->loaded[model].rank == 4;
  struct loaded_tensor shaped = {
      .dtype = row->rule == RULE_ONLY ? row->dtype : operands->loaded[row->model].dtype};
  /* What is computed from codes has none of their scales. */
  if (row->rule == RULE_COMPUTED && shaped.dtype == FA3_FLOAT8_E4M3) shaped.dtype = FA3_FLOAT32;
  enum axis axes[4];
  shaped.rank = file_axes(operands, tensor, batch, axes);
  for (int d = 0; d < shaped.rank; d++) shaped.shape[d] = extent_of(operands, axes[d]);
  return shaped;
}

/* Reads a tensor, which has no view yet: what packs it may not have been read. */
static int load(const struct attention_options *options, enum tensor tensor, const char *source,
                struct operands *operands) {
  const struct tensor_row *row = &tensor_rows[tensor];
  const char *const names[] = {row->name, other_names[tensor][0], other_names[tensor][1], NULL};
  struct loaded_tensor *loaded = &operands->loaded[tensor];
  loaded_tensor_free(loaded);
  if (row->rule == RULE_ONLY && row->dtype != FA3_FLOAT32) {
    TRY(lengths_read(source, &options->rules, names, option_of(tensor), row->dtype, loaded));
    return row->vector ? check_rank(operands, tensor) : 0; /* before what it says is used */
  }
  return loaded_tensor_read(source, &options->rules, names, NULL,
                            row->rule == RULE_ONLY ? "float32" : floating_point_elements, loaded);
}

enum tensor operands_scale_of(enum tensor codes) {
  enum tensor scale = 0;
  while (tensor_rows[scale].rule != RULE_SCALE || tensor_rows[scale].model != codes) scale++;
  return scale;
}

int64_t *operands_scale_rows(struct operands *operands, enum tensor scale) {
  fa3_forward_args *args = &operands->forward.args.forward;
  return scale == TENSOR_query_scale ? &args->query_scale_rows
         : scale == TENSOR_key_scale ? &args->key_scale_rows
                                     : &args->value_scale_rows;
}

/* The scale beside codes, and how many rows share one. */
static int load_scale(const struct attention_options *options, enum tensor codes,
                      struct operands *operands) {
  const enum tensor scale = operands_scale_of(codes);
  const char *const names[] = {tensor_rows[codes].name, other_names[codes][0], NULL};
  const char *source = options->sources[codes];
  struct loaded_tensor number;
  TRY(loaded_tensor_read(source, &options->rules, names, "_scale", "float32",
                         &operands->loaded[scale]));
  TRY(loaded_tensor_read(source, &options->rules, names, "_scale_rows", "int64", &number));
  if (!number.given) return 0;
  const bool good = number.dtype == FA3_INT64 && loaded_tensor_elements(&number) == 1;
  if (good) *operands_scale_rows(operands, scale) = *(const int64_t *)number.data;
  const int code = good ? 0 : fail(EXIT_INPUT, "%s: expected one int64", number.origin);
  loaded_tensor_free(&number);
  return code;
}

int operands_load(const struct attention_options *options, enum tensor tensor, const char *source,
                  struct operands *operands) {
  TRY(load(options, tensor, source, operands));
  return operands_set_view(operands, tensor);
}

/* Passes on why the library refused, naming the file that it is about. */
static int name_file(const struct operands *operands, fa3_status status) {
  const char *message = library_message();
  const int code = library_exit_code(status);
  const size_t length = strcspn(message, ".[ ");
  for (int i = 0; i < TENSORS; i++) {
    const char *name = tensor_rows[i].name;
    if (operands->loaded[i].given && strlen(name) == length && !strncmp(message, name, length))
      return fail(code, "%s: %s", operands->loaded[i].origin, message);
  }
  if (strncmp(message, "head_dim ", 9) == 0)
    return fail(code, "%s: %s", operands->loaded[TENSOR_query].origin, message);
  if (strncmp(message, "value_head_dim ", 15) == 0)
    return fail(code, "%s: %s", operands->loaded[TENSOR_value].origin, message);
  return fail(code, "%s", message);
}

/* On the CPU, with outputs that are not there yet described as they will be. */
static struct call call_to_check(const struct operands *operands, const struct call *call) {
  const struct argument_struct *list = arguments_of(call->phase);
  struct call complete = *call;
  call_set_device(&complete, (fa3_device){FA3_CPU, 0}, 0);
  for (int i = 0; i < list->count; i++) {
    const enum tensor tensor = list->arguments[i].tensor;
    if (!list->arguments[i].output || list->arguments[i].optional) continue;
    const struct loaded_tensor shaped = shape_of(operands, tensor);
    if (!operands->loaded[tensor].given)
      *argument_in(&complete.args, &list->arguments[i]) = view_of(operands, tensor, &shaped);
  }
  return complete;
}

int operands_check(const struct operands *operands, const struct call *call) {
  const struct call complete = call_to_check(operands, call);
  size_t bytes;
  const fa3_status status = library_check(&complete, &bytes);
  return status ? name_file(operands, status) : 0;
}

/* The contents of the lengths, at which the library looks when it is to compute, but before it
 * looks at the workspace: without one it does no more. */
static int check_lengths(const struct operands *operands) {
  const struct call complete = call_to_check(operands, &operands->forward);
  size_t bytes;
  if (library_check(&complete, &bytes) || bytes == 0) return 0;
  const fa3_status status = fa3_forward(&complete.args.forward);
  return status == FA3_INVALID_WORKSPACE ? 0 : name_file(operands, status);
}

#define SET_OPTIONS(args, options)                   \
  do {                                               \
    (args).struct_size = sizeof(args);               \
    (args).flags = (options)->flags;                 \
    (args).softmax_scale = (options)->softmax_scale; \
    (args).softcap = (options)->softcap;             \
    (args).window_left = (options)->window_left;     \
    (args).window_right = (options)->window_right;   \
  } while (0)
#define SET_LONGEST(args)                                        \
  do {                                                           \
    (args).max_seqlen_q = lengths_longest(&(args).cu_seqlens_q); \
    (args).max_seqlen_k = lengths_longest(&(args).cu_seqlens_k); \
  } while (0)

static void begin(const struct attention_options *options, struct operands *operands) {
  memset(operands, 0, sizeof *operands);
  operands->heads_first = options->rules.heads_first;
  operands->forward.phase = FA3_FORWARD;
  operands->backward.phase = FA3_BACKWARD;
}

int operands_read_some(const struct attention_options *options, struct operands *operands) {
  static const enum tensor starts[] = {TENSOR_cu_seqlens_q, TENSOR_cu_seqlens_k};
  begin(options, operands);
  for (int i = 0; i < 2; i++)
    if (options->sources[starts[i]])
      TRY(operands_load(options, starts[i], options->sources[starts[i]], operands));
  for (int i = 0; i < INPUTS; i++) {
    const char *source = options->sources[inputs[i]];
    const char *const names[] = {tensor_rows[inputs[i]].name, other_names[inputs[i]][0], NULL};
    struct loaded_tensor *loaded = &operands->loaded[inputs[i]];
    static const char elements[] = "float32, float16 or bfloat16";
    if (source || options->rules.container)
      TRY(loaded_tensor_read(source, &options->rules, names, source ? NULL : "", elements, loaded));
    if (loaded->given) TRY(operands_set_view(operands, inputs[i]));
  }
  return 0;
}

int operands_read(const struct attention_options *options, struct operands *operands) {
  const struct argument_struct *list = arguments_of(FA3_FORWARD);
  begin(options, operands);
  SET_OPTIONS(operands->forward.args.forward, options);
  SET_OPTIONS(operands->backward.args.backward, options);
  if (options->deterministic) operands->backward.args.backward.flags |= FA3_DETERMINISTIC;
  for (int i = 0; i < list->count; i++) {
    const struct argument *argument = &list->arguments[i];
    const char *source = options->sources[argument->tensor];
    if (!argument->output && (source || !argument->optional))
      TRY(load(options, argument->tensor, source, operands));
  }
  for (int i = 0; i < INPUTS; i++)
    if (operands->loaded[inputs[i]].dtype == FA3_FLOAT8_E4M3)
      TRY(load_scale(options, inputs[i], operands));
  for (enum tensor i = 0; i < TENSORS; i++)
    if (operands->loaded[i].given) TRY(operands_set_view(operands, i));
  TRY(operands_check(operands, &operands->forward));
  TRY(check_lengths(operands));
  SET_LONGEST(operands->forward.args.forward);
  SET_LONGEST(operands->backward.args.backward);
  return 0;
}

int operands_make(struct operands *operands, enum tensor tensor, fa3_dtype dtype) {
  struct loaded_tensor *loaded = &operands->loaded[tensor];
  *loaded = shape_of(operands, tensor);
  if (dtype) loaded->dtype = dtype;
  (void)snprintf(loaded->origin, sizeof loaded->origin, "the %s", tensor_rows[tensor].name);
  TRY(loaded_tensor_make(loaded, tensor_rows[tensor].name));
  return operands_set_view(operands, tensor);
}

/* Whether a device takes the calls, in their order. */
struct candidates {
  struct call *calls[5];
  int count;
};

static fa3_status takes(fa3_device device, const void *context) {
  const struct candidates *candidates = context;
  fa3_status status = FA3_OK;
  for (int i = 0; i < candidates->count && !status; i++) {
    struct call call = *candidates->calls[i];
    size_t bytes;
    call.args.forward.device = device;
    status = library_check(&call, &bytes);
  }
  return status;
}

int operands_choose_device(struct operands *operands, int passes,
                           const struct device_options *chosen) {
  struct candidates candidates = {0};
  fa3_device device = {0};
  for (int i = 0; i < operands->quantize_count; i++)
    candidates.calls[candidates.count++] = &operands->quantize[i];
  if (passes > 0) candidates.calls[candidates.count++] = &operands->forward;
  if (passes > 1) candidates.calls[candidates.count++] = &operands->backward;
  for (int i = 0; i < candidates.count; i++)
    call_set_device(candidates.calls[i], device, chosen->num_threads);
  TRY(device_choose(chosen, takes, &candidates, &device));
  for (int i = 0; i < candidates.count; i++)
    call_set_device(candidates.calls[i], device, chosen->num_threads);
  return 0;
}

void operands_describe(const struct operands *operands, enum tensor tensor, char *text,
                       size_t size) {
  static const char *const axis_names[AXES] = {
      [AXIS_BATCH] = "batch",       [AXIS_BATCH_AND_ONE] = "batch + 1",
      [AXIS_BATCH_K] = "batch",     [AXIS_ROWS_Q] = "seqlen",
      [AXIS_ROWS_K] = "seqlen",     [AXIS_PAGES] = "pages of a sequence",
      [AXIS_HEADS_Q] = "heads",     [AXIS_HEADS_K] = "heads",
      [AXIS_HEAD_DIM] = "head dim", [AXIS_VALUE_HEAD_DIM] = "head dim"};
  const bool paged = operands->loaded[TENSOR_page_table].given;
  const struct loaded_tensor *loaded = &operands->loaded[tensor];
  enum axis axes[4];
  file_axes(operands, tensor, loaded->rank == tensor_rows[tensor].shape->rank, axes);
  size_t length = 0;
  for (int d = 0; d < loaded->rank && length < size; d++) {
    const char *name = axis_names[axes[d]];
    if (paged && axes[d] == AXIS_BATCH_K) name = "pages";
    if (paged && axes[d] == AXIS_ROWS_K) name = "page size";
    length += (size_t)snprintf(text + length, size - length, "%s%s%s%" PRId64, d ? ", " : "(",
                               name ? name : "", name ? " " : "", loaded->shape[d]);
  }
  if (length < size)
    (void)snprintf(text + length, size - length, "%s) %s", loaded->rank ? "" : "(",
                   loaded->dtype == FA3_INT32   ? "int32"
                   : loaded->dtype == FA3_INT64 ? "int64"
                                                : dtype_name(loaded->dtype));
}

void operands_free(struct operands *operands) {
  for (int i = 0; i < TENSORS; i++) loaded_tensor_free(&operands->loaded[i]);
  for (int i = 0; i < operands->quantize_count; i++) loaded_tensor_free(&operands->originals[i]);
}
