#include "sampling.h"

#include <pthread.h>

#include "parallel.h"
#include "progress.h"
#include "random.h"

int64_t sampling_total(const struct sampling *sampling) {
  int64_t rows = 0;
  for (int64_t b = 0; b < sampling->batch; b++) rows += sampling->rows(sampling->context, b);
  return rows * sampling->heads;
}

/* Row `index` of all, counted along rows, then heads, then sequences. */
static void visit_index(const struct sampling *sampling, int64_t index) {
  for (int64_t b = 0; b < sampling->batch; b++) {
    int64_t rows = sampling->rows(sampling->context, b);
    if (index < rows * sampling->heads) {
      sampling->visit(sampling->context, b, index / rows, index % rows);
      return;
    }
    index -= rows * sampling->heads;
  }
}

/* What the threads share. */
struct samples {
  const struct sampling *sampling;
  int64_t count;
  int64_t total;
  uint64_t seed;
  pthread_mutex_t lock; /* of the progress */
  struct progress progress;
};

/* The share's own random number, whichever thread it is on. */
static void visit_share(void *argument, int64_t share) {
  struct samples *samples = argument;
  uint64_t state = samples->seed + (uint64_t)share;
  const double at = ((double)share + random_unit(&state)) / (double)samples->count;
  int64_t index = (int64_t)(at * (double)samples->total);
  if (samples->count == samples->total || index >= samples->total) index = share;
  visit_index(samples->sampling, index);
  pthread_mutex_lock(&samples->lock);
  progress_add(&samples->progress, 1);
  pthread_mutex_unlock(&samples->lock);
}

void sampling_visit(const struct sampling *sampling, int64_t count, uint64_t seed,
                    const char *label) {
  struct samples samples = {.sampling = sampling,
                            .total = sampling_total(sampling),
                            .seed = random_bits(&seed),
                            .lock = PTHREAD_MUTEX_INITIALIZER};
  samples.count = count < samples.total ? count : samples.total;
  if (label) progress_begin(&samples.progress, label, (double)samples.count);
  reference_for(reference_threads(), samples.count, visit_share, &samples);
  progress_clear(&samples.progress);
}
