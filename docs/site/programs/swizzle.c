/* Which of the 32 banks of shared memory eight threads read at once: thread r reads 16 bytes of row
 * r, the same unit of each row, from rows of 128 bytes. With rows as they are, and swizzled. */
#include <stdio.h>

enum { row_bytes = 128, unit_bytes = 16, banks = 32, bank_bytes = 4 };

static int first_bank(int row, int unit) {
  return (row * row_bytes + unit * unit_bytes) / bank_bytes % banks;
}

static int rounds(int unit, int swizzled) {
  int readers[banks] = {0}, most = 0;
  for (int row = 0; row < 8; row++) {
    const int place = swizzled ? unit ^ row % 8 : unit;
    const int bank = first_bank(row, place);
    printf(" %2d-%-2d", bank, bank + 3);
    for (int i = 0; i < 4; i++)
      if (++readers[bank + i] > most) most = readers[bank + i];
  }
  return most;
}

int main(void) {
  printf("                row 0     1     2     3     4     5     6     7\n");
  for (int unit = 0; unit < 2; unit++)
    for (int swizzled = 0; swizzled < 2; swizzled++) {
      printf("unit %d, %-8s", unit, swizzled ? "swizzled" : "plain");
      const int took = rounds(unit, swizzled);
      printf("  rounds: %d\n", took);
    }
  return 0;
}
