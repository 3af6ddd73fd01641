/* What E4M3 codes cost a score, the product of a query and a key of 128 numbers: as they are, and
 * turned by the same random rotation. One number in a thousand is an outlier. The greatest scores
 * are those that a softmax listens to. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

enum { columns = 128, queries = 200, keys = 4096 };

static uint64_t state = 1;

static double uniform(void) /* in (0, 1) */
{
  state = state * 6364136223846793005u + 1442695040888963407u;
  return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

static double normal(void) {
  return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform());
}

static void draw(double *x) {
  for (int d = 0; d < columns; d++) {
    x[d] = normal();
    if (uniform() < 0.001) x[d] += 10 * normal();
  }
}

/* Random signs, then sums and differences of pairs in seven rounds: lengths and angles stay. */
static void rotate(const double *sign, double *x) {
  for (int d = 0; d < columns; d++) x[d] *= sign[d] / sqrt(columns);
  for (int bit = 1; bit < columns; bit *= 2)
    for (int d = 0; d < columns; d++)
      if (!(d & bit)) {
        const double low = x[d], high = x[d + bit];
        x[d] = low + high;
        x[d + bit] = low - high;
      }
}

/* The nearest number with four significant bits: E4M3, with a scale that suits. */
static void round_all(double *x) {
  for (int d = 0; d < columns; d++) {
    int exponent;
    const double mantissa = frexp(x[d], &exponent);
    x[d] = ldexp(nearbyint(mantissa * 16) / 16, exponent);
  }
}

static double product(const double *q, const double *k) {
  double sum = 0;
  for (int d = 0; d < columns; d++) sum += q[d] * k[d];
  return sum / sqrt(columns);
}

int main(void) {
  static double key[keys][columns], code[2][keys][columns];
  double sign[columns], squares[2][2] = {{0}};
  for (int d = 0; d < columns; d++) sign[d] = uniform() < 0.5 ? -1 : 1;
  for (int j = 0; j < keys; j++) {
    draw(key[j]);
    for (int d = 0; d < columns; d++) code[0][j][d] = code[1][j][d] = key[j][d];
    rotate(sign, code[1][j]);
    for (int turned = 0; turned < 2; turned++) round_all(code[turned][j]);
  }
  for (int i = 0; i < queries; i++) {
    double q[columns], of_code[2][columns], greatest = -INFINITY, of_greatest[2] = {0};
    draw(q);
    for (int d = 0; d < columns; d++) of_code[0][d] = of_code[1][d] = q[d];
    rotate(sign, of_code[1]);
    for (int turned = 0; turned < 2; turned++) round_all(of_code[turned]);
    for (int j = 0; j < keys; j++) {
      const double score = product(q, key[j]);
      for (int turned = 0; turned < 2; turned++) {
        const double error = product(of_code[turned], code[turned][j]) - score;
        squares[turned][0] += error * error / queries / keys;
        if (score > greatest) of_greatest[turned] = error;
      }
      if (score > greatest) greatest = score;
    }
    for (int turned = 0; turned < 2; turned++)
      squares[turned][1] += of_greatest[turned] * of_greatest[turned] / queries;
  }
  printf("error of a score (rms)   all    the greatest of each query\n");
  for (int turned = 0; turned < 2; turned++)
    printf("%-20s  %6.3f  %6.3f\n", turned ? "rotated" : "as they are", sqrt(squares[turned][0]),
           sqrt(squares[turned][1]));
  return 0;
}
