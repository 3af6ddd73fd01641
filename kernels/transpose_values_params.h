/* The launch contract of kernels/transpose_values.cu, shared by host and device: V^T of FP8 values,
 * for the kernels that take them so. */
#ifndef FA3_TRANSPOSE_VALUES_PARAMS_H
#define FA3_TRANSPOSE_VALUES_PARAMS_H

#include "forward_params.h"

/* Tiles of tile_k keys, counted from each sequence's first, as they are to lie in shared memory: in
 * the order of sequences, tiles, heads. */
typedef struct {
  unsigned char *data;
  int heads;
  int per_sequence; /* tiles; of packed sequences 0 */
  int count;        /* tiles of all sequences, of each head */
} fa3_transposed_values;

/* Where the tiles of sequence `b` begin. Of packed ones each has room for a tile more than its
 * whole ones. */
FA3_SHARED int fa3_first_transposed(const fa3_transposed_values *values, const int *cu_seqlens,
                                    int b, int tile_k) {
  return cu_seqlens ? cu_seqlens[b] / tile_k + b : b * values->per_sequence;
}

/* A length that is too large leads nowhere else than to the last tile. */
FA3_SHARED unsigned char *fa3_transposed_tile(const fa3_transposed_values *values, int tile,
                                              int head, int tile_bytes) {
  if ((unsigned)tile >= (unsigned)values->count) tile = values->count - 1;
  return values->data + ((int64_t)tile * values->heads + head) * tile_bytes;
}

enum { FA3_TRANSPOSE_VALUES_THREADS = 128 };

/* A grid of (tiles of a sequence times chunks of columns, heads, sequences). */
typedef struct {
  fa3_tensor_map value; /* as the forward kernel's */
  fa3_sequences sequences;
  fa3_transposed_values to;
} fa3_transpose_values_params;

#define FA3_TRANSPOSE_VALUES_SHARED_BYTES(tile_k) ((tile_k)*128 + 8)

#endif
