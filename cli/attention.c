#include "attention.h"

#include <stdlib.h>

#include "progress.h"
#include "slice.h"

/* Long enough that starting and joining threads does not count, short enough to be seen. */
static const double part_seconds = 0.5;

/* Work under way, in parts. */
struct parts {
  fa3_forward_args *args; /* the whole */
  struct progress progress;
  double flops;  /* of a part that takes part_seconds */
  int64_t grain; /* rows that give every thread some */
  int32_t *starts_q;
  int32_t *starts_k;
};

static fa3_status reserve_workspace(fa3_forward_args *args) {
  size_t bytes;
  fa3_status status = fa3_forward_workspace(args, &bytes);
  if (status || bytes <= args->workspace_size) return status;
  free(args->workspace);
  args->workspace = malloc(bytes);
  args->workspace_size = args->workspace ? bytes : 0;
  return args->workspace ? FA3_OK : FA3_OUT_OF_MEMORY;
}

fa3_status attention_call(fa3_forward_args *args) {
  fa3_status status = reserve_workspace(args);
  return status ? status : fa3_forward(args);
}

static double sequence_flops(const fa3_forward_args *args, int64_t batch) {
  struct slice_sequence sequence = slice_sequence(args, batch);
  return slice_flops(args, &sequence, 0, sequence.rows) *
         (double)args->query.shape[args->query.rank - 2];
}

double attention_flops(const fa3_forward_args *args) {
  double flops = 0;
  for (int64_t b = 0; b < slice_batch(args); b++) flops += sequence_flops(args, b);
  return flops;
}

/* One part; what it took sets the size of the next ones. */
static fa3_status run_part(struct parts *parts, fa3_forward_args *part, double flops) {
  double start = seconds_now();
  part->workspace = parts->args->workspace;
  part->workspace_size = parts->args->workspace_size;
  fa3_status status = attention_call(part);
  parts->args->workspace = part->workspace;
  parts->args->workspace_size = part->workspace_size;
  double seconds = seconds_now() - start;
  if (seconds > part_seconds / 100) parts->flops = flops / seconds * part_seconds;
  progress_add(&parts->progress, flops);
  return status;
}

/* A head of its own is too much for one part. */
static fa3_status run_head(struct parts *parts, const struct slice_sequence *sequence,
                           int64_t head) {
  const fa3_forward_args *args = parts->args;
  double group =
      (double)args->query.shape[args->query.rank - 2] / (double)args->key.shape[args->key.rank - 2];
  for (int64_t begin = 0, end; begin < sequence->rows; begin = end) {
    struct slice slice;
    double flops = 0;
    end = begin;
    do {
      int64_t rest = sequence->rows - end;
      int64_t rows = rest < parts->grain ? rest : parts->grain;
      flops += slice_flops(args, sequence, end, end + rows) * group;
      end += rows;
    } while (end < sequence->rows && flops < parts->flops);
    slice_rows(args, sequence, head, head + 1, begin, end, &slice);
    fa3_status status = run_part(parts, &slice.args, flops);
    if (status) return status;
  }
  return FA3_OK;
}

/* A sequence of its own is too much for one part. */
static fa3_status run_sequence(struct parts *parts, int64_t batch, double sequence_total) {
  const fa3_forward_args *args = parts->args;
  struct slice_sequence sequence = slice_sequence(args, batch);
  int64_t heads = args->key.shape[args->key.rank - 2];
  double head_flops = sequence_total / (double)heads;
  for (int64_t begin = 0, end; begin < heads; begin = end) {
    fa3_status status;
    int64_t count = (int64_t)(parts->flops / head_flops);
    end = count < heads - begin ? begin + count : heads;
    if (end > begin) {
      struct slice slice;
      slice_rows(args, &sequence, begin, end, 0, sequence.rows, &slice);
      status = run_part(parts, &slice.args, head_flops * (double)(end - begin));
    } else {
      end = begin + 1;
      status = run_head(parts, &sequence, begin);
    }
    if (status) return status;
  }
  return FA3_OK;
}

static fa3_status run_parts(struct parts *parts) {
  const fa3_forward_args *args = parts->args;
  int64_t batch = slice_batch(args);
  for (int64_t begin = 0, end; begin < batch; begin = end) {
    fa3_status status;
    double next = sequence_flops(args, begin);
    double flops = 0;
    for (end = begin; end < batch && flops + next <= parts->flops; end++) {
      flops += next;
      if (end + 1 < batch) next = sequence_flops(args, end + 1);
    }
    if (end > begin) {
      fa3_forward_args cut;
      slice_sequences(args, begin, end, parts->starts_q, parts->starts_k, &cut);
      status = run_part(parts, &cut, flops);
    } else {
      end = begin + 1;
      status = run_sequence(parts, begin, next);
    }
    if (status) return status;
  }
  return FA3_OK;
}

fa3_status attention_run(fa3_forward_args *args) {
  struct parts parts = {.args = args};
  progress_begin(&parts.progress, "attention", attention_flops(args));
  if (!parts.progress.shown) return attention_call(args);

  fa3_device_info info = {.struct_size = sizeof info};
  fa3_status status = fa3_get_device_info(args->device, &info);
  if (status) return status;
  int64_t units = args->num_threads ? args->num_threads : info.units;
  parts.flops = 1e9 * (double)units; /* little, to find out how fast this machine is */
  parts.grain = 128 * units;
  size_t starts = ((size_t)slice_batch(args) + 1) * sizeof(int32_t);
  parts.starts_q = malloc(starts);
  parts.starts_k = malloc(starts);
  status = parts.starts_q && parts.starts_k ? run_parts(&parts) : FA3_OUT_OF_MEMORY;
  free(parts.starts_q);
  free(parts.starts_k);
  progress_clear(&parts.progress);
  return status;
}
