/* The forward kernel's launch contract, shared by host and device.
 *
 * Tensor maps (16-bit elements, zero fill out of bounds; innermost dimension
 * first; `C` is the variant's `chunk`, swizzle 2 * C bytes; a head dim below the
 * variant's is encoded as it is and zero filled):
 *   query  5-d (head_dim, packed, seqlen_q, heads, batch)  box (C, packed, rows/packed, 1, 1)
 *   key    4-d (head_dim, seqlen_k, heads_k, batch)         box (C, tile_n, 1, 1)
 *   value  4-d (head_dim_v, seqlen_k, heads_k, batch)       box (C, tile_n, 1, 1)
 *   out    4-d (head_dim_v, seqlen_q, heads_q, batch)       box (C, 16, 1, 1)
 * `rows` is 64. `packed` is how many query heads of one key head share a tile: 1,
 * or heads_q / heads_k (<= 64); then `heads` counts key heads, query head h sits
 * at (h % packed, h / packed), and rows is 64 rounded down to a multiple of it.
 * With cumulative lengths seqlen is the total and the batch dimension is 1. */
#ifndef FA3_FORWARD_PARAMS_H
#define FA3_FORWARD_PARAMS_H

#include <stdint.h>

#include "scheduler.h"

#ifdef __cplusplus
#define FA3_ALIGN(n) alignas(n)
#else
#define FA3_ALIGN(n) _Alignas(n)
#endif

typedef struct {
  FA3_ALIGN(128) unsigned char opaque[128];
} fa3_tensor_map;

typedef struct {
  fa3_tensor_map query, key, value, out;

  void *out_pointer; /* for rows that the copy engine may not write */
  float *lse;        /* may be null */
  const float *sink; /* one logit per query head, or null */
  int64_t out_stride_batch, out_stride_row, out_stride_head; /* elements */
  int64_t lse_stride_batch, lse_stride_head;                 /* elements; rows are adjacent */

  const int *cu_seqlens_q, *cu_seqlens_k; /* batch + 1 entries, or null */
  const int *used_q, *used_k;             /* per-sequence lengths, or null */
  const int *leftpad_k;                   /* keys to skip at a sequence's start, or null */
  const int *batch_index_k; /* the batch entry of key and value of each sequence, or null */
  const int64_t *diagonal;  /* the key that query 0 stands at, or null: keys - queries */
  int seqlen_q, seqlen_k;   /* the lengths where the arrays are null */

  fa3_tile_space tiles;      /* blocks: of warpgroups * (rows/packed) queries */
  int packed;                /* query heads per tile */
  int packed_inverse;        /* 65536 / packed + 1: row / packed is row * this >> 16 for row < 64 */
  int queries_per_warpgroup; /* 64 / packed */
  int queries_per_key;       /* heads_q / heads_k */
  int head_dim_v;            /* what is stored, a multiple of 8 */
  int64_t window_left, window_right; /* FA3_NO_LIMIT: none */

  float scale_log2;    /* of the scores, or the cap, times log2(e) */
  float softcap_log2;  /* 0: no cap; else scale / cap * 2 log2(e) */
  unsigned *next_tile; /* zero, as the kernel leaves it too: tiles go to whoever is free; null: in
                          turns */
  int store_by_tma;    /* whole row groups of a warp may go through the copy engine */
  int clear_value;     /* rows beyond a sequence's end may hold anything: zero V's */
} fa3_forward_params;

/* The length of `tile_counters`, an array of each variant's cubin: zeros for next_tile. */
#define FA3_TILE_COUNTERS 1024

/* What a compiled variant needs of the host, in constants (the kernel asserts the same): the depth
 * of the rings of keys and of values, threads, columns of a tile that lie side by side in shared
 * memory, and shared memory with room for the barriers and the work in hand. */
#define FA3_FORWARD_STAGES 2
#define FA3_FORWARD_THREADS(tile_q) (128 + 2 * (tile_q))
#define FA3_FORWARD_CHUNK(head_dim, head_dim_v) \
  ((head_dim) % 64 == 0 && (head_dim_v) % 64 == 0 ? 64 : 32)
#define FA3_FORWARD_SHARED_BYTES(head_dim, head_dim_v, tile_q, tile_k)                         \
  (2 * ((tile_q) * (head_dim) + FA3_FORWARD_STAGES * (tile_k) * ((head_dim) + (head_dim_v))) + \
   2 * (tile_q)*FA3_FORWARD_CHUNK(head_dim, head_dim_v) *                                      \
       ((head_dim_v) < 2 * FA3_FORWARD_CHUNK(head_dim, head_dim_v) ? 1 : 2) +                  \
   1024)

#endif
