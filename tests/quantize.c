/* fa3_quantize against the definition in fa3.h in double precision: scales, nearest codes, what the
 * rotation, the mean and rotary embedding do before, what is not written, what is refused. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "fa3.h"
#include "half.h"
#include "rng.h"
#include "test.h"

enum { MOST_DIM = 256, POISON = 0x5a };

/* By the format's definition. */
static double value_of(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude =
      exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp((double)mantissa, -9);
  return code & 0x80 ? -magnitude : magnitude;
}

/* The code of a magnitude, by looking at all; of two that are as near the even one. */
static int nearest_code(double magnitude) {
  int best = 0;
  for (int code = 1; code < 0x7f; code++) {
    const double better = fabs(magnitude - value_of(best)) - fabs(magnitude - value_of(code));
    if (better > 0 || (better == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

/* Whether element d becomes negative. */
static bool sign_of(uint64_t seed, int d) {
  uint64_t z = seed + ((uint64_t)d / 64 + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return z >> d % 64 & 1;
}

/* The Hadamard matrices that lie along the diagonal, as sums of all their elements. */
static void rotate(uint64_t seed, int width, double *x) {
  double before[MOST_DIM];
  for (int d = 0; d < width; d++) before[d] = sign_of(seed, d) ? -x[d] : x[d];
  for (int first = 0, size; first < width; first += size) {
    for (size = 1; 2 * size <= width - first;) size *= 2;
    for (int i = 0; i < size; i++) {
      double sum = 0;
      for (int j = 0; j < size; j++)
        sum += __builtin_parity((unsigned)(i & j)) ? -before[first + j] : before[first + j];
      x[first + i] = sum / sqrt(size);
    }
  }
}

/* A call, and what the header says of it. */
struct trial {
  fa3_quantize_args args;
  int64_t batch, rows, heads, dim; /* rows of a dense batch, or of all */
  bool packed;
  int32_t starts[8], used[8];
  float cos[64 * MOST_DIM / 2], sin[64 * MOST_DIM / 2];
  int32_t positions[256];
  struct buffer input, codes, scale;
};

static int64_t rows_of(const struct trial *t, int64_t b) {
  if (t->args.seqused_q.data) return t->used[b];
  return t->packed ? t->starts[b + 1] - t->starts[b] : t->rows;
}

/* A row of the sequence in memory, counted from the tensor's first. */
static int64_t row_at(const struct trial *t, int64_t b, int64_t row) {
  return t->packed ? t->starts[b] + row : b * t->rows + row;
}

static int64_t element_at(const struct trial *t, const fa3_tensor *tensor, int64_t b, int64_t row,
                          int64_t head) {
  const int64_t *strides = tensor->strides;
  if (t->packed) return (t->starts[b] + row) * strides[0] + head * strides[1];
  return b * strides[0] + row * strides[1] + head * strides[2];
}

static double input_at(const struct trial *t, int64_t index) {
  const void *data = t->args.input.data;
  if (t->args.input.dtype == FA3_FLOAT32) return (double)((const float *)data)[index];
  const uint16_t bits = ((const uint16_t *)data)[index];
  return (double)(t->args.input.dtype == FA3_FLOAT16 ? float_from_half(bits)
                                                     : float_from_bfloat(bits));
}

/* With rotary embedding. */
static void read_row(const struct trial *t, int64_t b, int64_t row, int64_t head, double *x) {
  const int64_t from = element_at(t, &t->args.input, b, row, head);
  const bool interleaved = t->args.flags & FA3_ROTARY_INTERLEAVED;
  for (int64_t d = 0; d < t->dim; d++) x[d] = input_at(t, from + d);
  if (!t->args.rotary_cos.data) return;
  const int64_t pairs = t->args.rotary_cos.shape[1];
  const int64_t position = t->args.positions.data ? t->positions[row_at(t, b, row)] : row;
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + pairs;
    const double c = (double)t->cos[position * pairs + i], s = (double)t->sin[position * pairs + i];
    const double u = x[first], v = x[second];
    x[first] = u * c - v * s;
    x[second] = u * s + v * c;
  }
}

/* What is quantised; and how far the library's may be from it. Of an element, turning rounds three
 * times, the mean and taking it off once each, and the transform's factors and sums of up to 256
 * terms ten times: 16 times at most, each by 2^-24 of no more than the magnitudes that are summed.
 */
static double prepare_row(const struct trial *t, int64_t b, int64_t row, int64_t head,
                          const double *mean, double *x) {
  const bool changed = t->args.rotary_cos.data || t->args.flags;
  double sum = 0;
  read_row(t, b, row, head, x);
  for (int64_t d = 0; d < t->dim; d++) {
    sum += 2 * (fabs(x[d]) + 2 * fabs(mean[d])); /* a pair is up to twice its larger element */
    x[d] -= mean[d];
  }
  if (t->args.flags & FA3_ROTATE) rotate(t->args.seed, (int)t->dim, x);
  return changed ? 16 * 0x1p-24 * sum : 0;
}

static void find_mean(const struct trial *t, int64_t b, int64_t head, double *mean) {
  double x[MOST_DIM] = {0};
  memset(mean, 0, MOST_DIM * sizeof *mean);
  if (!(t->args.flags & FA3_SUBTRACT_MEAN)) return;
  for (int64_t row = 0; row < rows_of(t, b); row++) {
    read_row(t, b, row, head, x);
    for (int64_t d = 0; d < t->dim; d++) mean[d] += x[d] / (double)rows_of(t, b);
  }
}

/* Where a row's scale is: the header's words, once more. */
static int64_t scale_at(const struct trial *t, int64_t b, int64_t row, int64_t head) {
  const fa3_tensor *scale = &t->args.codes_scale;
  const int64_t rows = t->args.codes_scale_rows;
  if (scale->rank == 1) return 0;
  if (!rows) return b * scale->strides[0] + head * scale->strides[1];
  if (t->packed)
    return head * scale->strides[0] + (t->starts[b] / rows + b + row / rows) * scale->strides[1];
  return b * scale->strides[0] + head * scale->strides[1] + row / rows * scale->strides[2];
}

static float written_scale(const struct trial *t, int64_t at) {
  return ((const float *)t->args.codes_scale.data)[at];
}

static void check_row(const struct trial *t, int64_t b, int64_t row, int64_t head,
                      const double *mean) {
  const uint8_t *codes = t->args.codes.data;
  const int64_t to = element_at(t, &t->args.codes, b, row, head);
  const float scale = written_scale(t, scale_at(t, b, row, head));
  double x[MOST_DIM] = {0};
  const double bound = prepare_row(t, b, row, head, mean, x);
  for (int64_t d = 0; d < t->dim; d++) {
    const int code = codes[to + d];
    if (bound == 0) { /* nothing but a division rounds before the code does */
      const float quotient = (float)x[d] / scale;
      const int expected = nearest_code((double)fabsf(quotient)) | (signbit(quotient) ? 0x80 : 0);
      if (code != expected)
        fail_msg("row %d, element %d: %a / %a is 0x%02x: expected 0x%02x", (int)row, (int)d, x[d],
                 (double)scale, (unsigned)code, (unsigned)expected);
      continue;
    }
    const double nearest = value_of(nearest_code(fabs(x[d]) / (double)scale)) * (double)scale;
    const double least = fabs(fabs(x[d]) - nearest) + 2 * bound + 0x1p-23 * fabs(x[d]);
    if (!(fabs(value_of(code) * (double)scale - x[d]) <= least))
      fail_msg("row %d, element %d: %g is code 0x%02x of scale %g", (int)row, (int)d, x[d],
               (unsigned)code, (double)scale);
  }
}

/* The scales from the rows that share them, in double; then every code. */
static void check(const struct trial *t) {
  static double largest[1 << 14], slack[1 << 14];
  const size_t scales = t->scale.size / sizeof(float);
  assert_in_range(scales, 0, 1 << 14);
  for (size_t i = 0; i < scales; i++) largest[i] = -1;
  double mean[MOST_DIM], x[MOST_DIM] = {0};
  for (int64_t b = 0; b < t->batch; b++)
    for (int64_t head = 0; head < t->heads; head++) {
      find_mean(t, b, head, mean);
      for (int64_t row = 0; row < rows_of(t, b); row++) {
        const int64_t at = scale_at(t, b, row, head);
        const double bound = prepare_row(t, b, row, head, mean, x);
        if (largest[at] < 0) largest[at] = slack[at] = 0;
        for (int64_t d = 0; d < t->dim; d++) largest[at] = fmax(largest[at], fabs(x[d]));
        slack[at] = fmax(slack[at], bound);
      }
    }
  for (size_t i = 0; i < scales; i++) {
    uint32_t bits;
    memcpy(&bits, (const char *)t->args.codes_scale.data + i * sizeof bits, sizeof bits);
    if (largest[i] < 0) { /* of no row */
      assert_int_equal(bits, 0x01010101 * POISON);
      continue;
    }
    const double expected = fmax(largest[i] / 448, 0x1p-126);
    const double got = (double)written_scale(t, (int64_t)i);
    if (!(fabs(got - expected) <= slack[i] / 448 + 0x1p-24 * expected))
      fail_msg("scale %zu is %g: expected %g", i, got, expected);
  }
  for (int64_t b = 0; b < t->batch; b++)
    for (int64_t head = 0; head < t->heads; head++) {
      find_mean(t, b, head, mean);
      for (int64_t row = 0; row < rows_of(t, b); row++) check_row(t, b, row, head, mean);
    }
}

/* Codes beside those of used rows are what they were. */
static void check_untouched(const struct trial *t) {
  const uint8_t *codes = t->args.codes.data;
  bool *written = calloc(t->codes.size + 1, sizeof *written);
  assert_non_null(written);
  for (int64_t b = 0; b < t->batch; b++)
    for (int64_t row = 0; row < rows_of(t, b); row++)
      for (int64_t head = 0; head < t->heads; head++)
        memset(written + element_at(t, &t->args.codes, b, row, head), true, (size_t)t->dim);
  for (size_t i = 0; i < t->codes.size; i++)
    if (!written[i] && codes[i] != POISON) fail_msg("code %zu, of no used row, was written", i);
  free(written);
  buffer_check(&t->input, "input");
  buffer_check(&t->codes, "codes");
  buffer_check(&t->scale, "codes_scale");
}

/* A tensor with `gap` elements after each head, and as many rows of padding after each row. */
static fa3_tensor make_view(const struct trial *t, fa3_dtype dtype, int64_t gap) {
  fa3_tensor view = {.dtype = dtype, .rank = t->packed ? 3 : 4};
  const int64_t shape[] = {t->batch, t->rows, t->heads, t->dim};
  memcpy(view.shape, shape + t->packed, (size_t)view.rank * sizeof *shape);
  int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; d--) {
    view.strides[d] = stride;
    stride = stride * view.shape[d] + gap;
  }
  return view;
}

static size_t extent_of(const fa3_tensor *tensor) {
  int64_t last = 1;
  for (int d = 0; d < tensor->rank; d++) {
    if (!tensor->shape[d]) return 0;
    last += (tensor->shape[d] - 1) * tensor->strides[d];
  }
  return (size_t)last;
}

static void *make_buffer(struct buffer *buffer, const fa3_tensor *tensor) {
  const size_t size = extent_of(tensor) * fa3_dtype_size(tensor->dtype);
  *buffer = buffer_at_end(size);
  memset(buffer->data, POISON, size);
  return buffer->data;
}

static void fill_input(struct trial *t, struct rng *rng) {
  const size_t count = extent_of(&t->args.input);
  const double size = exp2((double)rng_between(rng, -8, 8)), centre = 3 * rng_normal(rng);
  for (size_t i = 0; i < count; i++) {
    const double outlier = rng_chance(rng, 0.01) ? 30 * rng_normal(rng) : 0;
    const float x = (float)(size * (centre + rng_normal(rng) + outlier));
    if (t->args.input.dtype == FA3_FLOAT32)
      ((float *)t->args.input.data)[i] = x;
    else
      ((uint16_t *)t->args.input.data)[i] =
          t->args.input.dtype == FA3_FLOAT16 ? half_from_float(x) : bfloat_from_float(x);
  }
}

static void make_lengths(struct trial *t, struct rng *rng) {
  for (int64_t b = 0; t->packed && b < t->batch; b++)
    t->starts[b + 1] = (int32_t)(t->starts[b] + rng_between(rng, 0, 40));
  t->rows = t->packed ? t->starts[t->batch] + rng_between(rng, 0, 3) : rng_between(rng, 0, 60);
  if (t->packed) {
    t->args.cu_seqlens_q = fa3_vector(t->starts, FA3_INT32, t->batch + 1);
    t->args.max_seqlen_q = rng_between(rng, 0, 1) * 41;
  }
  if (rng_chance(rng, 0.5)) return;
  for (int64_t b = 0; b < t->batch; b++)
    t->used[b] =
        (int32_t)rng_between(rng, 0, t->packed ? t->starts[b + 1] - t->starts[b] : t->rows);
  t->args.seqused_q = fa3_vector(t->used, FA3_INT32, t->batch);
}

static void make_scale(struct trial *t, struct rng *rng) {
  fa3_tensor *scale = &t->args.codes_scale;
  const int64_t form = rng_between(rng, 0, 2), gap = rng_between(rng, 0, 2);
  const int64_t rows = form == 2 ? RNG_PICK(rng, 1, 2, 7, 16, 33, 128, INT64_MAX) : 0;
  *scale = (fa3_tensor){.dtype = FA3_FLOAT32, .rank = 1, .shape = {1}, .strides = {1}};
  t->args.codes_scale_rows = rows;
  if (form > 0) {
    const int64_t blocks = t->packed ? (rows ? t->rows / rows : 0) + t->batch
                                     : (rows ? t->rows / rows + (t->rows % rows > 0) : 0);
    const int64_t dense[] = {t->batch, t->heads, blocks}, packed[] = {t->heads, blocks};
    scale->rank = form == 1 || t->packed ? 2 : 3;
    memcpy(scale->shape, form == 2 && t->packed ? packed : dense,
           (size_t)scale->rank * sizeof *dense);
    int64_t stride = 1 + gap;
    for (int d = scale->rank - 1; d >= 0; d--) {
      scale->strides[d] = stride;
      stride = stride * scale->shape[d] + gap;
    }
  }
  scale->data = make_buffer(&t->scale, scale);
}

static void make_rotary(struct trial *t, struct rng *rng) {
  const int64_t pairs = rng_between(rng, 0, t->dim / 2);
  for (int64_t i = 0; i < 64 * pairs; i++) {
    const double angle = 10 * rng_normal(rng);
    t->cos[i] = (float)cos(angle);
    t->sin[i] = (float)sin(angle);
  }
  t->args.rotary_cos = t->args.rotary_sin = (fa3_tensor){
      .data = t->cos, .dtype = FA3_FLOAT32, .rank = 2, .shape = {64, pairs}, .strides = {pairs, 1}};
  t->args.rotary_sin.data = t->sin;
  if (rng_chance(rng, 0.5)) t->args.flags |= FA3_ROTARY_INTERLEAVED;
  if (rng_chance(rng, 0.5)) return;
  fa3_tensor *positions = &t->args.positions;
  for (int i = 0; i < 256; i++) t->positions[i] = (int32_t)rng_between(rng, 0, 63);
  *positions = t->packed ? fa3_vector(t->positions, FA3_INT32, t->rows)
                         : (fa3_tensor){.data = t->positions,
                                        .dtype = FA3_INT32,
                                        .rank = 2,
                                        .shape = {t->batch, t->rows},
                                        .strides = {t->rows, 1}};
}

static void free_trial(struct trial *t) {
  buffer_free(&t->input);
  buffer_free(&t->codes);
  buffer_free(&t->scale);
}

static void test_random_calls(void **state) {
  (void)state;
  static struct trial trial;
  struct trial *t = &trial;
  for (uint64_t number = 0; number < 120; number++) {
    struct rng rng = rng_for(number);
    memset(t, 0, sizeof *t);
    fa3_quantize_args *args = &t->args;
    *args = (fa3_quantize_args){.struct_size = sizeof *args, .num_threads = 3};
    t->packed = rng_chance(&rng, 0.4);
    t->batch = rng_between(&rng, 0, 4);
    t->heads = rng_between(&rng, 1, 3);
    t->dim = RNG_PICK(&rng, 1, 3, 16, 17, 64, 80, 96, 127, 128, 192, 255, 256);
    make_lengths(t, &rng);
    args->input = make_view(t, (fa3_dtype)RNG_PICK(&rng, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16),
                            rng_between(&rng, 0, 5));
    args->codes = make_view(t, FA3_FLOAT8_E4M3, rng_between(&rng, 0, 5));
    args->input.data = make_buffer(&t->input, &args->input);
    args->codes.data = make_buffer(&t->codes, &args->codes);
    fill_input(t, &rng);
    make_scale(t, &rng);
    if (rng_chance(&rng, 0.3)) args->flags |= FA3_SUBTRACT_MEAN;
    if (rng_chance(&rng, 0.4)) {
      args->flags |= FA3_ROTATE;
      args->seed = rng_chance(&rng, 0.2) ? 0 : rng_bits(&rng);
    }
    if (rng_chance(&rng, 0.3)) make_rotary(t, &rng);
    if (fa3_quantize(args)) fail_msg("call %llu: %s", (unsigned long long)number, fa3_last_error());
    check(t);
    check_untouched(t);
    free_trial(t);
  }
}

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
    rotate(seed, dim, q_turned);
    rotate(seed, dim, k_turned);
    for (int d = 0; d < dim; d++) {
      const double q_error = half_step(q_turned[d], q_scale);
      const double k_error = half_step(k_turned[d], k_scale);
      score += value_of(q_codes[d]) * q_scale * value_of(k_codes[d]) * k_scale;
      wrong += value_of(q_codes[d]) * q_scale * value_of(other[d]) * o_scale;
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
  const fa3_status got = fa3_quantize(args);
  if (got != status || !strstr(fa3_last_error(), text))
    fail_msg("%s (%s): expected %s with \"%s\"", fa3_status_name(got), fa3_last_error(),
             fa3_status_name(status), text);
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
  REFUSED(args.input.dtype = FA3_INT32, FA3_INVALID_DTYPE, "input.dtype");
  REFUSED(args.input.dtype = FA3_FLOAT8_E4M3, FA3_UNSUPPORTED,
          "FA3_FLOAT8_E4M3: expected FA3_FLOAT32");
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
  REFUSED(args.flags = FA3_CAUSAL, FA3_INVALID_FLAGS, "flags is 0x1");
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
  capability.device.type = FA3_CUDA;
  assert_int_equal(fa3_supports(&capability), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "CUDA"));
  capability.device.type = FA3_CPU;
  capability.output_dtype = FA3_FLOAT16;
  assert_int_equal(fa3_supports(&capability), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "codes"));
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_calls), cmocka_unit_test(test_edges),
      cmocka_unit_test(test_scores),       cmocka_unit_test(test_outlier),
      cmocka_unit_test(test_refusals),     cmocka_unit_test(test_packed_refusals),
      cmocka_unit_test(test_no_rows),      cmocka_unit_test(test_support),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
