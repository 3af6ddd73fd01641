/* What is supported: the answers of fa3_supports, and the table of kernels and processor levels. */
#include <stdbool.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "tensors.h"
#include "test.h"

static fa3_capability usual_capability(void) {
  return (fa3_capability){.struct_size = sizeof(fa3_capability),
                          .phase = FA3_FORWARD,
                          .query_dtype = FA3_FLOAT32,
                          .key_dtype = FA3_FLOAT32,
                          .value_dtype = FA3_FLOAT32,
                          .output_dtype = FA3_FLOAT32,
                          .head_dim = 64,
                          .value_head_dim = 64};
}

/* The whole table, from head dim -8 to 300 and every dtype, against the header's words. */
static void test_supports_table(void **state) {
  (void)state;
  static const fa3_dtype dtypes[] = {0, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16, 16, FA3_INT32};
  enum { DTYPES = sizeof dtypes / sizeof *dtypes };
  for (int q = 0; q < DTYPES; q++)
    for (int k = 0; k < DTYPES; k++)
      for (int v = 0; v < DTYPES; v++)
        for (int o = 0; o < DTYPES; o++) {
          fa3_capability capability = usual_capability();
          capability.query_dtype = dtypes[q];
          capability.key_dtype = dtypes[k];
          capability.value_dtype = dtypes[v];
          capability.output_dtype = dtypes[o];
          bool good = q >= 1 && q <= 3 && k == q && v == q && (o == q || o == 1);
          for (capability.phase = FA3_FORWARD; capability.phase <= FA3_BACKWARD; capability.phase++)
            if (fa3_supports(&capability) != (good ? FA3_OK : FA3_UNSUPPORTED))
              fail_msg("dtypes %d %d %d %d", dtypes[q], dtypes[k], dtypes[v], dtypes[o]);
        }
  for (int head_dim = -8; head_dim <= 300; head_dim++)
    for (int value_head_dim = -8; value_head_dim <= 300; value_head_dim++) {
      fa3_capability capability = usual_capability();
      capability.head_dim = head_dim;
      capability.value_head_dim = value_head_dim;
      bool good = head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0 && value_head_dim >= 8 &&
                  value_head_dim <= 256 && value_head_dim % 8 == 0;
      for (capability.phase = FA3_FORWARD; capability.phase <= FA3_BACKWARD; capability.phase++)
        if (fa3_supports(&capability) != (good ? FA3_OK : FA3_UNSUPPORTED))
          fail_msg("head dims %d %d", head_dim, value_head_dim);
    }
}

/* Those of the other calls: new keys and values of one dtype into a cache of it or of codes; parts
 * into any dtype but codes. */
static void test_supports_other_calls(void **state) {
  (void)state;
  static const fa3_dtype dtypes[] = {0,  FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16, FA3_FLOAT8_E4M3,
                                     77, FA3_INT32};
  enum { DTYPES = sizeof dtypes / sizeof *dtypes };
  for (int q = 0; q < DTYPES; q++)
    for (int k = 0; k < DTYPES; k++)
      for (int v = 0; v < DTYPES; v++) {
        fa3_capability capability = usual_capability();
        capability.phase = FA3_APPEND;
        capability.query_dtype = dtypes[q];
        capability.key_dtype = dtypes[k];
        capability.value_dtype = dtypes[v];
        const bool good = q >= 1 && q <= 4 && (k == q || k == 4) && v == k;
        if (fa3_supports(&capability) != (good ? FA3_OK : FA3_UNSUPPORTED))
          fail_msg("append, dtypes %d %d %d", dtypes[q], dtypes[k], dtypes[v]);
      }
  for (int o = 0; o < DTYPES; o++) {
    fa3_capability capability = {.struct_size = sizeof capability, .phase = FA3_COMBINE};
    capability.value_head_dim = 5;
    capability.output_dtype = dtypes[o];
    if (fa3_supports(&capability) != (o >= 1 && o <= 3 ? FA3_OK : FA3_UNSUPPORTED))
      fail_msg("combine, dtype %d", dtypes[o]);
  }
  for (int head_dim = -8; head_dim <= 300; head_dim++) {
    fa3_capability capability = usual_capability();
    capability.phase = FA3_COMBINE;
    capability.value_head_dim = head_dim;
    assert_int_equal(fa3_supports(&capability), head_dim > 0 ? FA3_OK : FA3_UNSUPPORTED);
    capability.phase = FA3_APPEND;
    assert_int_equal(fa3_supports(&capability), head_dim > 0 ? FA3_OK : FA3_UNSUPPORTED);
    capability.value_head_dim = 64;
    capability.head_dim = head_dim;
    assert_int_equal(fa3_supports(&capability), head_dim > 0 ? FA3_OK : FA3_UNSUPPORTED);
    capability.key_dtype = capability.value_dtype = FA3_FLOAT8_E4M3;
    const bool of_codes = head_dim > 0 && head_dim <= 256 && head_dim % 16 == 0;
    assert_int_equal(fa3_supports(&capability), of_codes ? FA3_OK : FA3_UNSUPPORTED);
  }
}

/* Each feature alone, in each phase: those of its tensors, and what has none. */
static void test_supports_features(void **state) {
  (void)state;
  static const fa3_phase phases[] = {FA3_FORWARD, FA3_BACKWARD, FA3_QUANTIZE, FA3_APPEND,
                                     FA3_COMBINE};
  for (size_t p = 0; p < sizeof phases / sizeof *phases; p++) {
    const fa3_phase phase = phases[p];
    const bool attends = phase == FA3_FORWARD || phase == FA3_BACKWARD;
    const struct argument_struct *list = arguments_of(phase);
    fa3_features known = attends || phase == FA3_APPEND ? FA3_FEATURE_GROUPED_HEADS : 0;
    if (attends) known |= FA3_FEATURE_CAUSAL | FA3_FEATURE_WINDOW | FA3_FEATURE_SOFTCAP;
    if (phase == FA3_BACKWARD) known |= FA3_FEATURE_ACCUMULATE | FA3_FEATURE_DETERMINISTIC;
    for (int i = 0; i < list->count; i++) known |= tensor_rows[list->arguments[i].tensor].feature;
    for (int bit = 0; bit < 64; bit++) {
      const bool good = known >> bit & 1;
      fa3_capability capability = usual_capability();
      capability.phase = phase;
      if (phase == FA3_QUANTIZE) capability.output_dtype = FA3_FLOAT8_E4M3;
      capability.features = (fa3_features)1 << bit;
      const fa3_status status = fa3_supports(&capability);
      if (good) assert_int_equal(status, FA3_OK);
      if (!good) expect_refused(status, FA3_UNSUPPORTED, list->name);
      if (!good) expect_refused(status, FA3_UNSUPPORTED, "features");
    }
  }
}

static void test_supports_refuses(void **state) {
  (void)state;
  assert_int_equal(fa3_supports(NULL), FA3_INVALID_STRUCT);
  fa3_capability capability = usual_capability();
  capability.struct_size = sizeof capability - 1;
  expect_refused(fa3_supports(&capability), FA3_INVALID_STRUCT, "struct_size");
  capability = usual_capability();
  capability.device.type = 7;
  expect_refused(fa3_supports(&capability), FA3_INVALID_DEVICE, "device.type");
  capability = usual_capability();
  capability.device.index = -1;
  expect_refused(fa3_supports(&capability), FA3_INVALID_DEVICE, "device.index");
  static const fa3_phase phases[] = {-1, 0, 3, 7};
  for (size_t i = 0; i < sizeof phases / sizeof *phases; i++) {
    capability = usual_capability();
    capability.phase = phases[i];
    expect_refused(fa3_supports(&capability), FA3_UNSUPPORTED, "phase");
  }
  capability = usual_capability();
  capability.head_dim = 12;
  expect_refused(fa3_supports(&capability), FA3_UNSUPPORTED, "head_dim is 12");
  capability = usual_capability();
  capability.value_head_dim = 264;
  expect_refused(fa3_supports(&capability), FA3_UNSUPPORTED, "value_head_dim is 264");
  capability = usual_capability();
  capability.device.type = FA3_CUDA; /* no kernel takes float32 */
  expect_refused(fa3_supports(&capability), FA3_UNSUPPORTED, "CUDA");
}

static void test_kernel_table(void **state) {
  (void)state;
  int selected[FA3_BACKWARD + 1][FA3_FLOAT8_E4M3 + 1] = {0};
  int32_t count = fa3_kernel_count();
  assert_true(count > 0);
  for (int32_t i = 0; i < count; i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    assert_int_equal(fa3_get_kernel_info(i, &kernel), FA3_OK);
    assert_int_equal(kernel.struct_size, sizeof kernel);
    assert_in_range(strlen(kernel.name), 1, sizeof kernel.name - 2); /* or it may be cut */
    assert_in_range(kernel.phase, FA3_FORWARD, FA3_BACKWARD);
    if (kernel.selected) assert_true(kernel.usable);
    for (int32_t j = 0; j < i; j++) { /* no two rows say the same */
      fa3_kernel_info other = {.struct_size = sizeof other};
      assert_int_equal(fa3_get_kernel_info(j, &other), FA3_OK);
      assert_true(strcmp(kernel.engine, other.engine) != 0 ||
                  strcmp(kernel.name, other.name) != 0 || kernel.phase != other.phase ||
                  kernel.dtype != other.dtype || kernel.head_dim != other.head_dim ||
                  kernel.value_head_dim != other.value_head_dim);
    }
    if (strcmp(kernel.engine, "cpu") != 0) {
      assert_string_equal(kernel.engine, "cuda");
      assert_in_range(kernel.dtype, FA3_FLOAT16, FA3_FLOAT8_E4M3);
      assert_in_range(kernel.head_dim, 64, 256);
      assert_in_range(kernel.value_head_dim, 64, 256);
      continue;
    }
    assert_in_range(kernel.dtype, FA3_FLOAT32, FA3_FLOAT8_E4M3);
    assert_int_equal(kernel.head_dim, 256);
    assert_int_equal(kernel.value_head_dim, 256);
    selected[kernel.phase][kernel.dtype] += kernel.selected;
  }
  for (int phase = FA3_FORWARD; phase <= FA3_BACKWARD; phase++)
    for (int dtype = FA3_FLOAT32; dtype <= FA3_BFLOAT16; dtype++)
      assert_int_equal(selected[phase][dtype], 1);
  assert_int_equal(selected[FA3_FORWARD][FA3_FLOAT8_E4M3], 1);
  assert_int_equal(selected[FA3_BACKWARD][FA3_FLOAT8_E4M3], 0);
  fa3_kernel_info kernel = {.struct_size = sizeof kernel};
  static const int32_t past[] = {-1, INT32_MIN, INT32_MAX};
  for (int i = 0; i < 3; i++) {
    expect_refused(fa3_get_kernel_info(past[i], &kernel), FA3_INVALID_INDEX, "index");
  }
  assert_int_equal(fa3_get_kernel_info(count, &kernel), FA3_INVALID_INDEX);
  assert_int_equal(fa3_get_kernel_info(0, NULL), FA3_INVALID_STRUCT);
  kernel.struct_size = 8;
  expect_refused(fa3_get_kernel_info(0, &kernel), FA3_INVALID_STRUCT, "struct_size");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_supports_table),    cmocka_unit_test(test_supports_other_calls),
      cmocka_unit_test(test_supports_features), cmocka_unit_test(test_supports_refuses),
      cmocka_unit_test(test_kernel_table),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
