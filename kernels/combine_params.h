/* The combine kernel's launch contract, shared by host and device: several averages of each row, of
 * different keys, become one. A row, number r of a sequence being query r / heads and head
 * r % heads, is a warp's, or a block's; the grid is (blocks of the longest sequence, batch). */
#ifndef FA3_COMBINE_PARAMS_H
#define FA3_COMBINE_PARAMS_H

#include <stdint.h>

enum { FA3_COMBINE_WARPS = 8, FA3_COMBINE_THREADS = 32 * FA3_COMBINE_WARPS };

/* Warps that share a row of so many parts. */
#define FA3_COMBINE_WARPS_OF(parts) ((parts) > 8 ? FA3_COMBINE_WARPS : 1)

/* Threads of combine_rows that share a row: four columns each, of up to 128 at a time. */
#define FA3_COMBINE_ROW_THREADS(head_dim) ((head_dim) > 64 ? 32 : 16)

/* What FA3_COMBINE writes. */
enum { FA3_COMBINE_FLOAT32 = 0, FA3_COMBINE_FLOAT16 = 1, FA3_COMBINE_BFLOAT16 = 2 };

/* Strides in elements. */
typedef struct {
  int64_t split, batch, row, head;
} fa3_combine_strides;

/* Of a tile of rows whose keys several of the decode kernel's blocks have: the first of them, and
 * how many there are, as many blocks apart as there are key heads; 0 if one has all, and no results
 * are partial. */
typedef struct {
  int block, count;
} fa3_combine_parts;

/* Of the shares of keys that are dealt out, of the forward kernel or of speculative_fp8, whose
 * blocks have one each: the tile that begins in a share and goes on in the next ones of its team.
 * The first row is `query` of head `head` * group. */
typedef struct {
  int batch, head, query;
  int count; /* shares that have parts of it; 0: there is none */
} fa3_combine_tile;

typedef struct {
  const float *partial;     /* averages; the last dimension is contiguous */
  const float *partial_lse; /* -inf where a split has no key: its average is not read */
  fa3_combine_strides partial_strides, partial_lse_strides;
  void *output;
  float *lse; /* may be null */
  fa3_combine_strides output_strides, lse_strides;
  const float *sink;       /* one logit per head, or null */
  const int *cu_seqlens_q; /* batch + 1 entries, or null: where sequences are in output and lse */
  const int *used_q;       /* per-sequence lengths, or null */
  int seqlen_q;            /* the length where the arrays are null, else the most there may be */
  int splits, heads, head_dim;
  int kind;  /* of output */
  int warps; /* that share a row: 1 or FA3_COMBINE_WARPS */

  /* Not null: instead of strides and splits, where a tile's parts are. A block has two places of
   * tile_rows rows: the second for a tile that it is the first of, and that goes on in others, the
   * first for one that it goes on with. */
  const fa3_combine_parts *parts;  /* [batch][key head][row tile] */
  int tile_rows, row_tiles, group; /* a tile's row r: query r / group, head r % group */

  /* Of combine_tiles, in place of `parts`; the grid is (blocks of a tile's rows, shares). */
  const fa3_combine_tile *tiles; /* of each share */
  int team;                      /* the next part is the share's so many on */
  int by_four;                   /* four columns of the output lie at a multiple of 8 bytes */
} fa3_combine_params;

#endif
