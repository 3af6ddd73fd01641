/* The numbers that a byte can be: E4M3, one sign, 4 bits of exponent, 3 of mantissa. */
#include <math.h>
#include <stdio.h>

static double value(int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  if (code == 127) return NAN;
  return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
}

int main(void) {
  const int shown[] = {0, 1, 2, 7, 8, 14, 15};
  for (int i = 0; i < 7; i++) {
    printf("exponent %2d:", shown[i]);
    for (int mantissa = 0; mantissa < 8; mantissa++)
      printf(" %9.4g", value(shown[i] << 3 | mantissa));
    printf("\n");
  }
  double worst = 0;
  for (int code = 8; code < 126; code++) {
    const double middle = (value(code) + value(code + 1)) / 2;
    worst = fmax(worst, (middle - value(code)) / middle);
  }
  printf("from 2^-6 on a number is rounded by at most %.1f%% of it\n", 100 * worst);
  return 0;
}
