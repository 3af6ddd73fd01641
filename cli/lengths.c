#include "lengths.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "numbers.h"
#include "slice.h"

static int read_list(const char *list, const char *option, struct loaded_tensor *lengths) {
  size_t count = 1;
  for (const char *c = list; *c; c++) count += *c == ',';
  memset(lengths, 0, sizeof *lengths);
  (void)snprintf(lengths->origin, sizeof lengths->origin, "%s", option);
  lengths->data = malloc(count * sizeof(int64_t));
  if (!lengths->data) return fail(EXIT_FAILED, "%s: no memory for it", option);
  if (!parse_integers(list, INT64_MIN, INT64_MAX, lengths->data, count, &count))
    return fail(EXIT_USAGE, "%s %s: expected integers with commas between them", option, list);
  lengths->dtype = FA3_INT64;
  lengths->rank = 1;
  lengths->shape[0] = (int64_t)count;
  return 0;
}

/* int64, which is what NumPy makes, to int32. */
static int narrow(struct loaded_tensor *lengths) {
  const int64_t *wide = lengths->data;
  int64_t count = loaded_tensor_elements(lengths);
  int32_t *narrowed = malloc((size_t)count * sizeof *narrowed + 1);
  if (!narrowed) return fail(EXIT_FAILED, "%s: no memory for it", lengths->origin);
  for (int64_t i = 0; i < count; i++) {
    if (wide[i] < INT32_MIN || wide[i] > INT32_MAX) {
      free(narrowed);
      return fail(EXIT_INPUT, "%s: element %" PRId64 " is %" PRId64 ": expected less than 2^31",
                  lengths->origin, i, wide[i]);
    }
    narrowed[i] = (int32_t)wide[i];
  }
  free(lengths->data);
  lengths->data = narrowed;
  lengths->dtype = FA3_INT32;
  return 0;
}

static int widen(struct loaded_tensor *lengths) {
  const int32_t *narrow_data = lengths->data;
  int64_t count = loaded_tensor_elements(lengths);
  int64_t *widened = malloc((size_t)count * sizeof *widened + 1);
  if (!widened) return fail(EXIT_FAILED, "%s: no memory for it", lengths->origin);
  for (int64_t i = 0; i < count; i++) widened[i] = narrow_data[i];
  free(lengths->data);
  lengths->data = widened;
  lengths->dtype = FA3_INT64;
  return 0;
}

int lengths_read(const char *source, const struct source_rules *rules, const char *const *names,
                 const char *option, fa3_dtype dtype, struct loaded_tensor *lengths) {
  static const char integers[] = "int32 or int64";
  bool list = source[strspn(source, "-0123456789,")] == '\0';
  if (list)
    TRY(read_list(source, option, lengths));
  else
    TRY(loaded_tensor_read(source, rules, names, integers, lengths));
  if (lengths->dtype == dtype) return 0;
  if (lengths->dtype == FA3_INT64) return narrow(lengths);
  if (lengths->dtype == FA3_INT32) return widen(lengths);
  return fail(EXIT_INPUT, "%s: its elements are floating point: expected %s", lengths->origin,
              integers);
}

static int check_entry(const struct loaded_tensor *lengths, int64_t index, int64_t min,
                       int64_t max) {
  if (!lengths->rank) return 0;
  int64_t value = lengths->dtype == FA3_INT64 ? ((const int64_t *)lengths->data)[index]
                                              : ((const int32_t *)lengths->data)[index];
  if (value >= min && value <= max) return 0;
  return fail(EXIT_INPUT,
              "%s: element %" PRId64 " is %" PRId64 ": expected %" PRId64 " to %" PRId64,
              lengths->origin, index, value, min, max);
}

/* Starts at 0, never falls, stays within the packed rows. */
static int check_starts(const struct loaded_tensor *starts, int64_t total) {
  if (!starts->rank) return 0;
  const int32_t *values = starts->data;
  TRY(check_entry(starts, 0, 0, 0));
  for (int64_t b = 1; b < starts->shape[0]; b++) TRY(check_entry(starts, b, values[b - 1], total));
  return 0;
}

/* Rows that a sequence has in memory. */
static int64_t allotted(const fa3_tensor *tensor, const struct loaded_tensor *starts,
                        int64_t batch) {
  const int32_t *values = starts->data;
  return starts->rank ? values[batch + 1] - values[batch] : tensor->shape[1];
}

int lengths_check(const fa3_forward_args *args, const struct loaded_tensor loaded[OPERANDS]) {
  /* The library's limit is twice that: a slice's diagonal is further off, by its first row. */
  const int64_t max_diagonal = (int64_t)1 << 59;
  TRY(check_starts(&loaded[CU_SEQLENS_Q], args->query.shape[0]));
  TRY(check_starts(&loaded[CU_SEQLENS_K], args->key.shape[0]));
  for (int64_t b = 0; b < slice_batch(args); b++) {
    int64_t rows_q = allotted(&args->query, &loaded[CU_SEQLENS_Q], b);
    int64_t rows_k = allotted(&args->key, &loaded[CU_SEQLENS_K], b);
    TRY(check_entry(&loaded[SEQUSED_Q], b, 0, rows_q));
    TRY(check_entry(&loaded[SEQUSED_K], b, 0, rows_k));
    if (loaded[SEQUSED_K].rank) rows_k = ((const int32_t *)loaded[SEQUSED_K].data)[b];
    TRY(check_entry(&loaded[LEFTPAD_K], b, 0, rows_k));
    TRY(check_entry(&loaded[CACHE_BATCH_INDEX], b, 0, args->key.shape[0] - 1));
    TRY(check_entry(&loaded[DIAGONAL], b, -max_diagonal, max_diagonal));
  }
  return 0;
}

int64_t lengths_longest(const struct loaded_tensor *starts) {
  const int32_t *values = starts->data;
  int64_t longest = 1;
  if (!starts->rank) return 0;
  for (int64_t b = 1; b < starts->shape[0]; b++)
    if (values[b] - values[b - 1] > longest) longest = values[b] - values[b - 1];
  return longest;
}
