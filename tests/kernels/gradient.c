/* The backward pass's routines beside those of the forward pass. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { STRIDE = 96, LARGEST_DIM = 256 };

static const double u = 0x1p-24;

/* A strip as backward.c makes it; the probabilities are at most 1, as an lse makes them. */
struct strip {
  struct gradient_step step;
  float *scores; /* these four are guarded */
  float *gradients;
  float *lse;
  float *delta;
  float *scores_before;
  float *gradients_before;
};

static struct strip strip_new(struct run *run, int64_t rows, int64_t columns, double spread,
                              float softcap) {
  struct rng *rng = &run->rng;
  struct strip s = {.step = {.rows = rows,
                             .columns = columns,
                             .stride = STRIDE,
                             .scale = (float)(0.05 + rng_uniform(rng)),
                             .softcap = softcap}};
  s.step.scores = s.scores = new_floats(rows * STRIDE);
  s.step.gradients = s.gradients = new_floats(rows * STRIDE);
  s.step.lse = s.lse = new_floats(columns);
  s.step.delta = s.delta = new_floats(columns);
  for (int64_t c = 0; c < columns; c++) {
    const double hidden = (double)RNG_PICK(rng, 0, 0, 1, 2) / 2;
    float largest = -INFINITY;
    for (int64_t r = 0; r < rows; r++) {
      double score = spread * rng_normal(rng);
      if (softcap > 0) score = softcap * tanh(score / softcap);
      s.scores[r * STRIDE + c] = rng_chance(rng, hidden) ? -INFINITY : (float)score;
      s.gradients[r * STRIDE + c] = (float)rng_normal(rng);
      largest = fmaxf(largest, s.scores[r * STRIDE + c] * s.step.scale);
    }
    const bool seen = largest > -INFINITY && rng_chance(rng, 0.9);
    s.lse[c] = seen ? largest + (float)rng_uniform(rng) : INFINITY;
    s.delta[c] = (float)rng_normal(rng);
  }
  s.scores_before = copy_floats(s.scores, rows * STRIDE);
  s.gradients_before = copy_floats(s.gradients, rows * STRIDE);
  return s;
}

static void strip_free(struct strip *s) {
  guarded_free(s->scores);
  guarded_free(s->gradients);
  guarded_free(s->lse);
  guarded_free(s->delta);
  free(s->scores_before);
  free(s->gradients_before);
}

/* As softmax.c counts what 2^x loses; exp's argument is a product, a difference and a product with
 * log2(e), rounded itself. The products and the derivative of the cap lose some units more. */
static bool check_score(const struct run *run, const struct strip *s, int64_t r, int64_t c) {
  const struct gradient_step *step = &s->step;
  const double stored = run->routines->elements_per_word == 1 ? 0 : 0x1p-8;
  const double score = s->scores_before[r * STRIDE + c], scaled = score * (double)step->scale;
  const double exponent = scaled - (double)step->lse[c];
  const double probability = exp(exponent);
  const double relative = probability == 0 ? 0 : (fabs(scaled) + 3 * fabs(exponent) + 6) * u;
  double value = load_arranged(run->routines, step->scores + r * STRIDE, 1, c);
  if (!near(run, "probability", r, c, value, probability,
            probability * (relative + stored) + 0x1p-126))
    return false;
  const double difference = (double)s->gradients_before[r * STRIDE + c] - (double)step->delta[c];
  double derivative = 1;
  if (step->softcap > 0 && probability > 0) derivative -= pow(score / (double)step->softcap, 2);
  const double gradient = probability * difference * derivative;
  const double bound = fabs(gradient) * (relative + stored + 4 * u) +
                       probability * fabs(difference) * (step->softcap > 0 ? 6 * u : 0) +
                       (fabs(difference) + 1) * 0x1p-126;
  value = load_arranged(run->routines, step->gradients + r * STRIDE, 1, c);
  return near(run, "gradient", r, c, value, gradient, bound);
}

static bool check_gradient(struct run *run) {
  const int64_t panel = run->routines->panel;
  const int64_t columns = panel * rng_between(&run->rng, 1, STRIDE / panel);
  struct strip s =
      strip_new(run, rng_between(&run->rng, 1, run->routines->strip), columns,
                (double)RNG_PICK(&run->rng, 1, 10, 200), (float)RNG_PICK(&run->rng, 0, 0, 5, 50));
  run->routines->gradient(&s.step);
  bool good =
      (guarded_intact(s.scores) && guarded_intact(s.gradients)) || wrong(run, "wrote outside");
  for (int64_t r = 0; good && r < s.step.rows; r++)
    for (int64_t c = 0; good && c < columns; c++) good = check_score(run, &s, r, c);
  strip_free(&s);
  return good;
}

static void call_gradient(const struct run *run, void *argument) {
  struct strip *s = argument;
  const size_t size = (size_t)(s->step.rows * STRIDE) * sizeof(float);
  memcpy(s->scores, s->scores_before, size);
  memcpy(s->gradients, s->gradients_before, size);
  run->routines->gradient(&s->step);
}

static void bench_gradient(struct run *run) {
  const int64_t rows = run->routines->strip;
  struct strip s = strip_new(run, rows, STRIDE, 1, 0);
  report(run, "with copies", call_gradient, &s, (double)(rows * STRIDE), "score");
  strip_free(&s);
}

struct transposition {
  int64_t rows, columns, stride;
  float *arranged;
  float *transposed;
};

static struct transposition transposition_new(struct run *run, int64_t rows, int64_t columns) {
  struct transposition t = {rows, columns, .stride = (int64_t)run->routines->strip + 8};
  t.arranged = new_floats(rows * STRIDE);
  t.transposed = new_floats(columns * t.stride);
  for (int64_t i = 0; i < rows * STRIDE; i++) {
    const double values[2] = {rng_normal(&run->rng), rng_normal(&run->rng)};
    t.arranged[i] = arrange_word(run->routines, values);
  }
  return t;
}

static void transposition_free(struct transposition *t) {
  guarded_free(t->arranged);
  guarded_free(t->transposed);
}

static void call_transpose(const struct run *run, void *argument) {
  struct transposition *t = argument;
  run->routines->transpose(t->arranged, t->rows, t->columns, STRIDE, t->transposed, t->stride);
}

/* Zeros fill the rows up to a multiple of 8; what comes after stays as it was. */
static bool check_column(const struct run *run, const struct transposition *t, int64_t column) {
  const struct routines *routines = run->routines;
  const float *to = t->transposed + column * t->stride;
  const int64_t whole = (t->rows + 7) / 8 * 8;
  for (int64_t r = 0; r < whole; r++) {
    const double value = load_arranged(routines, to, 1, r);
    const double expected =
        r < t->rows ? load_arranged(routines, t->arranged + r * STRIDE, 1, column) : 0;
    if (!(value == expected))
      return wrong(run, "row %d of %d, column %d is %g: expected %g", (int)r, (int)t->rows,
                   (int)column, value, expected);
  }
  for (int64_t word = whole / routines->elements_per_word; word < t->stride; word++)
    if (!isnan(to[word])) return wrong(run, "wrote past the rows of column %d", (int)column);
  return true;
}

static bool check_transpose(struct run *run) {
  const int64_t panel = run->routines->panel;
  struct transposition t = transposition_new(run, rng_between(&run->rng, 1, run->routines->strip),
                                             panel * rng_between(&run->rng, 1, STRIDE / panel));
  call_transpose(run, &t);
  bool good = guarded_intact(t.transposed) || wrong(run, "wrote outside");
  for (int64_t c = 0; good && c < t.columns; c++) good = check_column(run, &t, c);
  transposition_free(&t);
  return good;
}

static void bench_transpose(struct run *run) {
  struct transposition t = transposition_new(run, run->routines->strip, STRIDE);
  report(run, "a strip x 96", call_transpose, &t, (double)(t.rows * STRIDE), "element");
  transposition_free(&t);
}

struct dot {
  struct rows a, b;
  float result;
};

static struct rows random_row(struct run *run, int64_t width) {
  struct rows row = {.dtype = run->dtype, .count = 1, .width = width};
  char *data = guarded_new((size_t)width * fa3_dtype_size(run->dtype));
  fill_rows(&run->rng, &row, data);
  row.data = data;
  return row;
}

static void call_dot(const struct run *run, void *argument) {
  struct dot *d = argument;
  d->result = run->routines->dot(d->a.data, d->b.data, d->a.width, d->a.dtype);
}

static void dot_free(struct dot *d) {
  guarded_free((char *)d->a.data);
  guarded_free((char *)d->b.data);
}

static bool check_dot(struct run *run) {
  const int64_t width = 8 * rng_between(&run->rng, 1, LARGEST_DIM / 8);
  struct dot d = {random_row(run, width), random_row(run, width), NAN};
  call_dot(run, &d);
  double sum = 0, magnitude = 0;
  for (int64_t i = 0; i < width; i++) {
    const double product = load_element(&d.a, 0, i) * load_element(&d.b, 0, i);
    sum += product;
    magnitude += fabs(product);
  }
  bool good = near(run, "the sum", 0, 0, d.result, sum, (double)width * u * magnitude);
  dot_free(&d);
  return good;
}

static void bench_dot(struct run *run) {
  struct dot d = {random_row(run, 128), random_row(run, 128), NAN};
  report(run, "128", call_dot, &d, 128, "element");
  dot_free(&d);
}

const struct subject gradient_subject = {"gradient", false, check_gradient, bench_gradient};
const struct subject transpose_subject = {"transpose", false, check_transpose, bench_transpose};
const struct subject dot_subject = {"dot", true, check_dot, bench_dot};
