/* Every field of every tensor in the structs of fa3_forward and fa3_backward, wrong in turn. */
#include <stdio.h>
#include <string.h>

#include "call.h"
#include "test.h"

static struct call call; /* too large for some stacks */

static const struct call_pass *const passes[] = {&call_forward, &call_backward};
enum { PASSES = 2 };

/* Spoils field `field` of one tensor of a fresh call; `value` goes into the message. */
static void refuse_field(const struct call_pass *pass, bool packed, const struct argument *which,
                         int64_t value, fa3_status status, bool before_data, const char *format,
                         int index) {
  char field[32], name[64], what[128];
  snprintf(field, sizeof field, format, index);
  snprintf(name, sizeof name, "%s.%s", tensor_rows[which->tensor].name, field);
  snprintf(what, sizeof what, "%s %s = %lld", packed ? "packed" : "dense", name, (long long)value);
  call_init(&call, packed);
  fa3_tensor *tensor = call_tensor(&call, pass, which);
  if (!strncmp(field, "dtype", 5)) tensor->dtype = (fa3_dtype)value;
  if (!strncmp(field, "rank", 4)) tensor->rank = (int32_t)value;
  if (!strncmp(field, "shape", 5)) tensor->shape[index] = value;
  if (!strncmp(field, "strides", 7)) tensor->strides[index] = value;
  if (!strncmp(field, "reserved", 8)) tensor->reserved[index] = (uint64_t)value;
  char text[32];
  snprintf(text, sizeof text, "%lld", (long long)value);
  call_is_refused(&call, pass, what, status, before_data, (const char *const[]){name, text, NULL});
}

static void refuse_every_field(const struct call_pass *pass, bool packed,
                               const struct argument *which) {
  call_init(&call, packed);
  const fa3_tensor tensor = *call_tensor(&call, pass, which);
  if (tensor.rank == 0) return; /* an optional tensor that this call can't have */
  const int last = tensor.rank - 1;

  static const fa3_dtype dtypes[] = {0, -1, 5, 16, 31, 34, 1 << 30};
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
    refuse_field(pass, packed, which, dtypes[i], FA3_INVALID_DTYPE, true, "dtype", 0);
  fa3_dtype other = tensor.dtype >= FA3_INT32 ? FA3_FLOAT32 : FA3_INT32;
  refuse_field(pass, packed, which, other, FA3_INVALID_DTYPE, true, "dtype", 0);

  const int32_t ranks[] = {0, -1, tensor.rank - 1, tensor.rank + 1, 5, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
    refuse_field(pass, packed, which, ranks[i], FA3_INVALID_SHAPE, true, "rank", 0);

  for (int d = 0; d < 4; d++) {
    refuse_field(pass, packed, which, -1, FA3_INVALID_SHAPE, true, "shape[%d]", d);
    refuse_field(pass, packed, which, INT64_MIN, FA3_INVALID_SHAPE, true, "shape[%d]", d);
    refuse_field(pass, packed, which, INT64_MAX, FA3_INVALID_SHAPE, true, "shape[%d]", d);
    refuse_field(pass, packed, which, -1, FA3_INVALID_STRIDE, true, "strides[%d]", d);
    refuse_field(pass, packed, which, INT64_MIN, FA3_INVALID_STRIDE, true, "strides[%d]", d);
    refuse_field(pass, packed, which, INT64_MAX, FA3_INVALID_STRIDE, true, "strides[%d]", d);
  }
  for (int d = tensor.rank; d < 4; d++) {
    refuse_field(pass, packed, which, 1, FA3_INVALID_SHAPE, true, "shape[%d]", d);
    refuse_field(pass, packed, which, 1, FA3_INVALID_STRIDE, true, "strides[%d]", d);
  }
  refuse_field(pass, packed, which, 2, FA3_INVALID_STRIDE, true, "strides[%d]", last);
  refuse_field(pass, packed, which, 0, FA3_INVALID_STRIDE, true, "strides[%d]", last);
  if (which->output)
    for (int d = 0; d < last; d++)
      for (int64_t stride = 0; stride < tensor.shape[last]; stride++)
        refuse_field(pass, packed, which, stride, FA3_INVALID_STRIDE, true, "strides[%d]", d);
  for (int i = 0; i < 6; i++)
    refuse_field(pass, packed, which, i + 1, FA3_INVALID_RESERVED, true, "reserved[%d]", i);
}

static void test_every_field_of_every_tensor(void **state) {
  (void)state;
  for (int p = 0; p < PASSES; p++)
    for (int i = 0; i < arguments_of(passes[p]->phase)->count; i++) {
      const struct argument *which = &arguments_of(passes[p]->phase)->arguments[i];
      refuse_every_field(passes[p], false, which);
      refuse_every_field(passes[p], true, which);
    }
}

/* An extent that is one too large, for every dimension: the message names either side. */
static void refuse_extents(const struct call_pass *pass) {
  const struct argument_struct *list = arguments_of(pass->phase);
  for (int packed = 0; packed <= 1; packed++) {
    for (int i = 0; i < list->count; i++) {
      const struct argument *which = &list->arguments[i];
      for (int d = 0; d < 4; d++) {
        call_init(&call, packed);
        fa3_tensor *tensor = call_tensor(&call, pass, which);
        if (d >= tensor->rank) continue;
        /* Any batch of keys will do with an index. */
        if (pass == &call_forward && !packed && d == 0 && which->tensor == TENSOR_key) continue;
        tensor->shape[d]++;
        if (d == tensor->rank - 1) tensor->shape[d] += 7; /* stays a multiple of 8 */
        const char *name = tensor_rows[which->tensor].name;
        if (!strcmp(name, "cu_seqlens_q")) name = "shape"; /* it says what the batch is */
        char what[64];
        snprintf(what, sizeof what, "%s %s.shape[%d]", packed ? "packed" : "dense",
                 tensor_rows[which->tensor].name, d);
        call_is_refused(&call, pass, what, FA3_INVALID_SHAPE, true,
                        (const char *const[]){name, NULL});
      }
    }
  }
}

static void test_extents_that_do_not_match(void **state) {
  (void)state;
  for (int p = 0; p < PASSES; p++) refuse_extents(passes[p]);
}

static void refuse_data_pointers(const struct call_pass *pass) {
  const struct argument_struct *list = arguments_of(pass->phase);
  for (int packed = 0; packed <= 1; packed++) {
    for (int i = 0; i < list->count; i++) {
      const struct argument *which = &list->arguments[i];
      char name[64];
      snprintf(name, sizeof name, "%s.data", tensor_rows[which->tensor].name);
      call_init(&call, packed);
      if (call_tensor(&call, pass, which)->rank == 0) continue;
      call_tensor(&call, pass, which)->data = NULL;
      call_is_refused(&call, pass, name, FA3_INVALID_POINTER, false,
                      (const char *const[]){name, NULL});
      call_init(&call, packed);
      fa3_tensor *tensor = call_tensor(&call, pass, which);
      tensor->data = (char *)tensor->data + 1;
      call_is_refused(&call, pass, name, FA3_INVALID_POINTER, false,
                      (const char *const[]){name, NULL});
    }
  }
}

static void test_data_pointers(void **state) {
  (void)state;
  for (int p = 0; p < PASSES; p++) refuse_data_pointers(passes[p]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_field_of_every_tensor),
      cmocka_unit_test(test_extents_that_do_not_match),
      cmocka_unit_test(test_data_pointers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
