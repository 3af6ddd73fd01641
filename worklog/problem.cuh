// A problem with its data on host and device, what float64 says of it, and the
// checks of a step's output.
#ifndef WORKLOG_PROBLEM_CUH
#define WORKLOG_PROBLEM_CUH

#include "ladder.cuh"

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

struct problem {
  attention a;
  size_t count;  // elements of a tensor
  std::vector<uint16_t> query, key, value, out;
  bf16 *out_zone;                 // kGuard, the output, kGuard
  std::vector<row> rows;          // those compared
  std::vector<double> reference;  // [row][kHeadDim]
  std::vector<double> bound;      // of the error of each, see reference_rows
  double plain_rms;               // the error of plain 16-bit attention
};

// Compares `samples` rows with float64, or all of them if that is 0.
problem make_problem(int batch, int heads, int seqlen, bool causal, int samples);
void free_problem(problem &p);

// K0's scores, for as long as it needs them. False if there is no room.
bool take_scores(const step *s, problem &p);
void drop_scores(problem &p);

void poison(problem &p);  // fills the output with NaN
void run(const step *s, const problem &p);

// Runs a step on a poisoned output. What is wrong is printed.
bool check(const step *s, problem &p, double *rms);
bool output_is_the_same(const step *s, problem &p, const std::vector<uint16_t> &checked);

#endif
