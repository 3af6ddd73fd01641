/* Our calls as XLA's custom calls, which JAX reaches by jax.ffi. A call's attributes are the
 * argument struct's numbers by name, and two lists of names: `inputs`, of the arguments, and
 * `outputs`, of the results. No Python is touched here: XLA calls on threads of its own. */
#include "xla.h"

#include <stdlib.h>
#include <string.h>

static struct xla_error *fail(const struct xla_frame *frame, int code, const char *message) {
  struct xla_error_args args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args);
}

static struct xla_error *fail_status(const struct xla_frame *frame, fa3_status status) {
  int code = status == FA3_UNSUPPORTED ? XLA_UNIMPLEMENTED : XLA_INTERNAL;
  return fail(frame, status < 100 ? XLA_INVALID_ARGUMENT : code, fa3_last_error());
}

static const struct field *field_of(const struct phase *phase, const char *name, size_t length) {
  for (int i = 0; i < phase->num_fields; i++)
    if (strlen(phase->fields[i].name) == length && !memcmp(phase->fields[i].name, name, length))
      return &phase->fields[i];
  return NULL;
}

static int is_named(const struct xla_span *name, const char *text) {
  return name->length == strlen(text) && !memcmp(name->text, text, name->length);
}

/* XLA's arrays are dense. Returns a problem's name, or null. */
static const char *set_tensor(fa3_tensor *tensor, const struct xla_buffer *buffer) {
  static const struct {
    int xla;
    fa3_dtype ours;
  } dtypes[] = {{XLA_F32, FA3_FLOAT32}, {XLA_F16, FA3_FLOAT16},          {XLA_BF16, FA3_BFLOAT16},
                {XLA_S32, FA3_INT32},   {XLA_F8E4M3FN, FA3_FLOAT8_E4M3}, {XLA_S64, FA3_INT64}};
  if (buffer->rank > 4) return "an array has more than 4 dimensions";
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
    if (dtypes[i].xla == buffer->dtype) tensor->dtype = dtypes[i].ours;
  if (!tensor->dtype) return "an array's dtype is none that libfa3 has";
  tensor->data = buffer->data;
  tensor->rank = (int32_t)buffer->rank;
  int64_t stride = 1;
  for (int64_t axis = buffer->rank - 1; axis >= 0; axis--) {
    tensor->shape[axis] = buffer->dims[axis];
    tensor->strides[axis] = stride;
    stride *= buffer->dims[axis];
  }
  return NULL;
}

/* Gives the buffers to the fields in `list`, names with blanks between them. Arguments behind the
 * last name are memory of the results. */
static const char *set_tensors(const struct phase *phase, union arguments *args,
                               const struct xla_span *list, const struct xla_buffers *buffers) {
  const char *name = list->text, *end = list->text + list->length;
  for (int64_t i = 0; i < buffers->size && name < end; i++) {
    size_t length = 0;
    while (name + length < end && name[length] != ' ') length++;
    const struct field *field = field_of(phase, name, length);
    if (!field || !is_tensor(field)) return "inputs or outputs name what is no array";
    const char *problem =
        set_tensor((fa3_tensor *)((char *)args + field->offset), buffers->buffers[i]);
    if (problem) return problem;
    name += length < (size_t)(end - name) ? length + 1 : length;
  }
  return NULL;
}

static const char *set_number(const struct phase *phase, union arguments *args,
                              const struct xla_span *name, const struct xla_scalar *scalar) {
  const struct field *field = field_of(phase, name->text, name->length);
  if (field && field->kind == FLOAT && scalar->dtype == XLA_F32) {
    memcpy((char *)args + field->offset, scalar->value, sizeof(float));
    return NULL;
  }
  int64_t number;
  if (!field || is_tensor(field) || field->kind == FLOAT || scalar->dtype != XLA_S64)
    return "an attribute is no number of the call: expected a field's name, of int64 or float32";
  memcpy(&number, scalar->value, sizeof number);
  return set_integer(args, field, number) ? "an attribute does not fit its field" : NULL;
}

static struct xla_error *run_on_cpu(const struct phase *phase, union arguments *args,
                                    const struct xla_frame *frame) {
  size_t bytes = 0;
  fa3_status status = phase->workspace(args, &bytes);
  if (status) return fail_status(frame, status);
  void *workspace = malloc(bytes);
  if (bytes && !workspace) return fail(frame, XLA_INTERNAL, "no memory for the workspace");
  status = phase->run(args, workspace, bytes);
  free(workspace);
  return status ? fail_status(frame, status) : NULL;
}

static struct xla_error *run_on_gpu(const struct phase *phase, union arguments *args,
                                    const struct xla_frame *frame) {
  const struct xla_api *api = frame->api;
  if (api->struct_size < sizeof *api)
    return fail(frame, XLA_UNIMPLEMENTED, "this XLA does not say which GPU a call is for");
  struct xla_stream_args stream = {sizeof stream, NULL, frame->context, NULL};
  struct xla_error *error = api->stream_get(&stream);
  if (error) return error;
  struct xla_device_args device = {sizeof device, NULL, frame->context, 0};
  error = api->device_get(&device);
  if (error) return error;
  args->common.device = (fa3_device){FA3_CUDA, device.ordinal};
  args->common.stream = stream.stream;
  size_t bytes = 0;
  fa3_status status = phase->workspace(args, &bytes);
  if (status) return fail_status(frame, status);
  struct xla_allocate_args memory = {sizeof memory, NULL, frame->context, bytes, 1, NULL};
  if (bytes) error = api->device_allocate(&memory);
  if (error) return error;
  status = phase->run(args, memory.data, bytes);
  struct xla_free_args freed = {sizeof freed, NULL, frame->context, bytes, memory.data};
  if (bytes) error = api->device_free(&freed);
  return status ? fail_status(frame, status) : error;
}

static struct xla_error *handle(const struct phase *phase, struct xla_frame *frame, int on_gpu) {
  struct xla_extension *extension = frame->extension_start;
  if (extension && extension->type == XLA_METADATA) {
    extension->metadata->version.major = 0;
    extension->metadata->version.minor = 1;
    return NULL;
  }
  if (frame->stage != XLA_EXECUTE) return NULL;
  union arguments args = {.common = {.struct_size = phase->struct_size}};
  const char *problem = NULL;
  for (int64_t i = 0; i < frame->attributes.size && !problem; i++) {
    const struct xla_span *name = frame->attributes.names[i];
    const void *value = frame->attributes.values[i];
    if (frame->attributes.types[i] == XLA_SCALAR)
      problem = set_number(phase, &args, name, value);
    else if (frame->attributes.types[i] == XLA_STRING && is_named(name, "inputs"))
      problem = set_tensors(phase, &args, value, &frame->arguments);
    else if (frame->attributes.types[i] == XLA_STRING && is_named(name, "outputs"))
      problem = set_tensors(phase, &args, value, &frame->results);
    else
      problem = "an attribute is no number, and neither inputs nor outputs";
  }
  if (problem) return fail(frame, XLA_INVALID_ARGUMENT, problem);
  return (on_gpu ? run_on_gpu : run_on_cpu)(phase, &args, frame);
}

static struct xla_error *forward(struct xla_frame *frame) {
  return handle(&phases[FORWARD_PHASE], frame, 0);
}

static struct xla_error *forward_on_gpu(struct xla_frame *frame) {
  return handle(&phases[FORWARD_PHASE], frame, 1);
}

static struct xla_error *backward(struct xla_frame *frame) {
  return handle(&phases[BACKWARD_PHASE], frame, 0);
}

static struct xla_error *backward_on_gpu(struct xla_frame *frame) {
  return handle(&phases[BACKWARD_PHASE], frame, 1);
}

xla_handler_function *const xla_handlers[NUM_PHASES][2] = {
    [FORWARD_PHASE] = {forward, forward_on_gpu}, [BACKWARD_PHASE] = {backward, backward_on_gpu}};
