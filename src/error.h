/* The thread's last error. */
#ifndef FA3_SRC_ERROR_H
#define FA3_SRC_ERROR_H

#include "fa3.h"

/* Stores the message (one line, printf format) and returns `status`. */
fa3_status set_error(fa3_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* For a call that succeeds though something that it tried has failed: the thread's message as it
 * was before. */
struct error_message {
  char text[512];
};
struct error_message error_keep(void);
void error_put_back(const struct error_message *before);

/* Leaves the function with the status of a call that failed. */
#define TRY(call)                                \
  do {                                           \
    fa3_status try_status = (call);              \
    if (try_status != FA3_OK) return try_status; \
  } while (0)

#endif
