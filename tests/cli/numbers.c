/* Numbers of options: the whole text, within the limits, or nothing. */
#include "numbers.h"

#include <float.h>

#include "test.h"

static void test_integers(void **state) {
  (void)state;
  static const char *const bad[] = {
      "",   " 1", "+1", "1 ", "1x", "0x1", "-", "--1", "1.", "1e3", "9223372036854775808",
      "11", "-6"};
  int64_t value = 0;
  assert_true(parse_integer("-5", -5, 10, &value) && value == -5);
  assert_true(parse_integer("10", -5, 10, &value) && value == 10);
  assert_true(parse_integer("9223372036854775807", 0, INT64_MAX, &value) && value == INT64_MAX);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    assert_false(parse_integer(bad[i], -5, 10, &value));
  assert_true(parse_integer("64k", 0, INT64_MAX, &value) && value == 65536);
  assert_false(parse_integer("k", 0, INT64_MAX, &value));
  assert_false(parse_integer("2kk", 0, INT64_MAX, &value));
  assert_false(parse_integer("9223372036854775807k", 0, INT64_MAX, &value));
}

static void test_reals(void **state) {
  (void)state;
  static const char *const bad[] = {"", " 1", "1 ", "1,5", "nan", "inf", "1e39", "-1"};
  float value = 0;
  assert_true(parse_real("0.5", 0, &value) && value == 0.5F);
  assert_true(parse_real("-1e2", -FLT_MAX, &value) && value == -100);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    assert_false(parse_real(bad[i], 0, &value));
}

static void test_lists(void **state) {
  (void)state;
  static const char *const bad[] = {"", ",", "1,", ",1", "1,,2", "1;2", "1, 2", "1,2,3,4", "-1"};
  int64_t values[3];
  size_t count = 0;
  assert_true(parse_integers("7", 0, 9, values, 3, &count) && count == 1 && values[0] == 7);
  assert_true(parse_integers("0,5,9", 0, 9, values, 3, &count) && count == 3);
  assert_true(values[0] == 0 && values[1] == 5 && values[2] == 9);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    assert_false(parse_integers(bad[i], 0, 9, values, 3, &count));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_integers), cmocka_unit_test(test_reals),
                                     cmocka_unit_test(test_lists)};
  return cmocka_run_group_tests_name("numbers", tests, NULL, NULL);
}
