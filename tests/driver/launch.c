/* Calls on the Hopper GPU that fake.c shows, each function of the driver failing in turn: the
 * status and the message name it, and the thread's context and capture mode are as they were. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "fake.h"
#include "test.h"

static const fa3_device gpu = {FA3_CUDA, 0};

static fa3_forward_args make_args(void) {
  fa3_forward_args args = {.struct_size = sizeof args, .device = gpu, .flags = FA3_CAUSAL};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++) *tensors[i] = fa3_dense(place(i + 1), FA3_BFLOAT16, 2, 10000, 4, 64);
  args.workspace = place(9);
  args.workspace_size = 64 << 20;
  return args;
}

static void check_failure(fa3_status status, const char *function) {
  if ((status != FA3_DEVICE_ERROR && status != FA3_INTERNAL_ERROR) ||
      !strstr(fa3_last_error(), status == FA3_DEVICE_ERROR ? function : "tensor map"))
    fail_msg("%s fails: %s, \"%s\"", function, fa3_status_name(status), fa3_last_error());
  assert_true(fake_thread_is_clean());
}

/* What fails while loading is tried again by the next call. */
static void test_prepare(void **state) {
  (void)state;
  static const char *const functions[] = {
      "cuDeviceGet",         "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
      "cuCtxPushCurrent",    "cuLibraryLoadData",    "cuLibraryGetKernel",
      "cuKernelGetFunction", "cuFuncLoad",           "cuKernelSetAttribute"};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    setenv("FAKE_CUDA_FAILING", functions[i], 1);
    check_failure(fa3_prepare(gpu), functions[i]);
  }
  unsetenv("FAKE_CUDA_FAILING");
  assert_int_equal(fa3_prepare(gpu), FA3_OK);
  assert_true(fake_thread_is_clean());
}

static void test_forward(void **state) {
  (void)state;
  static const char *const functions[] = {"cuCtxGetCurrent", "cuCtxPushCurrent",
                                          "cuPointerGetAttributes", "cuTensorMapEncodeTiled",
                                          "cuLaunchKernelEx"};
  const fa3_forward_args args = make_args();
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    setenv("FAKE_CUDA_FAILING", functions[i], 1);
    check_failure(fa3_forward(&args), functions[i]);
  }
  /* A stream without a counter of its own has one in the workspace. */
  static const char *const asked[] = {"cuStreamIsCapturing", "cuStreamGetId", "cuLibraryGetGlobal"};
  for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
    char both[64];
    snprintf(both, sizeof both, "%s cuMemsetD32Async", asked[i]);
    setenv("FAKE_CUDA_FAILING", both, 1);
    check_failure(fa3_forward(&args), "cuMemsetD32Async");
    setenv("FAKE_CUDA_FAILING", asked[i], 1);
    assert_int_equal(fa3_forward(&args), FA3_OK);
  }
  unsetenv("FAKE_CUDA_FAILING");
  assert_int_equal(fa3_forward(&args), FA3_OK);
  assert_true(fake_thread_is_clean());
}

/* Where tiles share a scale there are three launches: the first to fail is the call's failure. */
static void test_quantize(void **state) {
  (void)state;
  const fa3_quantize_args args = {.struct_size = sizeof args,
                                  .device = gpu,
                                  .input = fa3_dense(place(1), FA3_BFLOAT16, 2, 3000, 4, 64),
                                  .codes = fa3_dense(place(2), FA3_FLOAT8_E4M3, 2, 3000, 4, 64),
                                  .codes_scale = fa3_vector(place(3), FA3_FLOAT32, 1),
                                  .flags = FA3_SUBTRACT_MEAN};
  static const char *const functions[] = {"cuCtxPushCurrent", "cuPointerGetAttributes",
                                          "cuLaunchKernelEx"};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    setenv("FAKE_CUDA_FAILING", functions[i], 1);
    const fa3_status status = fa3_quantize(&args);
    check_failure(status, functions[i]);
  }
  unsetenv("FAKE_CUDA_FAILING");
  assert_int_equal(fa3_quantize(&args), FA3_OK);
  assert_true(fake_thread_is_clean());
}

static int launches, dependent;

static void count_launch(const struct fake_launch *launch) {
  launches++;
  dependent += launch->dependent;
}

/* The kernel of a call without copies may begin early, unless the environment forbids it. */
static void test_dependent_launch(void **state) {
  (void)state;
  const char *wanted = getenv("FA3_DEPENDENT_LAUNCH");
  const fa3_forward_args args = make_args();
  fake_watch(count_launch);
  assert_int_equal(fa3_forward(&args), FA3_OK);
  fake_watch(NULL);
  assert_true(launches > 0);
  assert_int_equal(dependent, wanted && !strcmp(wanted, "0") ? 0 : launches);
}

int main(void) {
  const fa3_capability capability = {.struct_size = sizeof capability,
                                     .device = gpu,
                                     .phase = FA3_FORWARD,
                                     .query_dtype = FA3_BFLOAT16,
                                     .key_dtype = FA3_BFLOAT16,
                                     .value_dtype = FA3_BFLOAT16,
                                     .output_dtype = FA3_BFLOAT16,
                                     .head_dim = 64,
                                     .value_head_dim = 64};
  if (fa3_supports(&capability)) {
    printf("skipped: %s\n", fa3_last_error());
    return TEST_SKIPPED;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_prepare),
      cmocka_unit_test(test_forward),
      cmocka_unit_test(test_quantize),
      cmocka_unit_test(test_dependent_launch),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
