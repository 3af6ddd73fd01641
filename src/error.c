#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local struct error_message last_error;

fa3_status set_error(fa3_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error.text, sizeof last_error.text, format, arguments);
  va_end(arguments);
  return status;
}

struct error_message error_keep(void) {
  return last_error;
}

void error_put_back(const struct error_message *before) {
  last_error = *before;
}

const char *fa3_last_error(void) {
  return last_error.text;
}

const char *fa3_status_name(fa3_status status) {
  switch (status) {
#define NAME(value) \
  case value:       \
    return #value;
    NAME(FA3_OK)
    NAME(FA3_INVALID_STRUCT)
    NAME(FA3_INVALID_DEVICE)
    NAME(FA3_INVALID_POINTER)
    NAME(FA3_INVALID_DTYPE)
    NAME(FA3_INVALID_SHAPE)
    NAME(FA3_INVALID_STRIDE)
    NAME(FA3_INVALID_LENGTHS)
    NAME(FA3_INVALID_FLAGS)
    NAME(FA3_INVALID_SCALE)
    NAME(FA3_INVALID_SOFTCAP)
    NAME(FA3_INVALID_WINDOW)
    NAME(FA3_INVALID_WORKSPACE)
    NAME(FA3_INVALID_STREAM)
    NAME(FA3_INVALID_THREADS)
    NAME(FA3_INVALID_RESERVED)
    NAME(FA3_INVALID_ENVIRONMENT)
    NAME(FA3_INVALID_INDEX)
    NAME(FA3_INVALID_SPLITS)
    NAME(FA3_UNSUPPORTED)
    NAME(FA3_NO_DRIVER)
    NAME(FA3_DRIVER_TOO_OLD)
    NAME(FA3_NO_HOPPER_GPU)
    NAME(FA3_OUT_OF_MEMORY)
    NAME(FA3_DEVICE_ERROR)
    NAME(FA3_INTERNAL_ERROR)
#undef NAME
    default:
      return "unknown status";
  }
}
