/* The decode kernel's launch contract, shared by host and device.
 *
 * A block has up to 8 or 16 rows: query heads of one key head times queries of one sequence, row r
 * being query r / group and the group's head r % group. It attends to one part (split) of the
 * sequence's keys. Blocks of a cluster have neighbouring splits, and put their results together.
 * Block index =
 * ((batch * heads_k + head) * row_tiles + row tile) * splits + split. */
#ifndef FA3_DECODE_PARAMS_H
#define FA3_DECODE_PARAMS_H

#include <stdint.h>

#include "append_params.h"
#include "combine_params.h"
#include "fp8_scales.h"
#include "sequence.h"

enum {
  FA3_DECODE_ROWS = 16,                    /* of a block, at most */
  FA3_DECODE_WARPS = 4,                    /* where a variant has no number of its own */
  FA3_DECODE_KEYS = 16 * FA3_DECODE_WARPS, /* a unit: a load of so many warps */
  FA3_DECODE_MAX_CLUSTER = 16
};

/* Rows of query, key or value: the data and all strides are multiples of 16 bytes, which strides
 * are counted in. */
typedef struct {
  const char *data;
  uint32_t stride_batch; /* of key and value: of a page, where they are paged */
  uint32_t stride_row;
  uint32_t stride_head;
} fa3_decode_input;

/* n / divisor = (n + high word of n * factor) >> shift, for n below 2^31. */
typedef struct {
  uint32_t divisor, factor, shift;
} fa3_divisor;

typedef struct {
  fa3_decode_input query, key, value;
  void *output;
  int64_t output_stride_batch, output_stride_row, output_stride_head; /* elements */
  float *lse;                                                         /* may be null */
  int64_t lse_stride_batch, lse_stride_row, lse_stride_head;
  const float *sink; /* one logit per query head, or null */

  int lengths_known;       /* no array of sequences is there: a block knows what it has to do */
  fa3_sequences sequences; /* seqlen_q, seqlen_k: also bounds of the lengths in the arrays */
  fa3_divisor page_size;   /* INT32_MAX: there are no pages */
  int pages;               /* or entries of the batch, that there are */
  int rows_k;              /* that a sequence, or a packed batch, has in memory: no other is read */

  int appended; /* newest keys of a sequence that the kernel before writes, and it alone; or 0 */
  int early_blocks; /* the first so many begin while it does; others find that it is done */

  int most_queries; /* of a sequence: those with more are not this kernel's but the forward one's */

  fa3_divisor heads_k;
  fa3_divisor group;        /* query heads of a key head */
  fa3_divisor row_tiles;    /* of the longest sequence */
  fa3_divisor splits;       /* a multiple of the cluster's blocks */
  int cluster;              /* blocks that put their results together, a power of two */
  int split_units;          /* units of FA3_DECODE_KEYS keys of a split; 0: an even share */
  int head_dim, head_dim_v; /* multiples of 8 */

  float scale;        /* of the scores, or the cap */
  float softcap_log2; /* 0: no cap; else scale / cap * 2 log2(e) */
  int output_kind;    /* FA3_OUTPUT_... */

  /* With more than one cluster for a row: each one's average and log-sum-exp, for combine. Those of
   * cluster c are at index ((c * batch + b) * seqlen_q + query) * heads_q + head. Null: the result
   * is whole. */
  float *partial;
  float *partial_lse;
  int batch;

  /* Where each tile's partial results are, with keys dealt out evenly (decode_deal.cuh). */
  fa3_combine_parts *parts;
  /* The same for combine_tiles, in place of `parts`: of each block, the tile that begins there and
   * that others go on with. Rows of a sequence are then no more than a tile has. Both null: keys
   * are split. */
  fa3_combine_tile *begun;
  int most_units;  /* of FA3_DECODE_KEYS keys, of a sequence */
  int piece_units; /* that a tile's beginning counts for */
} fa3_decode_params;

/* The launch contract of the kernel that appends too: a block has all of a sequence's rows of a key
 * head, and only its blocks read its newest keys. Where a sequence has several clusters, turned
 * queries are not in the place of those that they were made of. */
typedef struct {
  fa3_decode_params decode;
  fa3_append_params
      append;      /* elements are read by words; `query` is decode's, before it is turned */
  int query_pairs; /* that are turned */
} fa3_decode_append_params;
enum { FA3_DECODE_APPEND_THREADS = 2 * 32 * FA3_DECODE_WARPS };

/* What queries are where key and value are E4M3 codes. */
enum { FA3_QUERY_BF16, FA3_QUERY_FP16, FA3_QUERY_E4M3 };

/* The launch contract of the kernel for such a cache. A page, of a cache in pages, stands for a
 * sequence in its scales. */
typedef struct {
  fa3_decode_params decode;
  fa3_scales query_scale, key_scale, value_scale;
  fa3_divisor key_scale_rows, value_scale_rows; /* that share a scale; 1 where a whole head does */
  int query;                                    /* FA3_QUERY_... */
  int few_queries; /* of the kernels for chunks: sequences with no more are another's */
} fa3_decode_fp8_params;

/* Whether registers have no room for what a block does while it attends: such a kernel deals no
 * keys out, and awaits an append as a whole. */
#define FA3_DECODE_KEEPS_WORK(head_dim, element_bytes) ((element_bytes) == 2 && (head_dim) > 128)

/* Whether a kernel of 16 bits may append. With more rows it takes longer to turn the queries than
 * two kernels do. */
#define FA3_DECODE_MAY_APPEND(rows, head_dim) ((rows) <= 8 && !FA3_DECODE_KEEPS_WORK(head_dim, 2))

/* What a compiled variant needs of the host: rings of loads of 16 keys and values, and of their
 * scales; and what the blocks of a cluster send each other. */
#define FA3_DECODE_SHARED_BYTES(rows, head_dim, stages) \
  (FA3_DECODE_WARPS * (stages)*16 * 2 * (head_dim)*2 + (rows) * (head_dim)*4 + 4096)
#define FA3_DECODE_FP8_SHARED_BYTES(warps, rows, head_dim, loads)                                  \
  ((warps)*32 * ((loads) * ((head_dim) + 4) + ((rows) > 8 && (head_dim) > 128 ? (head_dim) : 0)) + \
   (rows) * (head_dim)*4 + 4096)

/* A block of chunk_fp8: so many rows, and warps that load. What it has in shared memory: Q where it
 * stays there, the tiles of K and V as float16 and their scales, each loading warp's ring of codes.
 */
enum { FA3_CHUNK_FP8_ROWS = 128 };
#define FA3_CHUNK_FP8_LOADERS(head_dim) ((head_dim) > 128 ? 4 : 8)
#define FA3_CHUNK_FP8_THREADS(head_dim) \
  (32 * FA3_CHUNK_FP8_LOADERS(head_dim) + 2 * FA3_CHUNK_FP8_ROWS)
#define FA3_CHUNK_FP8_TILES(head_dim) ((head_dim) > 128 ? 1 : 4)
#define FA3_CHUNK_FP8_SHARED_BYTES(head_dim, tile_k, stages)                                   \
  (((head_dim) > 128 ? FA3_CHUNK_FP8_ROWS * (head_dim)*2 : 0) +                                \
   FA3_CHUNK_FP8_TILES(head_dim) * ((tile_k) * (head_dim)*4 + (tile_k)*8) +                    \
   FA3_CHUNK_FP8_LOADERS(head_dim) * (stages)*32 * ((head_dim) + 4) + FA3_CHUNK_FP8_ROWS * 8 + \
   256)

/* A block of speculative_fp8: so many rows and warpgroups, and blocks of a multiprocessor. What it
 * has in shared memory: Q; of each warpgroup P, and of each of its warps a ring of codes and what
 * it tells of its rows. */
enum {
  FA3_SPECULATIVE_FP8_ROWS = 32,
  FA3_SPECULATIVE_FP8_GROUPS = 2,
  FA3_SPECULATIVE_FP8_BLOCKS = 2
};
#define FA3_SPECULATIVE_FP8_SHARED_BYTES(rows, head_dim, stages)                                \
  ((rows) * (head_dim)*2 +                                                                      \
   FA3_SPECULATIVE_FP8_GROUPS * ((rows)*128 + 4 * (stages)*32 * ((head_dim) + 4) + (rows)*48) + \
   (rows)*12 + 384)

#endif
