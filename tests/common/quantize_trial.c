#include "quantize_trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "nearest.h"
#include "reference.h"
#include "tensor.h"
#include "test.h"

enum { MOST_DIM = E4M3_MOST_DIM, POISON = QUANTIZE_POISON, MOST_SCALES = 1 << 17 };

/* The code of a magnitude, of two that are as near the even one: codes have the order of their
 * values. */
static int nearest_code(double magnitude) {
  int below = 0, above = 0x7e;
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    if (e4m3_value(middle) <= magnitude)
      below = middle;
    else
      above = middle;
  }
  const double nearer = fabs(magnitude - e4m3_value(above)) - fabs(magnitude - e4m3_value(below));
  return nearer > 0 || (nearer == 0 && below % 2 == 0) ? below : above;
}

static int64_t rows_of(const struct quantize_trial *t, int64_t b) {
  if (t->args.seqused_q.data) return t->used[b];
  return t->packed ? t->starts[b + 1] - t->starts[b] : t->rows;
}

/* A row of the sequence in memory, counted from the tensor's first. */
static int64_t row_at(const struct quantize_trial *t, int64_t b, int64_t row) {
  return t->packed ? t->starts[b] + row : b * t->rows + row;
}

static int64_t element_at(const struct quantize_trial *t, const fa3_tensor *tensor, int64_t b,
                          int64_t row, int64_t head) {
  const int64_t *strides = tensor->strides;
  if (t->packed) return (t->starts[b] + row) * strides[0] + head * strides[1];
  return b * strides[0] + row * strides[1] + head * strides[2];
}

static double nearest_number(fa3_dtype dtype, double x) {
  if (dtype == FA3_FLOAT32) return (double)(float)x;
  return (double)number_of_bits(dtype, nearest_bits(dtype, (long double)x));
}

/* A pair before a rotation, to the bit. */
static void turn_before_rotation(const struct quantize_trial *t, float c, float s, double *first,
                                 double *second) {
  const fa3_dtype dtype = t->args.input.dtype;
  const double u = *first, v = *second;
  if (t->args.rotary_cos.dtype == FA3_FLOAT32) {
    const float products[] = {(float)u * c, (float)v * s, (float)u * s, (float)v * c};
    *first = nearest_number(dtype, (double)(products[0] - products[1]));
    *second = nearest_number(dtype, (double)(products[2] + products[3]));
    return;
  }
  *first = nearest_number(dtype, u * (double)c - nearest_number(dtype, v * (double)s));
  *second = nearest_number(dtype, v * (double)c + nearest_number(dtype, u * (double)s));
}

/* With rotary embedding. */
static void read_row(const struct quantize_trial *t, int64_t b, int64_t row, int64_t head,
                     double *x) {
  const int64_t from = element_at(t, &t->args.input, b, row, head);
  const bool interleaved = t->args.flags & FA3_ROTARY_INTERLEAVED;
  for (int64_t d = 0; d < t->dim; d++) x[d] = reference_load(&t->args.input, from + d);
  if (!t->args.rotary_cos.data) return;
  const int64_t pairs = t->args.rotary_cos.shape[1];
  const int64_t position = t->args.positions.data ? t->positions[row_at(t, b, row)] : row;
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + pairs;
    const float c = t->cos[position * pairs + i], s = t->sin[position * pairs + i];
    const double u = x[first], v = x[second];
    if (t->args.flags & FA3_ROTATE) {
      turn_before_rotation(t, c, s, &x[first], &x[second]);
      continue;
    }
    x[first] = u * (double)c - v * (double)s;
    x[second] = u * (double)s + v * (double)c;
  }
}

/* What is quantised; and how far the library's may be from it. Of an element, turning rounds three
 * times, the mean and taking it off once each, and the transform's factors and sums of up to 256
 * terms ten times: 16 times at most, each by 2^-24 of no more than the magnitudes that are summed.
 */
static double prepare_row(const struct quantize_trial *t, int64_t b, int64_t row, int64_t head,
                          const double *mean, double *x) {
  const bool changed = t->args.rotary_cos.data || t->args.flags;
  double sum = 0;
  read_row(t, b, row, head, x);
  for (int64_t d = 0; d < t->dim; d++) {
    sum += 2 * (fabs(x[d]) + 2 * fabs(mean[d])); /* a pair is up to twice its larger element */
    x[d] -= mean[d];
  }
  if (t->args.flags & FA3_ROTATE) rotate_head(t->args.seed, (int)t->dim, x);
  return changed ? 16 * 0x1p-24 * sum : 0;
}

static void find_mean(const struct quantize_trial *t, int64_t b, int64_t head, double *mean) {
  double x[MOST_DIM] = {0};
  memset(mean, 0, MOST_DIM * sizeof *mean);
  if (!(t->args.flags & FA3_SUBTRACT_MEAN)) return;
  for (int64_t row = 0; row < rows_of(t, b); row++) {
    read_row(t, b, row, head, x);
    for (int64_t d = 0; d < t->dim; d++) mean[d] += x[d] / (double)rows_of(t, b);
  }
}

/* Where a row's scale is: the header's words, once more. */
static int64_t scale_at(const struct quantize_trial *t, int64_t b, int64_t row, int64_t head) {
  const fa3_tensor *scale = &t->args.codes_scale;
  const int64_t rows = t->args.codes_scale_rows;
  if (scale->rank == 1) return 0;
  if (!rows) return b * scale->strides[0] + head * scale->strides[1];
  if (t->packed)
    return head * scale->strides[0] + (t->starts[b] / rows + b + row / rows) * scale->strides[1];
  return b * scale->strides[0] + head * scale->strides[1] + row / rows * scale->strides[2];
}

static float written_scale(const struct quantize_trial *t, int64_t at) {
  return ((const float *)t->args.codes_scale.data)[at];
}

static void check_row(const struct quantize_trial *t, int64_t b, int64_t row, int64_t head,
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
    const double nearest = e4m3_value(nearest_code(fabs(x[d]) / (double)scale)) * (double)scale;
    const double least = fabs(fabs(x[d]) - nearest) + 2 * bound + 0x1p-23 * fabs(x[d]);
    if (!(fabs(e4m3_value(code) * (double)scale - x[d]) <= least))
      fail_msg("row %d, element %d: %g is code 0x%02x of scale %g", (int)row, (int)d, x[d],
               (unsigned)code, (double)scale);
  }
}

/* The scales from the rows that share them, in double; then every code. */
static void check_written(const struct quantize_trial *t) {
  static double largest[MOST_SCALES], slack[MOST_SCALES];
  const size_t scales = t->scale.size / sizeof(float);
  assert_in_range(scales, 0, MOST_SCALES);
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
static void check_untouched(const struct quantize_trial *t) {
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
static fa3_tensor make_view(const struct quantize_trial *t, fa3_dtype dtype, int64_t gap) {
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

static void *make_buffer(struct buffer *buffer, const fa3_tensor *tensor) {
  const size_t size = (size_t)tensor_reach(tensor) * fa3_dtype_size(tensor->dtype);
  *buffer = buffer_at_end(size);
  memset(buffer->data, POISON, size);
  return buffer->data;
}

static void fill_input(struct quantize_trial *t, struct rng *rng) {
  const double size = exp2((double)rng_between(rng, -8, 8)), centre = 3 * rng_normal(rng);
  for (int64_t i = 0; i < tensor_reach(&t->args.input); i++) {
    const double outlier = rng_chance(rng, 0.01) ? 30 * rng_normal(rng) : 0;
    tensor_store(&t->args.input, i, size * (centre + rng_normal(rng) + outlier));
  }
}

static void make_lengths(struct quantize_trial *t, struct rng *rng, int64_t longest) {
  for (int64_t b = 0; t->packed && b < t->batch; b++)
    t->starts[b + 1] = (int32_t)(t->starts[b] + rng_between(rng, 0, longest));
  t->rows = t->packed ? t->starts[t->batch] + rng_between(rng, 0, 3) : rng_between(rng, 0, longest);
  if (t->packed) {
    t->args.cu_seqlens_q = fa3_vector(t->starts, FA3_INT32, t->batch + 1);
    t->args.max_seqlen_q = rng_between(rng, 0, 1) * (longest + 1);
  }
  if (rng_chance(rng, 0.5)) return;
  for (int64_t b = 0; b < t->batch; b++)
    t->used[b] =
        (int32_t)rng_between(rng, 0, t->packed ? t->starts[b + 1] - t->starts[b] : t->rows);
  t->args.seqused_q = fa3_vector(t->used, FA3_INT32, t->batch);
}

static void make_scale(struct quantize_trial *t, struct rng *rng) {
  fa3_tensor *scale = &t->args.codes_scale;
  const int64_t form = rng_between(rng, 0, 2), gap = rng_between(rng, 0, 2);
  const int64_t rows = form == 2 ? RNG_PICK(rng, 1, 2, 7, 16, 33, 128, 500, INT64_MAX) : 0;
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

/* Of float32 or of the input's dtype, whose numbers `numbers` then has. */
static void fill_table(struct buffer *buffer, fa3_tensor *table, float *numbers) {
  table->data = make_buffer(buffer, table);
  for (int64_t i = 0; i < table->shape[0] * table->shape[1]; i++) {
    tensor_store(table, i, (double)numbers[i]);
    numbers[i] = (float)reference_load(table, i);
  }
}

static void make_rotary(struct quantize_trial *t, struct rng *rng, int64_t longest) {
  /* Of a whole head, of vectors, of any. */
  int64_t pairs = t->dim / 2;
  if (rng_chance(rng, 0.6)) pairs = rng_between(rng, 0, t->dim / 2);
  if (rng_chance(rng, 0.5)) pairs = pairs / 8 * 8;
  const int64_t rows = longest + 4;
  t->cos = malloc((size_t)(rows * pairs + 1) * sizeof *t->cos);
  t->sin = malloc((size_t)(rows * pairs + 1) * sizeof *t->sin);
  assert_true(t->cos && t->sin);
  for (int64_t i = 0; i < rows * pairs; i++) {
    const double angle = 10 * rng_normal(rng);
    t->cos[i] = (float)cos(angle);
    t->sin[i] = (float)sin(angle);
  }
  const fa3_dtype dtype = rng_chance(rng, 0.5) ? FA3_FLOAT32 : t->args.input.dtype;
  t->args.rotary_cos = t->args.rotary_sin = make_matrix(NULL, dtype, rows, pairs);
  fill_table(&t->cos_table, &t->args.rotary_cos, t->cos);
  fill_table(&t->sin_table, &t->args.rotary_sin, t->sin);
  if (rng_chance(rng, 0.5)) t->args.flags |= FA3_ROTARY_INTERLEAVED;
  if (rng_chance(rng, 0.5)) return;
  fa3_tensor *positions = &t->args.positions;
  const int64_t all = t->packed ? t->rows : t->batch * t->rows;
  t->positions = malloc((size_t)(all + 1) * sizeof *t->positions);
  assert_non_null(t->positions);
  for (int64_t i = 0; i < all; i++) t->positions[i] = (int32_t)rng_between(rng, 0, rows - 1);
  *positions = t->packed ? fa3_vector(t->positions, FA3_INT32, t->rows)
                         : make_matrix(t->positions, FA3_INT32, t->batch, t->rows);
}

void quantize_trial_make(struct quantize_trial *t, struct rng *rng, int64_t longest) {
  fa3_quantize_args *args = &t->args;
  assert_in_range(longest, 1, QUANTIZE_MOST_ROWS);
  *t = (struct quantize_trial){.args = {.struct_size = sizeof *args, .num_threads = 3}};
  t->packed = rng_chance(rng, 0.4);
  t->batch = rng_between(rng, 0, 4);
  if (rng_chance(rng, 0.05)) { /* short ones */
    t->batch = rng_between(rng, 33, QUANTIZE_MOST_BATCH);
    if (longest > 20) longest = 20;
  }
  t->heads = rng_between(rng, 1, 3);
  if (t->batch <= 4 && longest <= 400 && rng_chance(rng, 0.3)) t->heads = rng_between(rng, 4, 9);
  t->dim = RNG_PICK(rng, 1, 3, 8, 16, 17, 40, 64, 80, 96, 127, 128, 192, 255, 256);
  const bool by_products = rng_chance(rng, 0.2); /* what a GPU's tensor cores rotate */
  if (by_products) t->dim = RNG_PICK(rng, 64, 128, 256);
  make_lengths(t, rng, longest);
  const int least = by_products ? FA3_FLOAT16 : FA3_FLOAT32;
  args->input = make_view(t, (fa3_dtype)RNG_PICK(rng, least, FA3_FLOAT16, FA3_BFLOAT16),
                          by_products ? RNG_PICK(rng, 0, 8) : RNG_PICK(rng, 0, 0, 1, 3, 5, 8));
  args->codes = make_view(t, FA3_FLOAT8_E4M3,
                          by_products ? RNG_PICK(rng, 0, 16) : RNG_PICK(rng, 0, 0, 1, 3, 5, 16));
  args->input.data = make_buffer(&t->input, &args->input);
  args->codes.data = make_buffer(&t->codes, &args->codes);
  fill_input(t, rng);
  make_scale(t, rng);
  if (rng_chance(rng, 0.3)) args->flags |= FA3_SUBTRACT_MEAN;
  if (by_products || rng_chance(rng, 0.4)) {
    args->flags |= FA3_ROTATE;
    args->seed = rng_chance(rng, 0.2) ? 0 : rng_bits(rng);
  }
  if (rng_chance(rng, by_products ? 0.7 : 0.3)) make_rotary(t, rng, longest);
}

void quantize_trial_check(const struct quantize_trial *t) {
  check_written(t);
  check_untouched(t);
}

void quantize_trial_free(struct quantize_trial *t) {
  buffer_free(&t->input);
  buffer_free(&t->codes);
  buffer_free(&t->scale);
  buffer_free(&t->cos_table);
  buffer_free(&t->sin_table);
  free(t->cos);
  free(t->sin);
  free(t->positions);
}
