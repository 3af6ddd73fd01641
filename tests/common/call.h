/* A small valid call with every optional tensor, to be spoilt in one place. */
#ifndef FA3_TESTS_CALL_H
#define FA3_TESTS_CALL_H

#include <stdbool.h>

#include "fa3.h"

enum {
  CALL_BATCH = 2,
  CALL_SEQLEN_Q = 3,
  CALL_SEQLEN_K = 4,
  CALL_HEADS_Q = 4,
  CALL_HEADS_K = 2,
  CALL_HEAD_DIM = 16,
  CALL_VALUE_HEAD_DIM = 24
};

struct call {
  fa3_forward_args args;
  float query[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_HEAD_DIM];
  float key[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_HEAD_DIM];
  float value[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_VALUE_HEAD_DIM];
  float output[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_VALUE_HEAD_DIM];
  float lse[CALL_BATCH * CALL_HEADS_Q * CALL_SEQLEN_Q];
  float sink[CALL_HEADS_Q];
  int32_t cu_seqlens_q[CALL_BATCH + 1];
  int32_t cu_seqlens_k[CALL_BATCH + 1];
  int32_t seqused_q[CALL_BATCH];
  int32_t seqused_k[CALL_BATCH];
  int32_t leftpad_k[CALL_BATCH];
  int32_t cache_batch_index[CALL_BATCH];
  int64_t diagonal[CALL_BATCH];
  char workspace[1 << 20];
};

/* Dense, with cache_batch_index; or packed, with both cu_seqlens. Float32, causal, a window, a
 * scale and a softcap. */
void call_init(struct call *call, bool packed);

/* The tensors of fa3_forward_args, by name. */
struct call_tensor {
  const char *name;
  size_t offset;
};
extern const struct call_tensor call_tensors[];
extern const int call_tensor_count;
fa3_tensor *call_tensor(struct call *call, int which);

/* Fails unless fa3_forward returns `status` with a one-line message that contains every one of
 * `texts` (ended by null), and writes nothing. With `before_data` fa3_forward_workspace has to
 * answer the same. `what` says how the call was spoilt. */
void call_is_refused(struct call *call, const char *what, fa3_status status, bool before_data,
                     const char *const texts[]);

#endif
