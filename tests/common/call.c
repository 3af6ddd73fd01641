#include "call.h"

#include <stdio.h>
#include <string.h>

#include "test.h"

static void init_forward(struct call *call, bool packed) {
  fa3_forward_args *args = &call->forward;
  args->struct_size = sizeof *args;
  if (packed) {
    int64_t total_q = (int64_t)CALL_BATCH * CALL_SEQLEN_Q;
    int64_t total_k = (int64_t)CALL_BATCH * CALL_SEQLEN_K;
    args->query = fa3_packed(call->query, FA3_FLOAT32, total_q, CALL_HEADS_Q, CALL_HEAD_DIM);
    args->key = fa3_packed(call->key, FA3_FLOAT32, total_k, CALL_HEADS_K, CALL_HEAD_DIM);
    args->value = fa3_packed(call->value, FA3_FLOAT32, total_k, CALL_HEADS_K, CALL_VALUE_HEAD_DIM);
    args->output =
        fa3_packed(call->output, FA3_FLOAT32, total_q, CALL_HEADS_Q, CALL_VALUE_HEAD_DIM);
    args->lse = fa3_packed_lse(call->lse, CALL_HEADS_Q, total_q);
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
    args->lse = fa3_lse(call->lse, CALL_BATCH, CALL_HEADS_Q, CALL_SEQLEN_Q);
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

/* The same tensors in memory, and gradients of their shapes. */
static void init_backward(struct call *call) {
  const fa3_forward_args *forward = &call->forward;
  fa3_backward_args *args = &call->backward;
  *args = (fa3_backward_args){.struct_size = sizeof *args,
                              .query = forward->query,
                              .key = forward->key,
                              .value = forward->value,
                              .output = forward->output,
                              .lse = forward->lse,
                              .grad_output = forward->output,
                              .grad_query = forward->query,
                              .grad_key = forward->key,
                              .grad_value = forward->value,
                              .grad_lse = forward->lse,
                              .sink = forward->sink,
                              .grad_sink = forward->sink,
                              .cu_seqlens_q = forward->cu_seqlens_q,
                              .cu_seqlens_k = forward->cu_seqlens_k,
                              .seqused_q = forward->seqused_q,
                              .seqused_k = forward->seqused_k,
                              .leftpad_k = forward->leftpad_k,
                              .diagonal = forward->diagonal,
                              .max_seqlen_q = forward->max_seqlen_q,
                              .max_seqlen_k = forward->max_seqlen_k,
                              .flags = forward->flags,
                              .softmax_scale = forward->softmax_scale,
                              .softcap = forward->softcap,
                              .num_threads = forward->num_threads,
                              .window_left = forward->window_left,
                              .window_right = forward->window_right,
                              .workspace = forward->workspace,
                              .workspace_size = forward->workspace_size};
  args->grad_output.data = call->grad_output;
  args->grad_lse.data = call->grad_lse;
  args->grad_query.data = call->grad_query;
  args->grad_key.data = call->grad_key;
  args->grad_value.data = call->grad_value;
  args->grad_sink.data = call->grad_sink;
}

void call_init(struct call *call, bool packed) {
  memset(call, 0, sizeof *call);
  float *const poisoned[] = {call->output,   call->lse,        call->grad_query,
                             call->grad_key, call->grad_value, call->grad_sink};
  const size_t sizes[] = {sizeof call->output,   sizeof call->lse,        sizeof call->grad_query,
                          sizeof call->grad_key, sizeof call->grad_value, sizeof call->grad_sink};
  for (size_t i = 0; i < sizeof poisoned / sizeof *poisoned; i++)
    memset(poisoned[i], 0xff, sizes[i]);
  init_forward(call, packed);
  init_backward(call);
}

#define FORWARD(name, output) \
  { #name, offsetof(struct call, forward.name), output }
#define BACKWARD(name, output) \
  { #name, offsetof(struct call, backward.name), output }

static const struct call_tensor forward_tensors[] = {
    FORWARD(query, false),        FORWARD(key, false),          FORWARD(value, false),
    FORWARD(output, true),        FORWARD(lse, true),           FORWARD(sink, false),
    FORWARD(cu_seqlens_q, false), FORWARD(cu_seqlens_k, false), FORWARD(seqused_q, false),
    FORWARD(seqused_k, false),    FORWARD(leftpad_k, false),    FORWARD(cache_batch_index, false),
    FORWARD(diagonal, false),
};

static const struct call_tensor backward_tensors[] = {
    BACKWARD(query, false),        BACKWARD(key, false),          BACKWARD(value, false),
    BACKWARD(output, false),       BACKWARD(lse, false),          BACKWARD(grad_output, false),
    BACKWARD(grad_query, true),    BACKWARD(grad_key, true),      BACKWARD(grad_value, true),
    BACKWARD(grad_lse, false),     BACKWARD(sink, false),         BACKWARD(grad_sink, true),
    BACKWARD(cu_seqlens_q, false), BACKWARD(cu_seqlens_k, false), BACKWARD(seqused_q, false),
    BACKWARD(seqused_k, false),    BACKWARD(leftpad_k, false),    BACKWARD(diagonal, false),
};

static fa3_status forward_workspace(const struct call *call, size_t *bytes) {
  return fa3_forward_workspace(&call->forward, bytes);
}

static fa3_status run_forward(const struct call *call) {
  return fa3_forward(&call->forward);
}

static fa3_status backward_workspace(const struct call *call, size_t *bytes) {
  return fa3_backward_workspace(&call->backward, bytes);
}

static fa3_status run_backward(const struct call *call) {
  return fa3_backward(&call->backward);
}

const struct call_pass call_forward = {
    forward_tensors,         sizeof forward_tensors / sizeof *forward_tensors,
    "fa3_forward_workspace", forward_workspace,
    "fa3_forward",           run_forward};
const struct call_pass call_backward = {
    backward_tensors,         sizeof backward_tensors / sizeof *backward_tensors,
    "fa3_backward_workspace", backward_workspace,
    "fa3_backward",           run_backward};

fa3_tensor *call_tensor(struct call *call, const struct call_pass *pass, int which) {
  return (fa3_tensor *)(void *)((char *)call + pass->tensors[which].offset);
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

void call_is_refused(struct call *call, const struct call_pass *pass, const char *what,
                     fa3_status status, bool before_data, const char *const texts[]) {
  static struct call before;
  before = *call;
  size_t bytes = 12345;
  fa3_status workspace_status = pass->workspace(call, &bytes);
  check_status(what, pass->workspace_name, workspace_status, before_data ? status : FA3_OK);
  if (before_data) {
    check_message(what, texts);
    if (bytes != 12345) fail_msg("%s: *bytes was written", what);
  }
  check_status(what, pass->run_name, pass->run(call), status);
  check_message(what, texts);
  if (memcmp((const char *)&before, (const char *)call, sizeof before) != 0)
    fail_msg("%s: something was written", what);
}
