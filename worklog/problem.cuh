// A problem with its data on host and device, what float64 says of it, and the
// checks of a step's output.
#ifndef WORKLOG_PROBLEM_CUH
#define WORKLOG_PROBLEM_CUH

#include "ladder.cuh"
#include "parallel.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <vector>

#define CUDA(call)                                                                               \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      exit(2);                                                                                   \
    }                                                                                            \
  } while (0)

struct row {
  int batch, row, head;
};

// Q, K and V as numbers.
struct values {
  std::vector<float> query, key, value;
};

// What float64 says of them, for the rows that are compared.
struct expectation {
  std::vector<double> out;    // [row][kHeadDim]
  std::vector<double> bound;  // of the error of each
  double rms_bound;
};

struct problem {
  attention a;
  size_t count;  // elements of a tensor
  values inputs;
  std::vector<uint16_t> out;
  bf16 *out_zone;         // kGuard, the output, kGuard
  std::vector<row> rows;  // those compared
  expectation expected;   // its rms_bound is the error of plain 16-bit attention
};

// Inputs have mean 0 and variance 1; with outliers, one in a thousand has a normal number
// of standard deviation 10 added, as in FlashAttention-3's table of errors. Compares
// `samples` rows with float64, or all of them if that is 0.
problem make_problem(int batch, int heads, int seqlen, bool causal, bool outliers, int samples);
void free_problem(problem &p);

// K0's scores, for as long as it needs them. False if there is no room.
bool take_scores(const step *s, problem &p);
void drop_scores(problem &p);

// reference.cu: attention in float64 from the inputs, and from a step's codes; and whether
// those are the right ones, with the numbers that they stand for.
expectation expect_16_bits(const problem &p);
expectation expect_codes(const problem &p, const values &decoded);
bool codes_are_right(const step *s, const problem &p, values *decoded);

void poison(problem &p);  // fills the output with NaN
void quantise(const step *s, const problem &p);
void run(const step *s, const problem &p);

// Root mean square errors against float64: from the inputs, and from the numbers that the
// step computes with, which differ if it takes codes.
struct errors {
  double all, own;
};

// Runs a step on a poisoned output. What is wrong is printed.
bool check(const step *s, problem &p, errors *e);
bool output_is_the_same(const step *s, problem &p, const std::vector<uint16_t> &checked);

#endif
