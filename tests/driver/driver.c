/* What every call answers for a CUDA device:
 *   test_driver INDEX COUNT STATUS TEXT...
 * fa3_prepare, fa3_forward_workspace and fa3_forward on GPU number INDEX give STATUS and a message
 * with every TEXT, and fa3_device_count gives COUNT. The GPUs are those of fake.c. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "test.h"

static struct call call;
static int gpu_index;
static int gpu_count;
static const char *status_name;
static char **texts;

static void check_message(const char *function) {
  for (char **text = texts; *text; text++)
    if (!strstr(fa3_last_error(), *text))
      fail_msg("%s: \"%s\" lacks \"%s\"", function, fa3_last_error(), *text);
}

static void test_answers(void **state) {
  (void)state;
  assert_int_equal(fa3_device_count(9), 0);
  assert_int_equal(fa3_device_count(FA3_CUDA), gpu_count);
  for (int32_t i = 0; i < fa3_kernel_count(); i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    assert_int_equal(fa3_get_kernel_info(i, &kernel), FA3_OK);
  }
  assert_string_equal(fa3_last_error(), ""); /* to count and to describe is not to fail */
  fa3_status status = fa3_prepare((fa3_device){FA3_CUDA, gpu_index});
  assert_string_equal(fa3_status_name(status), status_name);
  check_message("fa3_prepare");

  call_init(&call, false);
  call.forward.device = call.backward.device = (fa3_device){FA3_CUDA, gpu_index};
  call.forward.num_threads = call.backward.num_threads = 0;
  call_is_refused(&call, &call_forward, "device = CUDA", status, true, (const char *const *)texts);
  call_is_refused(&call, &call_backward, "device = CUDA", status, true, (const char *const *)texts);

  /* Again: the driver is loaded once, and the answer stays. */
  assert_int_equal(fa3_prepare((fa3_device){FA3_CUDA, gpu_index}), status);
  check_message("fa3_prepare");
}

/* A GPU that is there is described, whether it can be used or not. */
static void test_device_info(void **state) {
  (void)state;
  fa3_device_info info = {.struct_size = sizeof info};
  fa3_status status = fa3_get_device_info((fa3_device){FA3_CUDA, gpu_index}, &info);
  if (gpu_index >= gpu_count || !strcmp(status_name, "FA3_DEVICE_ERROR")) {
    assert_string_equal(fa3_status_name(status), status_name);
    check_message("fa3_get_device_info");
    return;
  }
  assert_int_equal(status, FA3_OK);
  assert_memory_equal(info.name, "Fake GPU ", 9);
  assert_memory_equal(info.level, "sm_", 3);
  assert_int_equal(info.units, 132);
  assert_true(info.memory_bytes == (uint64_t)80 << 30);
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  gpu_index = (int)strtol(argv[1], NULL, 10);
  gpu_count = (int)strtol(argv[2], NULL, 10);
  status_name = argv[3];
  texts = argv + 4;
  if (!getenv("FAKE_CUDA") && dlopen("libcuda.so.1", RTLD_NOW)) {
    puts("skipped: there is a driver on this machine");
    return TEST_SKIPPED;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_answers),
      cmocka_unit_test(test_device_info),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
