#include "numbers.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* As strtoll, without the spaces and the '+' that it skips; a k after it is 1024. */
static bool read_integer(const char *text, const char **end, int64_t *value) {
  char *after;
  long long number;
  if (!isdigit((unsigned char)text[0]) && text[0] != '-') return false;
  errno = 0;
  number = strtoll(text, &after, 10);
  if (after == text || errno) return false;
  *value = number;
  *end = after + (*after == 'k');
  return *after != 'k' || !__builtin_mul_overflow(number, 1024LL, value);
}

bool parse_integer(const char *text, int64_t min, int64_t max, int64_t *value) {
  const char *end;
  return read_integer(text, &end, value) && !*end && *value >= min && *value <= max;
}

bool parse_real(const char *text, float min, float *value) {
  char *end;
  if (isspace((unsigned char)text[0])) return false;
  *value = strtof(text, &end);
  /* What is no zero must not become one. */
  const bool lost = *value == 0 && strtod(text, NULL) != 0;
  return end > text && !*end && isfinite(*value) && *value >= min && !lost;
}

bool parse_integers(const char *text, int64_t min, int64_t max, int64_t *values, size_t capacity,
                    size_t *count) {
  for (*count = 0; *count < capacity; text++) {
    int64_t value;
    if (!read_integer(text, &text, &value) || value < min || value > max) return false;
    values[(*count)++] = value;
    if (*text != ',') return !*text;
  }
  return false;
}
