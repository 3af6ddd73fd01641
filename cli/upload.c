#include "upload.h"

#include "cuda.h"
#include "failure.h"

/* Bytes from its first element to its last. */
static size_t extent(const fa3_tensor *tensor) {
  int64_t last = 0;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] == 0) return 0;
    last += (tensor->shape[d] - 1) * tensor->strides[d];
  }
  return ((size_t)last + 1) * fa3_dtype_size(tensor->dtype);
}

/* Makes the tensor a view of a copy in the GPU's memory. An output is copied too: not all of it
 * need be written. */
static int add(struct upload *upload, const char *name, fa3_tensor *tensor, bool output) {
  if (tensor->rank == 0) return 0;
  struct uploaded *copy = &upload->tensors[upload->count];
  *copy = (struct uploaded){.host = tensor->data, .size = extent(tensor), .output = output};
  TRY(cuda_allocate(copy->size, name, &copy->device));
  upload->count++;
  tensor->data = copy->device;
  return cuda_upload(copy->device, copy->host, copy->size);
}

int upload_call(const struct call *host, struct call *call, struct upload *upload) {
  const struct argument_struct *list = arguments_of(host->phase);
  *call = *host;
  for (int i = 0; i < list->count; i++) {
    const struct argument *argument = &list->arguments[i];
    TRY(add(upload, tensor_rows[argument->tensor].name, argument_in(&call->args, argument),
            argument->output));
  }
  return 0;
}

int upload_fetch(const struct upload *upload) {
  TRY(cuda_wait());
  for (int i = 0; i < upload->count; i++) {
    const struct uploaded *copy = &upload->tensors[i];
    if (copy->output) TRY(cuda_download(copy->host, copy->device, copy->size));
  }
  return 0;
}

void upload_free(struct upload *upload) {
  for (int i = 0; i < upload->count; i++) cuda_free(upload->tensors[i].device);
  upload->count = 0;
}
