/* The thread's last error. */
#ifndef FA3_SRC_ERROR_H
#define FA3_SRC_ERROR_H

#include "fa3.h"

/* Stores the message (one line, printf format) and returns `status`. */
fa3_status set_error(fa3_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
