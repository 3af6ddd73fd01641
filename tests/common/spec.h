/* What one trial asks for, before any memory is laid out: small enough to print in one line. */
#ifndef FA3_TESTS_SPEC_H
#define FA3_TESTS_SPEC_H

#include <stdbool.h>
#include <stddef.h>

#include "fa3.h"
#include "rng.h"

/* How tensors lie in memory. */
enum layout {
  LAYOUT_CONTIGUOUS,
  LAYOUT_HEADS_FIRST, /* (batch, heads, seqlen, head_dim) in memory */
  LAYOUT_PADDED,      /* dimensions in any order, with gaps; extents of 1 have wild strides */
  LAYOUT_EXPANDED,    /* as padded, and some input strides are 0 */
  LAYOUT_COUNT
};

/* The scales of FP8 keys or values. */
enum scale_form { SCALE_NONE, SCALE_ONE, SCALE_HEADS, SCALE_BLOCKS, SCALE_FORMS };

struct spec {
  fa3_dtype dtype;
  bool codes; /* key and value are E4M3, with scales: */
  enum scale_form key_scale;
  enum scale_form value_scale;
  int64_t scale_rows; /* of SCALE_BLOCKS */
  fa3_dtype output_dtype;
  fa3_dtype sink_dtype; /* 0: no sink */
  int64_t batch;
  int64_t heads_k;
  int64_t group; /* heads_q / heads_k */
  int64_t head_dim;
  int64_t value_head_dim;
  int64_t max_seqlen_q; /* longest sequence; the only length of a dense batch */
  int64_t max_seqlen_k;
  bool packed_q;
  bool packed_k;
  bool seqused_q;
  bool seqused_k;
  bool leftpad_k;
  bool batch_index;
  int64_t page_size; /* 0: key and value are no pages */
  int32_t num_splits;
  int64_t split_keys;
  bool diagonal;
  bool lse;
  uint32_t flags;
  int64_t window_left;
  int64_t window_right;
  float scale; /* with FA3_SCALE */
  float softcap;
  int32_t num_threads;
  enum layout layout;
  double spread; /* standard deviation of query's and key's elements */
  bool one_hot;  /* all of a query but one element is 0: its scores are exact */
  double sink;   /* and of sinks, a tenth of which are -infinity */
};

/* Anything that fa3_forward takes, of modest size. */
struct spec spec_random(struct rng *rng);

/* The same with scores up to 1e30 by magnitude, and sinks and scales up to the largest float. */
struct spec spec_random_extreme(struct rng *rng);

void spec_print(const struct spec *spec, char *text, size_t size);

#endif
