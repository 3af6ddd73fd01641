/* fa3_quantize on single rows whose codes are known, on rows that are rotated, and what it refuses.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "e4m3.h"
#include "expect.h"
#include "fa3.h"
#include "rng.h"
#include "test.h"

enum { MOST_DIM = E4M3_MOST_DIM, POISON = 0x5a };

/* One row of `count` numbers with a scale of its own. */
static float quantize_row(const float *numbers, int64_t count, uint32_t flags, uint64_t seed,
                          uint8_t *codes) {
  float scale = NAN;
  const fa3_quantize_args args = {.struct_size = sizeof args,
                                  .input = fa3_dense(numbers, FA3_FLOAT32, 1, 1, 1, count),
                                  .codes = fa3_dense(codes, FA3_FLOAT8_E4M3, 1, 1, 1, count),
                                  .codes_scale = fa3_vector(&scale, FA3_FLOAT32, 1),
                                  .flags = flags,
                                  .seed = seed};
  if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
  return scale;
}

static void check_codes(const float *numbers, int count, float expected_scale,
                        const uint8_t *expected) {
  uint8_t codes[16] = {0};
  const float scale = quantize_row(numbers, count, 0, 0, codes);
  if (scale != expected_scale)
    fail_msg("scale is %a: expected %a", (double)scale, (double)expected_scale);
  for (int i = 0; i < count; i++)
    if (codes[i] != expected[i])
      fail_msg("%a is 0x%02x: expected 0x%02x", (double)numbers[i], codes[i], expected[i]);
}
#define CODES(expected_scale, numbers, ...)                                                 \
  check_codes((const float[])UNPACK numbers, (int)(sizeof((const uint8_t[]){__VA_ARGS__})), \
              expected_scale, (const uint8_t[]){__VA_ARGS__})
#define UNPACK(...) \
  { __VA_ARGS__ }

static void test_edges(void **state) {
  (void)state;
  CODES(0x1p-126f, (0, -0.0F, 0), 0, 0x80, 0);
  /* With 448 the scale is 1: ties to even, normal and subnormal; signs. */
  CODES(1, (448, 1.0625F, 1.1875F, -1.0625F, 432, 431.9F), 0x7e, 0x38, 0x3a, 0xb8, 0x7e, 0x7d);
  CODES(1, (448, 0x1p-10f, 0x3p-10f, 0x1.8p-9f, 0x1.004p-10f, -0x1p-11f), 0x7e, 0, 2, 2, 1, 0x80);
  CODES(1, (448, 0x1p-9f, 0x1p-6f, 0x1.fp-7f, 0x1.dp-7f), 0x7e, 1, 8, 8, 7);
  /* NaN and infinity become NaN, and the others do not see them. */
  CODES(2, (NAN, 896, -INFINITY, INFINITY, 2), 0x7f, 0x7e, 0x7f, 0x7f, 0x38);
  CODES(0x1p-126f, (INFINITY, 0), 0x7f, 0);
  /* The largest and the smallest numbers. */
  CODES(FLT_MAX / 448, (FLT_MAX, -FLT_MAX, FLT_MAX / 448), 0x7e, 0xfe, 0x38);
  CODES(0x1p-126f, (0x1p-126f, 0x1p-135f, 0x1p-136f, 0x1p-149f), 0x38, 1, 0, 0);
  CODES(0x1p-126f, (0x1.cp-118f, 0x1p-127f), 0x7e, 0x30);
}

/* |dequantised - x| for each element: half a step, of 2^-3 of the number's power of two or, below
 * 2^-6 of codes, of 2^-9. */
static double half_step(double x, double scale) {
  return fmax(fabs(x) * 0x1p-4, 0x1p-10 * scale) + 0x1p-20 * fabs(x);
}

/* Queries and keys of one seed have the scores that they had; of two seeds they do not. */
static void test_scores(void **state) {
  (void)state;
  struct rng rng = rng_for(1000);
  static const int dims[] = {16, 48, 64, 80, 96, 112, 128, 160, 192, 256};
  int kept = 0, changed = 0;
  for (int n = 0; n < 200; n++) {
    const int dim = dims[n % 10];
    const uint64_t seed = rng_bits(&rng);
    float q[MOST_DIM], k[MOST_DIM];
    uint8_t q_codes[MOST_DIM], k_codes[MOST_DIM], other[MOST_DIM];
    double exact = 0, score = 0, wrong = 0, bound = 0, q_turned[MOST_DIM], k_turned[MOST_DIM];
    for (int d = 0; d < dim; d++) {
      q[d] = (float)rng_normal(&rng) * (d == n % dim ? 50.0F : 1.0F);
      k[d] = (float)rng_normal(&rng);
      exact += (double)q[d] * (double)k[d];
      q_turned[d] = (double)q[d];
      k_turned[d] = (double)k[d];
    }
    const double q_scale = (double)quantize_row(q, dim, FA3_ROTATE, seed, q_codes);
    const double k_scale = (double)quantize_row(k, dim, FA3_ROTATE, seed, k_codes);
    const double o_scale = (double)quantize_row(k, dim, FA3_ROTATE, seed + 1, other);
    rotate_head(seed, dim, q_turned);
    rotate_head(seed, dim, k_turned);
    for (int d = 0; d < dim; d++) {
      const double q_error = half_step(q_turned[d], q_scale);
      const double k_error = half_step(k_turned[d], k_scale);
      score += e4m3_value(q_codes[d]) * q_scale * e4m3_value(k_codes[d]) * k_scale;
      wrong += e4m3_value(q_codes[d]) * q_scale * e4m3_value(other[d]) * o_scale;
      bound += q_error * fabs(k_turned[d]) + k_error * fabs(q_turned[d]) + q_error * k_error;
    }
    kept += fabs(score - exact) <= bound;
    changed += fabs(wrong - exact) > bound;
  }
  assert_int_equal(kept, 200);
  assert_in_range(changed, 40, 200);
}

/* One outlier of 448 leaves nothing of numbers below 2^-10, and all of them when it is spread. */
static void test_outlier(void **state) {
  (void)state;
  float numbers[128];
  uint8_t codes[128];
  for (int d = 0; d < 128; d++) numbers[d] = d == 5 ? 448 : 0.9F * 0x1p-10f;
  quantize_row(numbers, 128, 0, 0, codes);
  for (int d = 0; d < 128; d++) assert_int_equal(codes[d], d == 5 ? 0x7e : 0);
  quantize_row(numbers, 128, FA3_ROTATE, 3, codes);
  for (int d = 0; d < 128; d++) assert_true((codes[d] & 0x7f) >= 0x7d);
}

enum { BATCH = 2, ROWS = 5, TOTAL = BATCH * ROWS, HEADS = 3, DIM = 32 };
static float input[BATCH * ROWS * HEADS * DIM];
static uint8_t codes[BATCH * ROWS * HEADS * DIM];
static float scales[BATCH * HEADS * ROWS];
static float table[ROWS * DIM / 2];
static int32_t lengths[BATCH + 1], positions[BATCH * ROWS];

static fa3_quantize_args good_args(void) {
  memset(codes, POISON, sizeof codes);
  memset(scales, POISON, sizeof scales);
  memset(lengths, 0, sizeof lengths);
  memset(positions, 0, sizeof positions);
  return (fa3_quantize_args){
      .struct_size = sizeof(fa3_quantize_args),
      .input = fa3_dense(input, FA3_FLOAT32, BATCH, ROWS, HEADS, DIM),
      .codes = fa3_dense(codes, FA3_FLOAT8_E4M3, BATCH, ROWS, HEADS, DIM),
      .codes_scale = {scales, FA3_FLOAT32, 2, {BATCH, HEADS}, {HEADS, 1}, {0}}};
}

static void refused(const fa3_quantize_args *args, fa3_status status, const char *text) {
  expect_refused(fa3_quantize(args), status, text);
  for (size_t i = 0; i < sizeof codes; i++)
    if (codes[i] != POISON) fail_msg("%s: something was written", text);
}

static void test_refusals(void **state) {
  (void)state;
  fa3_quantize_args args;
#define REFUSED(spoil, ...)      \
  do {                           \
    args = good_args();          \
    spoil;                       \
    refused(&args, __VA_ARGS__); \
  } while (0)
  const fa3_tensor absent = {0};
  const fa3_tensor turn = {table, FA3_FLOAT32, 2, {ROWS, DIM / 2}, {DIM / 2, 1}, {0}};
  assert_int_equal(fa3_quantize(NULL), FA3_INVALID_STRUCT);
  REFUSED(args.struct_size = 8, FA3_INVALID_STRUCT, "struct_size");
  REFUSED(args.input = absent, FA3_INVALID_POINTER, "input is absent");
  REFUSED(args.codes = absent, FA3_INVALID_POINTER, "codes is absent");
  REFUSED(args.codes_scale = absent, FA3_INVALID_POINTER, "codes_scale is absent");
  REFUSED(args.input.data = NULL, FA3_INVALID_POINTER, "input.data");
  REFUSED(args.codes.data = NULL, FA3_INVALID_POINTER, "codes.data");
  REFUSED(args.codes_scale.data = NULL, FA3_INVALID_POINTER, "codes_scale.data");
  REFUSED(args.input.dtype = FA3_INT32, FA3_INVALID_DTYPE,
          "expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16");
  REFUSED(args.input.dtype = FA3_FLOAT8_E4M3, FA3_INVALID_DTYPE, "input.dtype is 4");
  REFUSED(args.codes.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "codes.dtype");
  REFUSED(args.codes.shape[1] = 4, FA3_INVALID_SHAPE, "codes.shape[1] is 4: expected 5");
  REFUSED(args.codes.strides[1] = 8, FA3_INVALID_STRIDE, "codes.strides[1]");
  REFUSED(args.input.shape[3] = args.codes.shape[3] = 0, FA3_INVALID_SHAPE, "input.shape[3]");
  REFUSED((args.input.shape[3] = args.codes.shape[3] = 257,
           args.codes.strides[2] = args.codes.strides[1] = 1000, args.codes.strides[1] = 10000,
           args.codes.strides[0] = 100000),
          FA3_UNSUPPORTED, "head_dim is 257: expected 1 to 256");
  REFUSED(args.codes_scale.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "codes_scale.dtype");
  REFUSED(args.codes_scale.shape[1] = 0, FA3_INVALID_SHAPE,
          "codes_scale.shape[1] is 0: expected 3");
  REFUSED(args.codes_scale.shape[0] = 1, FA3_INVALID_SHAPE, "codes_scale.shape[0]");
  REFUSED(args.codes_scale.strides[0] = 0, FA3_INVALID_STRIDE, "codes_scale.strides[0]");
  REFUSED(args.codes_scale_rows = -1, FA3_INVALID_SCALE, "codes_scale_rows is -1");
  REFUSED(args.codes_scale_rows = 2, FA3_INVALID_SHAPE, "codes_scale.rank is 2: with");
  REFUSED(args.flags = FA3_CAUSAL, FA3_INVALID_FLAGS, "flags is 0x1: 0x1 is not for fa3_quantize");
  REFUSED(args.seed = 7, FA3_INVALID_FLAGS, "seed is 7");
  REFUSED(args.num_threads = -1, FA3_INVALID_THREADS, "num_threads");
  REFUSED(args.stream = &args, FA3_INVALID_STREAM, "stream");
  REFUSED(args.rotary_cos = turn, FA3_INVALID_FLAGS, "rotary_cos is given without rotary_sin");
  REFUSED(args.flags = FA3_ROTARY_INTERLEAVED, FA3_INVALID_FLAGS, "FA3_ROTARY_INTERLEAVED");
  REFUSED((args.rotary_cos = args.rotary_sin = turn,
           args.rotary_cos.shape[1] = args.rotary_sin.shape[1] = DIM / 2 + 1),
          FA3_INVALID_SHAPE, "rotary_cos.shape[1] is 17: expected at most half of 32, input's");
  REFUSED((args.rotary_cos = args.rotary_sin = turn,
           args.rotary_cos.dtype = args.rotary_sin.dtype = FA3_BFLOAT16),
          FA3_INVALID_DTYPE, "rotary_cos.dtype");
  REFUSED((args.rotary_cos = args.rotary_sin = turn,
           args.rotary_cos.shape[0] = args.rotary_sin.shape[0] = ROWS - 1),
          FA3_INVALID_LENGTHS, "row 4 of sequence 0 is at position 4");
  REFUSED((args.rotary_cos = args.rotary_sin = turn, positions[7] = -1,
           args.positions = (fa3_tensor){positions, FA3_INT32, 2, {BATCH, ROWS}, {ROWS, 1}, {0}}),
          FA3_INVALID_LENGTHS, "row 2 of sequence 1 is at position -1");
  REFUSED((args.seqused_q = fa3_vector(lengths, FA3_INT32, BATCH), lengths[1] = ROWS + 1),
          FA3_INVALID_LENGTHS, "seqused_q[1] is 6");
  REFUSED(args.max_seqlen_q = 3, FA3_INVALID_FLAGS, "max_seqlen_q");
}

static void test_packed_refusals(void **state) {
  (void)state;
  for (int wrong = 0; wrong < 4; wrong++) {
    fa3_quantize_args args = good_args();
    args.input = fa3_packed(input, FA3_FLOAT32, TOTAL, HEADS, DIM);
    args.codes = fa3_packed(codes, FA3_FLOAT8_E4M3, TOTAL, HEADS, DIM);
    args.cu_seqlens_q = fa3_vector(lengths, FA3_INT32, BATCH + 1);
    lengths[1] = wrong == 0 ? 9 : 4;
    lengths[2] = wrong == 1 ? TOTAL + 1 : 8;
    args.max_seqlen_q = wrong == 2 ? 3 : 0;
    if (wrong == 3) {
      args.codes_scale_rows = 4;
      args.codes_scale.shape[0] = HEADS;
      args.codes_scale.shape[1] = TOTAL / 4 + BATCH - 1;
      args.codes_scale.strides[0] = 4;
    }
    refused(&args, wrong == 3 ? FA3_INVALID_SHAPE : FA3_INVALID_LENGTHS,
            wrong == 3 ? "codes_scale.shape[1] is 3: expected 4" : "cu_seqlens_q");
  }
}

/* What asks for nothing costs nothing. */
static void test_no_rows(void **state) {
  (void)state;
  float scale = 7;
  fa3_quantize_args args = good_args();
  args.codes_scale = fa3_vector(&scale, FA3_FLOAT32, 1);
  args.input.shape[0] = args.codes.shape[0] = INT64_C(1) << 40;
  args.input.shape[1] = args.codes.shape[1] = 0;
  args.rotary_cos = args.rotary_sin =
      (fa3_tensor){table, FA3_FLOAT32, 2, {ROWS, DIM / 2}, {DIM / 2, 1}, {0}};
  if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
  assert_true(scale == 7);
}

static void test_support(void **state) {
  (void)state;
  fa3_capability capability = {.struct_size = sizeof capability,
                               .phase = FA3_QUANTIZE,
                               .query_dtype = FA3_BFLOAT16,
                               .output_dtype = FA3_FLOAT8_E4M3,
                               .head_dim = 80,
                               .features = FA3_FEATURE_VARLEN_QUERY | FA3_FEATURE_SEQUSED_QUERY};
  assert_int_equal(fa3_supports(&capability), FA3_OK);
  capability.output_dtype = FA3_FLOAT16;
  for (int device = FA3_CPU; device <= FA3_CUDA; device++) {
    capability.device.type = device;
    assert_int_equal(fa3_supports(&capability), FA3_UNSUPPORTED);
    assert_true(strstr(fa3_last_error(), "codes'") || strstr(fa3_last_error(), "no CUDA kernels"));
  }
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_edges),           cmocka_unit_test(test_scores),
      cmocka_unit_test(test_outlier),         cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_packed_refusals), cmocka_unit_test(test_no_rows),
      cmocka_unit_test(test_support),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
