/* Struct sizes old and new, the tables that can be asked, DLPack, status names, and the message
 * that each thread has of its own. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "call.h"
#include "test.h"

static struct call call;

#define assert_message(text)                                                                      \
  do {                                                                                            \
    if (!strstr(fa3_last_error(), text)) fail_msg("\"%s\" lacks \"%s\"", fa3_last_error(), text); \
  } while (0)

/* No message before the first failure: run first. */
static void test_no_error_at_first(void **state) {
  (void)state;
  assert_string_equal(fa3_last_error(), "");
}

static void test_a_newer_caller(void **state) {
  (void)state;
  struct {
    fa3_forward_args args;
    unsigned char unknown[40];
  } newer = {0};
  struct {
    fa3_backward_args args;
    unsigned char unknown[40];
  } newer_backward = {0};
  size_t bytes;
  call_init(&call, false);
  newer.args = call.forward;
  newer.args.struct_size = sizeof newer;
  newer_backward.args = call.backward;
  newer_backward.args.struct_size = sizeof newer_backward;
  assert_int_equal(fa3_forward(&newer.args), FA3_OK);
  assert_int_equal(fa3_backward(&newer_backward.args), FA3_OK);
  for (size_t i = 0; i < sizeof newer.unknown; i++) {
    newer.unknown[i] = newer_backward.unknown[i] = 1;
    memset(call.output, 0xff, sizeof call.output);
    memset(call.grad_query, 0xff, sizeof call.grad_query);
    assert_int_equal(fa3_forward_workspace(&newer.args, &bytes), FA3_UNSUPPORTED);
    assert_message("struct_size");
    assert_int_equal(fa3_forward(&newer.args), FA3_UNSUPPORTED);
    assert_true(call.output[0] != call.output[0]);
    assert_int_equal(fa3_backward_workspace(&newer_backward.args, &bytes), FA3_UNSUPPORTED);
    assert_message("struct_size");
    assert_int_equal(fa3_backward(&newer_backward.args), FA3_UNSUPPORTED);
    assert_true(call.grad_query[0] != call.grad_query[0]);
    newer.unknown[i] = newer_backward.unknown[i] = 0;
  }
}

/* Fields that came later are zero for a caller who does not know them. */
static void test_an_older_caller(void **state) {
  (void)state;
  call_init(&call, false);
  call.forward.struct_size = offsetof(fa3_forward_args, reserved_multiprocessors);
  call.backward.struct_size = offsetof(fa3_backward_args, reserved_multiprocessors);
  call.forward.reserved_multiprocessors = call.backward.reserved_multiprocessors = -1;
  assert_int_equal(fa3_forward(&call.forward), FA3_OK);
  assert_int_equal(fa3_backward(&call.backward), FA3_OK);
}

/* No byte behind struct_size is read. */
static void test_args_end_where_they_say(void **state) {
  (void)state;
  call_init(&call, false);
  struct buffer forward = buffer_at_end(sizeof call.forward);
  struct buffer backward = buffer_at_end(sizeof call.backward);
  memcpy(forward.data, &call.forward, sizeof call.forward);
  memcpy(backward.data, &call.backward, sizeof call.backward);
  buffer_make_read_only(&forward);
  buffer_make_read_only(&backward);
  assert_int_equal(fa3_forward((const fa3_forward_args *)(void *)forward.data), FA3_OK);
  assert_int_equal(fa3_backward((const fa3_backward_args *)(void *)backward.data), FA3_OK);
  buffer_free(&forward);
  buffer_free(&backward);
}

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
      assert_int_equal(fa3_supports(&capability), good ? FA3_OK : FA3_UNSUPPORTED);
      if (!good) assert_message(list->name);
      if (!good) assert_message("features");
    }
  }
}

static void test_supports_refuses(void **state) {
  (void)state;
  assert_int_equal(fa3_supports(NULL), FA3_INVALID_STRUCT);
  fa3_capability capability = usual_capability();
  capability.struct_size = sizeof capability - 1;
  assert_int_equal(fa3_supports(&capability), FA3_INVALID_STRUCT);
  assert_message("struct_size");
  capability = usual_capability();
  capability.device.type = 7;
  assert_int_equal(fa3_supports(&capability), FA3_INVALID_DEVICE);
  assert_message("device.type");
  capability = usual_capability();
  capability.device.index = -1;
  assert_int_equal(fa3_supports(&capability), FA3_INVALID_DEVICE);
  assert_message("device.index");
  static const fa3_phase phases[] = {-1, 0, 3, 7};
  for (size_t i = 0; i < sizeof phases / sizeof *phases; i++) {
    capability = usual_capability();
    capability.phase = phases[i];
    assert_int_equal(fa3_supports(&capability), FA3_UNSUPPORTED);
    assert_message("phase");
  }
  capability = usual_capability();
  capability.head_dim = 12;
  fa3_supports(&capability);
  assert_message("head_dim is 12");
  capability = usual_capability();
  capability.value_head_dim = 264;
  fa3_supports(&capability);
  assert_message("value_head_dim is 264");
  capability = usual_capability();
  capability.device.type = FA3_CUDA; /* no kernel takes float32 */
  assert_int_equal(fa3_supports(&capability), FA3_UNSUPPORTED);
  assert_message("CUDA");
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
    assert_true(kernel.name[0]);
    assert_in_range(kernel.phase, FA3_FORWARD, FA3_BACKWARD);
    if (kernel.selected) assert_true(kernel.usable);
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
    assert_int_equal(fa3_get_kernel_info(past[i], &kernel), FA3_INVALID_INDEX);
    assert_message("index");
  }
  assert_int_equal(fa3_get_kernel_info(count, &kernel), FA3_INVALID_INDEX);
  assert_int_equal(fa3_get_kernel_info(0, NULL), FA3_INVALID_STRUCT);
  kernel.struct_size = 8;
  assert_int_equal(fa3_get_kernel_info(0, &kernel), FA3_INVALID_STRUCT);
  assert_message("struct_size");
}

static void test_device_info(void **state) {
  (void)state;
  const fa3_device cpu = {FA3_CPU, 0};
  assert_int_equal(fa3_device_count(FA3_CPU), 1);
  assert_int_equal(fa3_device_count(9), 0);
  assert_int_equal(fa3_prepare(cpu), FA3_OK);
  struct {
    fa3_device_info info;
    char unknown[16];
  } newer;
  memset(&newer, 0xee, sizeof newer);
  newer.info.struct_size = sizeof newer;
  assert_int_equal(fa3_get_device_info(cpu, &newer.info), FA3_OK);
  assert_int_equal(newer.info.struct_size, sizeof newer);
  assert_true(newer.info.name[0] && newer.info.level[0]);
  assert_true(newer.info.units >= 1);
  assert_true(newer.info.memory_bytes > (uint64_t)1 << 20);
  assert_int_equal(newer.info.reserved, 0);
  for (size_t i = 0; i < sizeof newer.unknown; i++) assert_int_equal(newer.unknown[i], 0);

  static const fa3_device wrong[] = {{FA3_CPU, 1}, {FA3_CPU, -1}, {FA3_CUDA, -1}, {2, 0}, {-1, 0}};
  fa3_device_info info = {.struct_size = sizeof info};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *field =
        wrong[i].type == FA3_CPU || wrong[i].type == FA3_CUDA ? "device.index" : "device.type";
    assert_int_equal(fa3_prepare(wrong[i]), FA3_INVALID_DEVICE);
    assert_message(field);
    assert_int_equal(fa3_get_device_info(wrong[i], &info), FA3_INVALID_DEVICE);
    assert_message(field);
  }
  assert_int_equal(fa3_get_device_info(cpu, NULL), FA3_INVALID_STRUCT);
  info.struct_size = 3;
  assert_int_equal(fa3_get_device_info(cpu, &info), FA3_INVALID_STRUCT);
  assert_message("struct_size");
}

static void test_names(void **state) {
  (void)state;
  assert_string_equal(fa3_version(), "0.1.0");
  assert_string_equal(fa3_status_name(FA3_OK), "FA3_OK");
  assert_string_equal(fa3_status_name(FA3_INVALID_STRIDE), "FA3_INVALID_STRIDE");
  assert_string_equal(fa3_status_name(FA3_INTERNAL_ERROR), "FA3_INTERNAL_ERROR");
  static const fa3_status unknown[] = {-1, 19, 99, 104, 199, 203, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
    assert_string_equal(fa3_status_name(unknown[i]), "unknown status");
  static const fa3_status last[] = {FA3_INVALID_SPLITS, FA3_NO_HOPPER_GPU, FA3_INTERNAL_ERROR};
  for (int range = 0; range < 3; range++)
    for (fa3_status status = range * 100 + !range; status <= last[range]; status++)
      assert_memory_equal(fa3_status_name(status), "FA3_", 4);
}

static void test_tensor_helpers(void **state) {
  (void)state;
  static const struct {
    fa3_dtype dtype;
    size_t size;
  } sizes[] = {{FA3_FLOAT32, 4}, {FA3_FLOAT16, 2}, {FA3_BFLOAT16, 2},
               {FA3_INT32, 4},   {FA3_INT64, 8},   {0, 0},
               {-1, 0},          {16, 0},          {34, 0}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    assert_int_equal(fa3_dtype_size(sizes[i].dtype), sizes[i].size);
  const fa3_tensor dense = {&call, FA3_FLOAT16, 4, {2, 3, 5, 8}, {120, 40, 8, 1}, {0}};
  const fa3_tensor packed = {&call, FA3_BFLOAT16, 3, {7, 5, 8}, {40, 8, 1}, {0}};
  const fa3_tensor vector = {&call, FA3_INT32, 1, {9}, {1}, {0}};
  fa3_tensor made = fa3_dense(&call, FA3_FLOAT16, 2, 3, 5, 8);
  assert_memory_equal(&made, &dense, sizeof made);
  made = fa3_packed(&call, FA3_BFLOAT16, 7, 5, 8);
  assert_memory_equal(&made, &packed, sizeof made);
  made = fa3_vector(&call, FA3_INT32, 9);
  assert_memory_equal(&made, &vector, sizeof made);
  made = fa3_dense(NULL, FA3_FLOAT32, INT64_MAX, INT64_MAX, INT64_MIN, -1); /* only stays defined */
  assert_int_equal(made.shape[0], INT64_MAX);
}

/* dlpack.h, version 1.0: DLTensor. */
struct dl_tensor {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

/* All that both calls have is taken over; struct_size stays the caller's. */
static void test_backward_init(void **state) {
  (void)state;
  for (int packed = 0; packed < 2; packed++) {
    call_init(&call, packed);
    call.forward.cache_batch_index = (fa3_tensor){0};
    fa3_backward_args made = {.struct_size = sizeof made}, expected = call.backward;
    assert_int_equal(fa3_backward_init(&call.forward, &made), FA3_OK);
    const fa3_tensor none = {0};
    expected.grad_output = expected.grad_query = expected.grad_key = expected.grad_value = none;
    expected.grad_lse = expected.grad_sink = none;
    expected.workspace = NULL;
    expected.workspace_size = 0;
    expected.flags = call.forward.flags;
    assert_memory_equal(&made, &expected, sizeof made);
  }
  call_init(&call, false);
  fa3_backward_args made = {.struct_size = sizeof made};
  assert_int_equal(fa3_backward_init(&call.forward, &made), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "cache_batch_index"));
  assert_int_equal(fa3_backward_init(NULL, &made), FA3_INVALID_STRUCT);
  call.forward.cache_batch_index = (fa3_tensor){0};
  assert_int_equal(fa3_backward_init(&call.forward, NULL), FA3_INVALID_STRUCT);
  made.struct_size = 0;
  assert_int_equal(fa3_backward_init(&call.forward, &made), FA3_INVALID_STRUCT);
}

static void test_dlpack(void **state) {
  (void)state;
  int64_t shape[5] = {2, 3, 4, 8, 1}, strides[4] = {1000, 8, 24, 1};
  const struct dl_tensor usual = {
      .data = &call, .device = {1, 0}, .ndim = 4, .dtype = {2, 32, 1}, .shape = shape};
  struct dl_tensor source = usual;
  fa3_tensor tensor;
  memset(&tensor, 0xee, sizeof tensor);
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_OK);
  fa3_tensor expected = fa3_dense(&call, FA3_FLOAT32, 2, 3, 4, 8);
  assert_memory_equal(&tensor, &expected, sizeof tensor);
  source.strides = strides;
  source.byte_offset = 64;
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_OK);
  memcpy(expected.strides, strides, sizeof strides);
  expected.data = (char *)&call + 64;
  assert_memory_equal(&tensor, &expected, sizeof tensor);
  source.byte_offset = UINT64_MAX;
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_POINTER);
  assert_non_null(strstr(fa3_last_error(), "byte_offset"));

  static const struct {
    uint8_t code, bits;
    uint16_t lanes;
    fa3_dtype dtype; /* 0: refused */
  } dtypes[] = {{2, 32, 1, FA3_FLOAT32},
                {2, 16, 1, FA3_FLOAT16},
                {4, 16, 1, FA3_BFLOAT16},
                {0, 32, 1, FA3_INT32},
                {0, 64, 1, FA3_INT64},
                {2, 64, 1, 0},
                {2, 32, 4, 0},
                {2, 32, 0, 0},
                {1, 32, 1, 0},
                {4, 32, 1, 0},
                {0, 8, 1, 0},
                {17, 8, 1, 0}};
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
    source = usual;
    source.dtype.code = dtypes[i].code;
    source.dtype.bits = dtypes[i].bits;
    source.dtype.lanes = dtypes[i].lanes;
    fa3_status status = fa3_tensor_from_dlpack(&source, &tensor);
    assert_int_equal(status, dtypes[i].dtype ? FA3_OK : FA3_INVALID_DTYPE);
    if (status)
      assert_message(dtypes[i].bits == 64 ? "dtype has code 2 (float64)" : "dtype");
    else
      assert_int_equal(tensor.dtype, dtypes[i].dtype);
  }
  static const int32_t devices[] = {1, 2, 3, 13};
  for (int32_t type = -1; type < 20; type++) {
    bool good = false;
    for (int i = 0; i < 4; i++) good = good || devices[i] == type;
    source = usual;
    source.device.type = type;
    assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), good ? FA3_OK : FA3_INVALID_DEVICE);
  }
  static const int32_t ranks[] = {-1, 0, 5, INT32_MAX};
  for (int i = 0; i < 4; i++) {
    source = usual;
    source.ndim = ranks[i];
    assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_SHAPE);
    assert_message("dimensions");
  }
  source = usual;
  source.shape = NULL;
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_POINTER);
  assert_int_equal(fa3_tensor_from_dlpack(NULL, &tensor), FA3_INVALID_POINTER);
  assert_int_equal(fa3_tensor_from_dlpack(&usual, NULL), FA3_INVALID_POINTER);
}

static void *fail_elsewhere(void *result) {
  *(bool *)result = !strcmp(fa3_last_error(), "");
  fa3_forward(NULL);
  *(bool *)result = *(bool *)result && strstr(fa3_last_error(), "args");
  return NULL;
}

static void test_each_thread_has_its_error(void **state) {
  (void)state;
  assert_int_equal(fa3_get_kernel_info(-1, NULL), FA3_INVALID_INDEX);
  char *mine = strdup(fa3_last_error());
  assert_non_null(mine);
  bool good = false;
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &good), 0);
  pthread_join(thread, NULL);
  assert_true(good);
  assert_string_equal(fa3_last_error(), mine);
  free(mine);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_error_at_first),
      cmocka_unit_test(test_a_newer_caller),
      cmocka_unit_test(test_an_older_caller),
      cmocka_unit_test(test_args_end_where_they_say),
      cmocka_unit_test(test_supports_table),
      cmocka_unit_test(test_supports_other_calls),
      cmocka_unit_test(test_supports_features),
      cmocka_unit_test(test_supports_refuses),
      cmocka_unit_test(test_kernel_table),
      cmocka_unit_test(test_device_info),
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_tensor_helpers),
      cmocka_unit_test(test_backward_init),
      cmocka_unit_test(test_dlpack),
      cmocka_unit_test(test_each_thread_has_its_error),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
