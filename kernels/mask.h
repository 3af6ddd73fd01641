/* What a query sees: plain C, for host and device.
 *
 * Query i of a sequence of `queries` sees key j of `keys` if
 *     i + lower <= j <= i + upper.
 * A causal mask that is aligned to the bottom right has upper = keys - queries, so that the last
 * query sees the last key; FA3_UNBOUNDED stands for no limit. */
#ifndef FA3_MASK_H
#define FA3_MASK_H

#include <stdint.h>

#include "scheduler.h"

/* Beyond any sequence, and small enough to be added to a position. */
#define FA3_UNBOUNDED (1 << 29)
/* A window's side without a limit; as MASK_UNBOUNDED of src/mask.h. */
#define FA3_NO_LIMIT (INT64_MAX / 4)
#define FA3_MAX_SEQLEN (1 << 28)

typedef struct {
  int queries, keys; /* lengths of this sequence */
  int lower, upper;
} fa3_mask;

/* A range of keys, `begin` included, `end` not. */
typedef struct {
  int begin, end;
} fa3_range;

/* The mask of one sequence, whose query 0 stands at key `diagonal`. */
FA3_SHARED fa3_mask fa3_make_mask(int queries, int keys, int64_t diagonal, int64_t left,
                                  int64_t right) {
  const int64_t lower = left == FA3_NO_LIMIT ? -FA3_UNBOUNDED : diagonal - left;
  const int64_t upper = right == FA3_NO_LIMIT ? FA3_UNBOUNDED : diagonal + right;
  fa3_mask mask;
  mask.queries = queries;
  mask.keys = keys;
  mask.lower = lower < -FA3_UNBOUNDED  ? -FA3_UNBOUNDED
               : lower > FA3_UNBOUNDED ? FA3_UNBOUNDED
                                       : (int)lower;
  mask.upper = upper < -FA3_UNBOUNDED  ? -FA3_UNBOUNDED
               : upper > FA3_UNBOUNDED ? FA3_UNBOUNDED
                                       : (int)upper;
  return mask;
}

FA3_SHARED fa3_range fa3_visible_keys(const fa3_mask *mask, int query) {
  const int begin = query + mask->lower, end = query + mask->upper + 1;
  fa3_range seen;
  seen.begin = begin > 0 ? begin : 0;
  seen.end = end < mask->keys ? end : mask->keys;
  return seen;
}

/* Of a range, one of so many shares, as even as they can be: the first is number 0. */
FA3_SHARED fa3_range fa3_share_of(fa3_range range, int number, int shares) {
  const int count = range.end - range.begin;
  fa3_range share;
  share.begin = range.begin + count * number / shares;
  share.end = range.begin + count * (number + 1) / shares;
  return share;
}

/* What two ranges have in common; from 0 to 0 if that is nothing. */
FA3_SHARED fa3_range fa3_common_range(fa3_range a, fa3_range b) {
  fa3_range common;
  common.begin = a.begin > b.begin ? a.begin : b.begin;
  common.end = a.end < b.end ? a.end : b.end;
  if (common.begin >= common.end) common.begin = common.end = 0;
  return common;
}

/* The tiles of `width` keys that any of the queries first <= i < last sees; empty
 * (end <= begin) if there are none. */
FA3_SHARED fa3_range fa3_visible_tiles(const fa3_mask *mask, int first, int last, int width) {
  fa3_range tiles;
  tiles.begin = 0;
  tiles.end = 0;
  if (last > mask->queries) last = mask->queries;
  if (first < last) {
    const int begin = fa3_visible_keys(mask, first).begin;
    const int end = fa3_visible_keys(mask, last - 1).end;
    if (begin < end) {
      tiles.begin = begin / width;
      tiles.end = (end + width - 1) / width;
    }
  }
  return tiles;
}

/* The queries that see this key; empty (end <= begin) if there are none. */
FA3_SHARED fa3_range fa3_seeing_queries(const fa3_mask *mask, int key) {
  const int begin = key - mask->upper, end = key - mask->lower + 1;
  fa3_range seeing;
  seeing.begin = begin > 0 ? begin : 0;
  seeing.end = end < mask->queries ? end : mask->queries;
  return seeing;
}

/* The tiles of `width` queries that see any of the keys first <= j < last; empty (end <= begin) if
 * there are none. */
FA3_SHARED fa3_range fa3_seeing_tiles(const fa3_mask *mask, int first, int last, int width) {
  fa3_range tiles;
  tiles.begin = 0;
  tiles.end = 0;
  if (last > mask->keys) last = mask->keys;
  if (first < last) {
    const int begin = fa3_seeing_queries(mask, first).begin;
    const int end = fa3_seeing_queries(mask, last - 1).end;
    if (begin < end) {
      tiles.begin = begin / width;
      tiles.end = (end + width - 1) / width;
    }
  }
  return tiles;
}

/* The keys that every one of the queries first <= i < last sees: a tile inside needs no mask. */
FA3_SHARED fa3_range fa3_common_keys(const fa3_mask *mask, int first, int last) {
  fa3_range common;
  if (last > mask->queries) last = mask->queries;
  common.begin = fa3_visible_keys(mask, last - 1).begin;
  common.end = fa3_visible_keys(mask, first).end;
  return common;
}

/* The queries that see every one of the keys first <= j < last. */
FA3_SHARED fa3_range fa3_common_queries(const fa3_mask *mask, int first, int last) {
  fa3_range common;
  if (last > mask->keys) last = mask->keys;
  common.begin = fa3_seeing_queries(mask, last - 1).begin;
  common.end = fa3_seeing_queries(mask, first).end;
  return common;
}

#endif
