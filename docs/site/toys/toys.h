/* What the course's toys ask of the library: called from the page, compiled to WebAssembly, and by
 * tests/site/toys.py, compiled like the library itself. Plain numbers and arrays alone, for
 * JavaScript to fill and read; the page checks what its reader typed. */
#ifndef FA3_TOYS_H
#define FA3_TOYS_H

#include <stdint.h>

#define TOY __attribute__((visibility("default")))

/* softmax.c: what is known of a row after a step of the online softmax. */
struct softmax_row {
  float maximum; /* of the scores so far */
  float rescale; /* what the step multiplied the former sum and output by */
  float sum;     /* of exp(score - maximum) */
  float output;  /* of exp(score - maximum) * value */
  float result;  /* output / sum: attention over the keys so far */
  float lse;
};

/* The CPU engine's online softmax over `count` keys, `width` at a time; a row per step, and each
 * key's exp(score - maximum) as its step had it. Returns the number of steps. */
TOY int toy_softmax(int count, const float *scores, const float *values, int width,
                    struct softmax_row *rows, float *exponentials);

/* The formula as it is written, in float32 and without a maximum: sum, then output, then their
 * quotient. */
TOY void toy_naive_softmax(int count, const float *scores, const float *values, float *result);

/* tiles.c: one head's queries and keys, and the tiles they are cut into. */
struct tile_problem {
  int32_t queries, keys;
  int32_t causal;
  int32_t left, right; /* the window, -1 without a limit; causal makes `right` 0 */
  int32_t tile_q, tile_k;
};

enum { TILE_SKIPPED, TILE_MASKED, TILE_WHOLE };

/* The kind of each tile, row block after row block. */
TOY void toy_tile_kinds(const struct tile_problem *problem, uint8_t *kinds);

enum { ORDER_LONGEST_FIRST, ORDER_IN_TURN, ORDER_ROW_BY_ROW };

struct schedule {
  int32_t heads, batches;
  int32_t section; /* heads in flight together */
  int32_t multiprocessors;
  int32_t order;
  double row_block_clocks; /* what a tile of the output takes beside its tiles of keys */
  double key_tile_clocks;
};

/* Which multiprocessor computes a tile of the output, and when, in clocks. */
struct scheduled_tile {
  int32_t block, head, batch, multiprocessor;
  double begin, end;
};

/* The tiles of all heads in the order in which they are taken; returns how many there are. */
TOY int toy_schedule(const struct tile_problem *problem, const struct schedule *schedule,
                     struct scheduled_tile *tiles);

/* timeline.c: a thread block of a producer and two consumer warpgroups, in clocks. */
struct timeline {
  int32_t tiles;        /* of keys */
  int32_t turns;        /* warpgroups take turns at issuing products */
  int32_t overlap;      /* the next scores are computed under this softmax */
  int32_t stages;       /* buffers for keys, and as many for values */
  double product;       /* one warpgroup's Q K^T or P V, with the matrix unit to itself */
  double softmax;       /* maximum, exponentials, packing */
  double issue;         /* from the turn to the first product under way */
  double load;          /* a tile of keys or values */
  double second_starts; /* how much later than the first, which starts with the first keys */
};

enum { LANE_LOADS, LANE_FIRST, LANE_SECOND, LANE_UNIT, LANES };
enum { SPAN_LOAD_KEYS, SPAN_LOAD_VALUES, SPAN_ISSUE, SPAN_SCORES, SPAN_SOFTMAX, SPAN_OUTPUT };

struct span {
  int32_t lane, kind, tile;
  int32_t warpgroup; /* of the matrix unit's spans */
  double begin, end;
};

/* Every span, in the order of their ends; returns how many there are, at most `most`. */
TOY int toy_timeline(const struct timeline *timeline, struct span *spans, int most);

/* heads.c: attention of `tokens` tokens with themselves; query is (tokens, heads, head_dim), key
 * and value are (tokens, heads_k, head_dim). `weights`, (tokens, heads, width) with `width` the
 * tokens rounded up to a multiple of 8, gets the probabilities, `output` is as query and `lse`
 * (heads, tokens). `left` is the window, -1 without a limit. Returns null, or what is wrong. */
TOY const char *toy_heads(int tokens, int heads, int heads_k, int head_dim, const float *query,
                          const float *key, const float *value, int causal, int left,
                          float *weights, float *output, float *lse);

/* read.c: the model of examples/generate, its sizes, and what one of its layers makes of a text of
 * `count` bytes. `parameters` are the data of jargon.safetensors, the same in every call; query is
 * (count, heads, head_dim), key and value are (count, heads_k, head_dim). */
struct read_sizes {
  int32_t layers, heads, heads_k, head_dim;
};
TOY void toy_read_sizes(struct read_sizes *sizes);
TOY void toy_read(const uint8_t *text, int count, const uint16_t *parameters, int layer,
                  float *query, float *key, float *value);

#endif
