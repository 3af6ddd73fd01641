/* The library and the float64 reference against what PyTorch computed: golden.bin, which make.py
 * describes and made. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "level.h"
#include "reference.h"
#include "test.h"

enum { CASES = 18 };

struct header {
  int32_t dtype, batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, value_head_dim;
  int32_t causal, has_window, window_left, window_right, has_sink, zero[3];
  float softcap, scale;
};

static void *read_bytes(FILE *file, size_t size) {
  void *data = malloc(size);
  assert_non_null(data);
  assert_int_equal(fread(data, 1, size, file), size);
  return data;
}

static size_t tensor_bytes(const fa3_tensor *tensor) {
  size_t bytes = fa3_dtype_size(tensor->dtype);
  for (int d = 0; d < tensor->rank; d++) bytes *= (size_t)tensor->shape[d];
  return bytes;
}

static void read_tensor(FILE *file, fa3_tensor *tensor) {
  tensor->data = read_bytes(file, tensor_bytes(tensor));
}

static void check_row(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                      const double *golden_output, double golden_lse) {
  int64_t value_head_dim = args->output.shape[3];
  double output[256], bound[256], lse, lse_bound;
  reference_row(args, batch, head, row, output, &lse);
  reference_bound(args, batch, head, row, output, lse, bound, &lse_bound);
  int64_t first = reference_output_index(args, batch, head, row);
  for (int64_t d = 0; d < value_head_dim; d++) {
    /* Sums of at most 71 terms of order 1 in float64, twice. */
    if (!(fabs(output[d] - golden_output[d]) <= 1e-13))
      fail_msg("reference[%d, %d, %d, %d] is %.17g: PyTorch gave %.17g", (int)batch, (int)row,
               (int)head, (int)d, output[d], golden_output[d]);
    double got = reference_load(&args->output, first + d);
    if (!(fabs(got - golden_output[d]) <= bound[d]))
      fail_msg("output[%d, %d, %d, %d] is %.9g: PyTorch gave %.9g, expected at most %.3g off",
               (int)batch, (int)row, (int)head, (int)d, got, golden_output[d], bound[d]);
  }
  double got = reference_load(&args->lse, reference_lse_index(args, batch, head, row));
  if (!(fabs(lse - golden_lse) <= 1e-13) || !(fabs(got - golden_lse) <= lse_bound))
    fail_msg("lse[%d, %d, %d] is %.9g, the reference's %.17g: PyTorch gave %.17g", (int)batch,
             (int)head, (int)row, got, lse, golden_lse);
}

static void run_case(FILE *file) {
  struct header header;
  assert_int_equal(fread(&header, 1, sizeof header, file), sizeof header);
  fa3_forward_args args = {.struct_size = sizeof args};
  args.query =
      fa3_dense(NULL, header.dtype, header.batch, header.seqlen_q, header.heads_q, header.head_dim);
  args.key =
      fa3_dense(NULL, header.dtype, header.batch, header.seqlen_k, header.heads_k, header.head_dim);
  args.value = fa3_dense(NULL, header.dtype, header.batch, header.seqlen_k, header.heads_k,
                         header.value_head_dim);
  args.output = fa3_dense(NULL, header.dtype, header.batch, header.seqlen_q, header.heads_q,
                          header.value_head_dim);
  const int64_t lse_row = header.seqlen_q;
  args.lse = fa3_lse(NULL, header.batch, header.heads_q, lse_row);
  read_tensor(file, &args.query);
  read_tensor(file, &args.key);
  read_tensor(file, &args.value);
  if (header.has_sink) {
    args.sink = fa3_vector(NULL, FA3_FLOAT32, header.heads_q);
    read_tensor(file, &args.sink);
  }
  if (header.causal) args.flags |= FA3_CAUSAL;
  if (header.has_window) args.flags |= FA3_WINDOW;
  if (header.scale != 0) args.flags |= FA3_SCALE;
  args.window_left = header.window_left;
  args.window_right = header.window_right;
  args.softcap = header.softcap;
  args.softmax_scale = header.scale;

  int64_t rows = (int64_t)header.batch * header.heads_q * lse_row;
  double *golden_output = read_bytes(file, (size_t)(rows * header.value_head_dim) * sizeof(double));
  double *golden_lse = read_bytes(file, (size_t)rows * sizeof(double));
  args.output.data = malloc(tensor_bytes(&args.output));
  args.lse.data = malloc(tensor_bytes(&args.lse));
  memset(args.output.data, 0xff, tensor_bytes(&args.output));
  memset(args.lse.data, 0xff, tensor_bytes(&args.lse));
  expect_forward(args);

  for (int64_t b = 0; b < header.batch; b++)
    for (int64_t head = 0; head < header.heads_q; head++)
      for (int64_t row = 0; row < lse_row; row++)
        check_row(&args, b, head, row, golden_output + reference_output_index(&args, b, head, row),
                  golden_lse[reference_lse_index(&args, b, head, row)]);
  void *blocks[] = {args.query.data, args.key.data,  args.value.data, args.output.data,
                    args.lse.data,   args.sink.data, golden_output,   golden_lse};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
}

static void test_golden(void **state) {
  (void)state;
  FILE *file = fopen(GOLDEN, "rb");
  assert_non_null(file);
  for (int number = 0; number < CASES; number++) run_case(file);
  assert_int_equal(fgetc(file), EOF);
  (void)fclose(file);
}

int main(void) {
  level_require();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
