/* XLA's C ABI of custom calls, as xla.c uses it (xla/ffi/api/c_api.h, version 0.x: structs only
 * grow at the end), and our calls as such. */
#ifndef FA3_PYTHON_XLA_H
#define FA3_PYTHON_XLA_H

#include <stddef.h>
#include <stdint.h>

#include "phases.h"

enum xla_dtype {
  XLA_S32 = 4,
  XLA_S64 = 5,
  XLA_F16 = 10,
  XLA_F32 = 11,
  XLA_BF16 = 16,
  XLA_F8E4M3FN = 20
};
enum { XLA_SCALAR = 3, XLA_STRING = 4 }; /* an attribute's type */
enum { XLA_INVALID_ARGUMENT = 3, XLA_UNIMPLEMENTED = 12, XLA_INTERNAL = 13 }; /* an error's code */
enum { XLA_EXECUTE = 3 };                                                     /* a stage */
enum { XLA_METADATA = 1 }; /* an extension's type */

struct xla_error;

struct xla_version {
  size_t struct_size;
  void *extension_start;
  int major;
  int minor;
};

/* Of a handler that is asked what it was written for. */
struct xla_metadata {
  size_t struct_size;
  struct xla_version version;
};

struct xla_extension {
  size_t struct_size;
  int type;
  struct xla_extension *next;
  struct xla_metadata *metadata; /* of an extension of that type */
};

struct xla_error_args {
  size_t struct_size;
  void *extension_start;
  const char *message;
  int code;
};

/* What a GPU's stream, device and memory are asked with. */
struct xla_stream_args {
  size_t struct_size;
  void *extension_start;
  void *context;
  void *stream; /* out */
};

struct xla_device_args {
  size_t struct_size;
  void *extension_start;
  void *context;
  int32_t ordinal; /* out */
};

struct xla_allocate_args {
  size_t struct_size;
  void *extension_start;
  void *context;
  size_t size;
  size_t alignment;
  void *data; /* out */
};

/* Memory that work in the stream still uses may be freed: it is handed out in the stream's order.
 */
struct xla_free_args {
  size_t struct_size;
  void *extension_start;
  void *context;
  size_t size;
  void *data;
};

struct xla_api {
  size_t struct_size;
  void *extension_start;
  struct xla_version version;
  const void *internal;
  struct xla_error *(*error_create)(struct xla_error_args *args);
  const void *errors_and_handlers[3]; /* that nothing here calls, as the ones below */
  struct xla_error *(*stream_get)(struct xla_stream_args *args);
  const void *types_and_states[4];
  struct xla_error *(*device_allocate)(struct xla_allocate_args *args);
  struct xla_error *(*device_free)(struct xla_free_args *args);
  const void *threads_and_futures[6];
  struct xla_error *(*device_get)(struct xla_device_args *args);
};

struct xla_buffer {
  size_t struct_size;
  void *extension_start;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
};

struct xla_span {
  const char *text;
  size_t length;
};

struct xla_scalar {
  int dtype;
  void *value;
};

/* Arguments, and results. */
struct xla_buffers {
  size_t struct_size;
  void *extension_start;
  int64_t size;
  int *types;
  struct xla_buffer **buffers;
};

struct xla_attributes {
  size_t struct_size;
  void *extension_start;
  int64_t size;
  int *types;
  struct xla_span **names;
  void **values;
};

struct xla_frame {
  size_t struct_size;
  struct xla_extension *extension_start;
  const struct xla_api *api;
  void *context;
  int stage;
  struct xla_buffers arguments;
  struct xla_buffers results;
  struct xla_attributes attributes;
};

typedef struct xla_error *xla_handler_function(struct xla_frame *frame);

/* The forward and the backward call, null for the others, on the CPU and on a GPU. */
extern xla_handler_function *const xla_handlers[NUM_PHASES][2];

#endif
