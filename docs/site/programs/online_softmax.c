/* The softmax average of four values, from all scores at once and from one score after another. */
#include <math.h>
#include <stdio.h>

static float all_at_once(const float *score, const float *value, int keys) {
  float maximum = -INFINITY, sum = 0, output = 0;
  for (int j = 0; j < keys; j++) maximum = fmaxf(maximum, score[j]);
  for (int j = 0; j < keys; j++) sum += expf(score[j] - maximum);
  for (int j = 0; j < keys; j++) output += expf(score[j] - maximum) / sum * value[j];
  return output;
}

static float one_by_one(const float *score, const float *value, int keys) {
  float maximum = -INFINITY, sum = 0, output = 0;
  printf("score  value  maximum  factor  weight     sum   output  output / sum\n");
  for (int j = 0; j < keys; j++) {
    const float before = maximum;
    maximum = fmaxf(maximum, score[j]);
    const float factor = expf(before - maximum); /* 0 for the first score, 1 if nothing grew */
    const float weight = expf(score[j] - maximum);
    sum = sum * factor + weight;
    output = output * factor + weight * value[j];
    printf("%5g  %5g  %7g  %6.4f  %6.4f  %6.4f  %7.4f  %12.4f\n", score[j], value[j], maximum,
           factor, weight, sum, output, output / sum);
  }
  return output / sum;
}

int main(void) {
  const float score[] = {1, 3, 2, 5}, value[] = {10, 20, 30, 40};
  const float exact = all_at_once(score, value, 4), online = one_by_one(score, value, 4);
  printf("all at once: %.4f, one by one: %.4f\n", exact, online);
  return !(fabsf(exact - online) <= 1e-5F);
}
