#include "lengths.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "numbers.h"

static int read_list(const char *list, const char *option, struct loaded_tensor *lengths) {
  size_t count = 1;
  for (const char *c = list; *c; c++) count += *c == ',';
  memset(lengths, 0, sizeof *lengths);
  (void)snprintf(lengths->origin, sizeof lengths->origin, "%s", option);
  lengths->data = malloc(count * sizeof(int64_t));
  if (!lengths->data)
    return fail(EXIT_FAILED, "%s: no memory for it: %zu bytes", option, count * sizeof(int64_t));
  if (!parse_integers(list, INT64_MIN, INT64_MAX, lengths->data, count, &count))
    return fail(EXIT_USAGE, "%s %s: expected integers with commas between them", option, list);
  lengths->given = true;
  lengths->dtype = FA3_INT64;
  lengths->rank = 1;
  lengths->shape[0] = (int64_t)count;
  return 0;
}

/* From one integer type to the other; NumPy makes int64. */
static int convert(fa3_dtype dtype, struct loaded_tensor *lengths) {
  const bool narrow = dtype == FA3_INT32;
  const int64_t count = loaded_tensor_elements(lengths);
  const size_t bytes = (size_t)count * fa3_dtype_size(dtype);
  void *converted = malloc(bytes + 1);
  if (!converted)
    return fail(EXIT_FAILED, "%s: no memory for it: %zu bytes", lengths->origin, bytes);
  for (int64_t i = 0; i < count; i++) {
    const int64_t value =
        narrow ? ((const int64_t *)lengths->data)[i] : ((const int32_t *)lengths->data)[i];
    if (value < INT32_MIN || value > INT32_MAX) {
      free(converted);
      return fail(EXIT_INPUT, "%s: element %" PRId64 " is %" PRId64 ": expected less than 2^31",
                  lengths->origin, i, value);
    }
    if (narrow)
      ((int32_t *)converted)[i] = (int32_t)value;
    else
      ((int64_t *)converted)[i] = value;
  }
  free(lengths->data);
  lengths->data = converted;
  lengths->dtype = dtype;
  return 0;
}

int lengths_read(const char *source, const struct source_rules *rules, const char *const *names,
                 const char *option, fa3_dtype dtype, struct loaded_tensor *lengths) {
  static const char integers[] = "int32 or int64";
  bool list = source[strspn(source, "-0123456789,")] == '\0';
  if (list)
    TRY(read_list(source, option, lengths));
  else
    TRY(loaded_tensor_read(source, rules, names, NULL, integers, lengths));
  if (lengths->dtype == dtype) return 0;
  if (lengths->dtype == FA3_INT64 || lengths->dtype == FA3_INT32) return convert(dtype, lengths);
  return fail(EXIT_INPUT, "%s: its elements are floating point: expected %s", lengths->origin,
              integers);
}

int64_t lengths_longest(const fa3_tensor *starts) {
  const int32_t *values = starts->data;
  int64_t longest = 1;
  if (!starts->rank) return 0;
  for (int64_t b = 1; b < starts->shape[0]; b++)
    if (values[b] - values[b - 1] > longest) longest = values[b] - values[b - 1];
  return longest;
}
