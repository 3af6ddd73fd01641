/* A trial's call made on a GPU: its memory, guards included, is copied there and back, so that the
 * checks made for the CPU hold for the GPU. */
#ifndef FA3_TESTS_MIRROR_H
#define FA3_TESTS_MIRROR_H

#include "gpu.h"
#include "trial.h"

struct mirror {
  struct trial *trial;
  gpu_stream stream;
  fa3_forward_args args;              /* the trial's, with the GPU's pointers */
  gpu_pointer regions[TRIAL_BUFFERS]; /* what is copied of each buffer, between two guards */
  size_t workspace_size;
  gpu_pointer workspace; /* between two guards as well */
  unsigned char *before; /* what the regions and the guards held before the call, to compare */
  struct gpu_arena *arena;
};

/* Takes memory from the arena, which must hold all. With `aligned` every tensor starts at a
 * multiple of 128 bytes, else where the host's does. */
struct mirror mirror_new(struct trial *trial, struct gpu_arena *arena, gpu_stream stream,
                         bool aligned);
/* Copies everything there; outputs are NaN again. */
void mirror_upload(struct mirror *mirror);
/* fa3_forward, which must succeed; asynchronous. */
void mirror_run(const struct mirror *mirror);
/* Waits, copies the outputs back into the trial, and checks that nothing else has changed. */
void mirror_download(struct mirror *mirror);
/* The same call again: the outputs must be the same bytes. */
void mirror_repeat(struct mirror *mirror);
void mirror_free(struct mirror *mirror);

#endif
