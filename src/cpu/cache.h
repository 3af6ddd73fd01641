/* Where keys and values of a sequence lie, dense, packed or in pages. */
#ifndef FA3_CPU_CACHE_H
#define FA3_CPU_CACHE_H

#include "element.h"

static inline char *cache_row(const struct operand *operand, const struct sequence *sequence,
                              int64_t key, int64_t head) {
  const int64_t row = sequence->row_k + key;
  if (!sequence->pages) return element(operand, sequence->batch_k, row, head);
  return element(operand, sequence->pages[row / operand->rows], row % operand->rows, head);
}

#endif
