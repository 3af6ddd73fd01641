/* A small valid call of each pass with every optional tensor, to be spoilt in one place. */
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
  fa3_forward_args forward;
  fa3_backward_args backward;
  float query[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_HEAD_DIM];
  float key[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_HEAD_DIM];
  float value[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_VALUE_HEAD_DIM];
  float output[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_VALUE_HEAD_DIM];
  float lse[CALL_BATCH * CALL_HEADS_Q * CALL_SEQLEN_Q];
  float sink[CALL_HEADS_Q];
  float grad_output[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_VALUE_HEAD_DIM];
  float grad_lse[CALL_BATCH * CALL_HEADS_Q * CALL_SEQLEN_Q];
  float grad_query[CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_HEAD_DIM];
  float grad_key[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_HEAD_DIM];
  float grad_value[CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_VALUE_HEAD_DIM];
  float grad_sink[CALL_HEADS_Q];
  int32_t cu_seqlens_q[CALL_BATCH + 1];
  int32_t cu_seqlens_k[CALL_BATCH + 1];
  int32_t seqused_q[CALL_BATCH];
  int32_t seqused_k[CALL_BATCH];
  int32_t leftpad_k[CALL_BATCH];
  int32_t cache_batch_index[CALL_BATCH];
  int64_t diagonal[CALL_BATCH];
  char workspace[1 << 20];
};

/* Dense, the forward call with cache_batch_index; or packed, with both cu_seqlens. Float32, causal,
 * a window, a scale and a softcap. */
void call_init(struct call *call, bool packed);

/* A pass of the API: its functions and the tensors of its arguments, by name. */
struct call_tensor {
  const char *name;
  size_t offset; /* in struct call */
  bool output;
};
struct call_pass {
  const struct call_tensor *tensors;
  int tensor_count;
  const char *workspace_name;
  fa3_status (*workspace)(const struct call *call, size_t *bytes);
  const char *run_name;
  fa3_status (*run)(const struct call *call);
};
extern const struct call_pass call_forward;
extern const struct call_pass call_backward;
fa3_tensor *call_tensor(struct call *call, const struct call_pass *pass, int which);

/* Fails unless the pass returns `status` with a one-line message that contains every one of
 * `texts` (ended by null), and writes nothing. With `before_data` the function that tells the
 * workspace has to answer the same. `what` says how the call was spoilt. */
void call_is_refused(struct call *call, const struct call_pass *pass, const char *what,
                     fa3_status status, bool before_data, const char *const texts[]);

#endif
