/* Memory stays O(seqlen): at 131072 keys the process's peak is under inputs + outputs + 64 MiB, and
 * that of the backward pass under its tensors, a workspace that is not larger than they are, and as
 * much. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compare.h"
#include "tensor.h"
#include "reference.h"
#include "test.h"

enum { SEQLEN = 131072, HEAD_DIM = 64, SOME_QUERIES = 2048, WINDOW = 500 };

static const size_t allowance = (size_t)64 << 20;

/* The process's largest resident size so far. */
static size_t peak_bytes(void) {
  FILE *file = fopen("/proc/self/status", "r");
  assert_non_null(file);
  char line[256];
  size_t kilobytes = 0;
  while (fgets(line, sizeof line, file))
    if (strncmp(line, "VmHWM:", 6) == 0) kilobytes = strtoull(line + 6, NULL, 10);
  (void)fclose(file);
  assert_true(kilobytes > 0);
  return kilobytes << 10;
}

/* Values in [-1, 1] that repeat after a long time. */
static fa3_tensor make_tensor(fa3_dtype dtype, int64_t seqlen, uint32_t seed) {
  const fa3_tensor tensor = fa3_dense(malloc((size_t)seqlen * HEAD_DIM * fa3_dtype_size(dtype)),
                                      dtype, 1, seqlen, 1, HEAD_DIM);
  assert_non_null(tensor.data);
  for (int64_t i = 0; i < seqlen * HEAD_DIM; i++) {
    seed = seed * 1664525 + 1013904223;
    tensor_store(&tensor, i, (int32_t)seed * 0x1p-31);
  }
  return tensor;
}

static void check_rows(const fa3_forward_args *args, int64_t seqlen_q) {
  const int64_t rows[] = {0, seqlen_q / 2, seqlen_q - 1};
  for (int i = 0; i < 3; i++) compare_row(&(struct comparison){.row = rows[i]}, args);
}

static void check_gradients(const fa3_backward_args *args) {
  static const int64_t rows[] = {0, SEQLEN / 2, SEQLEN - 1};
  for (int i = 0; i < 3; i++) {
    struct comparison at = {.row = rows[i]};
    compare_grad_query(&at, args, NULL);
    compare_grad_key_value(&at, args, NULL, NULL);
  }
}

static void run(fa3_dtype dtype, int64_t seqlen_q, uint32_t flags) {
  fa3_forward_args args = {.struct_size = sizeof args};
  args.query = make_tensor(dtype, seqlen_q, 1);
  args.key = make_tensor(dtype, SEQLEN, 2);
  args.value = make_tensor(dtype, SEQLEN, 3);
  args.output = make_tensor(dtype, seqlen_q, 4);
  args.lse = fa3_lse(malloc((size_t)seqlen_q * sizeof(float)), 1, 1, seqlen_q);
  args.flags = flags;
  if (flags & FA3_WINDOW) args.window_left = WINDOW;
  assert_int_equal(fa3_forward_workspace(&args, &args.workspace_size), FA3_OK);
  assert_true(args.workspace_size <= allowance); /* touched or not */
  args.workspace = malloc(args.workspace_size + 1);
  assert_true(args.lse.data && (args.workspace || !args.workspace_size));
  assert_int_equal(fa3_forward(&args), FA3_OK);

  size_t peak = peak_bytes();
  size_t rows = 2 * (size_t)seqlen_q + 2 * (size_t)SEQLEN;
  size_t tensors = rows * HEAD_DIM * fa3_dtype_size(dtype) + (size_t)seqlen_q * sizeof(float);
  printf("peak %.1f MiB, tensors %.1f MiB, workspace %.1f MiB\n", (double)peak / 0x1p20,
         (double)tensors / 0x1p20, (double)args.workspace_size / 0x1p20);
  assert_true(peak <= tensors + allowance);
  check_rows(&args, seqlen_q);
  void *blocks[] = {args.query.data,  args.key.data, args.value.data,
                    args.output.data, args.lse.data, args.workspace};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
}

/* A forward call and its gradients. */
static void run_backward(fa3_dtype dtype) {
  fa3_backward_args args = {
      .struct_size = sizeof args, .flags = FA3_CAUSAL | FA3_WINDOW, .window_left = WINDOW};
  enum { TENSORS = 8 };
  fa3_tensor *tensors[TENSORS] = {&args.query,    &args.key,         &args.value,
                                  &args.output,   &args.grad_output, &args.grad_query,
                                  &args.grad_key, &args.grad_value};
  for (uint32_t i = 0; i < TENSORS; i++) *tensors[i] = make_tensor(dtype, SEQLEN, i + 1);
  args.lse = fa3_lse(malloc((size_t)SEQLEN * sizeof(float)), 1, 1, SEQLEN);
  fa3_forward_args forward = reference_forward_args(&args);
  const size_t bytes =
      TENSORS * (size_t)SEQLEN * HEAD_DIM * fa3_dtype_size(dtype) + (size_t)SEQLEN * sizeof(float);
  assert_int_equal(fa3_forward_workspace(&forward, &forward.workspace_size), FA3_OK);
  assert_int_equal(fa3_backward_workspace(&args, &args.workspace_size), FA3_OK);
  forward.workspace = malloc(forward.workspace_size + 1);
  args.workspace = malloc(args.workspace_size + 1);
  assert_true(args.lse.data && forward.workspace && args.workspace);
  assert_int_equal(fa3_forward(&forward), FA3_OK);
  assert_int_equal(fa3_backward(&args), FA3_OK);
  const size_t peak = peak_bytes();
  printf("backward: peak %.1f MiB, tensors %.1f MiB, workspace %.1f MiB\n", (double)peak / 0x1p20,
         (double)bytes / 0x1p20, (double)args.workspace_size / 0x1p20);
  assert_true(args.workspace_size <= bytes + allowance);
  assert_true(peak <= bytes + args.workspace_size + allowance);
  check_gradients(&args);
  for (int i = 0; i < TENSORS; i++) free(tensors[i]->data);
  free(args.lse.data);
  free(forward.workspace);
  free(args.workspace);
}

static void test_backward(void **state) {
  (void)state;
  run_backward(FA3_BFLOAT16);
  run_backward(FA3_FLOAT32);
}

/* In the order of rising size, because the peak is the whole process's. */
static void test_some_queries_bfloat16(void **state) {
  (void)state;
  run(FA3_BFLOAT16, SOME_QUERIES, 0);
}

static void test_all_queries_bfloat16(void **state) {
  (void)state;
  run(FA3_BFLOAT16, SEQLEN, FA3_CAUSAL | FA3_WINDOW);
}

static void test_some_queries_float32(void **state) {
  (void)state;
  run(FA3_FLOAT32, SOME_QUERIES, 0);
}

static void test_all_queries_float32(void **state) {
  (void)state;
  run(FA3_FLOAT32, SEQLEN, FA3_CAUSAL | FA3_WINDOW);
}

int main(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  puts("skipped: a sanitizer has memory of its own");
  return TEST_SKIPPED;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  puts("skipped: a sanitizer has memory of its own");
  return TEST_SKIPPED;
#endif
#endif
  if (access("/proc/self/status", R_OK)) {
    puts("skipped: /proc, which says how much memory was used, is not mounted");
    return TEST_SKIPPED;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_some_queries_bfloat16),
      cmocka_unit_test(test_some_queries_float32),
      cmocka_unit_test(test_all_queries_bfloat16),
      cmocka_unit_test(test_all_queries_float32),
      cmocka_unit_test(test_backward),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
