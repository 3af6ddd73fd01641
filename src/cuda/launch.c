#include "cuda/launch.h"

#include "error.h"

fa3_status launch_kernel(const struct cuda_scope *scope, const struct kernel *kernel, int entry,
                         const struct grid *grid, void *params) {
  const int shared_bytes = grid->shared_bytes                         ? (int)grid->shared_bytes
                           : entry > kernel->kind->others_with_shared ? 0
                           : grid->alone                              ? kernel_shared_limit(kernel)
                                                                      : kernel_shared_bytes(kernel);
  struct CUlaunchAttribute attributes[2];
  unsigned count = 0;
  if (grid->dependent && scope->device->dependent)
    attributes[count++] = (struct CUlaunchAttribute){
        .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value = {1}};
  if (grid->cluster)
    attributes[count++] = (struct CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                                     .value = {(int32_t)grid->cluster, 1, 1}};
  struct CUlaunchConfig config = {.grid_x = grid->x,
                                  .grid_y = grid->y,
                                  .grid_z = grid->z,
                                  .block_x = grid->threads,
                                  .block_y = 1,
                                  .block_z = 1,
                                  .shared_bytes = (unsigned)shared_bytes,
                                  .stream = scope->stream,
                                  .attributes = attributes,
                                  .attribute_count = count};
  void *parameters[] = {params};
  TRY_CUDA(scope->device->driver, cuLaunchKernelEx, &config,
           scope->device->entries[kernel - kernels][entry], parameters, NULL);
  return FA3_OK;
}
