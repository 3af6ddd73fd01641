/* FA3_CPU_LEVEL naming no level: every call that would run says so, the tables still answer. */
#include <stdlib.h>

#include "call.h"
#include "expect.h"
#include "test.h"

static struct call call;

static void test_level_that_does_not_exist(void **state) {
  (void)state;
  const char *const texts[] = {"FA3_CPU_LEVEL", "avx9000", "plain", NULL};
  for (int32_t i = 0; i < fa3_kernel_count(); i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    assert_int_equal(fa3_get_kernel_info(i, &kernel), FA3_OK);
    assert_int_equal(kernel.selected, 0);
  }
  fa3_device_info info = {.struct_size = sizeof info};
  assert_int_equal(fa3_get_device_info((fa3_device){FA3_CPU, 0}, &info), FA3_OK);
  assert_string_equal(fa3_last_error(), ""); /* these have not failed */
  call_init(&call, false);
  call_is_refused(&call, &call_forward, "FA3_CPU_LEVEL=avx9000", FA3_INVALID_ENVIRONMENT, true,
                  texts);
  call_is_refused(&call, &call_backward, "FA3_CPU_LEVEL=avx9000", FA3_INVALID_ENVIRONMENT, true,
                  texts);
  expect_refused(fa3_prepare((fa3_device){FA3_CPU, 0}), FA3_INVALID_ENVIRONMENT, "avx9000");
}

int main(void) {
  setenv("FA3_CPU_LEVEL", "avx9000", 1);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_level_that_does_not_exist)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
