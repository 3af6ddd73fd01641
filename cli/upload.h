/* A call's tensors in the GPU's memory. */
#ifndef FA3_CLI_UPLOAD_H
#define FA3_CLI_UPLOAD_H

#include <stdbool.h>

#include "fa3.h"

struct upload {
  struct uploaded {
    void *host;
    void *device;
    size_t size;
    bool output;
  } tensors[24];
  int count;
};

/* A call in the GPU's memory: `args` has been checked, `upload` is zero. The caller frees the
 * upload also on failure. */
int upload_forward(const fa3_forward_args *host, fa3_forward_args *args, struct upload *upload);
int upload_backward(const fa3_backward_args *host, fa3_backward_args *args, struct upload *upload);

/* Waits for the work, and brings the outputs back to where they came from. */
int upload_fetch(const struct upload *upload);

void upload_free(struct upload *upload);

#endif
