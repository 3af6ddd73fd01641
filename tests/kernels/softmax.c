#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { STRIDE = 256, MOST_WIDTH = 256 };

/* What one float32 operation loses. 2^x loses 2 of them in its polynomial's fit (exp2.h), 4 in
 * its operations, and what the rounding of x and of its terms makes of it. */
static const double u = 0x1p-24;

struct state {
  struct softmax_step step;
  float *scores; /* these four are guarded */
  float *output;
  float *maximum;
  float *sum;
  float *before; /* a copy of the scores */
  float *output_before;
  float *maximum_before;
  float *sum_before;
};

/* Rows that begin and rows that go on; -infinity here and there, or everywhere in a row. */
static struct state state_new(struct run *run, int64_t rows, int64_t columns, int64_t width,
                              double spread) {
  struct rng *rng = &run->rng;
  struct state s = {.step = {.rows = rows,
                             .columns = columns,
                             .score_stride = STRIDE,
                             .scale = (float)(0.05 + rng_uniform(rng)),
                             .output_stride = MOST_WIDTH,
                             .output_width = width}};
  s.step.scores = s.scores = new_floats(rows * STRIDE);
  s.step.output = s.output = new_floats(rows * MOST_WIDTH);
  s.step.maximum = s.maximum = new_floats(rows);
  s.step.sum = s.sum = new_floats(rows);
  for (int64_t r = 0; r < rows; r++) {
    double hidden = (double)RNG_PICK(rng, 0, 0, 1, 2) / 2;
    for (int64_t c = 0; c < columns; c++)
      s.scores[r * STRIDE + c] =
          rng_chance(rng, hidden) ? -INFINITY : (float)(spread * rng_normal(rng));
    for (int64_t i = 0; i < width; i++) s.output[r * MOST_WIDTH + i] = (float)rng_normal(rng);
    bool first = rng_chance(rng, 0.3);
    s.maximum[r] = first ? -INFINITY : (float)(2 * spread * rng_normal(rng));
    s.sum[r] = first ? 0 : (float)(1 + 10 * rng_uniform(rng));
  }
  s.before = copy_floats(s.scores, rows * STRIDE);
  s.output_before = copy_floats(s.output, rows * MOST_WIDTH);
  s.maximum_before = copy_floats(s.maximum, rows);
  s.sum_before = copy_floats(s.sum, rows);
  return s;
}

static void state_free(struct state *s) {
  guarded_free(s->scores);
  guarded_free(s->output);
  guarded_free(s->maximum);
  guarded_free(s->sum);
  free(s->before);
  free(s->output_before);
  free(s->maximum_before);
  free(s->sum_before);
}

static bool check_row(const struct run *run, const struct state *s, int64_t r) {
  const struct softmax_step *step = &s->step;
  const float *scores = s->before + r * STRIDE;
  float maximum = s->maximum_before[r];
  for (int64_t c = 0; c < step->columns; c++) maximum = fmaxf(maximum, scores[c]);
  if (!near(run, "maximum", r, 0, s->maximum[r], maximum, 0)) return false;

  const double scale = step->scale;
  double rescale =
      maximum == -INFINITY ? 1 : exp2(((double)s->maximum_before[r] - maximum) * scale);
  double shift = maximum == -INFINITY ? 0 : maximum;
  double sum = s->sum_before[r] * rescale, magnitude = 0;
  double stored = run->routines->elements_per_word == 1 ? 0 : 0x1p-8;
  for (int64_t c = 0; c < step->columns; c++) {
    double exponent = (scores[c] - shift) * scale; /* a difference and a product, both rounded */
    double expected = exp2(exponent);
    double relative = expected == 0 ? 0 : (2 * fabs(exponent) + 6) * u;
    double arranged = load_arranged(run->routines, step->scores + r * STRIDE, 1, c);
    if (!near(run, "probability", r, c, arranged, expected,
              expected * (relative + stored) + 0x1p-126))
      return false;
    sum += expected;
    magnitude += expected * relative;
  }
  double steps = (double)step->columns + 4 + (rescale > 0 ? 2 * fabs(log2(rescale)) : 0);
  if (!near(run, "sum", r, 0, s->sum[r], sum, magnitude + steps * u * sum + 0x1p-126)) return false;
  for (int64_t i = 0; i < step->output_width; i++) {
    double expected = s->output_before[r * MOST_WIDTH + i] * rescale;
    if (!near(run, "output", r, i, s->output[r * MOST_WIDTH + i], expected,
              fabs(expected) * (2 * fabs(log2(rescale)) + 4) * u + 0x1p-126))
      return false;
  }
  return true;
}

static bool check_softmax(struct run *run) {
  const struct routines *routines = run->routines;
  int64_t columns = routines->panel * rng_between(&run->rng, 1, STRIDE / routines->panel);
  int64_t width = routines->vector * rng_between(&run->rng, 1, MOST_WIDTH / routines->vector);
  struct state s = state_new(run, rng_between(&run->rng, 1, routines->strip), columns, width,
                             pow(10, (double)RNG_PICK(&run->rng, 0, 1, 2, 6, 12, 30)));
  routines->softmax(&s.step);
  bool good = (guarded_intact(s.scores) && guarded_intact(s.output) && guarded_intact(s.maximum) &&
               guarded_intact(s.sum)) ||
              wrong(run, "wrote outside");
  for (int64_t r = 0; good && r < s.step.rows; r++) good = check_row(run, &s, r);
  state_free(&s);
  return good;
}

static void call_softmax(const struct run *run, void *argument) {
  struct state *s = argument;
  memcpy(s->scores, s->before, (size_t)(s->step.rows * STRIDE) * sizeof *s->scores);
  run->routines->softmax(&s->step);
}

static void bench_softmax(struct run *run) {
  int64_t rows = run->routines->strip;
  struct state s = state_new(run, rows, STRIDE, 128, 1);
  report(run, "with a copy", call_softmax, &s, (double)(rows * STRIDE), "score");
  state_free(&s);
}

static bool check_cap(struct run *run) {
  int64_t columns = run->routines->vector * rng_between(&run->rng, 1, 64 / run->routines->vector);
  float scale = (float)(0.05 + rng_uniform(&run->rng));
  float softcap = (float)RNG_PICK(&run->rng, 1, 15, 50, 1000);
  double spread = (double)RNG_PICK(&run->rng, 1, 1, 100, 1000000);
  float *scores = new_floats(columns);
  for (int64_t c = 0; c < columns; c++) scores[c] = (float)(spread * rng_normal(&run->rng));
  const int special = (int)rng_between(&run->rng, 0, 3);
  scores[0] = special == 0 ? INFINITY : special == 1 ? -INFINITY : special == 2 ? NAN : 0;
  float *before = copy_floats(scores, columns);
  run->routines->cap(scores, columns, scale, softcap);
  bool good = guarded_intact(scores) || wrong(run, "wrote outside");
  for (int64_t c = 0; good && c < columns; c++) {
    double expected = softcap * tanh(before[c] * (double)scale / softcap);
    if (isnan(expected))
      good = isnan(scores[c]) || wrong(run, "the cap of NaN is %g", (double)scores[c]);
    else
      /* Near 0 the polynomial of exp2.h is all there is: it loses 13 of them. */
      good = near(run, "cap", 0, c, scores[c], expected, 24 * u * fabs(expected));
  }
  free(before);
  guarded_free(scores);
  return good;
}

static void call_cap(const struct run *run, void *scores) {
  run->routines->cap(scores, STRIDE, 1, 50);
}

static void bench_cap(struct run *run) {
  float *scores = new_floats(STRIDE);
  for (int64_t c = 0; c < STRIDE; c++) scores[c] = (float)rng_normal(&run->rng);
  report(run, "256", call_cap, scores, STRIDE, "score");
  guarded_free(scores);
}

const struct subject softmax_subject = {"softmax", false, check_softmax, bench_softmax};
const struct subject cap_subject = {"cap", false, check_cap, bench_cap};
