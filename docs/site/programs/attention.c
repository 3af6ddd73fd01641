/* Attention as the formula says it, for three tokens with two numbers each. */
#include <math.h>
#include <stdio.h>

enum { tokens = 3, head_dim = 2 };

static void attention(const float query[][head_dim], const float key[][head_dim],
                      const float value[][head_dim], float output[][head_dim]) {
  for (int i = 0; i < tokens; i++) {
    float score[tokens], sum = 0;
    for (int j = 0; j < tokens; j++) {
      score[j] = 0;
      for (int d = 0; d < head_dim; d++) score[j] += query[i][d] * key[j][d];
      score[j] = expf(score[j] / sqrtf(head_dim));
      sum += score[j];
    }
    printf("query %d looks at the keys with weights", i);
    for (int d = 0; d < head_dim; d++) output[i][d] = 0;
    for (int j = 0; j < tokens; j++) {
      const float probability = score[j] / sum;
      printf(" %.3f", probability);
      for (int d = 0; d < head_dim; d++) output[i][d] += probability * value[j][d];
    }
    printf(" and gets (%.3f, %.3f)\n", output[i][0], output[i][1]);
  }
}

int main(void) {
  const float query[tokens][head_dim] = {{1, 0}, {0, 1}, {1, 1}};
  const float key[tokens][head_dim] = {{1, 0}, {0, 1}, {1, 1}};
  const float value[tokens][head_dim] = {{1, 0}, {0, 2}, {4, 4}};
  float output[tokens][head_dim];
  attention(query, key, value, output);
  return 0;
}
