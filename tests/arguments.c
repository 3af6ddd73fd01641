/* Every field of fa3_forward_args and fa3_backward_args, wrong in turn: its own status, a message
 * that names it with its value, and nothing written. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "call.h"
#include "expect.h"
#include "test.h"

static struct call call; /* too large for some stacks */

static const struct call_pass *const passes[] = {&call_forward, &call_backward};
enum { PASSES = 2 };

/* The statement spoils a dense (or packed) call of a pass through `args`. */
#define REFUSED_PASS(pass, packed, before_data, statement, status, ...)   \
  do {                                                                    \
    call_init(&call, packed);                                             \
    fa3_##pass##_args *args = &call.pass;                                 \
    (void)args;                                                           \
    statement;                                                            \
    call_is_refused(&call, &call_##pass, #statement, status, before_data, \
                    (const char *const[]){__VA_ARGS__, NULL});            \
  } while (0)
#define REFUSED_FORWARD(statement, ...) REFUSED_PASS(forward, false, true, statement, __VA_ARGS__)
#define REFUSED_BACKWARD(statement, ...) REFUSED_PASS(backward, false, true, statement, __VA_ARGS__)

/* The same of both passes. */
#define REFUSED_CALL(...)                \
  do {                                   \
    REFUSED_PASS(forward, __VA_ARGS__);  \
    REFUSED_PASS(backward, __VA_ARGS__); \
  } while (0)
#define REFUSED(statement, ...) REFUSED_CALL(false, true, statement, __VA_ARGS__)
#define REFUSED_PACKED(statement, ...) REFUSED_CALL(true, true, statement, __VA_ARGS__)
#define REFUSED_PACKED_DATA(statement, ...) REFUSED_CALL(true, false, statement, __VA_ARGS__)

/* All values are 0: outputs and gradients in use are, and the rest is NaN as it was. */
static void check_zeros(const char *name, const float *elements, size_t count, size_t used) {
  size_t zeros = 0, untouched = 0;
  for (size_t i = 0; i < count; i++) {
    zeros += elements[i] == 0;
    untouched += isnan(elements[i]);
  }
  if (zeros != used || untouched != count - used)
    fail_msg("%s: %zu zeros of %zu, %zu untouched: expected %zu", name, zeros, count, untouched,
             used);
}
#define CHECK_ZEROS(array, used) \
  check_zeros(#array, call.array, sizeof call.array / sizeof *call.array, used)

static void test_unspoilt_calls_are_taken(void **state) {
  (void)state;
  const size_t key_rows = (size_t)CALL_BATCH * (CALL_SEQLEN_K - 2) * CALL_HEADS_K;
  for (int packed = 0; packed <= 1; packed++) {
    call_init(&call, packed);
    for (int p = 0; p < PASSES; p++) {
      size_t bytes = 0;
      if (passes[p]->workspace(&call, &bytes)) fail_msg("%s", fa3_last_error());
      assert_in_range(bytes, 0, sizeof call.workspace);
      if (passes[p]->run(&call)) fail_msg("%s", fa3_last_error());
    }
    CHECK_ZEROS(output, sizeof call.output / sizeof *call.output);
    CHECK_ZEROS(grad_query, sizeof call.grad_query / sizeof *call.grad_query);
    CHECK_ZEROS(grad_key, key_rows * CALL_HEAD_DIM);
    CHECK_ZEROS(grad_value, key_rows * CALL_VALUE_HEAD_DIM);
    CHECK_ZEROS(grad_sink, CALL_HEADS_Q);
  }
}

static void test_scalars(void **state) {
  (void)state;
  REFUSED(args->struct_size = 0, FA3_INVALID_STRUCT, "struct_size", "0");
  /* A byte less than the first version had. */
  REFUSED(args->struct_size = (size_t)((char *)&args->reserved_multiprocessors - (char *)args) - 1,
          FA3_INVALID_STRUCT, "struct_size");
  REFUSED(args->struct_size = SIZE_MAX, FA3_INVALID_STRUCT, "struct_size");
  REFUSED(args->device.type = 2, FA3_INVALID_DEVICE, "device.type", "2");
  REFUSED(args->device.type = -1, FA3_INVALID_DEVICE, "device.type", "-1");
  REFUSED(args->device.index = 1, FA3_INVALID_DEVICE, "device.index", "1");
  REFUSED(args->device.index = -1, FA3_INVALID_DEVICE, "device.index", "-1");
  REFUSED(args->stream = &call, FA3_INVALID_STREAM, "stream");
  REFUSED_FORWARD(args->flags |= 8, FA3_INVALID_FLAGS, "flags", "0x8 is not for fa3_forward");
  REFUSED_FORWARD(args->flags |= 16, FA3_INVALID_FLAGS, "flags", "0x10 is not for fa3_forward");
  REFUSED(args->flags |= 32, FA3_INVALID_FLAGS, "flags", "0x20 is not for fa3_");
  REFUSED(args->flags |= 256, FA3_INVALID_FLAGS, "flags", "0x100 is not for fa3_");
  REFUSED(args->flags |= 0x80000000, FA3_INVALID_FLAGS, "flags", "0x80000000 is unknown");
  REFUSED(args->softmax_scale = NAN, FA3_INVALID_SCALE, "softmax_scale", "nan");
  REFUSED(args->softmax_scale = INFINITY, FA3_INVALID_SCALE, "softmax_scale", "inf");
  REFUSED(args->flags &= ~(uint32_t)FA3_SCALE, FA3_INVALID_FLAGS, "softmax_scale", "FA3_SCALE");
  REFUSED(args->softcap = -1, FA3_INVALID_SOFTCAP, "softcap", "-1");
  REFUSED(args->softcap = NAN, FA3_INVALID_SOFTCAP, "softcap", "nan");
  REFUSED(args->softcap = INFINITY, FA3_INVALID_SOFTCAP, "softcap", "inf");
  REFUSED(args->softcap = 0x1p-127f, FA3_INVALID_SOFTCAP, "softcap", "5.87747e-39", "1.17549e-38");
  REFUSED(args->softcap = 0x1p-149f, FA3_INVALID_SOFTCAP, "softcap");
  REFUSED(args->window_left = -2, FA3_INVALID_WINDOW, "window_left", "-2");
  REFUSED(args->window_left = INT64_MIN, FA3_INVALID_WINDOW, "window_left");
  REFUSED(args->window_right = -2, FA3_INVALID_WINDOW, "window_right", "-2");
  REFUSED(args->window_right = INT64_MIN, FA3_INVALID_WINDOW, "window_right");
  REFUSED((args->flags &= ~(uint32_t)FA3_WINDOW, args->window_right = 0), FA3_INVALID_FLAGS,
          "window_left", "FA3_WINDOW");
  REFUSED((args->flags &= ~(uint32_t)FA3_WINDOW, args->window_left = 0), FA3_INVALID_FLAGS,
          "window_right", "FA3_WINDOW");
  REFUSED(args->num_threads = -1, FA3_INVALID_THREADS, "num_threads", "-1");
  REFUSED(args->reserved_multiprocessors = -1, FA3_INVALID_THREADS, "reserved_multiprocessors",
          "-1");
  REFUSED(args->reserved_multiprocessors = 8, FA3_INVALID_THREADS, "reserved_multiprocessors is 8",
          "the CPU");
  REFUSED(args->max_seqlen_q = -1, FA3_INVALID_LENGTHS, "max_seqlen_q", "-1");
  REFUSED(args->max_seqlen_k = INT64_MIN, FA3_INVALID_LENGTHS, "max_seqlen_k");
  REFUSED((args->flags = FA3_SCALE, args->window_left = args->window_right = 0), FA3_INVALID_FLAGS,
          "diagonal", "FA3_CAUSAL");
}

static void test_longest_of_dense_batches(void **state) {
  (void)state;
  REFUSED(args->max_seqlen_q = 3, FA3_INVALID_FLAGS, "max_seqlen_q", "3", "cu_seqlens_q");
  REFUSED(args->max_seqlen_k = 9, FA3_INVALID_FLAGS, "max_seqlen_k", "9", "cu_seqlens_k");
  REFUSED_FORWARD(args->max_seqlen_k = 9, FA3_INVALID_FLAGS, "cu_seqlens_k or page_table");
}

/* What asks for nothing costs nothing, however often it asks. */
static void test_batches_without_work(void **state) {
  (void)state;
  static const int64_t batches[] = {INT64_C(1) << 30, INT64_C(1) << 48};
  (void)alarm(20);
  for (int b = 0; b < 2; b++) {
    float none;
    const fa3_tensor empty = fa3_dense(&none, FA3_FLOAT32, batches[b], 0, 2, 16);
    const fa3_tensor lse = fa3_lse(&none, batches[b], 2, 0);
    fa3_tensor key = fa3_dense(call.key, FA3_FLOAT32, batches[b], 4, 2, 16);
    key.strides[0] = 0;
    fa3_forward_args forward = {.struct_size = sizeof forward,
                                .query = empty,
                                .key = key,
                                .value = key,
                                .output = empty,
                                .lse = lse,
                                .workspace = call.workspace,
                                .workspace_size = sizeof call.workspace};
    assert_int_equal(fa3_forward(&forward), FA3_OK);
    int32_t page = 0; /* the same of all, and then none */
    forward.page_table = (fa3_tensor){
        .data = &page, .dtype = FA3_INT32, .rank = 2, .shape = {batches[b], 1}, .strides = {0, 1}};
    assert_int_equal(fa3_forward(&forward), FA3_OK);
    page = -1;
    assert_int_equal(fa3_forward(&forward), FA3_INVALID_LENGTHS);
    forward.page_table.shape[1] = 0;
    forward.page_table.strides[0] = 1;
    assert_int_equal(fa3_forward(&forward), FA3_OK);
    float sinks[2] = {1, 2}, grad_sinks[2] = {3, 4};
    fa3_backward_args backward = {.struct_size = sizeof backward,
                                  .query = empty,
                                  .key = empty,
                                  .value = empty,
                                  .sink = fa3_vector(sinks, FA3_FLOAT32, 2),
                                  .grad_sink = fa3_vector(grad_sinks, FA3_FLOAT32, 2),
                                  .output = empty,
                                  .lse = lse,
                                  .grad_output = empty,
                                  .grad_query = empty,
                                  .grad_key = empty,
                                  .grad_value = empty,
                                  .workspace = call.workspace,
                                  .workspace_size = sizeof call.workspace};
    assert_int_equal(fa3_backward(&backward), FA3_OK);
    assert_true(grad_sinks[0] == 0 && grad_sinks[1] == 0);
  }
  (void)alarm(0);
}

static void test_workspace(void **state) {
  (void)state;
  for (int p = 0; p < PASSES; p++) {
    size_t bytes = 0;
    call_init(&call, false);
    assert_int_equal(passes[p]->workspace(&call, &bytes), FA3_OK);
    if (bytes == 0) continue;
    struct {
      const char *what;
      size_t size;
      void *data;
    } wrong[] = {{"workspace", bytes, NULL},
                 {"workspace_size", 0, call.workspace},
                 {"workspace_size", bytes - 1, call.workspace}};
    for (int i = 0; i < 3; i++) {
      call_init(&call, false);
      call.forward.workspace = call.backward.workspace = wrong[i].data;
      call.forward.workspace_size = call.backward.workspace_size = wrong[i].size;
      call_is_refused(&call, passes[p], wrong[i].what, FA3_INVALID_WORKSPACE, false,
                      (const char *const[]){wrong[i].what, NULL});
    }
  }
}

static void test_null(void **state) {
  (void)state;
  size_t bytes;
  expect_refused(fa3_forward(NULL), FA3_INVALID_STRUCT, "args");
  assert_int_equal(fa3_forward_workspace(NULL, &bytes), FA3_INVALID_STRUCT);
  expect_refused(fa3_backward(NULL), FA3_INVALID_STRUCT, "args");
  assert_int_equal(fa3_backward_workspace(NULL, &bytes), FA3_INVALID_STRUCT);
  for (int p = 0; p < PASSES; p++) {
    call_init(&call, false);
    assert_int_equal(passes[p]->workspace(&call, NULL), FA3_INVALID_POINTER);
    assert_non_null(strstr(fa3_last_error(), "bytes"));
  }
}

static void test_shapes_without_heads(void **state) {
  (void)state;
  REFUSED(args->query.shape[2] = 3, FA3_INVALID_SHAPE, "shape[2]");
  REFUSED(args->query.shape[2] = 0, FA3_INVALID_SHAPE, "query.shape[2]");
  REFUSED(args->key.shape[2] = 0, FA3_INVALID_SHAPE, "key.shape[2]");
  REFUSED(args->query.shape[3] = 0, FA3_INVALID_SHAPE, "query.shape[3]");
  REFUSED(args->value.shape[3] = 0, FA3_INVALID_SHAPE, "value.shape[3]");
  REFUSED((args->key.shape[2] = args->value.shape[2] = 3), FA3_INVALID_SHAPE, "multiple");
}

/* Sums and products of extents and strides that don't fit 64 bits. */
static void test_sizes_that_overflow(void **state) {
  (void)state;
  const int64_t huge = INT64_C(1) << 40;
  REFUSED(args->query.strides[0] = INT64_MAX / 2, FA3_INVALID_STRIDE, "query.strides");
  REFUSED((args->key.strides[0] = args->key.strides[1] = INT64_MAX / 6), FA3_INVALID_STRIDE,
          "key.strides");
  REFUSED((args->query.shape[1] = args->output.shape[1] = huge,
           args->query.strides[1] = args->output.strides[1] = huge),
          FA3_INVALID_STRIDE, "query.strides[1]");
  REFUSED((args->output.strides[0] = INT64_MAX / 2), FA3_INVALID_STRIDE, "output.strides");
  REFUSED_BACKWARD((args->grad_key.strides[0] = INT64_MAX / 2), FA3_INVALID_STRIDE,
                   "grad_key.strides");
  REFUSED((args->lse.strides[0] = INT64_MAX - 1), FA3_INVALID_STRIDE, "lse.strides");
  /* Expanded or empty, so that no offset is far. */
  REFUSED((args->key.shape[0] = args->key.shape[1] = huge,
           memset(args->key.strides, 0, 2 * sizeof *args->key.strides)),
          FA3_INVALID_SHAPE, "key.shape[1]", "overflows");
  REFUSED((args->query.shape[0] = args->query.shape[2] = huge, args->query.shape[1] = 0),
          FA3_INVALID_SHAPE, "query.shape[2]", "overflows");
}

/* What the tables of the engines don't have is unsupported, not invalid. */
static void test_unsupported(void **state) {
  (void)state;
  REFUSED_FORWARD((args->query.shape[3] = args->key.shape[3] = 12), FA3_UNSUPPORTED, "12");
  REFUSED_FORWARD((args->value.shape[3] = args->output.shape[3] = 20), FA3_UNSUPPORTED, "20");
  REFUSED_FORWARD((args->query = fa3_dense(call.query, FA3_FLOAT32, 2, 1, 1, 264),
                   args->key = args->value = args->output = args->query,
                   args->lse = args->sink = (fa3_tensor){0}),
                  FA3_UNSUPPORTED, "264");
  REFUSED_BACKWARD((args->query.shape[3] = args->key.shape[3] = args->grad_query.shape[3] =
                        args->grad_key.shape[3] = 12),
                   FA3_UNSUPPORTED, "12");
  REFUSED_BACKWARD((args->value.shape[3] = args->output.shape[3] = args->grad_output.shape[3] =
                        args->grad_value.shape[3] = 20),
                   FA3_UNSUPPORTED, "20");
}

/* What goes together in a packed batch: the message names the other argument. */
static void test_ranks(void **state) {
  (void)state;
  const fa3_tensor absent = {0};
  REFUSED_PACKED(args->cu_seqlens_q = absent, FA3_INVALID_SHAPE, "query.rank is 3: expected 4",
                 "cu_seqlens_q");
  REFUSED_PACKED(args->cu_seqlens_k = absent, FA3_INVALID_SHAPE, "key.rank is 3: expected 4",
                 "cu_seqlens_k");
}

static void test_dtypes_that_do_not_match(void **state) {
  (void)state;
  REFUSED(args->key.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "key.dtype is 2", "query's");
  REFUSED(args->value.dtype = FA3_BFLOAT16, FA3_INVALID_DTYPE, "value.dtype is 3", "key's");
  REFUSED(args->output.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "output.dtype is 2", "query's");
  REFUSED(args->sink.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "sink.dtype is 2", "query's");
}

/* The same call in float16, whose sink stays in float32. */
static void use_float16(fa3_backward_args *args) {
  args->query.dtype = args->key.dtype = args->value.dtype = FA3_FLOAT16;
  args->output.dtype = args->grad_output.dtype = FA3_FLOAT16;
  args->grad_query.dtype = args->grad_key.dtype = args->grad_value.dtype = FA3_FLOAT16;
}

static void test_gradients(void **state) {
  (void)state;
  const fa3_tensor absent = {0};
  REFUSED_BACKWARD(args->lse = absent, FA3_INVALID_POINTER, "lse is absent");
  REFUSED_BACKWARD(args->grad_output = absent, FA3_INVALID_POINTER, "grad_output is absent");
  REFUSED_BACKWARD(args->grad_query = absent, FA3_INVALID_POINTER, "grad_query is absent");
  REFUSED_BACKWARD(args->grad_key = absent, FA3_INVALID_POINTER, "grad_key is absent");
  REFUSED_BACKWARD(args->grad_value = absent, FA3_INVALID_POINTER, "grad_value is absent");
  REFUSED_BACKWARD(args->sink = absent, FA3_INVALID_FLAGS, "grad_sink", "without sink");
  REFUSED_BACKWARD(args->grad_output.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "grad_output.dtype");
  REFUSED_BACKWARD(args->grad_query.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "grad_query.dtype");
  REFUSED_BACKWARD(args->grad_key.dtype = FA3_BFLOAT16, FA3_INVALID_DTYPE, "grad_key.dtype");
  REFUSED_BACKWARD(args->grad_value.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "grad_value.dtype");
  REFUSED_BACKWARD(args->grad_sink.dtype = FA3_FLOAT16, FA3_INVALID_DTYPE, "grad_sink.dtype");
  REFUSED_BACKWARD((use_float16(args), args->grad_sink.dtype = FA3_FLOAT16), FA3_INVALID_DTYPE,
                   "grad_sink.dtype");
  REFUSED_BACKWARD((args->key.shape[0] = args->value.shape[0] = 3), FA3_INVALID_SHAPE,
                   "key.shape[0]", "3");
}

/* Bounds that no sequence comes near. */
static void test_large_bounds(void **state) {
  (void)state;
  for (int p = 0; p < PASSES; p++) {
    size_t near = 0, far = 0;
    call_init(&call, true);
    assert_int_equal(passes[p]->workspace(&call, &near), FA3_OK);
    call.forward.max_seqlen_q = call.backward.max_seqlen_q = INT64_MAX;
    call.forward.max_seqlen_k = call.backward.max_seqlen_k = INT64_MAX;
    assert_int_equal(passes[p]->workspace(&call, &far), FA3_OK);
    assert_int_equal(far, near);
    if (passes[p]->run(&call)) fail_msg("%s", fa3_last_error());
  }
}

/* What a backward call may leave out, or have otherwise than the others here. */
static void test_taken(void **state) {
  (void)state;
  const fa3_tensor absent = {0};
  for (int i = 0; i < 8; i++) {
    call_init(&call, false);
    fa3_backward_args *args = &call.backward;
    if (i == 0) args->grad_lse = absent;
    if (i == 1) args->grad_sink = absent;
    if (i == 2) args->sink = args->grad_sink = absent;
    if (i == 3) args->flags |= FA3_ACCUMULATE | FA3_DETERMINISTIC;
    if (i == 4) memset(args->grad_output.strides, 0, 3 * sizeof *args->grad_output.strides);
    if (i >= 5) use_float16(args); /* its gradients in float32 the second time */
    if (i == 6)
      args->grad_query.dtype = args->grad_key.dtype = args->grad_value.dtype = FA3_FLOAT32;
    if (i == 7) args->sink.dtype = args->grad_sink.dtype = FA3_FLOAT16;
    if (fa3_backward(args)) fail_msg("%d: %s", i, fa3_last_error());
  }
}

static void test_lengths(void **state) {
  (void)state;
  REFUSED_PACKED_DATA(call.cu_seqlens_q[0] = 1, FA3_INVALID_LENGTHS, "cu_seqlens_q[0]", "1");
  REFUSED_PACKED_DATA(call.cu_seqlens_q[0] = -1, FA3_INVALID_LENGTHS, "cu_seqlens_q[0]", "-1");
  REFUSED_PACKED_DATA(call.cu_seqlens_q[1] = 7, FA3_INVALID_LENGTHS, "cu_seqlens_q");
  REFUSED_PACKED_DATA((call.cu_seqlens_q[2] = 2, args->max_seqlen_q = 0), FA3_INVALID_LENGTHS,
                      "cu_seqlens_q[2]", "2");
  REFUSED_PACKED_DATA((call.cu_seqlens_q[2] = 7, args->max_seqlen_q = 0), FA3_INVALID_LENGTHS,
                      "cu_seqlens_q[2]", "7");
  REFUSED_PACKED_DATA(call.cu_seqlens_q[2] = INT32_MIN, FA3_INVALID_LENGTHS, "cu_seqlens_q[2]");
  REFUSED_PACKED_DATA(args->max_seqlen_q = 2, FA3_INVALID_LENGTHS, "cu_seqlens_q", "max_seqlen_q");
  REFUSED_PACKED_DATA(call.cu_seqlens_k[0] = 1, FA3_INVALID_LENGTHS, "cu_seqlens_k[0]", "1");
  REFUSED_PACKED_DATA((call.cu_seqlens_k[2] = 3, args->max_seqlen_k = 0), FA3_INVALID_LENGTHS,
                      "cu_seqlens_k[2]", "3");
  REFUSED_PACKED_DATA((call.cu_seqlens_k[2] = 9, args->max_seqlen_k = 0), FA3_INVALID_LENGTHS,
                      "cu_seqlens_k[2]", "9");
  REFUSED_PACKED_DATA(args->max_seqlen_k = 3, FA3_INVALID_LENGTHS, "cu_seqlens_k", "max_seqlen_k");
  for (int packed = 0; packed <= 1; packed++) {
    REFUSED_CALL(packed, false, call.seqused_q[1] = 4, FA3_INVALID_LENGTHS, "seqused_q[1]", "4");
    REFUSED_CALL(packed, false, call.seqused_q[0] = -1, FA3_INVALID_LENGTHS, "seqused_q[0]", "-1");
    REFUSED_CALL(packed, false, call.seqused_k[1] = 5, FA3_INVALID_LENGTHS, "seqused_k[1]", "5");
    REFUSED_CALL(packed, false, call.seqused_k[0] = INT32_MIN, FA3_INVALID_LENGTHS, "seqused_k[0]");
    REFUSED_CALL(packed, false, call.leftpad_k[1] = 4, FA3_INVALID_LENGTHS, "leftpad_k[1]", "4");
    REFUSED_CALL(packed, false, call.leftpad_k[0] = -1, FA3_INVALID_LENGTHS, "leftpad_k[0]", "-1");
    REFUSED_CALL(packed, false, call.diagonal[1] = INT64_MAX, FA3_INVALID_LENGTHS, "diagonal[1]");
    REFUSED_CALL(packed, false, call.diagonal[0] = INT64_MIN, FA3_INVALID_LENGTHS, "diagonal[0]");
  }
  REFUSED_PASS(forward, false, false, call.cache_batch_index[1] = 2, FA3_INVALID_LENGTHS,
               "cache_batch_index[1]", "2");
  REFUSED_PASS(forward, false, false, call.cache_batch_index[0] = -1, FA3_INVALID_LENGTHS,
               "cache_batch_index[0]", "-1");
  REFUSED_PASS(forward, true, true,
               args->cache_batch_index = fa3_vector(call.cache_batch_index, FA3_INT32, 2),
               FA3_INVALID_FLAGS, "cache_batch_index", "cu_seqlens_k");
  REFUSED_PACKED(args->cu_seqlens_q.shape[0] = 0, FA3_INVALID_SHAPE, "cu_seqlens_q.shape[0]");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_unspoilt_calls_are_taken),
      cmocka_unit_test(test_scalars),
      cmocka_unit_test(test_longest_of_dense_batches),
      cmocka_unit_test(test_batches_without_work),
      cmocka_unit_test(test_workspace),
      cmocka_unit_test(test_null),
      cmocka_unit_test(test_shapes_without_heads),
      cmocka_unit_test(test_sizes_that_overflow),
      cmocka_unit_test(test_unsupported),
      cmocka_unit_test(test_ranks),
      cmocka_unit_test(test_dtypes_that_do_not_match),
      cmocka_unit_test(test_lengths),
      cmocka_unit_test(test_large_bounds),
      cmocka_unit_test(test_gradients),
      cmocka_unit_test(test_taken),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
