/* Numbers as options give them: the whole text counts. */
#ifndef FA3_CLI_NUMBERS_H
#define FA3_CLI_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool parse_integer(const char *text, int64_t min, int64_t max, int64_t *value);

/* A finite float32, at least `min`. */
bool parse_real(const char *text, float min, float *value);

/* Integers of [min, max] with commas between them, at most `capacity`, at least one. */
bool parse_integers(const char *text, int64_t min, int64_t max, int64_t *values, size_t capacity,
                    size_t *count);

#endif
