#include "mirror.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

enum { PATTERN = 0xa5 };
static const size_t guard_bytes = 4096;

/* The tensor of the call that lies in buffer `which`; the workspace has none. */
static fa3_tensor *tensor_of(fa3_forward_args *args, int which) {
  fa3_tensor *tensors[TRIAL_BUFFERS] = {&args->query,        &args->key,
                                        &args->value,        &args->sink,
                                        &args->cu_seqlens_q, &args->cu_seqlens_k,
                                        &args->seqused_q,    &args->seqused_k,
                                        &args->leftpad_k,    &args->cache_batch_index,
                                        &args->diagonal,     &args->output,
                                        &args->lse};
  return tensors[which];
}

/* On the GPU: a guard, the buffer's bytes, a guard. */
static size_t region_size(const struct buffer *buffer) {
  return buffer->size + 2 * guard_bytes + 64;
}

struct mirror mirror_new(struct trial *trial, struct gpu_arena *arena, gpu_stream stream,
                         bool aligned) {
  struct mirror mirror = {.trial = trial, .stream = stream, .args = trial->args, .arena = arena};
  arena->used = 0;
  for (int i = 0; i < TRIAL_WORKSPACE; i++) {
    const struct buffer *buffer = &trial->buffers[i];
    if (!buffer->data) continue;
    size_t offset = aligned ? 0 : (uintptr_t)buffer->data % 64;
    mirror.regions[i] = gpu_arena_take(arena, region_size(buffer));
    tensor_of(&mirror.args, i)->data = (void *)(mirror.regions[i] + guard_bytes + offset);
  }
  mirror.args.device = (fa3_device){FA3_CUDA, 0};
  mirror.args.stream = stream;
  mirror.args.num_threads = 0;
  if (fa3_forward_workspace(&mirror.args, &mirror.workspace_size))
    fail_msg("fa3_forward_workspace: %s", fa3_last_error());
  mirror.workspace = gpu_arena_take(arena, mirror.workspace_size + 2 * guard_bytes + 64);
  mirror.args.workspace = (void *)(mirror.workspace + guard_bytes + (aligned ? 0 : 4));
  mirror.args.workspace_size = mirror.workspace_size;
  mirror.before = malloc(arena->used);
  assert_non_null(mirror.before);
  return mirror;
}

static size_t offset_in(const struct mirror *mirror, const void *pointer) {
  return (size_t)((gpu_pointer)pointer - mirror->arena->base);
}

void mirror_upload(struct mirror *mirror) {
  memset(mirror->before, PATTERN, mirror->arena->used);
  for (int i = 0; i < TRIAL_WORKSPACE; i++) {
    const struct buffer *buffer = &mirror->trial->buffers[i];
    if (!buffer->data) continue;
    unsigned char *to = mirror->before + offset_in(mirror, tensor_of(&mirror->args, i)->data);
    if (i < TRIAL_INPUTS)
      memcpy(to, buffer->data, buffer->size);
    else
      memset(to, 0xff, buffer->size);
  }
  GPU(cuMemcpyHtoDAsync, mirror->arena->base, mirror->before, mirror->arena->used, mirror->stream);
}

void mirror_run(const struct mirror *mirror) {
  if (fa3_forward(&mirror->args)) fail_msg("fa3_forward: %s", fa3_last_error());
}

/* What may have changed: outputs and the workspace. */
static bool may_change(const struct mirror *mirror, size_t offset, size_t *end) {
  for (int i = TRIAL_INPUTS; i < TRIAL_WORKSPACE; i++) {
    const struct buffer *buffer = &mirror->trial->buffers[i];
    if (!buffer->data) continue;
    size_t start =
        offset_in(mirror, tensor_of(&((struct mirror *)(uintptr_t)mirror)->args, i)->data);
    *end = start + buffer->size;
    if (offset >= start && offset < *end) return true;
  }
  size_t start = offset_in(mirror, mirror->args.workspace);
  *end = start + mirror->workspace_size;
  return offset >= start && offset < *end;
}

void mirror_download(struct mirror *mirror) {
  size_t used = mirror->arena->used;
  unsigned char *after = malloc(used);
  assert_non_null(after);
  GPU(cuMemcpyDtoHAsync, after, mirror->arena->base, used, mirror->stream);
  GPU(cuStreamSynchronize, mirror->stream);
  for (size_t i = 0; i < used; i++) {
    size_t end;
    if (after[i] == mirror->before[i]) continue;
    if (!may_change(mirror, i, &end))
      fail_msg("the byte at offset %zu of the GPU's memory was written, and belongs to no output",
               i);
  }
  for (int i = TRIAL_INPUTS; i < TRIAL_WORKSPACE; i++) {
    const struct buffer *buffer = &mirror->trial->buffers[i];
    if (buffer->data)
      memcpy(buffer->data, after + offset_in(mirror, tensor_of(&mirror->args, i)->data),
             buffer->size);
  }
  free(after);
}

void mirror_repeat(struct mirror *mirror) {
  const struct buffer *output = &mirror->trial->buffers[TRIAL_OUTPUT];
  unsigned char *first = malloc(output->size + 1);
  assert_non_null(first);
  if (output->data) memcpy(first, output->data, output->size);
  mirror_upload(mirror);
  mirror_run(mirror);
  mirror_download(mirror);
  if (output->data && memcmp(first, output->data, output->size) != 0)
    fail_msg("the same call again gave other bits");
  free(first);
}

void mirror_free(struct mirror *mirror) {
  free(mirror->before);
  *mirror = (struct mirror){0};
}
