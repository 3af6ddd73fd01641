/* The online softmax, step by step, on the routines that the CPU engine runs. */
#include <math.h>

#include "cpu/row_end.h"
#include "cpu/routines.h"
#include "toys.h"

enum { PANEL = 8 }; /* of the plain level: keys are taken in whole panels */
enum { MOST_WIDTH = 64, OUTPUT_WIDTH = PANEL };
enum { OUTPUT_COLUMN, RESCALE_COLUMN }; /* the second is 1 before each step */

static const float log2_e = 1.44269504f;

/* One step on keys [0, width), of which the panels' rest is -infinity. */
static void step(const float *scores, const float *values, int width, float *maximum, float *sum,
                 float *output, float *exponentials) {
  const int columns = (width + PANEL - 1) / PANEL * PANEL;
  float tile[MOST_WIDTH], arranged_values[MOST_WIDTH * OUTPUT_WIDTH] = {0};
  for (int key = 0; key < columns; key++) tile[key] = key < width ? scores[key] : -INFINITY;
  for (int key = 0; key < width; key++)
    arranged_values[key * OUTPUT_WIDTH + OUTPUT_COLUMN] = values[key];
  plain_routines.softmax(&(struct softmax_step){
      .rows = 1,
      .columns = columns,
      .scores = tile,
      .score_stride = MOST_WIDTH,
      .scale = log2_e,
      .maximum = maximum,
      .sum = sum,
      .output = output,
      .output_stride = OUTPUT_WIDTH,
      .output_width = OUTPUT_WIDTH,
  });
  for (int key = 0; key < width; key++) exponentials[key] = tile[key];
  plain_routines.multiply(&(struct product){
      .rows = 1,
      .columns = OUTPUT_WIDTH,
      .depth = columns,
      .left = tile,
      .left_stride = MOST_WIDTH,
      .right = arranged_values,
      .right_stride = sizeof arranged_values / sizeof *arranged_values,
      .output = output,
      .output_stride = OUTPUT_WIDTH,
      .accumulate = true,
  });
}

int toy_softmax(int count, const float *scores, const float *values, int width,
                struct softmax_row *rows, float *exponentials) {
  float maximum = -INFINITY, sum = 0, output[OUTPUT_WIDTH] = {0};
  int steps = 0;
  if (width < 1 || width > MOST_WIDTH) return 0;
  for (int key = 0; key < count; key += width, steps++) {
    const int keys = count - key < width ? count - key : width;
    output[RESCALE_COLUMN] = 1;
    step(scores + key, values + key, keys, &maximum, &sum, output, exponentials + key);
    const struct row_end end = end_row(maximum, sum, -INFINITY);
    rows[steps] = (struct softmax_row){.maximum = maximum,
                                       .rescale = output[RESCALE_COLUMN],
                                       .sum = sum,
                                       .output = output[OUTPUT_COLUMN],
                                       .result = output[OUTPUT_COLUMN] * end.factor,
                                       .lse = end.lse};
  }
  return steps;
}

void toy_naive_softmax(int count, const float *scores, const float *values, float *result) {
  float sum = 0, output = 0;
  for (int key = 0; key < count; key++) sum += expf(scores[key]);
  for (int key = 0; key < count; key++) output += expf(scores[key]) * values[key];
  result[0] = sum;
  result[1] = output;
  result[2] = output / sum;
}
