/* A trial's call made on a GPU: its memory, guards included, is copied there and back, so that the
 * checks made for the CPU hold for the GPU. */
#ifndef FA3_TESTS_MIRROR_H
#define FA3_TESTS_MIRROR_H

#include "gpu.h"
#include "gradient_trial.h"

/* A tensor of the call. */
struct mirror_region {
  size_t tensor; /* where struct mirror has its descriptor */
  const struct buffer *buffer;
  bool output;
  const char *before; /* what an output holds before the call; null: NaN */
};

struct mirror {
  gpu_stream stream;
  bool backward;
  fa3_forward_args forward_args; /* the trial's, with the GPU's pointers: those of its pass count */
  fa3_backward_args backward_args;
  struct mirror_region regions[TENSORS];
  int region_count;
  size_t workspace_size;
  gpu_pointer workspace; /* between two guards, as every region */
  unsigned char *before; /* what the regions and the guards held before the call, to compare */
  struct gpu_arena *arena;
};

/* Takes memory from the arena, which must hold all. With `aligned` every tensor starts at a
 * multiple of 128 bytes, else where the host's does. The engine must take the call. */
struct mirror mirror_new(struct trial *trial, struct gpu_arena *arena, gpu_stream stream,
                         bool aligned);
struct mirror mirror_new_backward(struct gradient_trial *trial, struct gpu_arena *arena,
                                  gpu_stream stream, bool aligned);
/* Copies everything there; outputs are as they were before a call. */
void mirror_upload(struct mirror *mirror);
/* The call, asynchronous. */
fa3_status mirror_call(const struct mirror *mirror);
/* The same, and it must succeed. */
void mirror_run(const struct mirror *mirror);
/* Waits, copies the outputs back into the trial, and checks that nothing else has changed. */
void mirror_download(struct mirror *mirror);
/* Every length in seqused_q and seqused_k becomes this one, on the GPU alone. */
void mirror_set_lengths(struct mirror *mirror, int32_t length);
/* The outputs' bytes, to be freed. */
char *mirror_copy_outputs(const struct mirror *mirror);
/* The same call again: outputs as they were before it, and after it they must be those bytes. */
void mirror_repeat(const struct mirror *mirror, const char *outputs);
/* Its parts, before and after the call. */
void mirror_reset(const struct mirror *mirror);
void mirror_expect(const struct mirror *mirror, const char *outputs);
void mirror_free(struct mirror *mirror);

#endif
