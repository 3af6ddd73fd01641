#include "sampling.h"

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

void sampling_visit(const struct sampling *sampling, int64_t count, uint64_t seed,
                    const char *label) {
  struct progress progress = {0};
  int64_t total = sampling_total(sampling);
  if (count > total) count = total;
  if (label) progress_begin(&progress, label, (double)count);
  for (int64_t i = 0; i < count; i++) {
    double at = ((double)i + random_unit(&seed)) / (double)count;
    int64_t index = (int64_t)(at * (double)total);
    if (count == total || index >= total) index = i;
    visit_index(sampling, index);
    progress_add(&progress, 1);
  }
  progress_clear(&progress);
}
