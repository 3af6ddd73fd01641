/* Elements beyond 2^31, in every dimension of every tensor: the memory is mapped, but only the
 * pages that hold rows are ever touched. */
#include <stdlib.h>
#include <sys/mman.h>

#include "compare.h"
#include "expect.h"
#include "rng.h"
#include "test.h"
#include "trial.h"

enum { BATCH = 2, SEQLEN = 5, HEADS = 3, HEAD_DIM = 32 };

/* One dimension has a stride that alone passes 2^31 elements. */
static void *make_tensor(fa3_tensor *tensor, int far_dimension, struct rng *rng) {
  const int64_t far = ((int64_t)1 << 31) + 64;
  *tensor = fa3_dense(NULL, FA3_BFLOAT16, BATCH, SEQLEN, HEADS, HEAD_DIM);
  tensor->strides[far_dimension] = far;
  size_t size = (size_t)(far * tensor->shape[far_dimension]) * 2;
  tensor->data =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (tensor->data == MAP_FAILED) return NULL;
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t s = 0; s < SEQLEN; s++)
      for (int64_t h = 0; h < HEADS; h++)
        for (int64_t d = 0; d < HEAD_DIM; d++)
          tensor_store(tensor,
                       b * tensor->strides[0] + s * tensor->strides[1] + h * tensor->strides[2] + d,
                       rng_normal(rng));
  return tensor->data;
}

static void free_tensor(const fa3_tensor *tensor, int far_dimension) {
  munmap(tensor->data, (size_t)(tensor->strides[far_dimension] * tensor->shape[far_dimension]) * 2);
}

static void check(const fa3_forward_args *args) {
  struct comparison at = {0};
  for (at.batch = 0; at.batch < BATCH; at.batch++)
    for (at.head = 0; at.head < HEADS; at.head++)
      for (at.row = 0; at.row < SEQLEN; at.row++) compare_row(&at, args);
}

static void test_far_apart(void **state) {
  (void)state;
  for (int far_dimension = 0; far_dimension < 3; far_dimension++) {
    struct rng rng = rng_for((uint64_t)far_dimension);
    fa3_forward_args args = {.struct_size = sizeof args};
    fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
    for (int i = 0; i < 4; i++)
      if (!make_tensor(tensors[i], far_dimension, &rng)) skip();
    expect_forward(args);
    check(&args);
    for (int i = 0; i < 4; i++) free_tensor(tensors[i], far_dimension);
  }
}

static void check_gradients(const fa3_backward_args *args) {
  struct comparison at = {0};
  for (at.batch = 0; at.batch < BATCH; at.batch++)
    for (at.head = 0; at.head < HEADS; at.head++)
      for (at.row = 0; at.row < SEQLEN; at.row++) {
        compare_grad_query(&at, args, NULL);
        compare_grad_key_value(&at, args, NULL, NULL);
      }
}

/* The gradients too; output's are any numbers, and lse is 0. */
static void test_gradients_far_apart(void **state) {
  (void)state;
  static float lse[BATCH * HEADS * SEQLEN];
  for (int far_dimension = 0; far_dimension < 3; far_dimension++) {
    struct rng rng = rng_for((uint64_t)far_dimension);
    fa3_backward_args args = {.struct_size = sizeof args,
                              .lse = {.data = lse,
                                      .dtype = FA3_FLOAT32,
                                      .rank = 3,
                                      .shape = {BATCH, HEADS, SEQLEN},
                                      .strides = {(int64_t)HEADS * SEQLEN, SEQLEN, 1}}};
    enum { FAR_TENSORS = 8 };
    fa3_tensor *tensors[FAR_TENSORS] = {&args.query,    &args.key,         &args.value,
                                        &args.output,   &args.grad_output, &args.grad_query,
                                        &args.grad_key, &args.grad_value};
    for (int i = 0; i < FAR_TENSORS; i++)
      if (!make_tensor(tensors[i], far_dimension, &rng)) skip();
    assert_int_equal(fa3_backward_workspace(&args, &args.workspace_size), FA3_OK);
    args.workspace = malloc(args.workspace_size);
    if (fa3_backward(&args)) fail_msg("%s", fa3_last_error());
    check_gradients(&args);
    free(args.workspace);
    for (int i = 0; i < FAR_TENSORS; i++) free_tensor(tensors[i], far_dimension);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_far_apart),
      cmocka_unit_test(test_gradients_far_apart),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
