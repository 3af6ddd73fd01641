/* Struct sizes old and new, the tables that can be asked, DLPack, status names, and the message
 * that each thread has of its own. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "call.h"
#include "expect.h"
#include "test.h"

static struct call call;

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
    expect_refused(fa3_forward_workspace(&newer.args, &bytes), FA3_UNSUPPORTED, "struct_size");
    assert_int_equal(fa3_forward(&newer.args), FA3_UNSUPPORTED);
    assert_true(call.output[0] != call.output[0]);
    expect_refused(fa3_backward_workspace(&newer_backward.args, &bytes), FA3_UNSUPPORTED,
                   "struct_size");
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
    expect_refused(fa3_prepare(wrong[i]), FA3_INVALID_DEVICE, field);
    expect_refused(fa3_get_device_info(wrong[i], &info), FA3_INVALID_DEVICE, field);
  }
  assert_int_equal(fa3_get_device_info(cpu, NULL), FA3_INVALID_STRUCT);
  info.struct_size = 3;
  expect_refused(fa3_get_device_info(cpu, &info), FA3_INVALID_STRUCT, "struct_size");
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
  expect_refused(fa3_backward_init(&call.forward, &made), FA3_UNSUPPORTED, "cache_batch_index");
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
  /* As NumPy has them, of no elements. */
  memset(strides, 0, sizeof strides);
  shape[1] = 0;
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_OK);
  expected = fa3_dense((char *)&call + 64, FA3_FLOAT32, 2, 0, 4, 8);
  assert_memory_equal(&tensor, &expected, sizeof tensor);
  shape[1] = 3;
  source.byte_offset = UINT64_MAX;
  expect_refused(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_POINTER, "byte_offset");

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
    const fa3_status status = fa3_tensor_from_dlpack(&source, &tensor);
    if (dtypes[i].dtype)
      assert_true(status == FA3_OK && tensor.dtype == dtypes[i].dtype);
    else
      expect_refused(status, FA3_INVALID_DTYPE,
                     dtypes[i].bits == 64 ? "dtype has code 2 (float64)" : "dtype");
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
    expect_refused(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_SHAPE, "dimensions");
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
      cmocka_unit_test(test_device_info),
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_tensor_helpers),
      cmocka_unit_test(test_backward_init),
      cmocka_unit_test(test_dlpack),
      cmocka_unit_test(test_each_thread_has_its_error),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
