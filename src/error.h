/* The thread's last error. */
#ifndef FA3_SRC_ERROR_H
#define FA3_SRC_ERROR_H

#include "fa3.h"

/* Stores the message (one line, printf format) and returns `status`. */
fa3_status set_error(fa3_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Leaves the function with the status of a call that failed. */
#define TRY(call)                                \
  do {                                           \
    fa3_status try_status = (call);              \
    if (try_status != FA3_OK) return try_status; \
  } while (0)

#endif
