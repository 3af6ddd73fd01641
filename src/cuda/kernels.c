#include "cuda/kernels.h"

#include <inttypes.h>

#include "error.h"
#include "kernels/backward_params.h"
#include "kernels/forward_params.h"

#ifdef FA3_CUDA_KERNELS

#define FA3_FORWARD(dtype, head_dim, value_head_dim, softcap, ...) \
  extern const char cubin_forward_##dtype##_##head_dim##_##value_head_dim##_##softcap[];
#define FA3_BACKWARD(dtype, head_dim, value_head_dim, softcap, ...) \
  extern const char cubin_backward_##dtype##_##head_dim##_##value_head_dim##_##softcap[];
#define FA3_BACKWARD_WIDE FA3_BACKWARD
#define FA3_HELPER(name) extern const char cubin_##name[];
#define FA3_HELPER_OF(dtype, name) extern const char cubin_##name##_##dtype[];
#include "kernels/variants.def"
#define CUBIN(name) cubin_##name

bool kernels_compiled(void) {
  return true;
}

int32_t kernels_cuda_version(void) {
  return 1000 * FA3_CUDA_MAJOR;
}

#else

#define CUBIN(name) NULL

bool kernels_compiled(void) {
  return false;
}

int32_t kernels_cuda_version(void) {
  return 0;
}

#endif

const void *const strided_cubin = CUBIN(strided);
const void *const backward_prepare_cubins[2] = {CUBIN(backward_prepare_fp16),
                                                CUBIN(backward_prepare_bf16)};

#define DTYPE_fp16 FA3_FLOAT16
#define DTYPE_bf16 FA3_BFLOAT16

const struct forward_kernel forward_kernels[FORWARD_KERNELS] = {
#define FA3_FORWARD(dtype_, head_dim_, value_head_dim_, softcap_, warpgroups_, tile_k_, stages, \
                    query_stages)                                                               \
  {.name = "sm_90a_" #warpgroups_ "x64x" #tile_k_, /* query rows x keys of a tile */            \
   .cubin = CUBIN(forward_##dtype_##_##head_dim_##_##value_head_dim_##_##softcap_),             \
   .dtype = DTYPE_##dtype_,                                                                     \
   .head_dim = (head_dim_),                                                                     \
   .value_head_dim = (value_head_dim_),                                                         \
   .softcap = (softcap_),                                                                       \
   .warpgroups = (warpgroups_),                                                                 \
   .tile_k = (tile_k_),                                                                         \
   .threads = FA3_FORWARD_THREADS(warpgroups_),                                                 \
   .chunk = FA3_FORWARD_CHUNK(head_dim_, value_head_dim_),                                      \
   .shared_bytes = FA3_FORWARD_SHARED_BYTES(head_dim_, value_head_dim_, warpgroups_, tile_k_,   \
                                            stages, query_stages)},
#include "kernels/variants.def"
};

#define BACKWARD(dtype_, head_dim_, value_head_dim_, softcap_, tile_q_, tile_k_, least_queries_, \
                 threads_, cluster_, shared_bytes_)                                              \
  {.name = "sm_90a_" #tile_q_ "x" #tile_k_,                                                      \
   .cubin = CUBIN(backward_##dtype_##_##head_dim_##_##value_head_dim_##_##softcap_),             \
   .dtype = DTYPE_##dtype_,                                                                      \
   .head_dim = (head_dim_),                                                                      \
   .value_head_dim = (value_head_dim_),                                                          \
   .softcap = (softcap_),                                                                        \
   .tile_q = (tile_q_),                                                                          \
   .tile_k = (tile_k_),                                                                          \
   .least_queries = (least_queries_),                                                            \
   .threads = (threads_),                                                                        \
   .cluster = (cluster_),                                                                        \
   .chunk = FA3_BACKWARD_CHUNK(head_dim_, value_head_dim_),                                      \
   .shared_bytes = (shared_bytes_)},

const struct backward_kernel backward_kernels[BACKWARD_KERNELS] = {
#define FA3_BACKWARD(dtype, head_dim, value_head_dim, softcap, tile_m, tile_n, stages, \
                     least_queries)                                                    \
  BACKWARD(dtype, head_dim, value_head_dim, softcap, tile_m, tile_n, least_queries,    \
           FA3_BACKWARD_THREADS, 1,                                                    \
           FA3_BACKWARD_SHARED_BYTES(head_dim, value_head_dim, tile_m, tile_n, stages))
#define FA3_BACKWARD_WIDE(dtype, head_dim, value_head_dim, softcap, grad_stages, ds_stages)    \
  BACKWARD(dtype, head_dim, value_head_dim, softcap, 64, 128, 0, FA3_BACKWARD_WIDE_THREADS, 2, \
           FA3_BACKWARD_WIDE_SHARED_BYTES(head_dim, value_head_dim, grad_stages, ds_stages))
#include "kernels/variants.def"
};

static fa3_status no_kernel(int64_t head_dim, int64_t value_head_dim) {
  return set_error(FA3_UNSUPPORTED,
                   "head dims %" PRId64 " and %" PRId64
                   " (query and key, value): no kernel takes them with this dtype",
                   head_dim, value_head_dim);
}

fa3_status find_forward_kernel(fa3_dtype dtype, int64_t head_dim, int64_t value_head_dim,
                               bool softcap, int32_t *kernel) {
  for (int32_t k = 0; k < FORWARD_KERNELS; k++) {
    const struct forward_kernel *candidate = &forward_kernels[k];
    if (candidate->dtype == dtype && candidate->head_dim >= head_dim &&
        candidate->value_head_dim >= value_head_dim && (candidate->softcap || !softcap)) {
      *kernel = k;
      return FA3_OK;
    }
  }
  return no_kernel(head_dim, value_head_dim);
}

fa3_status find_backward_kernel(fa3_dtype dtype, int64_t head_dim, int64_t value_head_dim,
                                bool softcap, int64_t queries, int32_t *kernel) {
  for (int32_t k = 0; k < BACKWARD_KERNELS; k++) {
    const struct backward_kernel *candidate = &backward_kernels[k];
    if (candidate->dtype == dtype && candidate->head_dim >= head_dim &&
        candidate->value_head_dim >= value_head_dim && (candidate->softcap || !softcap) &&
        candidate->least_queries <= queries) {
      *kernel = k;
      return FA3_OK;
    }
  }
  return no_kernel(head_dim, value_head_dim);
}
