#include "call.h"

#include <stdio.h>
#include <string.h>

#include "test.h"

void call_init(struct call *call, bool packed) {
  memset(call, 0, sizeof *call);
  memset(call->output, 0xff, sizeof call->output);
  memset(call->lse, 0xff, sizeof call->lse);
  fa3_forward_args *args = &call->args;
  args->struct_size = sizeof *args;
  if (packed) {
    int64_t total_q = (int64_t)CALL_BATCH * CALL_SEQLEN_Q;
    int64_t total_k = (int64_t)CALL_BATCH * CALL_SEQLEN_K;
    args->query = fa3_packed(call->query, FA3_FLOAT32, total_q, CALL_HEADS_Q, CALL_HEAD_DIM);
    args->key = fa3_packed(call->key, FA3_FLOAT32, total_k, CALL_HEADS_K, CALL_HEAD_DIM);
    args->value = fa3_packed(call->value, FA3_FLOAT32, total_k, CALL_HEADS_K, CALL_VALUE_HEAD_DIM);
    args->output =
        fa3_packed(call->output, FA3_FLOAT32, total_q, CALL_HEADS_Q, CALL_VALUE_HEAD_DIM);
    args->lse = (fa3_tensor){.data = call->lse,
                             .dtype = FA3_FLOAT32,
                             .rank = 2,
                             .shape = {CALL_HEADS_Q, total_q},
                             .strides = {total_q, 1}};
    args->cu_seqlens_q = fa3_vector(call->cu_seqlens_q, FA3_INT32, CALL_BATCH + 1);
    args->cu_seqlens_k = fa3_vector(call->cu_seqlens_k, FA3_INT32, CALL_BATCH + 1);
    args->max_seqlen_q = CALL_SEQLEN_Q;
    args->max_seqlen_k = CALL_SEQLEN_K;
  } else {
    args->query =
        fa3_dense(call->query, FA3_FLOAT32, CALL_BATCH, CALL_SEQLEN_Q, CALL_HEADS_Q, CALL_HEAD_DIM);
    args->key =
        fa3_dense(call->key, FA3_FLOAT32, CALL_BATCH, CALL_SEQLEN_K, CALL_HEADS_K, CALL_HEAD_DIM);
    args->value = fa3_dense(call->value, FA3_FLOAT32, CALL_BATCH, CALL_SEQLEN_K, CALL_HEADS_K,
                            CALL_VALUE_HEAD_DIM);
    args->output = fa3_dense(call->output, FA3_FLOAT32, CALL_BATCH, CALL_SEQLEN_Q, CALL_HEADS_Q,
                             CALL_VALUE_HEAD_DIM);
    args->lse = (fa3_tensor){.data = call->lse,
                             .dtype = FA3_FLOAT32,
                             .rank = 3,
                             .shape = {CALL_BATCH, CALL_HEADS_Q, CALL_SEQLEN_Q},
                             .strides = {(int64_t)CALL_HEADS_Q * CALL_SEQLEN_Q, CALL_SEQLEN_Q, 1}};
    args->cache_batch_index = fa3_vector(call->cache_batch_index, FA3_INT32, CALL_BATCH);
  }
  args->sink = fa3_vector(call->sink, FA3_FLOAT32, CALL_HEADS_Q);
  args->seqused_q = fa3_vector(call->seqused_q, FA3_INT32, CALL_BATCH);
  args->seqused_k = fa3_vector(call->seqused_k, FA3_INT32, CALL_BATCH);
  args->leftpad_k = fa3_vector(call->leftpad_k, FA3_INT32, CALL_BATCH);
  args->diagonal = fa3_vector(call->diagonal, FA3_INT64, CALL_BATCH);
  for (int b = 0; b < CALL_BATCH; b++) {
    call->cu_seqlens_q[b + 1] = (b + 1) * CALL_SEQLEN_Q;
    call->cu_seqlens_k[b + 1] = (b + 1) * CALL_SEQLEN_K;
    call->seqused_q[b] = CALL_SEQLEN_Q;
    call->seqused_k[b] = CALL_SEQLEN_K - 1;
    call->leftpad_k[b] = 1;
    call->cache_batch_index[b] = CALL_BATCH - 1 - b;
    call->diagonal[b] = b;
  }
  args->flags = FA3_CAUSAL | FA3_WINDOW | FA3_SCALE;
  args->window_left = 2;
  args->window_right = 1;
  args->softmax_scale = 0.25f;
  args->softcap = 30;
  args->num_threads = 1;
  args->workspace = call->workspace;
  args->workspace_size = sizeof call->workspace;
}

#define TENSOR(name) \
  { #name, offsetof(fa3_forward_args, name) }
const struct call_tensor call_tensors[] = {
    TENSOR(query),     TENSOR(key),       TENSOR(value),        TENSOR(output),
    TENSOR(lse),       TENSOR(sink),      TENSOR(cu_seqlens_q), TENSOR(cu_seqlens_k),
    TENSOR(seqused_q), TENSOR(seqused_k), TENSOR(leftpad_k),    TENSOR(cache_batch_index),
    TENSOR(diagonal),
};
const int call_tensor_count = sizeof call_tensors / sizeof *call_tensors;

fa3_tensor *call_tensor(struct call *call, int which) {
  return (fa3_tensor *)(void *)((char *)&call->args + call_tensors[which].offset);
}

static void check_message(const char *what, const char *const texts[]) {
  const char *message = fa3_last_error();
  for (int i = 0; texts[i]; i++)
    if (!strstr(message, texts[i])) fail_msg("%s: \"%s\" lacks \"%s\"", what, message, texts[i]);
  if (strchr(message, '\n')) fail_msg("%s: \"%s\" is not one line", what, message);
}

static void check_status(const char *what, const char *function, fa3_status got, fa3_status want) {
  if (got != want)
    fail_msg("%s: %s gave %s (%s), expected %s", what, function, fa3_status_name(got),
             got ? fa3_last_error() : "", fa3_status_name(want));
}

void call_is_refused(struct call *call, const char *what, fa3_status status, bool before_data,
                     const char *const texts[]) {
  static struct call before;
  before = *call;
  size_t bytes = 12345;
  fa3_status workspace_status = fa3_forward_workspace(&call->args, &bytes);
  check_status(what, "fa3_forward_workspace", workspace_status, before_data ? status : FA3_OK);
  if (before_data) {
    check_message(what, texts);
    if (bytes != 12345) fail_msg("%s: *bytes was written", what);
  }
  check_status(what, "fa3_forward", fa3_forward(&call->args), status);
  check_message(what, texts);
  if (memcmp((const char *)&before, (const char *)call, sizeof before) != 0)
    fail_msg("%s: something was written", what);
}
