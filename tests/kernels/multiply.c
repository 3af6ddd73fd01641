#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "integer.h"
#include "kernels.h"

/* Sizes in rows, columns and elements of depth. */
struct operands {
  struct product product;
  int64_t depth;
  int64_t whole_rows; /* what a level may touch: rows up to a strip, columns up to a panel */
  int64_t whole_columns;
  float *left;
  float *right;
  float *output;
};

static void fill_words(struct run *run, float *words, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    double values[2] = {rng_normal(&run->rng), rng_normal(&run->rng)};
    words[i] = arrange_word(run->routines, values);
  }
}

static struct operands operands_new(struct run *run, int64_t rows, int64_t columns, int64_t depth) {
  const struct routines *routines = run->routines;
  struct operands o = {
      .product = {.rows = rows, .columns = columns, .depth = depth},
      .depth = depth * routines->elements_per_word,
      .whole_rows = round_up(rows, routines->strip),
      .whole_columns = round_up(columns, routines->panel),
  };
  struct product *p = &o.product;
  p->left_stride = depth + rng_between(&run->rng, 0, 5);
  p->right_stride = routines->panel * (depth + rng_between(&run->rng, 0, 5));
  p->output_stride = o.whole_columns + rng_between(&run->rng, 0, 5);
  int64_t left = o.whole_rows * p->left_stride;
  int64_t right = o.whole_columns / routines->panel * p->right_stride;
  int64_t output = o.whole_rows * p->output_stride;
  p->left = o.left = new_floats(left);
  p->right = o.right = new_floats(right);
  p->output = o.output = new_floats(output);
  fill_words(run, o.left, left);
  fill_words(run, o.right, right);
  return o;
}

static void operands_free(struct operands *o) {
  guarded_free(o->left);
  guarded_free(o->right);
  guarded_free(o->output);
}

/* Each of n products and sums in float32 loses at most 2^-24 of the sum of magnitudes; what
 * VDPBF16PS and TDPBF16PS take for 0 loses at most the smallest normal number each time. */
static bool check_element(const struct run *run, const struct operands *o, int64_t row,
                          int64_t column, double before) {
  const struct routines *routines = run->routines;
  const struct product *p = &o->product;
  const float *left = p->left + row * p->left_stride;
  const float *right =
      p->right + column / routines->panel * p->right_stride + column % routines->panel;
  double sum = before, magnitude = fabs(before);
  for (int64_t k = 0; k < o->depth; k++) {
    double product =
        load_arranged(routines, left, 1, k) * load_arranged(routines, right, routines->panel, k);
    sum += product;
    magnitude += fabs(product);
  }
  double n = (double)o->depth + 1;
  double bound = n * 0x1p-24 / (1 - n * 0x1p-24) * magnitude + n * 0x1p-126;
  double value = p->output[row * p->output_stride + column];
  if (fabs(value - sum) <= bound) return true;
  return wrong(run, "%d x %d x %d: row %d, column %d is %.9g: expected %.9g within %.2g",
               (int)p->rows, (int)p->columns, (int)o->depth, (int)row, (int)column, value, sum,
               bound);
}

static void enter(const struct routines *routines) {
  if (routines->enter) routines->enter();
}

static void leave(const struct routines *routines) {
  if (routines->leave) routines->leave();
}

static bool check(struct run *run) {
  const struct routines *routines = run->routines;
  int64_t rows = rng_between(&run->rng, 1, routines->strip);
  int64_t columns = routines->vector * rng_between(&run->rng, 1, 256 / routines->vector);
  int64_t depth = routines->depth_step * rng_between(&run->rng, 1, 128 / routines->depth_step);
  struct operands o = operands_new(run, rows, columns, depth);
  struct product *p = &o.product;
  p->accumulate = rng_chance(&run->rng, 0.5);
  double *before = calloc((size_t)(rows * columns), sizeof *before);
  if (p->accumulate)
    for (int64_t i = 0; i < rows * columns; i++) {
      float value = (float)rng_normal(&run->rng);
      p->output[i / columns * p->output_stride + i % columns] = value;
      before[i] = value;
    }
  enter(routines);
  routines->multiply(p);
  leave(routines);
  bool good = guarded_intact(o.output) || wrong(run, "wrote outside");
  for (int64_t i = 0; good && i < rows * columns; i++)
    good = check_element(run, &o, i / columns, i % columns, before[i]);
  free(before);
  operands_free(&o);
  return good;
}

static void call(const struct run *run, void *product) {
  run->routines->multiply(product);
}

/* A strip with a tile of 256 keys at head dims 64 and 128. */
static void bench(struct run *run) {
  const struct routines *routines = run->routines;
  int64_t pair = routines->elements_per_word;
  const struct {
    const char *what;
    int64_t columns, depth;
    bool accumulate;
  } products[] = {{"scores, 64", 256, 64, false},
                  {"output, 64", 64, 256, true},
                  {"scores, 128", 256, 128, false},
                  {"output, 128", 128, 256, true}};
  for (int i = 0; i < 4; i++) {
    struct operands o =
        operands_new(run, routines->strip, products[i].columns, products[i].depth / pair);
    struct product *p = &o.product;
    p->accumulate = products[i].accumulate;
    memset(o.output, 0, (size_t)(o.whole_rows * p->output_stride) * sizeof *o.output);
    double work = 2 * (double)(p->rows * p->columns * o.depth);
    enter(routines);
    report(run, products[i].what, call, p, work, "flop");
    leave(routines);
    operands_free(&o);
  }
}

const struct subject multiply_subject = {"multiply", false, check, bench};
