#include "attention.h"

#include "failure.h"
#include "progress.h"
#include "slice.h"
#include "upload.h"

/* Long enough that what a call does beside its work does not count, short enough to be seen. */
static const double part_seconds = 0.5;

/* The next part of `most` heads, of one sequence or of whole ones; they are counted along heads. */
static struct slice next_part(const struct slice *whole, int64_t done, int64_t most) {
  const int64_t heads = whole->head_end;
  struct slice part = {.batch = done / heads, .head = done % heads};
  if (part.head == 0 && most >= heads) {
    part.batch_end = part.batch + most / heads;
    part.head_end = heads;
  } else {
    part.batch_end = part.batch + 1;
    part.head_end = part.head + most < heads ? part.head + most : heads;
  }
  return part;
}

/* The first part is one head, to find out how fast this machine is. */
static int run_parts(const struct call *call, const struct slice *whole,
                     struct progress *progress) {
  const int64_t all = whole->batch_end * whole->head_end;
  struct call cut = {0};
  int code = 0;
  for (int64_t done = 0, count = 1; !code && done < all; done += count) {
    if (done > 0) {
      const double heads = part_seconds * (double)done / (seconds_now() - progress->start);
      count = heads < 1 ? 1 : heads < (double)(all - done) ? (int64_t)heads : all - done;
    }
    const struct slice part = next_part(whole, done, count);
    count = (part.batch_end - part.batch) * (part.head_end - part.head);
    slice_call(call, &part, &cut);
    code = library_run(&cut);
    progress_add(progress, (double)count);
  }
  library_free_workspace(&cut);
  return code;
}

static int run_on_cpu(const struct call *call) {
  struct call whole_call = *call;
  if (call->phase == FA3_QUANTIZE) return library_run(&whole_call);
  const struct slice whole = slice_whole(call);
  struct progress progress;
  progress_begin(&progress, call->phase == FA3_BACKWARD ? "gradients" : "attention",
                 (double)(whole.batch_end * whole.head_end));
  if (progress.shown) {
    const int code = run_parts(call, &whole, &progress);
    progress_clear(&progress);
    return code;
  }
  const int code = library_run(&whole_call);
  library_free_workspace(&whole_call);
  return code;
}

static int run_on_gpu(const struct call *host) {
  struct call call;
  struct upload upload = {0};
  int code = upload_call(host, &call, &upload);
  if (!code) code = library_run(&call);
  if (!code) code = upload_fetch(&upload);
  library_free_workspace(&call);
  upload_free(&upload);
  return code;
}

int attention_run(const struct call *call) {
  return call_device(call).type == FA3_CUDA ? run_on_gpu(call) : run_on_cpu(call);
}
