/* Which keys a query may see, for the host; kernels/mask.h says the same in 32 bits.
 *
 * Query i (counted within its sequence) sees key j if
 *   i + diagonal - left <= j <= i + diagonal + right   and   0 <= j < seqlen_k
 * with left and right up to MASK_UNBOUNDED. The causal mask is right = 0. */
#ifndef FA3_SRC_MASK_H
#define FA3_SRC_MASK_H

#include <stdint.h>

/* Far above any seqlen, far below overflow when added to a position. */
#define MASK_UNBOUNDED (INT64_MAX / 4)

struct mask {
  int64_t diagonal;
  int64_t left;
  int64_t right;
  int64_t seqlen_k;
};

/* A half-open range of keys. */
struct key_range {
  int64_t begin;
  int64_t end;
};

/* And of queries. */
struct query_range {
  int64_t begin;
  int64_t end;
};

/* A position as the bound of a range in a sequence. */
static inline int64_t mask_clamp(int64_t position, int64_t seqlen) {
  return position < 0 ? 0 : position > seqlen ? seqlen : position;
}

/* The keys that query i sees. */
static inline struct key_range mask_row(const struct mask *mask, int64_t i) {
  struct key_range range = {0, mask->seqlen_k};
  if (mask->left < MASK_UNBOUNDED)
    range.begin = mask_clamp(i + mask->diagonal - mask->left, mask->seqlen_k);
  if (mask->right < MASK_UNBOUNDED)
    range.end = mask_clamp(i + mask->diagonal + mask->right + 1, mask->seqlen_k);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

/* The keys that at least one query of rows [first, last] sees. Each bound moves with i, so the
 * union of the rows' ranges runs from the first row's begin to the last row's end. */
static inline struct key_range mask_visible(const struct mask *mask, int64_t first, int64_t last) {
  struct key_range range = {mask_row(mask, first).begin, mask_row(mask, last).end};
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

/* The keys that every query of rows [first, last] sees: tiles inside need no mask. */
static inline struct key_range mask_full(const struct mask *mask, int64_t first, int64_t last) {
  struct key_range range = {mask_row(mask, last).begin, mask_row(mask, first).end};
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

/* The queries of seqlen_q that see at least one key of [first, last]: mask_visible from the keys'
 * side. */
static inline struct query_range mask_seeing(const struct mask *mask, int64_t seqlen_q,
                                             int64_t first, int64_t last) {
  struct query_range range = {0, seqlen_q};
  if (mask->right < MASK_UNBOUNDED)
    range.begin = mask_clamp(first - mask->diagonal - mask->right, seqlen_q);
  if (mask->left < MASK_UNBOUNDED)
    range.end = mask_clamp(last - mask->diagonal + mask->left + 1, seqlen_q);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

#endif
