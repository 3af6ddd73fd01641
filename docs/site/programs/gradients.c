/* The gradients of attention by their formulas, and by trying: the loss is the sum of g * O over
 * all elements, so that g is the gradient of the output. */
#include <math.h>
#include <stdio.h>

enum { tokens = 3, head_dim = 2 };
typedef double matrix[tokens][head_dim];

static double dot(const double *a, const double *b) {
  double sum = 0;
  for (int d = 0; d < head_dim; d++) sum += a[d] * b[d];
  return sum;
}

/* Output, and of each row the log-sum-exp. */
static void forward(matrix query, matrix key, matrix value, matrix output, double *lse) {
  for (int i = 0; i < tokens; i++) {
    double sum = 0;
    for (int d = 0; d < head_dim; d++) output[i][d] = 0;
    for (int j = 0; j < tokens; j++) {
      const double weight = exp(dot(query[i], key[j]) / sqrt(head_dim));
      sum += weight;
      for (int d = 0; d < head_dim; d++) output[i][d] += weight * value[j][d];
    }
    for (int d = 0; d < head_dim; d++) output[i][d] /= sum;
    lse[i] = log(sum);
  }
}

/* The gradients start as zeros. */
static void backward(matrix query, matrix key, matrix value, matrix output, const double *lse,
                     matrix grad_output, matrix grad_query, matrix grad_key, matrix grad_value) {
  const double scale = 1 / sqrt(head_dim);
  for (int i = 0; i < tokens; i++) {
    const double delta = dot(grad_output[i], output[i]); /* D */
    for (int j = 0; j < tokens; j++) {
      const double p = exp(dot(query[i], key[j]) * scale - lse[i]); /* again, not stored */
      const double dp = dot(grad_output[i], value[j]);
      const double ds = p * (dp - delta);
      for (int d = 0; d < head_dim; d++) {
        grad_value[j][d] += p * grad_output[i][d];
        grad_query[i][d] += scale * ds * key[j][d];
        grad_key[j][d] += scale * ds * query[i][d];
      }
    }
  }
}

static double loss_of(matrix query, matrix key, matrix value, matrix grad_output) {
  matrix output;
  double lse[tokens], loss = 0;
  forward(query, key, value, output, lse);
  for (int i = 0; i < tokens; i++) loss += dot(grad_output[i], output[i]);
  return loss;
}

int main(void) {
  matrix query = {{1, 0}, {0, 1}, {1, 1}}, key = {{1, 0}, {0, 1}, {1, 1}};
  matrix value = {{1, 0}, {0, 2}, {4, 4}}, grad_output = {{1, 0}, {0, 1}, {1, -1}};
  matrix output, gradient[3] = {{{0}}};
  double lse[tokens], worst = 0;
  forward(query, key, value, output, lse);
  backward(query, key, value, output, lse, grad_output, gradient[0], gradient[1], gradient[2]);

  matrix *const inputs[] = {&query, &key, &value};
  const char *const names[] = {"dQ", "dK", "dV"};
  for (int i = 0; i < tokens; i++)
    printf("dO[%d] = (%g, %g)\n", i, grad_output[i][0], grad_output[i][1]);
  printf("             by formula   by trying\n");
  for (int n = 0; n < 3; n++)
    for (int i = 0; i < tokens; i++)
      for (int d = 0; d < head_dim; d++) {
        const double step = 1e-5, was = (*inputs[n])[i][d];
        (*inputs[n])[i][d] = was + step;
        const double above = loss_of(query, key, value, grad_output);
        (*inputs[n])[i][d] = was - step;
        const double below = loss_of(query, key, value, grad_output);
        (*inputs[n])[i][d] = was;
        const double tried = (above - below) / (2 * step);
        worst = fmax(worst, fabs(tried - gradient[n][i][d]));
        if (i == 0) printf("%s[%d][%d]  %12.6f%12.6f\n", names[n], i, d, gradient[n][i][d], tried);
      }
  printf("all 18 differ by less than 1e-9: %s\n", worst < 1e-9 ? "yes" : "no");
  return !(worst < 1e-9);
}
