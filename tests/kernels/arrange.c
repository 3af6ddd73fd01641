/* Arranging copies: what comes out is compared bit for bit. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "integer.h"
#include "kernels.h"

enum { MOST_KEYS = 256, LARGEST_DIM = 256 };

static struct rows random_rows(struct run *run, int64_t most) {
  struct rows rows = {
      .dtype = run->dtype,
      .count = rng_between(&run->rng, 1, most),
      .width = 8 * rng_between(&run->rng, 1, LARGEST_DIM / 8),
  };
  int64_t size = (int64_t)fa3_dtype_size(run->dtype);
  rows.stride = size * (rows.width + rng_between(&run->rng, 0, 9));
  char *data = guarded_new((size_t)((rows.count - 1) * rows.stride + rows.width * size));
  fill_rows(&run->rng, &rows, data);
  rows.data = data;
  return rows;
}

static int64_t depth_of(const struct run *run, int64_t elements) {
  int64_t pair = run->routines->elements_per_word;
  return round_up((elements + pair - 1) / pair, run->routines->depth_step);
}

/* Compares one arranged element with the row's, or with the 0 of the padding. */
static bool same(const struct run *run, const struct rows *rows, int64_t row, int64_t element,
                 double factor, double arranged) {
  bool inside = row < rows->count && element < rows->width;
  double expected = inside ? factor * load_element(rows, row, element) : 0;
  if (arranged == expected) return true;
  return wrong(run, "row %d, element %d of %d x %d is %g: expected %g", (int)row, (int)element,
               (int)rows->count, (int)rows->width, arranged, expected);
}

static bool check_queries(struct run *run) {
  const struct routines *routines = run->routines;
  struct rows rows = random_rows(run, 20);
  double factor = (double)rng_between(&run->rng, -1, 1);
  int64_t depth = depth_of(run, rows.width);
  float *arranged = new_floats(rows.count * depth);
  routines->arrange_queries(&rows, (float)factor, depth, arranged);
  bool good = guarded_intact(arranged) || wrong(run, "wrote outside");
  for (int64_t r = 0; good && r < rows.count; r++)
    for (int64_t i = 0; good && i < depth * routines->elements_per_word; i++)
      good = same(run, &rows, r, i, factor, load_arranged(routines, arranged + r * depth, 1, i));
  guarded_free(arranged);
  guarded_free((char *)rows.data);
  return good;
}

static bool check_keys(struct run *run) {
  const struct routines *routines = run->routines;
  struct rows rows = random_rows(run, MOST_KEYS);
  int64_t depth = depth_of(run, rows.width), panel = routines->panel;
  int64_t columns = round_up(rows.count, panel);
  float *arranged = new_floats(columns * depth);
  routines->arrange_keys(&rows, depth, arranged);
  bool good = guarded_intact(arranged) || wrong(run, "wrote outside");
  for (int64_t key = 0; good && key < columns; key++) {
    const float *column = arranged + key / panel * panel * depth + key % panel;
    for (int64_t i = 0; good && i < depth * routines->elements_per_word; i++)
      good = same(run, &rows, key, i, 1, load_arranged(routines, column, panel, i));
  }
  guarded_free(arranged);
  guarded_free((char *)rows.data);
  return good;
}

static bool check_values(struct run *run) {
  const struct routines *routines = run->routines;
  struct rows rows = random_rows(run, MOST_KEYS);
  int64_t depth = depth_of(run, rows.count), panel = routines->panel;
  int64_t panel_stride = panel * (depth + rng_between(&run->rng, 0, 3));
  int64_t columns = round_up(rows.width, panel);
  float *arranged = new_floats(columns / panel * panel_stride);
  routines->arrange_values(&rows, depth, panel_stride, arranged);
  bool good = guarded_intact(arranged) || wrong(run, "wrote outside");
  for (int64_t i = 0; good && i < rows.width; i++) {
    const float *column = arranged + i / panel * panel_stride + i % panel;
    for (int64_t key = 0; good && key < depth * routines->elements_per_word; key++)
      good = same(run, &rows, key, i, 1, load_arranged(routines, column, panel, key));
  }
  guarded_free(arranged);
  guarded_free((char *)rows.data);
  return good;
}

static float rounded(fa3_dtype dtype, float value) {
  if (dtype == FA3_FLOAT16) return float_from_half(half_from_float(value));
  return dtype == FA3_BFLOAT16 ? float_from_bfloat(bfloat_from_float(value)) : value;
}

static bool check_stored(struct run *run, bool add) {
  struct rows stored = {.dtype = run->dtype, .count = 1};
  stored.width = 8 * rng_between(&run->rng, 1, LARGEST_DIM / 8);
  float factor = (float)rng_normal(&run->rng);
  float *row = guarded_new((size_t)round_up(stored.width, run->routines->panel) * sizeof *row);
  for (int64_t i = 0; i < stored.width; i++) row[i] = (float)(100 * rng_normal(&run->rng));
  const int64_t special = rng_between(&run->rng, 0, stored.width - 1);
  row[special] = (float)RNG_PICK(&run->rng, 0, 1) ? NAN : INFINITY;
  char *data = guarded_new((size_t)stored.width * fa3_dtype_size(run->dtype));
  stored.data = data;
  float before[LARGEST_DIM] = {0};
  if (add) {
    fill_rows(&run->rng, &stored, data);
    for (int64_t i = 0; i < stored.width; i++) before[i] = (float)load_element(&stored, 0, i);
  }
  (add ? run->routines->add_row : run->routines->store_row)(row, stored.width, factor, run->dtype,
                                                            data);
  bool good = guarded_intact(data) || wrong(run, "wrote outside");
  for (int64_t i = 0; good && i < stored.width; i++) {
    float product = row[i] * factor;
    float expected = rounded(run->dtype, add ? before[i] + product : product);
    double value = load_element(&stored, 0, i);
    if (!(value == (double)expected || (isnan(value) && isnan(expected))))
      good = wrong(run, "element %d is %g: expected %g", (int)i, value, (double)expected);
  }
  guarded_free(row);
  guarded_free(data);
  return good;
}

static bool check_store_row(struct run *run) {
  return check_stored(run, false);
}

static bool check_add_row(struct run *run) {
  return check_stored(run, true);
}

struct arrange_bench {
  struct rows rows;
  int64_t depth;
  float *arranged;
};

static void call_queries(const struct run *run, void *argument) {
  struct arrange_bench *b = argument;
  run->routines->arrange_queries(&b->rows, 1, b->depth, b->arranged);
}

static void call_keys(const struct run *run, void *argument) {
  struct arrange_bench *b = argument;
  run->routines->arrange_keys(&b->rows, b->depth, b->arranged);
}

static void call_values(const struct run *run, void *argument) {
  struct arrange_bench *b = argument;
  run->routines->arrange_values(&b->rows, b->depth, run->routines->panel * b->depth, b->arranged);
}

static void call_store_row(const struct run *run, void *argument) {
  struct arrange_bench *b = argument;
  run->routines->store_row((const float *)b->arranged, b->rows.width, 0.5f, run->dtype,
                           (char *)b->rows.data);
}

static void call_add_row(const struct run *run, void *argument) {
  struct arrange_bench *b = argument;
  run->routines->add_row((const float *)b->arranged, b->rows.width, 0.5f, run->dtype,
                         (char *)b->rows.data);
}

/* 256 rows of head dim 128, one of 8 heads: a tile as the engine arranges it. */
static void bench_arranging(struct run *run, void (*call)(const struct run *, void *),
                            int64_t count, int64_t depth) {
  struct arrange_bench b = {.depth = depth_of(run, depth)};
  int64_t size = (int64_t)fa3_dtype_size(run->dtype);
  b.rows =
      (struct rows){.dtype = run->dtype, .stride = size * 8 * 128, .count = count, .width = 128};
  char *data = guarded_new((size_t)(count * b.rows.stride));
  fill_rows(&run->rng, &b.rows, data);
  b.rows.data = data;
  const size_t words = (size_t)MOST_KEYS * LARGEST_DIM;
  b.arranged = guarded_new(words * sizeof *b.arranged);
  memset(b.arranged, 0, words * sizeof *b.arranged);
  report(run, count == 1 ? "1x128" : "256x128", call, &b, (double)(count * 128), "element");
  guarded_free(b.arranged);
  guarded_free(data);
}

static void bench_queries(struct run *run) {
  bench_arranging(run, call_queries, 256, 128);
}

static void bench_keys(struct run *run) {
  bench_arranging(run, call_keys, 256, 128);
}

static void bench_values(struct run *run) {
  bench_arranging(run, call_values, 256, 256);
}

static void bench_store_row(struct run *run) {
  bench_arranging(run, call_store_row, 1, 128);
}

static void bench_add_row(struct run *run) {
  bench_arranging(run, call_add_row, 1, 128);
}

const struct subject arrange_subjects[5] = {
    {"arrange_queries", true, check_queries, bench_queries},
    {"arrange_keys", true, check_keys, bench_keys},
    {"arrange_values", true, check_values, bench_values},
    {"store_row", true, check_store_row, bench_store_row},
    {"add_row", true, check_add_row, bench_add_row},
};
