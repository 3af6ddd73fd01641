#include "cuda/launch.h"

#include "error.h"

fa3_status launch_kernel(const struct launch *launch, CUkernel kernel, const struct grid *grid,
                         void *params) {
  struct CUlaunchConfig config = {.grid_x = grid->x,
                                  .grid_y = grid->y,
                                  .grid_z = 1,
                                  .block_x = grid->threads,
                                  .block_y = 1,
                                  .block_z = 1,
                                  .shared_bytes = grid->shared_bytes,
                                  .stream = launch->scope->stream};
  void *parameters[] = {params};
  TRY_CUDA(launch->device->driver, cuLaunchKernelEx, &config, kernel, parameters, NULL);
  return FA3_OK;
}
