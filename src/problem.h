/* What a call asks for, validated and normalised: the one form that plans, engines and
 * tests work on. */
#ifndef FA3_SRC_PROBLEM_H
#define FA3_SRC_PROBLEM_H

#include <stdbool.h>

#include "fa3.h"
#include "mask.h"
#include "tensors.h"

/* A 4-d view with the axes named; an axis that the tensor lacks has extent 1. Packed tensors are
 * one batch, with stride_batch 0: their sequences differ by the row they start at. An operand that
 * was not given has dtype 0. */
struct operand {
  char *data;
  fa3_dtype dtype;
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t dim;
  int64_t stride_batch;
  int64_t stride_row;
  int64_t stride_head;
};

struct problem {
  fa3_phase phase;
  fa3_device device;
  void *stream;
  fa3_features features;

  int64_t batch;
  int64_t heads_q;
  int64_t heads_k;
  int64_t head_dim;
  int64_t value_head_dim;
  int64_t rows_q;       /* seqlen_q of a dense batch, total_q of a packed one */
  int64_t rows_k;       /* likewise; of all pages of a sequence */
  int64_t batch_k;      /* batch extent of a dense key and value, or their pages */
  int64_t max_seqlen_q; /* bounds of one sequence's length; 0 if only the contents tell */
  int64_t max_seqlen_k;

  /* The tensors, by their names in fa3.h: operands, and pointers to contiguous integers, null if
   * they were not given. */
#define TENSOR(name, ...) struct operand name;
#define VECTOR(name, type, ...) const type *name;
#include "tensors.def"

  /* Rows of a block of them, or 0: `rows` of query_scale are blocks. */
  int64_t query_scale_rows;
  int64_t key_scale_rows;
  int64_t value_scale_rows;
  int64_t codes_scale_rows;

  bool accumulate;
  bool interleaved;        /* of rotary embedding */
  bool separate_sequences; /* none attends to another's new rows */
  bool subtract_mean;
  bool rotate;
  uint64_t seed; /* of the rotation */
  float scale;
  float softcap;        /* 0: none */
  int64_t window_left;  /* MASK_UNBOUNDED: none */
  int64_t window_right; /* 0 if causal */
  int32_t num_threads;  /* 0: the engine's default */
  int32_t reserved_multiprocessors;
  int32_t num_splits; /* at most; 0: the engine chooses */
  int64_t split_keys; /* of a part; 0: the engine chooses */
  int64_t appended;   /* newest keys of a sequence that the call queued just before writes */
  const struct problem *append; /* what the call does first, or null */

  void *workspace; /* as it was given, unchecked */
  size_t workspace_size;
};

/* Whether an operand was given and has elements. */
static inline bool has_elements(const struct operand *operand) {
  return operand->dtype && operand->batch && operand->rows && operand->heads && operand->dim;
}

/* A tensor's data, for loops over all of them. */
struct tensor_data {
  const char *name;
  void *data;
  fa3_dtype dtype;
  bool empty; /* there is nothing to read or write: it was not given, or has no elements */
};
struct tensor_data problem_tensor(const struct problem *problem, enum tensor tensor);
void problem_set_data(struct problem *problem, enum tensor tensor, void *data);

/* The operand of a tensor that is no vector; const if the problem is. */
struct operand *problem_operand(const struct problem *problem, enum tensor tensor);

/* Validates everything but data pointers, contents of lengths and the workspace, and fills in
 * `problem`. `args` is the phase's struct, of this version's size. Never reads through the caller's
 * tensors. */
fa3_status problem_from_args(fa3_phase phase, const void *args, struct problem *problem);

/* The checks that need the data: pointers present and aligned; for the CPU also the contents of
 * the lengths. */
fa3_status problem_check_data(const struct problem *problem);

/* The contents of lengths, pages and positions, which have to be the host's. */
fa3_status problem_check_lengths(const struct problem *problem);

/* What the problem asks of an engine. */
fa3_capability problem_capability(const struct problem *problem);

/* One sequence of the batch: where its rows are and what it masks. */
struct sequence {
  int64_t seqlen_q;
  int64_t row_q;   /* first row of query, output and lse */
  int64_t batch_q; /* index for stride_batch of query, output and lse */
  int64_t row_k;   /* first row of key and value, after left padding */
  int64_t leftpad; /* rows of padding before it */
  int64_t index;   /* in the batch */
  int64_t batch_k;
  const int32_t *pages; /* of key and value, or null: its rows are then rows of all of them */
  struct mask mask;     /* mask.seqlen_k is its number of keys */
};

/* Whether no vector tells the sequences apart, but for where their keys are. */
bool problem_sequences_alike(const struct problem *problem);

/* Whether a sequence may attend to new rows of another that the append writes: in the same page, or
 * the same entry of the cache. */
bool problem_shares_new_rows(const struct problem *append);

/* Reads the lengths (host memory); they have passed problem_check_data. */
struct sequence problem_sequence(const struct problem *problem, int64_t batch);

/* The position of a row that is appended or quantised in the tables of rotary embedding. */
int64_t problem_position(const struct problem *problem, const struct sequence *sequence,
                         int64_t row);

#endif
