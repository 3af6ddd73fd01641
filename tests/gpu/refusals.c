/* What a GPU's caller can get wrong: each call is refused with a status and a message, and leaves a
 * context in which the next good call works. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "gpu.h"
#include "test.h"

enum {
  BATCH = 2,
  SEQLEN = 200, /* with fewer the workspace may be empty */
  HEADS = 4,
  HEAD_DIM = 64,
  ROWS = BATCH * SEQLEN,
  GRADIENTS_WORKSPACE = 48 << 20
};

static struct gpu_arena arena;
static fa3_forward_args good;
static fa3_backward_args good_gradients;
static int refused;

static void *take(size_t size) {
  return (void *)gpu_arena_take(&arena, size);
}

static int open_arena(void **state) {
  (void)state;
  arena = gpu_arena_new((size_t)96 << 20);
  GPU(cuMemsetD8Async, arena.base, 0, arena.size, NULL);
  good =
      (fa3_forward_args){.struct_size = sizeof good, .device = {FA3_CUDA, 0}, .flags = FA3_CAUSAL};
  fa3_tensor *tensors[] = {&good.query, &good.key, &good.value, &good.output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_dense(take(1 << 20), FA3_BFLOAT16, BATCH, SEQLEN, HEADS, HEAD_DIM);
  good.workspace = take(1 << 20);
  good.workspace_size = 1 << 20;

  good_gradients = (fa3_backward_args){.struct_size = sizeof good_gradients,
                                       .device = {FA3_CUDA, 0},
                                       .query = good.query,
                                       .key = good.key,
                                       .value = good.value,
                                       .output = good.output,
                                       .grad_output = good.output,
                                       .flags = FA3_CAUSAL,
                                       .lse = fa3_lse(take(1 << 20), BATCH, HEADS, SEQLEN)};
  fa3_tensor *gradients[] = {&good_gradients.grad_query, &good_gradients.grad_key,
                             &good_gradients.grad_value};
  for (int i = 0; i < 3; i++)
    *gradients[i] = fa3_dense(take(1 << 20), FA3_BFLOAT16, BATCH, SEQLEN, HEADS, HEAD_DIM);
  good_gradients.workspace = take(GRADIENTS_WORKSPACE);
  good_gradients.workspace_size = GRADIENTS_WORKSPACE;
  return 0;
}

static void check_refused(const fa3_forward_args *args, fa3_status status, const char *text) {
  expect_refused(fa3_forward(args), status, text);
  if (fa3_forward(&good)) fail_msg("the next call: %s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  refused++;
}

/* `change` spoils a copy of the good call. */
#define REFUSED(change, status, text)  \
  do {                                 \
    fa3_forward_args spoilt = good;    \
    fa3_forward_args *args = &spoilt;  \
    change;                            \
    check_refused(args, status, text); \
  } while (0)

static void check_gradients_refused(const fa3_backward_args *args, fa3_status status,
                                    const char *text) {
  expect_refused(fa3_backward(args), status, text);
  if (fa3_backward(&good_gradients)) fail_msg("the next call: %s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  refused++;
}

#define GRADIENTS_REFUSED(change, status, text)  \
  do {                                           \
    fa3_backward_args spoilt = good_gradients;   \
    fa3_backward_args *args = &spoilt;           \
    change;                                      \
    check_gradients_refused(args, status, text); \
  } while (0)

static void test_gradients(void **state) {
  (void)state;
  void *host = malloc(1 << 20);
  size_t bytes;
  if (fa3_backward_workspace(&good_gradients, &bytes)) fail_msg("%s", fa3_last_error());
  assert_in_range(bytes, 1, GRADIENTS_WORKSPACE);
  GRADIENTS_REFUSED(args->query.data = host, FA3_INVALID_POINTER, "query.data");
  GRADIENTS_REFUSED(args->output.data = host, FA3_INVALID_POINTER, "output.data");
  GRADIENTS_REFUSED(args->lse.data = host, FA3_INVALID_POINTER, "lse.data");
  GRADIENTS_REFUSED(args->grad_output.data = host, FA3_INVALID_POINTER, "grad_output.data");
  GRADIENTS_REFUSED(args->grad_query.data = host, FA3_INVALID_POINTER, "grad_query.data");
  GRADIENTS_REFUSED(args->grad_key.data = host, FA3_INVALID_POINTER, "grad_key.data");
  GRADIENTS_REFUSED(args->grad_value.data = host, FA3_INVALID_POINTER, "grad_value.data");
  GRADIENTS_REFUSED(args->workspace = host, FA3_INVALID_POINTER, "workspace");
  GRADIENTS_REFUSED(args->workspace = NULL, FA3_INVALID_WORKSPACE, "workspace is null");
  GRADIENTS_REFUSED(args->workspace_size = bytes - 1, FA3_INVALID_WORKSPACE, "workspace_size");
  GRADIENTS_REFUSED(args->num_threads = 2, FA3_INVALID_THREADS, "num_threads");
  GRADIENTS_REFUSED(args->lse = (fa3_tensor){0}, FA3_INVALID_POINTER, "lse is absent");
  GRADIENTS_REFUSED(args->grad_key.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "grad_key.dtype");
  GRADIENTS_REFUSED(args->output.dtype = args->grad_output.dtype = FA3_FLOAT32, FA3_UNSUPPORTED,
                    "output");
  free(host);
}

static void test_pointers(void **state) {
  (void)state;
  void *host = malloc(1 << 20);
  REFUSED(args->query.data = NULL, FA3_INVALID_POINTER, "query.data is null");
  REFUSED(args->key.data = (char *)args->key.data + 1, FA3_INVALID_POINTER, "key.data");
  REFUSED(args->query.data = host, FA3_INVALID_POINTER, "query.data");
  REFUSED(args->key.data = host, FA3_INVALID_POINTER, "key.data");
  REFUSED(args->value.data = host, FA3_INVALID_POINTER, "value.data");
  REFUSED(args->output.data = host, FA3_INVALID_POINTER, "output.data");
  REFUSED(args->workspace = host, FA3_INVALID_POINTER, "workspace");
  REFUSED(args->sink = fa3_vector(host, FA3_FLOAT32, HEADS), FA3_INVALID_POINTER, "sink.data");
  REFUSED(args->seqused_k = fa3_vector(host, FA3_INT32, BATCH), FA3_INVALID_POINTER,
          "seqused_k.data");
  free(host);
}

static void test_workspace(void **state) {
  (void)state;
  size_t bytes;
  REFUSED(args->workspace = NULL, FA3_INVALID_WORKSPACE, "workspace is null");
  assert_int_equal(fa3_forward_workspace(&good, &bytes), FA3_OK);
  REFUSED(args->workspace_size = bytes - 1, FA3_INVALID_WORKSPACE, "workspace_size");
  /* A tensor that starts where the copy engine can't read needs more. */
  REFUSED((args->query.data = (char *)args->query.data + 2, args->workspace_size = bytes),
          FA3_INVALID_WORKSPACE, "workspace_size");
}

static void pack(fa3_forward_args *args) {
  fa3_tensor *tensors[] = {&args->query, &args->key, &args->value, &args->output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_packed(tensors[i]->data, FA3_BFLOAT16, ROWS, HEADS, HEAD_DIM);
  args->cu_seqlens_q = args->cu_seqlens_k = fa3_vector(args->workspace, FA3_INT32, BATCH + 1);
  args->max_seqlen_q = args->max_seqlen_k = SEQLEN;
}

static void test_lengths(void **state) {
  (void)state;
  REFUSED((pack(args), args->max_seqlen_q = 0), FA3_INVALID_LENGTHS, "max_seqlen_q is 0");
  REFUSED((pack(args), args->max_seqlen_k = 0), FA3_INVALID_LENGTHS, "max_seqlen_k is 0");
  REFUSED((pack(args), args->max_seqlen_q = INT64_C(1) << 40), FA3_UNSUPPORTED, "sequences");
}

static void set_dtype(fa3_forward_args *args, fa3_dtype dtype) {
  args->query.dtype = args->key.dtype = args->value.dtype = args->output.dtype = dtype;
}

static void test_support(void **state) {
  (void)state;
  REFUSED(set_dtype(args, FA3_FLOAT32), FA3_UNSUPPORTED, "FA3_BFLOAT16");
  REFUSED(args->key.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "key");
  REFUSED(args->output.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "output");
  REFUSED(args->num_threads = 2, FA3_INVALID_THREADS, "num_threads");
  REFUSED(args->device.index = 1000, FA3_INVALID_DEVICE, "device.index");
}

/* A capture that has gone wrong before the call: the driver's refusal comes back as a status. */
static void test_broken_capture(void **state) {
  (void)state;
  gpu_stream stream;
  gpu_graph graph = NULL;
  gpu_pointer memory;
  GPU(cuStreamCreate, &stream, 1);
  GPU(cuStreamBeginCapture, stream, 0);
  (void)gpu.cuMemAlloc(&memory, 1 << 20); /* ends a capture of the global mode */
  (void)gpu.cuStreamSynchronize(stream);
  fa3_forward_args args = good;
  args.stream = stream;
  fa3_status status = fa3_forward(&args);
  assert_int_equal(status, FA3_DEVICE_ERROR);
  assert_non_null(strstr(fa3_last_error(), "CAPTURE"));
  (void)gpu.cuStreamEndCapture(stream, &graph);
  if (fa3_forward(&args)) fail_msg("after the capture: %s", fa3_last_error());
  GPU(cuStreamSynchronize, stream);
  GPU(cuStreamDestroy, stream);
}

/* With a second GPU: its memory and streams are not the first one's; calls on it work. */
static void test_second_device(void **state) {
  (void)state;
  if (fa3_device_count(FA3_CUDA) < 2) skip();
  gpu_context second;
  gpu_stream stream;
  gpu_pointer memory;
  GPU(cuDevicePrimaryCtxRetain, &second, 1);
  GPU(cuCtxSetCurrent, second);
  GPU(cuStreamCreate, &stream, 1);
  GPU(cuMemAlloc, &memory, 68 << 20);
  GPU(cuCtxSetCurrent, gpu_primary());
  REFUSED(args->query.data = (void *)memory, FA3_INVALID_POINTER, "GPU 1");
  REFUSED(args->stream = stream, FA3_INVALID_STREAM, "GPU 1");
  fa3_forward_args args = good;
  args.device.index = 1;
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++) tensors[i]->data = (void *)(memory + ((gpu_pointer)i << 20));
  args.workspace = (void *)(memory + (4 << 20));
  gpu_stream streams[] = {stream, NULL};
  for (int i = 0; i < 2; i++) {
    args.stream = streams[i];
    if (fa3_forward(&args)) fail_msg("on the second GPU: %s", fa3_last_error());
  }
  GPU(cuCtxSetCurrent, second);
  GPU(cuCtxSynchronize, );
  GPU(cuCtxSetCurrent, gpu_primary());
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pointers),       cmocka_unit_test(test_workspace),
      cmocka_unit_test(test_lengths),        cmocka_unit_test(test_support),
      cmocka_unit_test(test_broken_capture), cmocka_unit_test(test_second_device),
      cmocka_unit_test(test_gradients),
  };
  int result = cmocka_run_group_tests(tests, open_arena, NULL);
  if (result == 0) printf("passed: %d calls\n", refused);
  return result;
}
