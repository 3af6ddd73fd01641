/* FA3_CHECK_DEVICE=1: what lengths, pages, indices and positions say is checked before a kernel is
 * queued, for each of these tensors. The GPU is fake.c's, whose memory is the host's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "fake.h"
#include "test.h"

enum { BATCH = 3, ROWS = 40, HEADS = 4, HEAD_DIM = 64, PAGES = 9, PAGE_SIZE = 16, COLUMNS = 3 };

static const fa3_device gpu = {FA3_CUDA, 0};
static int launches;

static void count_launch(const struct fake_launch *launch) {
  (void)launch;
  launches++;
}

static fa3_tensor tensor(int n, fa3_dtype dtype) {
  return fa3_dense(place(n), dtype, BATCH, ROWS, HEADS, HEAD_DIM);
}

static fa3_tensor packed(int n) {
  return fa3_packed(place(n), FA3_BFLOAT16, (int64_t)BATCH * ROWS, HEADS, HEAD_DIM);
}

static fa3_tensor matrix(void *data, int64_t rows, int64_t columns, int64_t stride,
                         fa3_dtype dtype) {
  return (fa3_tensor){
      .data = data, .dtype = dtype, .rank = 2, .shape = {rows, columns}, .strides = {stride, 1}};
}

static fa3_forward_args make_forward(void) {
  return (fa3_forward_args){.struct_size = sizeof(fa3_forward_args),
                            .device = gpu,
                            .query = tensor(1, FA3_BFLOAT16),
                            .key = tensor(2, FA3_BFLOAT16),
                            .value = tensor(3, FA3_BFLOAT16),
                            .output = tensor(4, FA3_BFLOAT16),
                            .workspace = place(5),
                            .workspace_size = 1 << 28};
}

static void check(fa3_status status, const char *message) {
  const fa3_status expected = message ? FA3_INVALID_LENGTHS : FA3_OK;
  if (status != expected || (message && !strstr(fa3_last_error(), message)) ||
      (launches > 0) != !message)
    fail_msg("%s, \"%s\", %d launches: expected %s", fa3_status_name(status), fa3_last_error(),
             launches, message ? message : "none of them refused");
  launches = 0;
}

/* The call is good, and no longer once a number is another one. */
#define CHECK(call, number, bad, message) \
  do {                                    \
    char kept[sizeof(number)];            \
    check(call, NULL);                    \
    memcpy(kept, &(number), sizeof kept); \
    (number) = bad;                       \
    check(call, message);                 \
    memcpy(&(number), kept, sizeof kept); \
  } while (0)

static void test_lengths(void **state) {
  (void)state;
  int32_t starts[] = {0, 10, 30, 100}, used[] = {0, 40, 20}, padding[] = {0, 3, 20},
          entries[] = {2, 0, 0};
  int64_t diagonal[] = {0, 1, 2};
  fa3_forward_args args = make_forward();
  args.seqused_q = args.seqused_k = fa3_vector(used, FA3_INT32, BATCH);
  CHECK(fa3_forward(&args), used[1], 41, "seqused_q[1] is 41: expected 0 to 40");
  args = make_forward();
  args.seqused_k = fa3_vector(used, FA3_INT32, BATCH);
  args.leftpad_k = fa3_vector(padding, FA3_INT32, BATCH);
  args.cache_batch_index = fa3_vector(entries, FA3_INT32, BATCH);
  args.diagonal = fa3_vector(diagonal, FA3_INT64, BATCH);
  args.flags = FA3_CAUSAL;
  CHECK(fa3_forward(&args), used[2], -1, "seqused_k[2] is -1");
  CHECK(fa3_forward(&args), padding[2], 21, "leftpad_k[2] is 21");
  CHECK(fa3_forward(&args), entries[0], 3, "cache_batch_index[0] is 3");
  CHECK(fa3_forward(&args), diagonal[1], INT64_MIN, "diagonal[1] is -9223372036854775808");
  args = make_forward();
  args.query = packed(1);
  args.key = packed(2);
  args.value = packed(3);
  args.output = packed(4);
  args.cu_seqlens_q = args.cu_seqlens_k = fa3_vector(starts, FA3_INT32, BATCH + 1);
  args.max_seqlen_q = args.max_seqlen_k = 70;
  CHECK(fa3_forward(&args), starts[0], 1, "cu_seqlens_q[0] is 1: expected 0");
  CHECK(fa3_forward(&args), starts[2], 29, "sequence 2 71 long");
  CHECK(fa3_forward(&args), starts[3], 121, "cu_seqlens_q");
}

static fa3_tensor pages(int n) {
  return fa3_dense(place(n), FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS, HEAD_DIM);
}

/* A table with a column that belongs to nobody, and an entry that no sequence uses. */
static void test_pages(void **state) {
  (void)state;
  int32_t table[] = {0, 1, 8, -7, 3, 4, 5, -7, 6, 7, 1000}, used[] = {48, 33, 32};
  fa3_forward_args args = make_forward();
  args.key = pages(2);
  args.value = pages(3);
  args.page_table = matrix(table, BATCH, COLUMNS, COLUMNS + 1, FA3_INT32);
  args.seqused_k = fa3_vector(used, FA3_INT32, BATCH);
  CHECK(fa3_forward(&args), table[2], 9, "page_table[0][2] is 9: expected one of key's 9 pages");
  CHECK(fa3_forward(&args), table[8], -1, "page_table[2][0] is -1");
  CHECK(fa3_forward(&args), used[2], 33, "page_table[2][2] is 1000");
}

static void test_append(void **state) {
  (void)state;
  int32_t positions[] = {0, 9, 99}, used[] = {0, 39, 20};
  fa3_append_args args = {.struct_size = sizeof args,
                          .device = gpu,
                          .new_key = fa3_dense(place(1), FA3_BFLOAT16, BATCH, 1, HEADS, HEAD_DIM),
                          .new_value = fa3_dense(place(2), FA3_BFLOAT16, BATCH, 1, HEADS, HEAD_DIM),
                          .key = tensor(3, FA3_BFLOAT16),
                          .value = tensor(4, FA3_BFLOAT16),
                          .rotary_cos = matrix(place(5), 100, 32, 32, FA3_FLOAT32),
                          .rotary_sin = matrix(place(6), 100, 32, 32, FA3_FLOAT32),
                          .positions = matrix(positions, BATCH, 1, 1, FA3_INT32),
                          .seqused_k = fa3_vector(used, FA3_INT32, BATCH)};
  CHECK(fa3_append(&args), used[1], 40, "seqused_k[1] is 40: expected room for 1 new rows in 40");
  CHECK(fa3_append(&args), positions[2], 100, "row 0 of sequence 2 is at position 100");
}

static void test_capture(void **state) {
  (void)state;
  int32_t used[] = {0, 40, 20};
  fa3_forward_args args = make_forward();
  setenv("FAKE_CUDA_CAPTURING", "1", 1);
  check(fa3_forward(&args), NULL); /* there is nothing to check */
  args.seqused_k = fa3_vector(used, FA3_INT32, BATCH);
  assert_int_equal(fa3_forward(&args), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "captured"));
  unsetenv("FAKE_CUDA_CAPTURING");
  check(fa3_forward(&args), NULL);
}

static void test_failures(void **state) {
  (void)state;
  static const char *const functions[] = {"cuStreamIsCapturing", "cuMemcpyDtoHAsync",
                                          "cuStreamSynchronize"};
  int32_t used[] = {0, 40, 20};
  fa3_forward_args args = make_forward();
  args.seqused_k = fa3_vector(used, FA3_INT32, BATCH);
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    setenv("FAKE_CUDA_FAILING", functions[i], 1);
    assert_int_equal(fa3_forward(&args), FA3_DEVICE_ERROR);
    assert_non_null(strstr(fa3_last_error(), functions[i]));
  }
  unsetenv("FAKE_CUDA_FAILING");
}

int main(void) {
  if (fa3_prepare(gpu)) {
    printf("skipped: %s\n", fa3_last_error());
    return TEST_SKIPPED;
  }
  fake_watch(count_launch);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_lengths), cmocka_unit_test(test_pages),
                                     cmocka_unit_test(test_append), cmocka_unit_test(test_capture),
                                     cmocka_unit_test(test_failures)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
