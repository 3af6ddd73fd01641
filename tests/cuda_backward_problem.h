#ifndef FA3_TESTS_CUDA_BACKWARD_PROBLEM_H
#define FA3_TESTS_CUDA_BACKWARD_PROBLEM_H

#include "cuda/plan.h"
#include "cuda_facts.h"
#include "engine.h"
#include "kernels/mask.h"
#include "test.h"

/* Backward calls without memory, and how they would run. */
static inline struct problem make_backward_problem(int64_t seqlen_q, int64_t seqlen_k,
                                                   int64_t head_dim, int64_t value_head_dim) {
  fa3_backward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  struct problem problem;
  args.query = fa3_dense(NULL, FA3_FLOAT16, 2, seqlen_q, 6, head_dim);
  args.key = fa3_dense(NULL, FA3_FLOAT16, 2, seqlen_k, 2, head_dim);
  args.value = fa3_dense(NULL, FA3_FLOAT16, 2, seqlen_k, 2, value_head_dim);
  args.output = fa3_dense(NULL, FA3_FLOAT16, 2, seqlen_q, 6, value_head_dim);
  args.lse = fa3_lse(NULL, 2, 6, seqlen_q);
  args.grad_output = args.output;
  args.grad_query = args.query;
  args.grad_key = args.key;
  args.grad_value = args.value;
  assert_int_equal(problem_from_args(FA3_BACKWARD, &args, &problem), FA3_OK);
  return problem;
}

static inline void set_causal(struct problem *problem) {
  problem->window_right = 0;
  problem->features |= FA3_FEATURE_CAUSAL;
}

static inline void set_window(struct problem *problem, int64_t window_left) {
  problem->window_left = window_left;
  problem->window_right = 0;
  problem->features |= FA3_FEATURE_WINDOW;
}

static inline struct backward_plan deal(int64_t batch, int64_t seqlen_q, int64_t seqlen_k,
                                        int64_t heads_q, int64_t heads_k, int64_t head_dim,
                                        bool causal) {
  struct problem problem = make_backward_problem(seqlen_q, seqlen_k, head_dim, head_dim);
  struct cuda_plan plan;
  problem.batch = problem.batch_k = batch;
  problem.heads_q = heads_q;
  problem.heads_k = heads_k;
  if (causal) set_causal(&problem);
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward;
}

static inline struct backward_plan deal_windows(int64_t batch, int64_t seqlen_q, int64_t seqlen_k,
                                                int64_t heads_q, int64_t heads_k, int64_t head_dim,
                                                int64_t window_left) {
  struct problem problem = make_backward_problem(seqlen_q, seqlen_k, head_dim, head_dim);
  struct cuda_plan plan;
  problem.batch = problem.batch_k = problem.query.batch = batch;
  problem.heads_q = heads_q;
  problem.heads_k = heads_k;
  set_window(&problem, window_left);
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward;
}

static inline struct problem make_packed_problem(int64_t batch, int64_t rows, int64_t longest,
                                                 int64_t head_dim) {
  static const int32_t cu_seqlens[2]; /* where it is does not matter */
  struct problem problem = make_backward_problem(rows, rows, head_dim, head_dim);
  problem.batch = batch;
  problem.batch_k = 1;
  problem.max_seqlen_q = problem.max_seqlen_k = longest;
  problem.cu_seqlens_q = problem.cu_seqlens_k = cu_seqlens;
  return problem;
}

static inline struct backward_plan deal_lengths(int64_t batch, int64_t rows, int64_t longest,
                                                int64_t heads_q, int64_t heads_k, int64_t head_dim,
                                                bool causal) {
  struct problem problem = make_packed_problem(batch, rows, longest, head_dim);
  struct cuda_plan plan;
  problem.heads_q = heads_q;
  problem.heads_k = heads_k;
  if (causal) set_causal(&problem);
  assert_int_equal(plan_backward(&problem, &facts, &plan), FA3_OK);
  return plan.backward;
}

static inline struct backward_plan deal_packed(int64_t batch, int64_t rows, int64_t longest,
                                               int64_t heads_q, int64_t heads_k, int64_t head_dim) {
  return deal_lengths(batch, rows, longest, heads_q, heads_k, head_dim, true);
}

static inline struct backward_plan deal_packed_full(int64_t batch, int64_t rows, int64_t longest,
                                                    int64_t heads, int64_t head_dim) {
  return deal_lengths(batch, rows, longest, heads, heads, head_dim, false);
}

#endif
