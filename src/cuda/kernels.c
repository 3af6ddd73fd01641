#include "cuda/kernels.h"

#include <inttypes.h>
#include <string.h>

#include "error.h"

#ifdef FA3_CUDA_KERNELS

#define FATBIN(name) fatbin_##name
#define DECLARE(name, ...) extern const char FATBIN(name)[];
FA3_KERNELS(DECLARE)
#undef DECLARE

bool kernels_compiled(void) {
  return true;
}

int32_t kernels_cuda_version(void) {
  return 1000 * FA3_CUDA_MAJOR;
}

#else

#define FATBIN(name) NULL

bool kernels_compiled(void) {
  return false;
}

int32_t kernels_cuda_version(void) {
  return 0;
}

#endif

#define KIND(kind) extern const struct kernel_kind kind##_kind;
FA3_KINDS(KIND)
#undef KIND

enum {
  DTYPE_fp32 = FA3_FLOAT32,
  DTYPE_fp16 = FA3_FLOAT16,
  DTYPE_bf16 = FA3_BFLOAT16,
  DTYPE_e4m3 = FA3_FLOAT8_E4M3
};

const struct kernel kernels[KERNELS] = {
#define ROW(name, kind_, architecture_, ...) \
  {.kind = &kind_##_kind, .architecture = #architecture_, .fatbin = FATBIN(name), __VA_ARGS__},
    FA3_KERNELS(ROW)
#undef ROW
};

bool kernels_for(const char *level) {
  for (int32_t k = 0; k < KERNELS; k++)
    if (!strcmp(kernels[k].architecture, level)) return true;
  return false;
}

int32_t kernel_shared_bytes(const struct kernel *kernel) {
  return kernel->kind->shared_bytes ? kernel->kind->shared_bytes(kernel) : 0;
}

int32_t kernel_shared_limit(const struct kernel *kernel) {
  const int32_t more_than_half = 116 << 10; /* of 228 KB, with the 1 KB that a block costs */
  const int32_t bytes = kernel_shared_bytes(kernel);
  return kernel->kind->may_be_alone && bytes < more_than_half ? more_than_half : bytes;
}

const struct kernel *find_kernel(const struct kernel_need *need) {
  for (int32_t k = 0; k < KERNELS; k++) {
    const struct kernel *kernel = &kernels[k];
    if (kernel->kind == need->kind &&
        (!need->architecture || !strcmp(kernel->architecture, need->architecture)) &&
        kernel->dtype == (int32_t)need->dtype && kernel->head_dim >= need->head_dim &&
        kernel->value_head_dim >= need->value_head_dim && (kernel->softcap || !need->softcap) &&
        (kernel->pages || !need->pages) && (!kernel->head_scales || need->head_scales) &&
        kernel->small_tiles == need->small_tiles && kernel->transposed == need->transposed &&
        kernel->unpacked == need->unpacked && kernel->by_head == need->by_head &&
        kernel->diagonal == need->diagonal && !kernel->last_keys == !need->last_keys &&
        kernel->last_keys >= need->last_keys && !kernel->most_keys == !need->most_keys &&
        kernel->most_keys >= need->most_keys && kernel->heads == need->heads &&
        kernel->warps == need->warps && kernel->least_queries <= need->queries &&
        kernel->tile_q >= need->tile_q)
      return kernel;
  }
  return NULL;
}

const struct kernel *find_like(const struct kernel *kernel, struct kernel_need need) {
  if (!need.kind) need.kind = kernel->kind;
  need.architecture = kernel->architecture;
  need.dtype = kernel->dtype;
  need.head_dim = kernel->head_dim;
  need.value_head_dim = kernel->value_head_dim;
  const struct kernel *other = find_kernel(&need);
  return other && other->head_dim == kernel->head_dim ? other : NULL;
}

fa3_status no_kernel(int64_t head_dim, int64_t value_head_dim) {
  return set_error(FA3_UNSUPPORTED,
                   "head dims %" PRId64 " and %" PRId64
                   " (query and key, value): no kernel takes them with this dtype",
                   head_dim, value_head_dim);
}
