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

/* Of `count` keys from `key` on, `there` of which there are: the others are the last one's. Rows of
 * a page, or of a dense cache, are a constant apart. */
static inline void cache_rows(const struct operand *operand, const struct sequence *sequence,
                              int64_t key, int64_t there, int64_t count, int64_t head,
                              const char **rows) {
  const int64_t stride = operand->stride_row * element_size(operand);
  for (int64_t k = 0, end; k < there; k = end) {
    const int64_t row = sequence->row_k + key + k;
    end = sequence->pages ? smaller(k + operand->rows - row % operand->rows, there) : there;
    const char *first = cache_row(operand, sequence, key + k, head);
    for (int64_t i = k; i < end; i++) rows[i] = first + (i - k) * stride;
  }
  for (int64_t k = there; k < count; k++) rows[k] = rows[there - 1];
}

#endif
