// What the small programs share: the check of CUDA's answers, and a tensor map of rows.
#ifndef WORKLOG_TOOLS_CUH
#define WORKLOG_TOOLS_CUH

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#define CUDA(call)                                                                               \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      exit(2);                                                                                   \
    }                                                                                            \
  } while (0)

// A tensor map: rows of `columns` numbers of 4 bytes, one below the other, of which a copy
// brings a box of box_rows by box_columns.
static inline CUtensorMap map_of_rows(uint32_t *tensor, int rows, int columns, int box_rows,
                                      int box_columns, CUtensorMapSwizzle swizzle) {
  typedef CUresult encode_function(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                   const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                   const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void *encode;
  cudaDriverEntryPointQueryResult found;
  CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                        &found));
  const cuuint64_t extents[4] = {(cuuint64_t)columns, (cuuint64_t)rows, 1, 1};
  const cuuint64_t row_bytes = columns * 4, all_bytes = row_bytes * rows;
  const cuuint64_t strides[3] = {row_bytes, all_bytes, all_bytes};
  const cuuint32_t box[4] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1, 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  CUtensorMap map;
  if (((encode_function *)encode)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, tensor, extents, strides,
                                  box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    fprintf(stderr, "no tensor map\n");
    exit(2);
  }
  return map;
}

// An array of the host and its copy on the device.
template <typename T>
struct array {
  std::vector<T> host;
  T *device;
};

template <typename T>
static array<T> make_array(size_t count) {
  array<T> a = {std::vector<T>(count), NULL};
  CUDA(cudaMalloc(&a.device, count * sizeof(T)));
  return a;
}

template <typename T>
static void to_device(array<T> &a) {
  CUDA(cudaMemcpy(a.device, a.host.data(), a.host.size() * sizeof(T), cudaMemcpyHostToDevice));
}

template <typename T>
static void to_host(array<T> &a) {
  CUDA(cudaMemcpy(a.host.data(), a.device, a.host.size() * sizeof(T), cudaMemcpyDeviceToHost));
}

// Says what was wrong, and ends the program.
static inline void expect(bool right, const char *what) {
  if (right) return;
  fprintf(stderr, "WRONG: %s\n", what);
  exit(1);
}

#endif
