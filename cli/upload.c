#include "upload.h"

#include <string.h>

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

/* A tensor of a call. */
struct field {
  const char *name;
  fa3_tensor *tensor;
  bool output;
};

static int add_all(struct upload *upload, const struct field *fields, size_t count) {
  for (size_t i = 0; i < count; i++)
    TRY(add(upload, fields[i].name, fields[i].tensor, fields[i].output));
  return 0;
}

int upload_forward(const fa3_forward_args *host, fa3_forward_args *args, struct upload *upload) {
  *args = *host;
  const struct field fields[] = {
      {"query", &args->query, false},
      {"key", &args->key, false},
      {"value", &args->value, false},
      {"output", &args->output, true},
      {"lse", &args->lse, true},
      {"sink", &args->sink, false},
      {"cu_seqlens_q", &args->cu_seqlens_q, false},
      {"cu_seqlens_k", &args->cu_seqlens_k, false},
      {"seqused_q", &args->seqused_q, false},
      {"seqused_k", &args->seqused_k, false},
      {"leftpad_k", &args->leftpad_k, false},
      {"cache_batch_index", &args->cache_batch_index, false},
      {"diagonal", &args->diagonal, false},
  };
  return add_all(upload, fields, sizeof fields / sizeof fields[0]);
}

int upload_backward(const fa3_backward_args *host, fa3_backward_args *args, struct upload *upload) {
  *args = *host;
  const struct field fields[] = {
      {"query", &args->query, false},
      {"key", &args->key, false},
      {"value", &args->value, false},
      {"output", &args->output, false},
      {"lse", &args->lse, false},
      {"grad_output", &args->grad_output, false},
      {"grad_query", &args->grad_query, true},
      {"grad_key", &args->grad_key, true},
      {"grad_value", &args->grad_value, true},
      {"grad_lse", &args->grad_lse, false},
      {"sink", &args->sink, false},
      {"grad_sink", &args->grad_sink, true},
      {"cu_seqlens_q", &args->cu_seqlens_q, false},
      {"cu_seqlens_k", &args->cu_seqlens_k, false},
      {"seqused_q", &args->seqused_q, false},
      {"seqused_k", &args->seqused_k, false},
      {"leftpad_k", &args->leftpad_k, false},
      {"diagonal", &args->diagonal, false},
  };
  return add_all(upload, fields, sizeof fields / sizeof fields[0]);
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
