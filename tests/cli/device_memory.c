/* The program's use of the CUDA driver, on the GPU that tests/driver/fake.c shows; what is not
 * given back fails the test when it ends. */
#include "cuda.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "test.h"
#include "upload.h"

enum { ROWS = 3, HEADS = 2, HEAD_DIM = 8, ELEMENTS = ROWS * HEADS * HEAD_DIM };

static int queue_nothing(void *context) {
  int *count = context;
  (*count)++;
  return 0;
}

static int queue_and_fail(void *context) {
  (void)context;
  return EXIT_UNSUPPORTED;
}

static void check_text(const char *text) {
  if (!strstr(failure_text(), text)) fail_msg("\"%s\" lacks \"%s\"", failure_text(), text);
}

/* All that a run does, with what a call does left out. */
static int use_everything(void) {
  static float query[ELEMENTS], output[ELEMENTS];
  const struct call host = {
      .phase = FA3_FORWARD,
      .args.forward = {.query = fa3_dense(query, FA3_FLOAT32, 1, ROWS, HEADS, HEAD_DIM),
                       .output = fa3_dense(output, FA3_FLOAT32, 1, ROWS, HEADS, HEAD_DIM)}};
  struct call call;
  struct upload upload = {0};
  double seconds = -1;
  int count = 0;
  int code = cuda_open(0);
  if (!code) code = upload_call(&host, &call, &upload);
  if (!code) code = cuda_time(queue_nothing, &count, &seconds);
  if (!code) code = upload_fetch(&upload);
  upload_free(&upload);
  cuda_close();
  if (!code) assert_true(count == 1 && seconds == 0);
  return code;
}

static void test_each_function_failing(void **state) {
  (void)state;
  static const char *const functions[] = {"cuDeviceGet",      "cuDevicePrimaryCtxRetain",
                                          "cuCtxPushCurrent", "cuMemAlloc",
                                          "cuMemcpyHtoD",     "cuEventCreate",
                                          "cuEventRecord",    "cuEventSynchronize",
                                          "cuMemcpyDtoH",     "cuEventElapsedTime",
                                          "cuCtxSynchronize"};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    setenv("FAKE_CUDA_FAILING", functions[i], 1);
    assert_int_equal(use_everything(), EXIT_FAILED);
    check_text("cuda:0: ");
    check_text(functions[i]);
    check_text("gave CUDA_ERROR_UNKNOWN (999)");
  }
  unsetenv("FAKE_CUDA_FAILING");
  setenv("FAKE_CUDA_MISSING", "cuMemcpyHtoD", 1);
  assert_int_equal(use_everything(), EXIT_UNSUPPORTED);
  check_text("cuMemcpyHtoD");
  unsetenv("FAKE_CUDA_MISSING");
  assert_int_equal(use_everything(), 0);
}

static void test_out_of_memory(void **state) {
  (void)state;
  void *memory = NULL;
  assert_int_equal(cuda_open(0), 0);
  setenv("FAKE_CUDA_MEMORY", "1000", 1);
  assert_int_equal(cuda_allocate(2000, "the workspace", &memory), EXIT_FAILED);
  check_text("cuda:0: no memory for the workspace: 2000 bytes, and 1000 are free");
  assert_null(memory);
  assert_int_equal(cuda_allocate(0, "nothing", &memory), 0);
  assert_non_null(memory);
  cuda_free(memory);
  unsetenv("FAKE_CUDA_MEMORY");
  cuda_close();
}

static void test_queue_failing(void **state) {
  (void)state;
  double seconds = -1;
  assert_int_equal(cuda_open(0), 0);
  assert_int_equal(cuda_time(queue_and_fail, NULL, &seconds), EXIT_UNSUPPORTED);
  assert_true(seconds == -1);
  cuda_close();
}

/* Everything between the first element and the last goes there, heads first or not, and outputs
 * come back. */
static void test_upload(void **state) {
  (void)state;
  float query[ELEMENTS], output[ELEMENTS], sink[HEADS] = {5, 6};
  int32_t starts[] = {0, ROWS};
  for (int i = 0; i < ELEMENTS; i++) {
    query[i] = (float)i;
    output[i] = (float)-i;
  }
  struct call host = {
      .phase = FA3_FORWARD,
      .args.forward = {.query = fa3_packed(query, FA3_FLOAT32, ROWS, HEADS, HEAD_DIM),
                       .output = fa3_packed(output, FA3_FLOAT32, ROWS, HEADS, HEAD_DIM),
                       .sink = fa3_vector(sink, FA3_FLOAT32, HEADS),
                       .cu_seqlens_q = fa3_vector(starts, FA3_INT32, 2)}};
  int64_t *strides = host.args.forward.query.strides;
  strides[0] = HEAD_DIM;
  strides[1] = (int64_t)ROWS * HEAD_DIM;
  struct call call;
  struct upload upload = {0};
  assert_int_equal(cuda_open(0), 0);
  assert_int_equal(upload_call(&host, &call, &upload), 0);
  assert_int_equal(upload.count, 4);
  const fa3_forward_args args = call.args.forward;
  assert_null(args.lse.data);
  assert_memory_equal(args.query.strides, strides, sizeof args.query.strides);

  /* The fake GPU's memory can be read here. */
  assert_memory_equal(args.query.data, query, sizeof query);
  assert_memory_equal(args.output.data, output, sizeof output);
  assert_memory_equal(args.sink.data, sink, sizeof sink);
  assert_memory_equal(args.cu_seqlens_q.data, starts, sizeof starts);
  assert_ptr_not_equal(args.query.data, query);
  memset(args.query.data, 1, sizeof query);
  memset(args.output.data, 1, sizeof output);
  assert_int_equal(upload_fetch(&upload), 0);
  assert_true(query[1] == 1);
  assert_memory_equal(output, args.output.data, sizeof output);
  upload_free(&upload);
  cuda_close();
}

/* All that a backward call has, the gradients alone as outputs. */
static void test_upload_backward(void **state) {
  (void)state;
  static int32_t data[TENSORS];
  const struct argument_struct *list = arguments_of(FA3_BACKWARD);
  struct call host = {.phase = FA3_BACKWARD}, call;
  for (int i = 0; i < list->count; i++) {
    data[i] = i;
    *argument_in(&host.args, &list->arguments[i]) = fa3_vector(&data[i], FA3_INT32, 1);
  }
  struct upload upload = {0};
  assert_int_equal(cuda_open(0), 0);
  assert_int_equal(upload_call(&host, &call, &upload), 0);
  assert_int_equal(upload.count, list->count);
  for (int i = 0; i < list->count; i++) {
    int32_t *copy = argument_in(&call.args, &list->arguments[i])->data;
    assert_ptr_not_equal(copy, &data[i]);
    assert_int_equal(*copy, i);
    *copy = -1;
  }
  assert_int_equal(upload_fetch(&upload), 0);
  for (int i = 0; i < list->count; i++) {
    const bool gradient = !strncmp(tensor_rows[list->arguments[i].tensor].name, "grad_", 5) &&
                          list->arguments[i].tensor != TENSOR_grad_output &&
                          list->arguments[i].tensor != TENSOR_grad_lse;
    assert_int_equal(data[i], gradient ? -1 : i);
  }
  upload_free(&upload);
  cuda_close();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_function_failing), cmocka_unit_test(test_out_of_memory),
      cmocka_unit_test(test_queue_failing),         cmocka_unit_test(test_upload),
      cmocka_unit_test(test_upload_backward),
  };
  return cmocka_run_group_tests_name("device_memory", tests, NULL, NULL);
}
