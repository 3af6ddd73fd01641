/* Checks and times each level's routines and the tile loops on top of them, by name. */
#ifndef FA3_TESTS_KERNELS_H
#define FA3_TESTS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

#include "fa3.h"
#include "rng.h"
#include "cpu/routines.h"

/* One set of routines. */
struct target {
  const char *name;
  bool (*usable)(void);
  const struct routines *routines;
};

/* One routine on one dtype. Random data comes from `rng`. */
struct run {
  const struct target *target;
  const struct routines *routines;
  fa3_dtype dtype;
  struct rng rng;
};

struct subject {
  const char *name;
  bool every_dtype; /* else the routine sees words only */
  /* One random case; false after saying what is wrong. */
  bool (*check)(struct run *run);
  /* Calls report() for what it times. */
  void (*bench)(struct run *run);
};

extern const struct subject arrange_subjects[5]; /* queries, keys, values, store_row, add_row */
extern const struct subject multiply_subject;
extern const struct subject cap_subject;
extern const struct subject softmax_subject;
extern const struct subject gradient_subject;
extern const struct subject transpose_subject;
extern const struct subject dot_subject;
extern const struct subject forward_subject;
extern const struct subject backward_subject;

/* Says what is wrong with this run, and returns false. */
bool wrong(const struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Whether a value is as expected, or within its bound; if not, says so. */
bool near(const struct run *run, const char *what, int64_t row, int64_t column, double value,
          double expected, double bound);

/* Times call(run, argument) and prints the median, the spread, and the rate for `work` units of
 * `unit` in each call. */
void report(const struct run *run, const char *what,
            void (*call)(const struct run *run, void *argument), void *argument, double work,
            const char *unit);

/* Memory that starts as NaN, aligned to 64 bytes, with a known pattern on either side. */
void *guarded_new(size_t size);
bool guarded_intact(const void *memory);
void guarded_free(void *memory);

/* So many floats, guarded; and a copy of some, to be freed. */
float *new_floats(int64_t count);
float *copy_floats(const float *from, int64_t count);

/* Random numbers of the dtype, `stride` bytes from row to row; what lies between stays NaN. */
void fill_rows(struct rng *rng, const struct rows *rows, char *data);
double load_element(const struct rows *rows, int64_t row, int64_t element);

/* Element `index` along the depth of words: word index / pair, half index % pair. */
double load_arranged(const struct routines *routines, const float *words, int64_t word_stride,
                     int64_t index);
/* A word made of the one or two elements at `values`. */
float arrange_word(const struct routines *routines, const double *values);

#endif
