/* One forward call in guarded memory, and its comparison with the float64 reference. Every
 * element of an input that no sequence uses is NaN, and all inputs are read-only; every byte of
 * an output starts as 0xff (NaN). */
#ifndef FA3_TESTS_TRIAL_H
#define FA3_TESTS_TRIAL_H

#include "buffer.h"
#include "spec.h"
#include "tensor.h"
#include "tensors.h"

struct trial {
  struct spec spec;
  fa3_forward_args args;
  struct buffer buffers[TENSORS]; /* of the tensors that the call has */
  struct buffer workspace;
};

/* Lays out and fills everything but the workspace; inputs are still writable. */
struct trial trial_new(const struct spec *spec, struct rng *rng);
void trial_free(struct trial *trial);

/* Whether a call of the phase writes the tensor. */
bool trial_is_output(fa3_phase phase, enum tensor tensor);

/* Memory of exactly that size at either end of its pages, in place of what the buffer was. */
void *trial_make_workspace(size_t bytes, struct buffer *workspace, struct rng *rng);

/* Makes the inputs read-only, gives the call a workspace of exactly the size it asks for, and
 * calls fa3_forward, which must succeed. */
void trial_run(struct trial *trial, struct rng *rng);

/* Compares rows with the reference (all of them if that takes at most `pairs` products of a query
 * and a key, else a random part, of some 16 rows at least), checks that nothing else was written,
 * and returns the largest error as a fraction of its bound. */
double trial_check(const struct trial *trial, struct rng *rng, double pairs);

/* Where one sequence's rows are, in query and output, or in key and value. */
struct rows {
  int64_t batch;
  int64_t first;
  int64_t count;
};
struct rows trial_query_rows(const struct trial *trial, int64_t batch);
struct rows trial_key_rows(const struct trial *trial, int64_t batch);

/* Random numbers in rows of a (batch, rows, heads, dim) or (rows, heads, dim) tensor, their
 * standard deviation `spread` in the middle and growing by `trend` along the rows. */
void trial_fill_rows(const fa3_tensor *tensor, struct rows rows, double spread, double trend,
                     struct rng *rng);

#endif
