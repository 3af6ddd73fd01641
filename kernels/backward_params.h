/* The backward kernels' launch contract, shared by host and device.
 *
 * Two launches on one stream, up to five:
 *   1. backward_prepare (backward_prepare.cu), or backward_prepare_long where rows of O have more
 *      than FA3_BACKWARD_PREPARE_COLUMNS: lse and D = rowsum(dO * O) - dlse of each row, in tiles,
 *      and zeros in the counters, in dQ where a block of rows sees no key, and in dK and dV of a
 *      head's first tiles that no query sees.
 *   2. backward (backward.cu, backward_wide.cu): dK, dV and dQ.
 *   3. backward_finish (of the same file), if dQ is finished later: stores it from `partial`.
 *   4. backward_sum (backward_prepare.cu), if backward_wide deals tiles out in parts: dK and dV as
 *      the sum over their parts, in the order of the parts.
 *   5. backward_sink (backward_prepare.cu), if the sink's gradient is wanted.
 * All but the last may be programmatic dependent launches: they wait for the one before by
 * themselves. backward_finish runs beside backward, waits for each block's sums, and ends after it.
 *
 * dQ is a sum over tiles of keys. Its blocks of tile_q rows collect that sum in `partial`, in the
 * order in which tiles are taken (backward_order.h): a counter per block tells how many tiles have
 * been added, and whose turn it is. The first tile stores, those between add, the last one adds
 * what is there to its own and writes the gradient. A block may have several such sums, of which
 * the last tile takes all. Where dQ is finished later, the last one adds too. So every gradient is
 * bitwise the same from run to run, and nothing is cleared before or converted after.
 *
 * Blocks of rows are numbered over the batch, `slot` being this number (fa3_backward_slot); a head
 * has FA3_BACKWARD_SLOTS of them. The workspace, each array aligned to 128 bytes, any content:
 *   counters  int   [2][sums][heads_q][slots]: of each of two shares of a block, or of one
 *   rows      float [heads_q][slots][FA3_BACKWARD_STATISTICS]: lse * log2(e) of each row, or
 *                   infinity for a row that takes no part; then D; then whether the block has an
 *                   lse beyond FA3_LARGE_LSE, in which case all of its lse are as they were given
 *   partial   float [sums][heads_q][slots][tile_q * head_dim of the variant], laid out as the
 *                   kernel likes
 *   parts     float [heads_k][key_slots][places][tile_k * (head_dim + head_dim_v) of the variant],
 *                   where tiles are dealt out in parts (backward_order.h): dV and dK of one or
 *                   several; fa3_part_places of each tile, which are numbered as blocks of rows
 *                   are. Of backward_wide [batch][heads_k][parts][seqlen_k][head_dim], then the
 *                   same with head_dim_v: grad_key and grad_value of the second launch
 *   arrivals  int   [heads_k][key_slots][FA3_BACKWARD_PART_WARPS], likewise: of each warp's keys,
 *                   the bits of pairs of which one side has arrived, and of those of which it has
 *                   left its sum
 *   sinks     float [heads_q][slots], if the sink's gradient is wanted
 *   next_tile one int, used if there are more tiles than blocks
 *
 * Tensor maps (16-bit elements, zero fill out of bounds; innermost dimension first; `C` is the
 * variant's chunk, swizzle 2 * C bytes; a head dim below the variant's is encoded as it is and zero
 * filled):
 *   query        4-d (head_dim, seqlen_q, heads_q, batch)    box (C, tile_q, 1, 1)
 *   grad_output  4-d (head_dim_v, seqlen_q, heads_q, batch)  box (C, tile_q, 1, 1)
 *   key          4-d (head_dim, seqlen_k, heads_k, batch)    box (C, keys, 1, 1)
 *   value        4-d (head_dim_v, seqlen_k, heads_k, batch)  box (C, keys, 1, 1)
 * `keys` is tile_k, but half of it for backward_wide.cu, where the two blocks of a cluster share a
 * tile (128 keys, and tile_q is 64); there each block of rows is counted twice for a tile. With
 * cumulative lengths seqlen is the total and the batch dimension is 1. */
#ifndef FA3_BACKWARD_PARAMS_H
#define FA3_BACKWARD_PARAMS_H

#include <stdint.h>

#include "backward_order.h"
#include "forward_params.h"
#include "sequence.h"

/* Blocks of queries. */
typedef struct {
  int tile_q, tile_k; /* of the variant */
  int blocks_q;       /* of tile_q rows, of the longest sequence (or a bound) */
} fa3_query_blocks;

/* A gradient that is written, or added to. */
typedef struct {
  void *data;
  int64_t stride_batch, stride_row, stride_head; /* elements */
  int head_dim;                                  /* what is stored, a multiple of 8 */
  int is_float;                                  /* else 16-bit, of the inputs' type */
  int accumulate;                                /* added to what is there */
  int vectors; /* data and strides (where there is more than one) are multiples of 16 bytes */
} fa3_gradient;

typedef struct {
  fa3_sequences sequences;
  fa3_query_blocks blocks;
  /* 16-bit; strides in elements. `vectors` as above, for both. */
  const void *output, *grad_output;
  int64_t output_stride_batch, output_stride_row, output_stride_head;
  int64_t grad_output_stride_batch, grad_output_stride_row, grad_output_stride_head;
  int head_dim_v, vectors;
  const float *lse, *grad_lse;                               /* the latter may be null */
  int64_t lse_stride_batch, lse_stride_row, lse_stride_head; /* elements */
  int64_t grad_lse_stride_batch, grad_lse_stride_row, grad_lse_stride_head;
  const float *sink; /* one logit per query head; null unless its gradient is wanted */
  fa3_gradient grad_query, grad_key, grad_value;
  int unseen;          /* a head's first tiles, of which no query sees a key */
  int queries_per_key; /* heads_q / heads_k */
  int slots, sums, arrival_words;
  int lengths_known; /* nothing of `sequences` is read from memory */
  int early;         /* as of the next kernel, and only where lengths are known */
  int *counters, *arrivals;
  float *rows, *sinks;
  unsigned *next_tile;
} fa3_backward_prepare_params;

typedef struct {
  fa3_sequences sequences;
  fa3_query_blocks blocks;
  const float *sinks;
  int slots, batches;
  void *grad_sink; /* heads_q entries */
  int64_t stride;  /* elements */
  int kind;        /* 0 float32, 1 float16, 2 bfloat16 */
  int accumulate;
} fa3_backward_sink_params;

typedef struct {
  fa3_tensor_map query, grad_output, key, value;
  fa3_sequences sequences;
  fa3_query_blocks blocks;
  fa3_gradient grad_query, grad_key, grad_value;
  fa3_key_tiles tiles;
  int queries_per_key; /* heads_q / heads_k */
  int heads, slots;    /* query heads */
  int key_slots;       /* of a head of keys */
  int *counters, *arrivals;
  const float *rows;
  float *partial, *parts;
  unsigned *next_tile; /* null: each block, or pair of blocks, has one tile, that of its number */
  int early; /* backward_wide: blocks are there before the kernels before backward_prepare are done,
                and find out what they have to do: without a counter, or lengths in memory */
  int finished_later;     /* dQ is left as a sum in `partial`: backward_finish stores it */
  float scale;            /* of the scores: what dQ and dK are multiplied by */
  float scale_log2;       /* of the scores, or the cap, times log2(e) */
  float softcap_log2;     /* 0: no cap; else scale / cap * 2 log2(e) */
  float natural;          /* of the scores, or the cap: what makes logits */
  int clear_query;        /* rows beyond a sequence's end may hold anything (cumulative or used */
  int clear_key;          /* lengths): zero them; likewise of keys */
  int64_t counters_apart; /* from one share's of a block to the other's */
  int64_t sums_apart;     /* from one sum's of a block to the next one's, in blocks */
} fa3_backward_params;

/* dK and dV where backward_wide deals tiles out in parts: each part's in float32, as fa3_gradient
 * describes it with head * parts + part for the head. */
typedef struct {
  fa3_sequences sequences;
  fa3_gradient part_key, part_value; /* what is added up */
  fa3_gradient grad_key, grad_value;
  int parts;
  int first; /* key of a head that a query sees */
} fa3_backward_sum_params;

/* Grids and threads: backward_prepare (blocks_q + unseen, heads_q, batch), also for 0 of both with
 * one block; backward_sink (heads_q); backward as many blocks as there
 * are SMs to use, at most fa3_key_tile_count; backward_wide as many pairs of blocks;
 * backward_finish and backward_finish_narrow, which takes its place where blocks are few and their
 * sums many (blocks_q * heads_q * slices of a block, batch); backward_sum (threads for eight
 * columns of each key, heads_k, batch).
 */
#define FA3_BACKWARD_PREPARE_THREADS 256
#define FA3_BACKWARD_PREPARE_COLUMNS 64
#define FA3_BACKWARD_SINK_THREADS 256
#define FA3_BACKWARD_SUM_THREADS 256
#define FA3_BACKWARD_FINISH_THREADS 128
#define FA3_BACKWARD_THREADS 384
#define FA3_BACKWARD_PART_WARPS 8
#define FA3_BACKWARD_WIDE_THREADS 512

/* Vectors that a thread of backward_finish takes, and how many such slices a block of dQ has. A
 * slice is 64 rows of 32 columns; with 80 queries it is all rows of half of the columns. A narrow
 * slice is 64 rows of eight columns; with 80 queries it is eight rows of half of the columns. */
#define FA3_BACKWARD_FINISH_VECTORS(tile_q, narrow) ((narrow) ? 1 : (tile_q) == 80 ? 10 : 4)
#define FA3_BACKWARD_FINISH_SLICES(head_dim, tile_q, narrow) \
  ((tile_q) * (head_dim) / (4 * 128 * FA3_BACKWARD_FINISH_VECTORS(tile_q, narrow)))

/* The largest tile_q. */
#define FA3_BACKWARD_MOST_QUERIES 128

/* Floats of a block of rows in `rows`: the last is there eight times, a pair for each thread of a
 * quad. */
#define FA3_BACKWARD_STATISTICS(tile_q) (2 * (tile_q) + 8)

/* Beyond it the roundings of lse * log2(e) are more than that of P to bfloat16. */
#define FA3_LARGE_LSE 4096.0f

/* Slots of a head: `rows_q` is seqlen_q, or with cumulative lengths the total. */
#define FA3_BACKWARD_SLOTS(cumulative, batch, rows_q, tile_q)     \
  ((cumulative) ? (int64_t)(rows_q) / (tile_q) + (int64_t)(batch) \
                : (int64_t)(batch) * (((rows_q) + (tile_q)-1) / (tile_q)))

/* Columns of a tile that lie side by side in shared memory. */
#define FA3_BACKWARD_CHUNK(head_dim, head_dim_v) FA3_FORWARD_CHUNK(head_dim, head_dim_v)

/* Shared memory of backward.cu: keys and values, of the next tile too with steps of 128 queries;
 * rings of queries and of dO, two tiles of dS, with steps of 64 queries a gradient on its way out,
 * the rows' statistics, barriers, the work in hand and the order of sequences. */
#define FA3_BACKWARD_STAGES 2
#define FA3_BACKWARD_KEY_STAGES(tile_q) ((tile_q) == 128 ? 2 : 1)
#define FA3_BACKWARD_STAGING_BYTES(head_dim, tile_q, tile_k) \
  ((tile_q) == 64 ? 2 * (tile_k) * (head_dim) : 0)
#define FA3_BACKWARD_SHARED_BYTES(head_dim, head_dim_v, tile_q, tile_k)                        \
  (2 * ((FA3_BACKWARD_KEY_STAGES(tile_q) * (tile_k) + FA3_BACKWARD_STAGES * (tile_q)) *        \
            ((head_dim) + (head_dim_v)) +                                                      \
        2 * (tile_q) * (tile_k)) +                                                             \
   FA3_BACKWARD_STAGING_BYTES(head_dim, tile_q, tile_k) + FA3_BACKWARD_STAGES * 8 * (tile_q) + \
   1024 + FA3_MOST_SORTED)

/* Shared memory of backward_wide.cu: 64 keys and values, 128 columns of the neighbour's keys, two
 * tiles of 64 queries and `do_stages` of dO, four tiles of dS, one of probabilities, and the rest.
 */
#define FA3_BACKWARD_WIDE_SHARED_BYTES(head_dim, head_dim_v, do_stages) \
  (128 * (3 * (head_dim) + 384 + (1 + (do_stages)) * (head_dim_v)) + 16384 + 2048)

/* The first slot of a sequence, whose first row in the tensors is `query_row`. */
FA3_SHARED int fa3_backward_slot(const fa3_sequences *sequences, const fa3_query_blocks *blocks,
                                 int batch, int query_row) {
  return sequences->cu_seqlens_q ? query_row / blocks->tile_q + batch : batch * blocks->blocks_q;
}

/* Likewise of tiles of keys. */
FA3_SHARED int fa3_backward_key_slot(const fa3_sequences *sequences, const fa3_key_tiles *tiles,
                                     int batch, int key_row, int tile_k) {
  return sequences->cu_seqlens_k ? key_row / tile_k + batch : batch * (tiles->first + tiles->tiles);
}

#endif
