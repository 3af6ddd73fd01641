/* A call's tensors in the GPU's memory. */
#ifndef FA3_CLI_UPLOAD_H
#define FA3_CLI_UPLOAD_H

#include "library.h"

struct upload {
  struct uploaded {
    void *host;
    void *device;
    size_t size;
    bool output;
  } tensors[TENSORS];
  int count;
};

/* A call in the GPU's memory: `host` has been checked, `upload` is zero. The caller frees the
 * upload also on failure. */
int upload_call(const struct call *host, struct call *call, struct upload *upload);

/* Waits for the work, and brings the outputs back to where they came from. */
int upload_fetch(const struct upload *upload);

void upload_free(struct upload *upload);

#endif
