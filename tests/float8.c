/* E4M3: the codes themselves; a forward call of codes and scales gives, bit for bit, what the same
 * numbers in float32 give; what is refused; NaN codes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <pmmintrin.h>
#endif

#include "e4m3.h"
#include "expect.h"
#include "fa3.h"
#include "float8.h"
#include "level.h"
#include "reference.h"
#include "rng.h"
#include "test.h"

static void test_every_code(void **state) {
  (void)state;
  for (int code = 0; code < 256; code++) {
    const double value = e4m3_value(code);
    const float decoded = float_from_e4m3((uint8_t)code);
    if (isnan(value))
      assert_true(isnan(decoded));
    else
      assert_true(decoded == (float)value);
    assert_int_equal(e4m3_from_float(decoded) & 0x7f, code & 0x7f);
    if (!isnan(value)) assert_int_equal(e4m3_from_float(decoded), code);
  }
}

/* A thread may have set subnormal floats to be taken for 0. */
static void test_flushed_subnormals(void **state) {
#ifdef __SSE2__
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  test_every_code(state);
  _mm_setcsr(before);
#else
  (void)state;
  skip();
#endif
}

static void test_rounding(void **state) {
  (void)state;
  for (int code = 0; code < 0x7e; code++) {
    const float low = (float)e4m3_value(code), high = (float)e4m3_value(code + 1);
    const float middle = (low + high) / 2;
    assert_int_equal(e4m3_from_float(middle), code % 2 ? code + 1 : code);
    assert_int_equal(e4m3_from_float(nextafterf(middle, 0)), code);
    assert_int_equal(e4m3_from_float(nextafterf(middle, 1000)), code + 1);
    assert_int_equal(e4m3_from_float(-middle), (code % 2 ? code + 1 : code) | 0x80);
  }
  assert_int_equal(e4m3_from_float(449), 0x7e);
  assert_int_equal(e4m3_from_float(-INFINITY), 0xfe);
  assert_int_equal(e4m3_from_float(1e-30f), 0);
}

enum {
  BATCH = 3,
  ROWS_Q = 70,
  ROWS_K = 300,
  HEADS_Q = 4,
  HEADS_K = 2,
  HEAD_DIM = 32,
  VALUE_HEAD_DIM = 48,
  MOST = BATCH * ROWS_K * HEADS_Q * VALUE_HEAD_DIM,
  MOST_SCALES = BATCH * HEADS_Q * ROWS_K
};

static uint8_t codes[3][MOST];
static float floats[3][MOST], scales[3][MOST_SCALES], outputs[2][MOST], lses[2][MOST];
static const int32_t starts_q[] = {0, 70, 70, 150}, starts_k[] = {0, 123, 400, 700};
static const int32_t leftpad[] = {0, 9, 64}, entries[] = {2, 0, 1};

static fa3_tensor *tensor_of(fa3_forward_args *args, int which) {
  return which == 0 ? &args->query : which == 1 ? &args->key : &args->value;
}

static fa3_tensor *scale_of(fa3_forward_args *args, int which) {
  return which == 0 ? &args->query_scale : which == 1 ? &args->key_scale : &args->value_scale;
}

/* The args of codes, without scales. */
static fa3_forward_args make_args(bool packed, struct rng *rng) {
  fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_CAUSAL, .num_threads = 2};
  const int64_t rows_q = packed ? 150 : ROWS_Q, rows_k = packed ? 700 : ROWS_K;
  for (int i = 0; i < 3; i++) {
    const int64_t rows = i ? rows_k : rows_q, heads = i ? HEADS_K : HEADS_Q;
    const int64_t dim = i < 2 ? HEAD_DIM : VALUE_HEAD_DIM;
    *tensor_of(&args, i) = packed ? fa3_packed(codes[i], FA3_FLOAT8_E4M3, rows, heads, dim)
                                  : fa3_dense(codes[i], FA3_FLOAT8_E4M3, BATCH, rows, heads, dim);
  }
  for (int i = 0; i < 3; i++) {
    for (int j = 0; j < MOST; j++) codes[i][j] = e4m3_from_float((float)rng_normal(rng) * 2);
    for (int j = 0; j < MOST_SCALES; j++) scales[i][j] = (float)(rng_uniform(rng) + 0.1);
  }
  args.output = packed ? fa3_packed(outputs[0], FA3_FLOAT32, rows_q, HEADS_Q, VALUE_HEAD_DIM)
                       : fa3_dense(outputs[0], FA3_FLOAT32, BATCH, rows_q, HEADS_Q, VALUE_HEAD_DIM);
  args.lse =
      packed ? fa3_packed_lse(lses[0], HEADS_Q, rows_q) : fa3_lse(lses[0], BATCH, HEADS_Q, rows_q);
  if (packed) {
    args.cu_seqlens_q = fa3_vector((void *)(uintptr_t)starts_q, FA3_INT32, BATCH + 1);
    args.cu_seqlens_k = fa3_vector((void *)(uintptr_t)starts_k, FA3_INT32, BATCH + 1);
    args.max_seqlen_q = 80;
    args.max_seqlen_k = 300;
  }
  return args;
}

/* What a row of a tensor is multiplied by: the header's words, once more. */
static float expected_scale(const fa3_forward_args *args, int which, int64_t rows_per, int64_t b,
                            int64_t row, int64_t head) {
  fa3_forward_args copy = *args;
  const fa3_tensor *scale = scale_of(&copy, which);
  const bool packed = args->cu_seqlens_q.data != NULL;
  const float *values = scale->data;
  if (!values) return 1;
  if (scale->rank == 1) return values[0];
  const int head_axis = packed && rows_per ? 0 : 1;
  if (which == 0 && scale->shape[head_axis] == HEADS_K) head /= HEADS_Q / HEADS_K;
  if (!rows_per) return values[b * scale->strides[0] + head * scale->strides[1]];
  if (!packed)
    return values[b * scale->strides[0] + head * scale->strides[1] +
                  row / rows_per * scale->strides[2]];
  const int32_t *starts = which ? starts_k : starts_q;
  const int64_t block = starts[b] / rows_per + b + row / rows_per;
  return values[head * scale->strides[0] + block * scale->strides[1]];
}

/* The same call in float32 has to give the same bits. */
static void compare(fa3_forward_args args) {
  const int64_t rows_per[] = {args.query_scale_rows, args.key_scale_rows, args.value_scale_rows};
  const bool packed = args.cu_seqlens_q.data != NULL;
  fa3_forward_args plain = args;
  for (int i = 0; i < 3; i++) {
    const fa3_tensor *from = tensor_of(&args, i);
    fa3_tensor *to = tensor_of(&plain, i);
    const int row_axis = packed ? 0 : 1;
    const int32_t *starts = i ? starts_k : starts_q;
    for (int64_t b = 0; b < BATCH; b++) {
      const int64_t first = packed ? starts[b] : 0;
      const int64_t rows = packed ? starts[b + 1] - starts[b] : from->shape[1];
      for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < from->shape[row_axis + 1]; head++) {
          const int64_t at = (packed ? 0 : b * from->strides[0]) +
                             (first + row) * from->strides[row_axis] +
                             head * from->strides[row_axis + 1];
          const float scale = expected_scale(&args, i, rows_per[i], b, row, head);
          for (int64_t d = 0; d < from->shape[row_axis + 2]; d++)
            floats[i][at + d] = (float)e4m3_value(codes[i][at + d]) * scale;
        }
    }
    to->data = floats[i];
    to->dtype = FA3_FLOAT32;
    *scale_of(&plain, i) = (fa3_tensor){0};
  }
  plain.query_scale_rows = plain.key_scale_rows = plain.value_scale_rows = 0;
  plain.output.data = outputs[1];
  plain.lse.data = lses[1];
  memset(outputs, 0xff, sizeof outputs);
  memset(lses, 0xff, sizeof lses);
  expect_forward(args);
  expect_forward(plain);
  assert_memory_equal(outputs[0], outputs[1], sizeof outputs[0]);
  assert_memory_equal(lses[0], lses[1], sizeof lses[0]);
  assert_true(isfinite(outputs[0][0]) && isfinite(lses[0][0]));
}

/* A scale of this shape, with strides that leave gaps. */
static fa3_tensor make_scale(int which, int32_t rank, const int64_t *shape) {
  fa3_tensor scale = {.data = scales[which], .dtype = FA3_FLOAT32, .rank = rank};
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; d--) {
    scale.shape[d] = shape[d];
    scale.strides[d] = stride;
    stride *= shape[d] + 1;
  }
  return scale;
}

static void test_scales(void **state) {
  (void)state;
  struct rng rng = rng_for(1);
  fa3_forward_args args = make_args(false, &rng);
  compare(args);
  for (int i = 0; i < 3; i++) *scale_of(&args, i) = make_scale(i, 1, (const int64_t[]){1});
  compare(args);
  for (int i = 0; i < 3; i++)
    *scale_of(&args, i) = make_scale(i, 2, (const int64_t[]){BATCH, HEADS_K});
  compare(args);
  args.query_scale = make_scale(0, 2, (const int64_t[]){BATCH, HEADS_Q});
  args.key_scale.strides[1] = 0;
  args.softcap = 2;
  compare(args);
  args.query_scale = make_scale(0, 3, (const int64_t[]){BATCH, HEADS_Q, ROWS_Q});
  args.query_scale_rows = 1;
  args.key_scale = make_scale(1, 3, (const int64_t[]){BATCH, HEADS_K, 3});
  args.key_scale_rows = 128;
  args.value_scale = make_scale(2, 3, (const int64_t[]){BATCH, HEADS_K, 5});
  args.value_scale_rows = 64;
  compare(args);
  args.leftpad_k = fa3_vector((void *)(uintptr_t)leftpad, FA3_INT32, BATCH);
  args.cache_batch_index = fa3_vector((void *)(uintptr_t)entries, FA3_INT32, BATCH);
  compare(args);
}

static void test_packed_scales(void **state) {
  (void)state;
  struct rng rng = rng_for(2);
  fa3_forward_args args = make_args(true, &rng);
  for (int i = 0; i < 3; i++)
    *scale_of(&args, i) = make_scale(i, 2, (const int64_t[]){BATCH, HEADS_K});
  compare(args);
  args.query_scale = make_scale(0, 2, (const int64_t[]){HEADS_Q, 150 / 16 + BATCH});
  args.query_scale_rows = 16;
  args.key_scale = make_scale(1, 2, (const int64_t[]){HEADS_K, 700 / 100 + BATCH});
  args.key_scale_rows = 100;
  args.value_scale = make_scale(2, 2, (const int64_t[]){HEADS_K, 700 + BATCH});
  args.value_scale_rows = 1;
  compare(args);
}

static void test_output_dtypes(void **state) {
  (void)state;
  struct rng rng = rng_for(3);
  fa3_forward_args args = make_args(false, &rng);
  static const fa3_dtype dtypes[] = {FA3_FLOAT16, FA3_BFLOAT16};
  for (int i = 0; i < 2; i++) {
    args.output.dtype = dtypes[i];
    memset(outputs, 0xff, sizeof outputs);
    expect_forward(args);
    uint16_t first;
    memcpy(&first, outputs, sizeof first);
    assert_int_not_equal(first, 0xffff);
  }
}

/* A NaN code of a key reaches the queries that see it, and no others. */
static void test_nan_code(void **state) {
  (void)state;
  for (int which = 1; which <= 2; which++) {
    struct rng rng = rng_for(4);
    fa3_forward_args args = make_args(false, &rng);
    const int64_t row = ROWS_K - 10; /* the last ten queries see it */
    codes[which][row * tensor_of(&args, which)->strides[1]] = which == 1 ? 0x7f : 0xff;
    expect_forward(args);
    for (int64_t q = 0; q < ROWS_Q; q++) {
      const float got = outputs[0][q * args.output.strides[1]];
      assert_true(isnan(got) == (q >= ROWS_Q - 10));
    }
  }
}

/* What a cache of codes is asked with. */
static const fa3_dtype query_dtypes[] = {FA3_FLOAT8_E4M3, FA3_FLOAT16, FA3_BFLOAT16, FA3_FLOAT32};

static void store_one(fa3_dtype dtype, void *query, int64_t i) {
  if (dtype == FA3_FLOAT32)
    ((float *)query)[i] = 1;
  else if (dtype == FA3_FLOAT8_E4M3)
    ((uint8_t *)query)[i] = e4m3_from_float(1);
  else
    ((uint16_t *)query)[i] = dtype == FA3_FLOAT16 ? 0x3c00 : 0x3f80;
}

/* The same of a few queries, of a value's element too: a column of the head's rows that see it. */
static void test_nan_code_of_few_rows(void **state) {
  (void)state;
  enum { FEW = 3, KEYS = 150, DIM = 112, GROUP = HEADS_Q / HEADS_K, TRIALS = 5 * 3 };
  static const int64_t keys[] = {0, 70, KEYS - 3, KEYS - 2, KEYS - 1}, columns[] = {0, 75, DIM - 1};
  static float query[FEW * HEADS_Q * DIM];
  for (int which = 1; which <= 2; which++)
    for (int trial = 0; trial < 4 * TRIALS; trial++) {
      const fa3_dtype dtype = query_dtypes[trial / TRIALS];
      const int64_t planted = keys[trial % 5], head = trial % HEADS_K;
      const int64_t column = columns[trial % TRIALS / 5];
      fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_CAUSAL};
      args.query = fa3_dense(query, dtype, 1, FEW, HEADS_Q, DIM);
      args.key = fa3_dense(codes[1], FA3_FLOAT8_E4M3, 1, KEYS, HEADS_K, DIM);
      args.value = fa3_dense(codes[2], FA3_FLOAT8_E4M3, 1, KEYS, HEADS_K, DIM);
      args.output = fa3_dense(outputs[0], FA3_FLOAT32, 1, FEW, HEADS_Q, DIM);
      for (int i = 0; i < FEW * HEADS_Q * DIM; i++) store_one(dtype, query, i);
      memset(codes, e4m3_from_float(1), sizeof codes);
      codes[which][(planted * HEADS_K + head) * DIM + column] = trial % 2 ? 0x7f : 0xff;
      expect_forward(args);
      for (int i = 0; i < FEW * HEADS_Q * DIM; i++) {
        const int64_t q = i / DIM / HEADS_Q;
        const bool reached = i / DIM % HEADS_Q / GROUP == head && planted <= KEYS - FEW + q &&
                             (which == 1 || i % DIM == column);
        assert_true(reached ? isnan(outputs[0][i]) : outputs[0][i] == 1);
      }
    }
}

/* With one key the output is its value, and lse the score: here one code of the key. */
static void test_every_code_of_few_rows(void **state) {
  (void)state;
  enum { DIM = 256 };
  static float query[DIM];
  for (int i = 0; i < DIM; i++) codes[0][i] = isnan(e4m3_value(i)) ? 0 : (uint8_t)i;
  for (int trial = 0; trial < 4 * DIM; trial++) {
    const fa3_dtype dtype = query_dtypes[trial / DIM];
    const int at = trial % DIM;
    fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_SCALE, .softmax_scale = 1};
    args.query = fa3_dense(query, dtype, 1, 1, 1, DIM);
    args.key = args.value = fa3_dense(codes[0], FA3_FLOAT8_E4M3, 1, 1, 1, DIM);
    args.output = fa3_dense(outputs[0], FA3_FLOAT32, 1, 1, 1, DIM);
    args.lse = fa3_lse(lses[0], 1, 1, 1);
    memset(query, 0, sizeof query);
    store_one(dtype, query, at);
    expect_forward(args);
    assert_true(lses[0][0] == (float)e4m3_value(codes[0][at]));
    for (int i = 0; i < DIM; i++) assert_true(outputs[0][i] == (float)e4m3_value(codes[0][i]));
  }
}

/* Each row has the scale of its query and head; lse is the score of the one key. */
static void test_query_scales_of_few_rows(void **state) {
  (void)state;
  enum { FEW = 3, DIM = 16 };
  fa3_forward_args args = {.struct_size = sizeof args, .flags = FA3_SCALE, .softmax_scale = 1};
  args.query = fa3_dense(codes[0], FA3_FLOAT8_E4M3, 1, FEW, HEADS_Q, DIM);
  args.key = fa3_dense(codes[1], FA3_FLOAT8_E4M3, 1, 1, HEADS_K, DIM);
  args.value = fa3_dense(codes[2], FA3_FLOAT8_E4M3, 1, 1, HEADS_K, DIM);
  args.output = fa3_dense(outputs[0], FA3_FLOAT32, 1, FEW, HEADS_Q, DIM);
  args.lse = fa3_lse(lses[0], 1, HEADS_Q, FEW);
  args.query_scale = fa3_lse(scales[0], 1, HEADS_Q, FEW);
  args.query_scale_rows = 1;
  memset(codes, e4m3_from_float(1), sizeof codes);
  for (int i = 0; i < HEADS_Q * FEW; i++) scales[0][i] = (float)(i + 1);
  expect_forward(args);
  for (int i = 0; i < HEADS_Q * FEW; i++) assert_true(lses[0][i] == (float)(DIM * (i + 1)));
}

/* A scale of infinity gives NaN, whatever the signs of what it scales, with few queries and many.
 */
static void test_infinite_scale(void **state) {
  (void)state;
  enum { MANY = 40, KEYS = 5, DIM = 16 };
  static uint8_t numbers[2][MANY * DIM];
  static float output[MANY * DIM], scale[3][KEYS];
  memset(numbers[0], e4m3_from_float(-1), sizeof numbers[0]);
  memset(numbers[1], e4m3_from_float(1), sizeof numbers[1]);
  for (int which = 0; which < 3; which++)
    for (int64_t queries = 1; queries <= MANY; queries += MANY - 1) {
      fa3_forward_args args = {.struct_size = sizeof args};
      args.query = fa3_dense(numbers[0], FA3_FLOAT8_E4M3, 1, queries, 1, DIM);
      args.key = fa3_dense(numbers[1], FA3_FLOAT8_E4M3, 1, KEYS, 1, DIM);
      args.value = fa3_dense(numbers[which < 2], FA3_FLOAT8_E4M3, 1, KEYS, 1, DIM);
      args.output = fa3_dense(output, FA3_FLOAT32, 1, queries, 1, DIM);
      for (int i = 0; i < 3; i++)
        for (int k = 0; k < KEYS; k++) scale[i][k] = i == which && (k == 2 || !i) ? INFINITY : 1;
      args.query_scale = fa3_vector(scale[0], FA3_FLOAT32, 1);
      args.key_scale = fa3_lse(scale[1], 1, 1, KEYS);
      args.value_scale = fa3_lse(scale[2], 1, 1, KEYS);
      args.key_scale_rows = args.value_scale_rows = 1;
      memset(output, 0, sizeof output);
      expect_forward(args);
      for (int64_t i = 0; i < queries * DIM; i++)
        if (!isnan(output[i]))
          fail_msg("scale %d, %d queries: %g", which, (int)queries, (double)output[i]);
    }
}

static void refuse(const fa3_forward_args *args, fa3_status status, const char *text) {
  size_t bytes;
  expect_refused(fa3_forward_workspace(args, &bytes), status, text);
}

static void test_refusals(void **state) {
  (void)state;
  struct rng rng = rng_for(5);
  const fa3_forward_args good = make_args(false, &rng);
  fa3_forward_args args = good;
  args.key_scale = make_scale(1, 2, (const int64_t[]){BATCH, HEADS_Q});
  refuse(&args, FA3_INVALID_SHAPE, "key_scale.shape[1] is 4: expected 2, the heads");
  args.key_scale = make_scale(1, 2, (const int64_t[]){BATCH + 1, HEADS_K});
  refuse(&args, FA3_INVALID_SHAPE, "key_scale.shape[0]");
  args.key_scale = make_scale(1, 2, (const int64_t[]){BATCH, HEADS_K});
  args.key_scale.dtype = FA3_FLOAT16;
  refuse(&args, FA3_INVALID_DTYPE, "key_scale.dtype");
  args.key_scale.dtype = FA3_FLOAT32;
  args.key_scale_rows = 128;
  refuse(&args, FA3_INVALID_SHAPE, "key_scale.rank is 2: with key_scale_rows 128 expected 3");
  args.key_scale = make_scale(1, 3, (const int64_t[]){BATCH, HEADS_K, 2});
  refuse(&args, FA3_INVALID_SHAPE, "key_scale.shape[2] is 2: expected 3, the blocks of rows");
  args.key_scale_rows = -1;
  refuse(&args, FA3_INVALID_SCALE, "key_scale_rows is -1");
  args = good;
  args.value_scale_rows = 64;
  refuse(&args, FA3_INVALID_FLAGS, "value_scale is absent");
  args = good;
  args.query.dtype = args.key.dtype = args.value.dtype = FA3_FLOAT32;
  args.query_scale = make_scale(0, 1, (const int64_t[]){1});
  refuse(&args, FA3_INVALID_DTYPE, "only FA3_FLOAT8_E4M3 has a scale");
  args = good;
  args.output.dtype = FA3_FLOAT8_E4M3;
  refuse(&args, FA3_INVALID_DTYPE, "output.dtype");
  args = good;
  args.query.shape[3] = args.key.shape[3] = 24;
  refuse(&args, FA3_UNSUPPORTED, "head_dim is 24: expected a multiple of 16");
  const fa3_capability backward = {.struct_size = sizeof backward,
                                   .phase = FA3_BACKWARD,
                                   .query_dtype = FA3_FLOAT8_E4M3,
                                   .key_dtype = FA3_FLOAT8_E4M3,
                                   .value_dtype = FA3_FLOAT8_E4M3,
                                   .output_dtype = FA3_FLOAT32,
                                   .head_dim = 64,
                                   .value_head_dim = 64};
  expect_refused(fa3_supports(&backward), FA3_UNSUPPORTED, "FA3_FLOAT8_E4M3");
}

static void test_dlpack(void **state) {
  (void)state;
  struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
  } source = {.data = codes, .device_type = 1, .ndim = 1, .code = 10, .bits = 8, .lanes = 1};
  const int64_t extent = 16;
  source.shape = &extent;
  fa3_tensor tensor;
  assert_int_equal(fa3_tensor_from_dlpack(&source, &tensor), FA3_OK);
  assert_int_equal(tensor.dtype, FA3_FLOAT8_E4M3);
  source.code = 12;
  expect_refused(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_DTYPE, "E5M2");
  source.code = 11;
  expect_refused(fa3_tensor_from_dlpack(&source, &tensor), FA3_INVALID_DTYPE, "E4M3FNUZ");
}

/* What a GPU may do to a row of codes: weights of 2^8 at the top become codes. The reference has
 * room for that, and for a CPU it has none. */
static void test_bound_of_a_gpu(void **state) {
  (void)state;
  enum { KEYS = 300, DIM = 64 };
  struct rng rng = rng_for(1);
  for (int which = 0; which < 3; which++)
    for (int i = 0; i < KEYS * DIM; i++)
      codes[which][i] = e4m3_from_float((float)fmin(fmax(rng_normal(&rng), -8), 8));
  fa3_forward_args args = {.struct_size = sizeof args};
  args.query = fa3_dense(codes[0], FA3_FLOAT8_E4M3, 1, 8, 1, DIM);
  args.key = fa3_dense(codes[1], FA3_FLOAT8_E4M3, 1, KEYS, 1, DIM);
  args.value = fa3_dense(codes[2], FA3_FLOAT8_E4M3, 1, KEYS, 1, DIM);
  args.output = fa3_dense(outputs[0], FA3_FLOAT32, 1, 8, 1, DIM);
  int beyond_cpu = 0;
  for (int row = 0; row < 8; row++) {
    double exact[DIM], bound[DIM], lse, lse_bound, scores[KEYS], top = -INFINITY, sum = 0;
    for (int j = 0; j < KEYS; j++) {
      scores[j] = 0;
      for (int d = 0; d < DIM; d++)
        scores[j] += e4m3_value(codes[0][row * DIM + d]) * e4m3_value(codes[1][j * DIM + d]) / 8;
      top = fmax(top, scores[j]);
    }
    double rounded[DIM] = {0};
    for (int j = 0; j < KEYS; j++) {
      const double weight = 256 * exp(scores[j] - top);
      sum += weight;
      for (int d = 0; d < DIM; d++)
        rounded[d] +=
            e4m3_value(e4m3_from_float((float)weight)) * e4m3_value(codes[2][j * DIM + d]);
    }
    reference_row(&args, 0, 0, row, exact, &lse);
    for (int gpu = 0; gpu < 2; gpu++) {
      args.device.type = gpu ? FA3_CUDA : FA3_CPU;
      reference_bound(&args, 0, 0, row, exact, lse, bound, &lse_bound);
      for (int d = 0; d < DIM; d++) {
        const bool outside = !(fabs(rounded[d] / sum - exact[d]) <= bound[d]);
        if (gpu) assert_false(outside);
        beyond_cpu += !gpu && outside;
      }
    }
  }
  assert_true(beyond_cpu > 100);
}

int main(void) {
  level_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_code),
      cmocka_unit_test(test_flushed_subnormals),
      cmocka_unit_test(test_rounding),
      cmocka_unit_test(test_scales),
      cmocka_unit_test(test_packed_scales),
      cmocka_unit_test(test_output_dtypes),
      cmocka_unit_test(test_nan_code),
      cmocka_unit_test(test_nan_code_of_few_rows),
      cmocka_unit_test(test_every_code_of_few_rows),
      cmocka_unit_test(test_query_scales_of_few_rows),
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_dlpack),
      cmocka_unit_test(test_infinite_scale),
      cmocka_unit_test(test_bound_of_a_gpu),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
