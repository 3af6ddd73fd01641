#ifndef FA3_TESTS_CUDA_PROBLEM_H
#define FA3_TESTS_CUDA_PROBLEM_H

#include "engine.h"
#include "test.h"

/* A forward call of sequences with as many queries as keys, without memory. */
static struct problem make_problem(fa3_dtype dtype, int64_t batch, int64_t seqlen, int64_t heads_q,
                                   int64_t heads_k, int64_t head_dim, int64_t value_head_dim) {
  fa3_forward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  struct problem problem;
  args.query = fa3_dense(NULL, dtype, batch, seqlen, heads_q, head_dim);
  args.key = fa3_dense(NULL, dtype, batch, seqlen, heads_k, head_dim);
  args.value = fa3_dense(NULL, dtype, batch, seqlen, heads_k, value_head_dim);
  args.output = fa3_dense(NULL, dtype, batch, seqlen, heads_q, value_head_dim);
  assert_int_equal(problem_from_args(FA3_FORWARD, &args, &problem), FA3_OK);
  return problem;
}

#endif
