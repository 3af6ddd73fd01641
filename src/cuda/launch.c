#include "cuda/launch.h"

#include "error.h"

fa3_status launch_kernel(const struct cuda_scope *scope, const struct kernel *kernel, int entry,
                         const struct grid *grid, void *params) {
  const int shared_bytes = entry == 0 ? kernel_shared_bytes(kernel) : 0;
  struct CUlaunchAttribute dependent = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                        .value = 1};
  struct CUlaunchConfig config = {.grid_x = grid->x,
                                  .grid_y = grid->y,
                                  .grid_z = grid->z,
                                  .block_x = grid->threads,
                                  .block_y = 1,
                                  .block_z = 1,
                                  .shared_bytes = (unsigned)shared_bytes,
                                  .stream = scope->stream,
                                  .attributes = &dependent,
                                  .attribute_count = grid->dependent ? 1 : 0};
  void *parameters[] = {params};
  TRY_CUDA(scope->device->driver, cuLaunchKernelEx, &config,
           scope->device->entries[kernel - kernels][entry], parameters, NULL);
  return FA3_OK;
}
