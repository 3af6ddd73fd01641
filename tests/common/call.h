/* A small valid call of each pass with every optional tensor, to be spoilt in one place. */
#ifndef FA3_TESTS_CALL_H
#define FA3_TESTS_CALL_H

#include <stdbool.h>

#include "fa3.h"
#include "tensors.h"

enum {
  CALL_BATCH = 2,
  CALL_SEQLEN_Q = 3,
  CALL_SEQLEN_K = 4,
  CALL_HEADS_Q = 4,
  CALL_HEADS_K = 2,
  CALL_HEAD_DIM = 16,
  CALL_VALUE_HEAD_DIM = 24,
  /* Elements of each shape of tensors.def. */
  CALL_QUERY = CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_HEAD_DIM,
  CALL_KEY = CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_HEAD_DIM,
  CALL_VALUE = CALL_BATCH * CALL_SEQLEN_K * CALL_HEADS_K * CALL_VALUE_HEAD_DIM,
  CALL_OUTPUT = CALL_BATCH * CALL_SEQLEN_Q * CALL_HEADS_Q * CALL_VALUE_HEAD_DIM,
  CALL_LSE = CALL_BATCH * CALL_HEADS_Q * CALL_SEQLEN_Q,
  CALL_HEADS = CALL_HEADS_Q,
  CALL_PAGES = CALL_BATCH * 2,
  CALL_NEW_KEY = 1, /* what follows is in no call of these passes */
  CALL_NEW_VALUE = 1,
  CALL_ROTARY = 1,
  CALL_POSITIONS = 1,
  CALL_PARTIAL = 1,
  CALL_PARTIAL_LSE = 1,
  CALL_SEQUENCES = CALL_BATCH,
  CALL_STARTS = CALL_BATCH + 1,
  CALL_ONE = 1
};

/* The arguments, and what the tensors hold. */
struct call {
  fa3_forward_args forward;
  fa3_backward_args backward;
#define TENSOR(name, dtypes, shape, feature) float name[CALL_##shape];
#define VECTOR(name, type, shape, feature) type name[CALL_##shape];
#include "tensors.def"
  char workspace[1 << 20];
};

/* Without pages. Dense, the forward call with cache_batch_index; or packed, with both cu_seqlens.
 * Float32, causal, a window, a scale and a softcap. */
void call_init(struct call *call, bool packed);

/* A pass of the API: its functions. */
struct call_pass {
  fa3_phase phase;
  const char *workspace_name;
  fa3_status (*workspace)(const struct call *call, size_t *bytes);
  const char *run_name;
  fa3_status (*run)(const struct call *call);
};
extern const struct call_pass call_forward;
extern const struct call_pass call_backward;

/* An argument of the pass in the call. */
fa3_tensor *call_tensor(struct call *call, const struct call_pass *pass,
                        const struct argument *argument);

/* Fails unless the pass returns `status` with a one-line message that contains every one of
 * `texts` (ended by null), and writes nothing. With `before_data` the function that tells the
 * workspace has to answer the same. `what` says how the call was spoilt. */
void call_is_refused(struct call *call, const struct call_pass *pass, const char *what,
                     fa3_status status, bool before_data, const char *const texts[]);

#endif
