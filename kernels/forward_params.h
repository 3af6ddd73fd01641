/* The forward kernel's launch contract, shared by host and device.
 *
 * Tensor maps (16-bit elements, zero fill out of bounds; innermost dimension
 * first; `C` is the variant's `chunk`, swizzle 2 * C bytes; a head dim below the
 * variant's is encoded as it is and zero filled):
 *   query   5-d (head_dim, tile_heads, seqlen_q, heads, batch)
 *                                                       box (C, tile_heads, 64 / tile_heads, 1, 1)
 *   key     4-d (head_dim, seqlen_k, heads_k, batch)    box (C, tile_k, 1, 1)
 *   value   4-d (head_dim_v, seqlen_k, heads_k, batch)  box (C, tile_k, 1, 1)
 *   output  5-d (head_dim_v, tile_heads, seqlen_q, heads, batch)
 *                                                       box (C, tile_heads, 16 / tile_heads, 1, 1)
 * `tile_heads` is how many query heads of one key head share a tile: 1, or heads_q / heads_k
 * (<= 64); then `heads` counts key heads, and query head h sits at (h % tile_heads,
 * h / tile_heads). With cumulative lengths seqlen is the total and the batch dimension is 1. Of a
 * cache in pages key and value have a page's rows for seqlen_k, the pages for the batch, and a
 * box's rows for tile_k. */
#ifndef FA3_FORWARD_PARAMS_H
#define FA3_FORWARD_PARAMS_H

#include <stdint.h>

#include "combine_params.h"
#include "scheduler.h"
#include "sequence.h"
#include "softmax_scale.h"

#ifdef __cplusplus
#define FA3_ALIGN(n) alignas(n)
#else
#define FA3_ALIGN(n) _Alignas(n)
#endif

typedef struct {
  FA3_ALIGN(128) unsigned char opaque[128];
} fa3_tensor_map;

/* What the codes of a head's keys, and of its values, are multiplied by. */
typedef struct {
  float key, value;
} fa3_head_scales;

/* Key or value in pages, for threads that copy: a row begins page * page_steps + row * row_steps +
 * head * head_steps steps behind `data`, less than 2^32 - 1. */
typedef struct {
  const void *data;
  uint32_t step; /* bytes, a multiple of 16 */
  uint32_t page_steps, row_steps, head_steps;
  int head_dim;
} fa3_paged_tensor;

typedef struct {
  fa3_tensor_map query, key, value, output;
  fa3_sequences sequences;
  unsigned page_size, pages;               /* of a cache; 0: key and value are no pages */
  int box;                                 /* rows of a box; 0: threads copy the pages */
  fa3_paged_tensor paged_key, paged_value; /* for these threads */

  void *output_data; /* for rows that the copy engine may not write */
  float *lse;        /* may be null */
  const float *sink; /* one logit per query head, or null */
  int64_t output_stride_batch, output_stride_row, output_stride_head; /* elements */
  int64_t lse_stride_batch, lse_stride_head; /* elements; rows are adjacent */

  fa3_tile_space tiles;      /* blocks: of tile_queries queries */
  int group;                 /* query heads of a key head: heads_q / heads_k */
  int tile_heads;            /* those of them that share a tile: 1, or all */
  int tile_heads_inverse;    /* 65536 / tile_heads + 1: row / tile_heads is row * this >> 16 */
  int queries_per_warpgroup; /* 64 / tile_heads */
  int queries_per_warp;      /* 16 / tile_heads, where that is a whole number */
  int tile_queries;          /* those of all warpgroups, or of the first ones */
  int head_dim_v;            /* what is stored, a multiple of 8 */

  fa3_softmax_scale scale;
  float softcap_log2;  /* 0: no cap; else scale / cap * 2 log2(e) */
  unsigned *next_tile; /* zero, as the kernel leaves it too: tiles go to whoever is free; null: in
                          turns */
  int store_by_tma;    /* whole row groups of a warp may go through the copy engine */
  int clip_output;     /* but not those that a tile's end, or a sequence's, cuts */
  int clear_value;     /* rows beyond a sequence's end may hold anything: zero V's */
  int few_queries;     /* sequences of so many, or fewer, are not this kernel's but decode's */

  /* Few tiles, many keys: the keys of each tile are shared out to so many blocks. Their averages
   * and log-sum-exps, of float32, go to place ((split * batches + batch) * longest_query + query) *
   * heads_q + head, and combine.cu makes output and lse of them. 1: none. */
  int splits;
  int longest_query; /* queries of the longest sequence */
  int part_stride;   /* from a query's place to the next one's: heads_q, or tile_heads */
  float *partial;    /* head_dim_v columns */
  float *partial_lse;

  /* Lengths that differ: all keys are dealt out in so many shares (forward_deal.cuh), 0: they are
   * not. A share has places for two tiles: the first for one that it goes on with, the second for
   * one that it begins and that others go on with. A tile's place number r is for query
   * r / tile_heads and head r % tile_heads of it. */
  struct {
    int shares;              /* a multiple of the team */
    int team;                /* tiles whose shares are side by side; heads are a multiple of it */
    fa3_combine_tile *begun; /* of each share */
  } deal;

  /* Of unpacked codes, one of the two: the scales of each sequence's key heads, or of the rows of
   * each, those of its keys and then those of its values. */
  struct {
    const fa3_head_scales *of_heads;
    const float *of_rows;
    int rows;    /* from a head's first scale of keys to its first of values, a multiple of 128 */
    int heads_k; /* of this launch */
  } unpacked;
} fa3_forward_params;

/* Where keys are dealt out, in tiles of keys: what a tile counts for beside its own, and what it
 * costs that tiles are cut. */
enum { FA3_FORWARD_TILE_UNITS = 2, FA3_FORWARD_CUT_UNITS = 6 };

/* The length of `tile_counters`, an array of each variant's cubin: zeros for next_tile. */
#define FA3_TILE_COUNTERS 32768

/* What a compiled variant needs of the host, in constants (the kernel asserts the same): the depth
 * of the rings of keys and of values, threads, columns of a tile that lie side by side in shared
 * memory, and shared memory with room for the barriers and the work in hand. */
#define FA3_FORWARD_STAGES 2
#define FA3_FORWARD_THREADS(tile_q) (128 + 2 * (tile_q))
#define FA3_FORWARD_CHUNK(head_dim, head_dim_v) \
  ((head_dim) % 64 == 0 && (head_dim_v) % 64 == 0 ? 64 : 32)
#define FA3_FORWARD_SHARED_BYTES(head_dim, head_dim_v, tile_q, tile_k, row_scales)             \
  (2 * ((tile_q) * (head_dim) + FA3_FORWARD_STAGES * (tile_k) * ((head_dim) + (head_dim_v))) + \
   2 * (tile_q)*FA3_FORWARD_CHUNK(head_dim, head_dim_v) *                                      \
       ((head_dim_v) < 2 * FA3_FORWARD_CHUNK(head_dim, head_dim_v) ? 1 : 2) +                  \
   ((row_scales) ? 16 * FA3_FORWARD_STAGES * (tile_k) : 0) + 1024)

#endif
