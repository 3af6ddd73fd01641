#include "mirror.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

enum { PATTERN = 0xa5 };
static const size_t guard_bytes = 4096;
/* Behind the workspace, where copies of whole tensors lie last. */
static const size_t workspace_guard_bytes = 1 << 20;

static fa3_tensor *tensor_of(const struct mirror *mirror, const struct mirror_region *region) {
  return (fa3_tensor *)((uintptr_t)mirror + region->tensor);
}

static void add_region(struct mirror *mirror, const fa3_tensor *tensor, const struct buffer *buffer,
                       bool output, const char *before) {
  if (!buffer->data) return;
  mirror->regions[mirror->region_count++] =
      (struct mirror_region){.tensor = (size_t)((uintptr_t)tensor - (uintptr_t)mirror),
                             .buffer = buffer,
                             .output = output,
                             .before = before};
}

/* On the GPU: a guard, the buffer's bytes, a guard. */
static void place_regions(struct mirror *mirror, bool aligned) {
  mirror->arena->used = 0;
  for (int i = 0; i < mirror->region_count; i++) {
    const struct buffer *buffer = mirror->regions[i].buffer;
    size_t offset = aligned ? 0 : (uintptr_t)buffer->data % 64;
    gpu_pointer start = gpu_arena_take(mirror->arena, buffer->size + 2 * guard_bytes + 64);
    tensor_of(mirror, &mirror->regions[i])->data = (void *)(start + guard_bytes + offset);
  }
}

static void place_workspace(struct mirror *mirror, bool aligned) {
  fa3_status status = mirror->backward
                          ? fa3_backward_workspace(&mirror->backward_args, &mirror->workspace_size)
                          : fa3_forward_workspace(&mirror->forward_args, &mirror->workspace_size);
  if (status) fail_msg("the workspace: %s", fa3_last_error());
  gpu_pointer start = gpu_arena_take(
      mirror->arena, guard_bytes + mirror->workspace_size + workspace_guard_bytes + 64);
  mirror->workspace = start + guard_bytes + (aligned ? 0 : 4);
  mirror->forward_args.workspace = (void *)mirror->workspace;
  mirror->forward_args.workspace_size = mirror->workspace_size;
  mirror->backward_args.workspace = (void *)mirror->workspace;
  mirror->backward_args.workspace_size = mirror->workspace_size;
  mirror->before = malloc(mirror->arena->used);
  assert_non_null(mirror->before);
}

/* The tensors of a call, from the buffers of a trial, or of a backward one that has them in two
 * places. */
static void add_regions(struct mirror *mirror, fa3_phase phase, const void *args,
                        const struct buffer *buffers, const struct buffer *others,
                        char *const *before) {
  const struct argument_struct *list = arguments_of(phase);
  for (int i = 0; i < list->count; i++) {
    const enum tensor tensor = list->arguments[i].tensor;
    const bool other = others && others[tensor].data;
    add_region(mirror, argument_in(args, &list->arguments[i]),
               other ? &others[tensor] : &buffers[tensor], list->arguments[i].output,
               before ? before[tensor] : NULL);
  }
}

struct mirror mirror_new(struct trial *trial, struct gpu_arena *arena, gpu_stream stream,
                         bool aligned) {
  struct mirror mirror = {.stream = stream, .forward_args = trial->args, .arena = arena};
  fa3_forward_args *args = &mirror.forward_args;
  args->device = (fa3_device){FA3_CUDA, 0};
  args->stream = stream;
  args->num_threads = 0;
  add_regions(&mirror, FA3_FORWARD, args, trial->buffers, NULL, NULL);
  place_regions(&mirror, aligned);
  place_workspace(&mirror, aligned);
  return mirror;
}

struct mirror mirror_new_backward(struct gradient_trial *trial, struct gpu_arena *arena,
                                  gpu_stream stream, bool aligned) {
  struct mirror mirror = {
      .stream = stream, .backward = true, .backward_args = trial->args, .arena = arena};
  fa3_backward_args *args = &mirror.backward_args;
  args->device = (fa3_device){FA3_CUDA, 0};
  args->stream = stream;
  args->num_threads = 0;
  add_regions(&mirror, FA3_BACKWARD, args, trial->forward.buffers, trial->buffers, trial->before);
  place_regions(&mirror, aligned);
  place_workspace(&mirror, aligned);
  return mirror;
}

static size_t offset_in(const struct mirror *mirror, const void *pointer) {
  return (size_t)((gpu_pointer)pointer - mirror->arena->base);
}

static size_t region_start(const struct mirror *mirror, const struct mirror_region *region) {
  return offset_in(mirror, tensor_of(mirror, region)->data);
}

void mirror_upload(struct mirror *mirror) {
  memset(mirror->before, PATTERN, mirror->arena->used);
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    unsigned char *to = mirror->before + region_start(mirror, region);
    if (!region->output)
      memcpy(to, region->buffer->data, region->buffer->size);
    else if (region->before)
      memcpy(to, region->before, region->buffer->size);
    else
      memset(to, 0xff, region->buffer->size);
  }
  GPU(cuMemcpyHtoDAsync, mirror->arena->base, mirror->before, mirror->arena->used, mirror->stream);
}

fa3_status mirror_call(const struct mirror *mirror) {
  return mirror->backward ? fa3_backward(&mirror->backward_args)
                          : fa3_forward(&mirror->forward_args);
}

void mirror_run(const struct mirror *mirror) {
  if (mirror_call(mirror)) fail_msg("the call: %s", fa3_last_error());
}

/* Where the output or the workspace ends that a byte belongs to; 0 if none may change there. */
static size_t end_of_change(const struct mirror *mirror, size_t offset) {
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    size_t start = region_start(mirror, region), end = start + region->buffer->size;
    if (region->output && offset >= start && offset < end) return end;
  }
  size_t start = (size_t)(mirror->workspace - mirror->arena->base);
  size_t end = start + mirror->workspace_size;
  return offset >= start && offset < end ? end : 0;
}

void mirror_download(struct mirror *mirror) {
  size_t used = mirror->arena->used;
  unsigned char *after = malloc(used);
  assert_non_null(after);
  GPU(cuMemcpyDtoHAsync, after, mirror->arena->base, used, mirror->stream);
  GPU(cuStreamSynchronize, mirror->stream);
  for (size_t i = 0; i < used; i++) {
    if (after[i] == mirror->before[i]) continue;
    size_t end = end_of_change(mirror, i);
    if (!end)
      fail_msg("the byte at offset %zu of the GPU's memory was written, and belongs to no output",
               i);
    i = end - 1;
  }
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    if (region->output)
      memcpy(region->buffer->data, after + region_start(mirror, region), region->buffer->size);
  }
  free(after);
}

void mirror_set_lengths(struct mirror *mirror, int32_t length) {
  const fa3_tensor *const tensors[] = {
      &mirror->forward_args.seqused_q, &mirror->forward_args.seqused_k,
      &mirror->backward_args.seqused_q, &mirror->backward_args.seqused_k};
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    const size_t start = region_start(mirror, region), size = region->buffer->size;
    for (int t = 0; t < 4; t++) {
      if (tensor_of(mirror, region) != tensors[t]) continue;
      for (size_t at = 0; at + sizeof length <= size; at += sizeof length)
        memcpy(mirror->before + start + at, &length, sizeof length);
      GPU(cuMemcpyHtoDAsync, mirror->arena->base + start, mirror->before + start, size,
          mirror->stream);
    }
  }
}

char *mirror_copy_outputs(const struct mirror *mirror) {
  size_t size = 1;
  for (int i = 0; i < mirror->region_count; i++)
    if (mirror->regions[i].output) size += mirror->regions[i].buffer->size;
  char *copy = malloc(size), *to = copy;
  assert_non_null(copy);
  for (int i = 0; i < mirror->region_count; i++) {
    const struct buffer *buffer = mirror->regions[i].buffer;
    if (!mirror->regions[i].output) continue;
    memcpy(to, buffer->data, buffer->size);
    to += buffer->size;
  }
  return copy;
}

void mirror_reset(const struct mirror *mirror) {
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    const size_t start = region_start(mirror, region);
    if (region->output && region->buffer->size)
      GPU(cuMemcpyHtoDAsync, mirror->arena->base + start, mirror->before + start,
          region->buffer->size, mirror->stream);
  }
  GPU(cuStreamSynchronize, mirror->stream);
}

void mirror_expect(const struct mirror *mirror, const char *outputs) {
  for (int i = 0; i < mirror->region_count; i++) {
    const struct mirror_region *region = &mirror->regions[i];
    const struct buffer *buffer = region->buffer;
    if (!region->output || !buffer->size) continue;
    GPU(cuMemcpyDtoHAsync, buffer->data, mirror->arena->base + region_start(mirror, region),
        buffer->size, mirror->stream);
    GPU(cuStreamSynchronize, mirror->stream);
    if (memcmp(outputs, buffer->data, buffer->size) != 0)
      fail_msg("the same call again gave other bits");
    outputs += buffer->size;
  }
}

void mirror_repeat(const struct mirror *mirror, const char *outputs) {
  mirror_reset(mirror);
  mirror_run(mirror);
  mirror_expect(mirror, outputs);
}

void mirror_free(struct mirror *mirror) {
  free(mirror->before);
  *mirror = (struct mirror){0};
}
