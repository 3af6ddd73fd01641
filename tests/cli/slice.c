/* A call in slices, cut anywhere, gives what the whole call is to give, and writes no more. */
#include "slice.h"

#include <stdlib.h>
#include <string.h>

#include "gradient_trial.h"
#include "test.h"

/* Cuts are the subject, not long sequences or threads. */
enum { TRIALS = 100, MAX_SEQLEN = 80 };

static struct spec short_spec(struct rng *rng) {
  struct spec spec = spec_random(rng);
  if (spec.max_seqlen_q > MAX_SEQLEN) spec.max_seqlen_q = MAX_SEQLEN;
  if (spec.max_seqlen_k > MAX_SEQLEN) spec.max_seqlen_k = MAX_SEQLEN;
  spec.num_threads = 1;
  spec.codes = false; /* a slice takes no scales */
  return spec;
}

/* Sequences and heads, each cut at random; whether there was more than one sequence to cut. */
static bool run_in_slices(const struct call *call, struct rng *rng) {
  const struct slice whole = slice_whole(call);
  struct call cut = {0};
  for (int64_t batch = 0, next; batch < whole.batch_end; batch = next) {
    next = rng_between(rng, batch + 1, whole.batch_end);
    for (int64_t head = 0, next_head; head < whole.head_end; head = next_head) {
      next_head = rng_between(rng, head + 1, whole.head_end);
      const struct slice slice = {batch, next, head, next_head};
      slice_call(call, &slice, &cut);
      if (library_run(&cut)) fail_msg("%s", fa3_last_error());
    }
  }
  library_free_workspace(&cut);
  return whole.batch_end > 1;
}

static void test_forward(void **state) {
  (void)state;
  int cut = 0;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct spec spec = short_spec(&rng);
    struct trial trial = trial_new(&spec, &rng);
    const struct call call = {.phase = FA3_FORWARD, .args.forward = trial.args};
    cut += run_in_slices(&call, &rng);
    (void)trial_check(&trial, &rng, 1e5);
    trial_free(&trial);
  }
  assert_in_range(cut, 1, TRIALS - 1);
}

static void test_backward(void **state) {
  (void)state;
  int cut = 0;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct spec forward = short_spec(&rng);
    const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    const struct call call = {.phase = FA3_BACKWARD, .args.backward = trial.args};
    cut += run_in_slices(&call, &rng);
    (void)gradient_trial_check(&trial, &rng, 1e5);
    gradient_trial_free(&trial);
  }
  assert_in_range(cut, 1, TRIALS - 1);
}

enum { SEQUENCES = 3, ROWS = 20, HEADS_Q = 4, HEADS_K = 2, DIM = 16, SCALE_ROWS = 8, BLOCKS = 3 };

/* Codes and every form of a scale. */
struct coded {
  uint8_t codes[3][SEQUENCES * ROWS * HEADS_Q * DIM];
  float scales[3][SEQUENCES * HEADS_Q * SEQUENCES * BLOCKS];
  float output[SEQUENCES * ROWS * HEADS_Q * DIM];
  int32_t starts[SEQUENCES + 1];
};
enum form { ONE, BY_HEAD, BY_KEY_HEAD, BY_ROWS, PACKED, FORMS };

static fa3_tensor scale_of(struct coded *coded, int which, enum form form) {
  const bool query = which == 0 && form != BY_KEY_HEAD;
  const int64_t heads = query ? HEADS_Q : HEADS_K;
  const int64_t packed_blocks = SEQUENCES * ROWS / SCALE_ROWS + SEQUENCES;
  fa3_tensor scale = {.data = coded->scales[which], .dtype = FA3_FLOAT32};
  const int64_t shape[] = {SEQUENCES, heads, form == PACKED ? packed_blocks : BLOCKS};
  scale.rank = form == ONE ? 1 : form == BY_ROWS ? 3 : 2;
  int64_t stride = 1;
  for (int d = scale.rank - 1; d >= 0; d--) {
    scale.shape[d] = form == ONE ? 1 : shape[d + (form == PACKED)];
    scale.strides[d] = stride;
    stride *= scale.shape[d];
  }
  return scale;
}

static struct call coded_call(struct coded *coded, enum form form) {
  const bool packed = form == PACKED;
  struct call call = {.phase = FA3_FORWARD};
  fa3_forward_args *args = &call.args.forward;
  fa3_tensor *const tensors[] = {&args->query, &args->key, &args->value, &args->output};
  fa3_tensor *const scales[] = {&args->query_scale, &args->key_scale, &args->value_scale};
  args->struct_size = sizeof *args;
  args->num_threads = 1;
  for (int i = 0; i < 4; i++) {
    const int64_t heads = i % 3 ? HEADS_K : HEADS_Q, total = (int64_t)SEQUENCES * ROWS;
    const fa3_dtype dtype = i < 3 ? FA3_FLOAT8_E4M3 : FA3_FLOAT32;
    const void *data = i < 3 ? (void *)coded->codes[i] : coded->output;
    *tensors[i] = packed ? fa3_packed(data, dtype, total, heads, DIM)
                         : fa3_dense(data, dtype, SEQUENCES, ROWS, heads, DIM);
    if (i < 3) *scales[i] = scale_of(coded, i, form);
  }
  if (form == BY_ROWS || packed)
    args->query_scale_rows = args->key_scale_rows = args->value_scale_rows = SCALE_ROWS;
  if (packed)
    args->cu_seqlens_q = args->cu_seqlens_k = fa3_vector(coded->starts, FA3_INT32, SEQUENCES + 1);
  return call;
}

static void test_scales(void **state) {
  (void)state;
  static struct coded coded;
  static float whole[sizeof coded.output / sizeof *coded.output];
  struct rng rng = rng_for(0);
  for (size_t i = 0; i < sizeof coded.codes; i++)
    ((uint8_t *)coded.codes)[i] = (uint8_t)(rng_between(&rng, 0x28, 0x40) | (i % 3 ? 0 : 0x80));
  for (size_t i = 0; i < sizeof coded.scales / sizeof(float); i++)
    ((float *)coded.scales)[i] = (float)(0.2 + rng_uniform(&rng));
  for (int b = 0; b <= SEQUENCES; b++) coded.starts[b] = b * ROWS;
  for (enum form form = ONE; form < FORMS; form++) {
    struct call call = coded_call(&coded, form);
    if (library_run(&call)) fail_msg("form %d: %s", (int)form, fa3_last_error());
    library_free_workspace(&call);
    memcpy(whole, coded.output, sizeof whole);
    for (int i = 0; i < 20; i++) {
      memset(coded.output, 0xff, sizeof coded.output);
      (void)run_in_slices(&call, &rng);
      assert_memory_equal(coded.output, whole, sizeof whole);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_forward),
                                     cmocka_unit_test(test_backward),
                                     cmocka_unit_test(test_scales)};
  return cmocka_run_group_tests_name("slice", tests, NULL, NULL);
}
