#include "attention.h"

#include <stdlib.h>

#include "failure.h"
#include "library.h"
#include "progress.h"
#include "slice.h"
#include "upload.h"

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
static int run_part(struct parts *parts, fa3_forward_args *part, double flops) {
  double start = seconds_now();
  part->workspace = parts->args->workspace;
  part->workspace_size = parts->args->workspace_size;
  int code = library_forward(part);
  parts->args->workspace = part->workspace;
  parts->args->workspace_size = part->workspace_size;
  double seconds = seconds_now() - start;
  if (seconds > part_seconds / 100) parts->flops = flops / seconds * part_seconds;
  progress_add(&parts->progress, flops);
  return code;
}

/* A head of its own is too much for one part. */
static int run_head(struct parts *parts, const struct slice_sequence *sequence, int64_t head) {
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
    TRY(run_part(parts, &slice.args, flops));
  }
  return 0;
}

/* A sequence of its own is too much for one part. */
static int run_sequence(struct parts *parts, int64_t batch, double sequence_total) {
  const fa3_forward_args *args = parts->args;
  struct slice_sequence sequence = slice_sequence(args, batch);
  int64_t heads = args->key.shape[args->key.rank - 2];
  double head_flops = sequence_total / (double)heads;
  for (int64_t begin = 0, end; begin < heads; begin = end) {
    int64_t count = (int64_t)(parts->flops / head_flops);
    end = count < heads - begin ? begin + count : heads;
    if (end > begin) {
      struct slice slice;
      slice_rows(args, &sequence, begin, end, 0, sequence.rows, &slice);
      TRY(run_part(parts, &slice.args, head_flops * (double)(end - begin)));
    } else {
      end = begin + 1;
      TRY(run_head(parts, &sequence, begin));
    }
  }
  return 0;
}

static int run_parts(struct parts *parts) {
  const fa3_forward_args *args = parts->args;
  int64_t batch = slice_batch(args);
  for (int64_t begin = 0, end; begin < batch; begin = end) {
    double next = sequence_flops(args, begin);
    double flops = 0;
    for (end = begin; end < batch && flops + next <= parts->flops; end++) {
      flops += next;
      if (end + 1 < batch) next = sequence_flops(args, end + 1);
    }
    if (end > begin) {
      fa3_forward_args cut;
      slice_sequences(args, begin, end, parts->starts_q, parts->starts_k, &cut);
      TRY(run_part(parts, &cut, flops));
    } else {
      end = begin + 1;
      TRY(run_sequence(parts, begin, next));
    }
  }
  return 0;
}

static int run_on_cpu(fa3_forward_args *args) {
  struct parts parts = {.args = args};
  progress_begin(&parts.progress, "attention", attention_flops(args));
  if (!parts.progress.shown) return library_forward(args);

  fa3_device_info info = {.struct_size = sizeof info};
  (void)fa3_get_device_info(args->device, &info);
  int64_t units = args->num_threads ? args->num_threads : info.units;
  parts.flops = 1e9 * (double)units; /* little, to find out how fast this machine is */
  parts.grain = 128 * units;
  size_t starts = ((size_t)slice_batch(args) + 1) * sizeof(int32_t);
  parts.starts_q = malloc(starts);
  parts.starts_k = malloc(starts);
  int code =
      parts.starts_q && parts.starts_k ? run_parts(&parts) : fail(EXIT_FAILED, "out of memory");
  free(parts.starts_q);
  free(parts.starts_k);
  progress_clear(&parts.progress);
  return code;
}

static int run_on_gpu(const fa3_forward_args *host) {
  fa3_forward_args args;
  struct upload upload = {0};
  int code = upload_forward(host, &args, &upload);
  if (!code) code = library_forward(&args);
  if (!code) code = upload_fetch(&upload);
  library_free_workspace(args.device, args.workspace);
  upload_free(&upload);
  return code;
}

int attention_run(const fa3_forward_args *args) {
  if (args->device.type == FA3_CUDA) return run_on_gpu(args);
  fa3_forward_args with_workspace = *args;
  int code = run_on_cpu(&with_workspace);
  library_free_workspace(args->device, with_workspace.workspace);
  return code;
}

/* Heads at a time; the first one tells how fast this machine is. */
static int run_backward_on_cpu(fa3_backward_args *args) {
  struct progress progress;
  const int64_t heads = args->key.shape[args->key.rank - 2];
  progress_begin(&progress, "gradients", (double)heads);
  if (!progress.shown) return library_backward(args);
  int code = 0;
  for (int64_t begin = 0, count = 1; !code && begin < heads; begin += count) {
    fa3_backward_args cut;
    if (begin > 0) {
      double head_seconds = (seconds_now() - progress.start) / (double)begin;
      double most = part_seconds / head_seconds;
      count = most < 1 ? 1 : most < (double)(heads - begin) ? (int64_t)most : heads - begin;
    }
    slice_heads(args, begin, begin + count, &cut);
    code = library_backward(&cut);
    args->workspace = cut.workspace;
    args->workspace_size = cut.workspace_size;
    progress_add(&progress, (double)count);
  }
  progress_clear(&progress);
  return code;
}

static int run_backward_on_gpu(const fa3_backward_args *host) {
  fa3_backward_args args;
  struct upload upload = {0};
  int code = upload_backward(host, &args, &upload);
  if (!code) code = library_backward(&args);
  if (!code) code = upload_fetch(&upload);
  library_free_workspace(args.device, args.workspace);
  upload_free(&upload);
  return code;
}

int attention_run_backward(const fa3_backward_args *args) {
  if (args->device.type == FA3_CUDA) return run_backward_on_gpu(args);
  fa3_backward_args with_workspace = *args;
  int code = run_backward_on_cpu(&with_workspace);
  library_free_workspace(args->device, with_workspace.workspace);
  return code;
}
