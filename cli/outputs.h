/* The files that a run writes. Tensors that go to one .safetensors file share it. */
#ifndef FA3_CLI_OUTPUTS_H
#define FA3_CLI_OUTPUTS_H

#include "loaded_tensor.h"
#include "output_file.h"

/* One tensor to write. */
struct output {
  const char *option; /* that asks for it */
  const char *path;
  const char *name; /* in a .safetensors file */
  const struct loaded_tensor *tensor;
};

struct outputs {
  struct output list[OUTPUT_FILES];
  int count;
  struct output_file files[OUTPUT_FILES]; /* the first `file_count` are begun */
  int file_count;
  int file_of[OUTPUT_FILES]; /* by tensor */
};

/* Outputs that can't be written are found here, before the work. At most OUTPUT_FILES of them. */
int outputs_begin(const struct output *list, int count, struct outputs *outputs);

/* The tensors have their contents now: all files are written, then each gets its name. */
int outputs_write(struct outputs *outputs);

/* What has not got its name goes. */
void outputs_discard(struct outputs *outputs);

#endif
