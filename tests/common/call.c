#include "call.h"

#include <stdio.h>
#include <string.h>

#include "test.h"

/* Where struct call has what a tensor holds. */
static const size_t contents[TENSORS] = {
#define TENSOR(name, ...) offsetof(struct call, name),
#define VECTOR(name, ...) offsetof(struct call, name),
#include "tensors.def"
};

static const int64_t extents[AXES] = {
    [AXIS_BATCH] = CALL_BATCH,       [AXIS_BATCH_AND_ONE] = CALL_BATCH + 1,
    [AXIS_BATCH_K] = CALL_BATCH,     [AXIS_PAGES] = 2,
    [AXIS_ROWS_Q] = CALL_SEQLEN_Q,   [AXIS_ROWS_K] = CALL_SEQLEN_K,
    [AXIS_HEADS_Q] = CALL_HEADS_Q,   [AXIS_HEADS_K] = CALL_HEADS_K,
    [AXIS_HEAD_DIM] = CALL_HEAD_DIM, [AXIS_VALUE_HEAD_DIM] = CALL_VALUE_HEAD_DIM};

/* Contiguous, and packed if it can be and the call is. */
static fa3_tensor make_tensor(struct call *call, enum tensor which, bool packed) {
  const struct tensor_row *row = &tensor_rows[which];
  const struct shape *shape = row->shape;
  const bool drops_batch = packed && shape->packed_by != TENSOR_nothing;
  fa3_tensor tensor = {.data = (char *)call + contents[which],
                       .dtype = row->rule == RULE_ONLY ? row->dtype : FA3_FLOAT32,
                       .rank = shape->rank - drops_batch};
  int64_t stride = 1;
  for (int d = tensor.rank - 1; d >= 0; d--) {
    const enum axis axis = shape->axes[d + drops_batch];
    const bool rows = axis == AXIS_ROWS_Q || axis == AXIS_ROWS_K;
    tensor.shape[d] = extents[axis] * (drops_batch && rows ? CALL_BATCH : 1);
    tensor.strides[d] = stride;
    stride *= tensor.shape[d];
  }
  return tensor;
}

/* Every tensor that a dense or a packed call of the phase can have, without pages; outputs are
 * NaN. */
static void make_tensors(struct call *call, fa3_phase phase, void *args, bool packed) {
  const struct argument_struct *list = arguments_of(phase);
  for (int i = 0; i < list->count; i++) {
    const enum tensor which = list->arguments[i].tensor;
    const bool starts = which == TENSOR_cu_seqlens_q || which == TENSOR_cu_seqlens_k;
    if (which == TENSOR_page_table) continue;
    if (packed ? which == TENSOR_cache_batch_index : starts) continue;
    if (tensor_rows[which].rule == RULE_SCALE) continue; /* of FP8 calls alone */
    fa3_tensor *tensor = argument_in(args, &list->arguments[i]);
    *tensor = make_tensor(call, which, packed);
    if (list->arguments[i].output)
      memset(tensor->data, 0xff, (size_t)(tensor->shape[0] * tensor->strides[0]) * sizeof(float));
  }
}

#define SET_OPTIONS(args)                               \
  do {                                                  \
    (args).struct_size = sizeof(args);                  \
    (args).max_seqlen_q = packed ? CALL_SEQLEN_Q : 0;   \
    (args).max_seqlen_k = packed ? CALL_SEQLEN_K : 0;   \
    (args).flags = FA3_CAUSAL | FA3_WINDOW | FA3_SCALE; \
    (args).window_left = 2;                             \
    (args).window_right = 1;                            \
    (args).softmax_scale = 0.25f;                       \
    (args).softcap = 30;                                \
    (args).num_threads = 1;                             \
    (args).workspace = call->workspace;                 \
    (args).workspace_size = sizeof call->workspace;     \
  } while (0)

void call_init(struct call *call, bool packed) {
  memset(call, 0, sizeof *call);
  make_tensors(call, FA3_FORWARD, &call->forward, packed);
  make_tensors(call, FA3_BACKWARD, &call->backward, packed);
  for (int b = 0; b < CALL_BATCH; b++) {
    call->cu_seqlens_q[b + 1] = (b + 1) * CALL_SEQLEN_Q;
    call->cu_seqlens_k[b + 1] = (b + 1) * CALL_SEQLEN_K;
    call->seqused_q[b] = CALL_SEQLEN_Q;
    call->seqused_k[b] = CALL_SEQLEN_K - 1;
    call->leftpad_k[b] = 1;
    call->cache_batch_index[b] = CALL_BATCH - 1 - b;
    call->diagonal[b] = b;
  }
  SET_OPTIONS(call->forward);
  SET_OPTIONS(call->backward);
}

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

const struct call_pass call_forward = {FA3_FORWARD, "fa3_forward_workspace", forward_workspace,
                                       "fa3_forward", run_forward};
const struct call_pass call_backward = {FA3_BACKWARD, "fa3_backward_workspace", backward_workspace,
                                        "fa3_backward", run_backward};

fa3_tensor *call_tensor(struct call *call, const struct call_pass *pass,
                        const struct argument *argument) {
  return argument_in(pass->phase == FA3_FORWARD ? (void *)&call->forward : (void *)&call->backward,
                     argument);
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
