/* How a forward call of few queries, or on a cache, runs on a GPU. */
#ifndef FA3_SRC_CUDA_DECODE_PLAN_H
#define FA3_SRC_CUDA_DECODE_PLAN_H

#include "cuda/staging.h"
#include "cuda/unpack.h"

struct cuda_facts;
struct cuda_plan;

/* Room for the results of parts of the keys, and what makes one of them. */
struct split_room {
  struct reservation partial;
  struct reservation partial_lse;
  struct reservation parts; /* where partial results are, of keys that are dealt out */
};

/* The functions of a kernel of 16 bits; those of codes have the first two, but for chunk_fp8. */
enum { DECODE_ALONE, DECODE_DEALT, DECODE_APPEND };

struct decode_plan {
  const struct kernel *kernel;  /* null: chunk has all sequences */
  const struct kernel *combine; /* null: each cluster's result is whole */
  int32_t most_queries; /* of a sequence: with more it is the forward kernel's, or chunk's */
  int32_t row_tiles;    /* of a key head of the longest sequence */
  int32_t splits;
  int32_t cluster;     /* splits that are put together at once */
  int32_t split_units; /* of a split; 0: an even share */
  int32_t blocks;      /* that all keys are dealt out to; 0: each sequence is split by itself */
  int32_t most_units;  /* of a sequence, where keys are dealt out, by this kernel or by chunk */
  int32_t piece_units; /* that a tile's beginning counts for there */
  bool alone;          /* a multiprocessor has one block */
  /* For the sequences of codes with more queries than most_queries, or null. */
  const struct kernel *chunk;
  int32_t chunk_tiles;  /* of rows, as row_tiles */
  int32_t chunk_splits; /* of a sequence's keys, which `combine` puts together */
  int32_t chunk_blocks; /* that all keys are dealt out to, as `blocks` */
  struct split_room room;
};

/* The kernel for keys of that dtype, and so many rows: queries of a sequence times query heads of a
 * key head. Null if there is none. */
const struct kernel *find_decode_kernel(const char *architecture, fa3_dtype key_dtype,
                                        int64_t head_dim, int64_t value_head_dim, bool softcap,
                                        int64_t rows);

/* Heads of keys that a block has at once, loads of 16 keys of a warp's step, and threads. */
int64_t decode_heads(const struct kernel *kernel);
int64_t decode_loads(const struct kernel *kernel);
int32_t decode_threads(const struct kernel *kernel);

/* Threads of a block of the kernel for chunks. */
int32_t chunk_threads(const struct kernel *kernel);

/* Whether a call has chunks: more rows of codes than a block of decode_fp8 takes, and much to read
 * again for each block. Splits by a fixed number of keys are decode_fp8's, for all queries. */
bool decode_has_chunks(const struct problem *problem);

/* FA3_UNSUPPORTED for tensors that these kernels do not take. Codes are taken where they lie: a
 * copy would cost more than the call. Strides are counted in 32 bits, as units of 16 bytes. */
fa3_status decode_check_inputs(const struct problem *problem);

/* Whether the decode kernel is for this call. */
bool decode_takes(const struct problem *problem);

/* Rows of a call's workspace for partial results of chunks of codes, also where this head dim needs
 * none, or the forward kernel takes the call. */
int64_t chunk_rows(const struct problem *problem, const struct cuda_facts *facts);

/* For the sequences with few queries of a call of the forward kernel, whose others may be prompts:
 * their number is known on the device alone. `decode` gets no kernel where this is no such call. */
fa3_status plan_few_queries(const struct problem *problem, const struct cuda_facts *facts,
                            struct decode_plan *decode);

/* Likewise as plan_forward. */
fa3_status plan_decode(const struct problem *problem, const struct cuda_facts *facts,
                       struct cuda_plan *plan);

#endif
