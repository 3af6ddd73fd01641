#include "failure.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>

/* Room for two paths and a reason. */
static char text[2 * PATH_MAX + 1024];

int fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  for (char *c = text; *c; c++)
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
  return code;
}

const char *failure_text(void) {
  return text;
}
