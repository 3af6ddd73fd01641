/* A GPU for tests: the part of the CUDA driver API that a caller of libfa3 would use. */
#ifndef FA3_TESTS_GPU_H
#define FA3_TESTS_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t gpu_pointer;
typedef struct CUstream_st *gpu_stream;
typedef struct CUctx_st *gpu_context;
typedef struct CUgraph_st *gpu_graph;
typedef struct CUgraphExec_st *gpu_graph_exec;
typedef struct CUevent_st *gpu_event;

/* The driver's functions, each with the CUDA version that gave it these parameters. Those for green
 * contexts, from 12.4 on, may be null. */
#define GPU_FUNCTIONS(FUNCTION)                                                                    \
  FUNCTION(cuInit, 12000, unsigned)                                                                \
  FUNCTION(cuDeviceGetCount, 12000, int *)                                                         \
  FUNCTION(cuDevicePrimaryCtxRetain, 12000, gpu_context *, int)                                    \
  FUNCTION(cuCtxCreate, 4000, gpu_context *, unsigned, int)                                        \
  FUNCTION(cuCtxDestroy, 12000, gpu_context)                                                       \
  FUNCTION(cuCtxSetCurrent, 12000, gpu_context)                                                    \
  FUNCTION(cuCtxGetCurrent, 12000, gpu_context *)                                                  \
  FUNCTION(cuCtxSynchronize, 12000, void)                                                          \
  FUNCTION(cuMemAlloc, 12000, gpu_pointer *, size_t)                                               \
  FUNCTION(cuMemFree, 12000, gpu_pointer)                                                          \
  FUNCTION(cuMemAllocHost, 12000, void **, size_t)                                                 \
  FUNCTION(cuMemFreeHost, 12000, void *)                                                           \
  FUNCTION(cuMemcpyHtoDAsync, 12000, gpu_pointer, const void *, size_t, gpu_stream)                \
  FUNCTION(cuMemcpyDtoHAsync, 12000, void *, gpu_pointer, size_t, gpu_stream)                      \
  FUNCTION(cuMemcpyDtoDAsync, 12000, gpu_pointer, gpu_pointer, size_t, gpu_stream)                 \
  FUNCTION(cuMemsetD8Async, 12000, gpu_pointer, unsigned char, size_t, gpu_stream)                 \
  FUNCTION(cuStreamCreate, 12000, gpu_stream *, unsigned)                                          \
  FUNCTION(cuStreamDestroy, 12000, gpu_stream)                                                     \
  FUNCTION(cuStreamSynchronize, 12000, gpu_stream)                                                 \
  FUNCTION(cuStreamBeginCapture, 12000, gpu_stream, int)                                           \
  FUNCTION(cuStreamEndCapture, 12000, gpu_stream, gpu_graph *)                                     \
  FUNCTION(cuGraphInstantiateWithFlags, 12000, gpu_graph_exec *, gpu_graph, unsigned long long)    \
  FUNCTION(cuGraphGetNodes, 12000, gpu_graph, void **, size_t *)                                   \
  FUNCTION(cuGraphLaunch, 12000, gpu_graph_exec, gpu_stream)                                       \
  FUNCTION(cuGraphDestroy, 12000, gpu_graph)                                                       \
  FUNCTION(cuGraphExecDestroy, 12000, gpu_graph_exec)                                              \
  FUNCTION(cuDeviceGetDevResource, 12040, int, void *, int)                                        \
  FUNCTION(cuDevSmResourceSplitByCount, 12040, void *, unsigned *, const void *, void *, unsigned, \
           unsigned)                                                                               \
  FUNCTION(cuDevResourceGenerateDesc, 12040, void **, void *, unsigned)                            \
  FUNCTION(cuGreenCtxCreate, 12040, void **, void *, int, unsigned)                                \
  FUNCTION(cuGreenCtxStreamCreate, 12050, gpu_stream *, void *, unsigned, int)                     \
  FUNCTION(cuGreenCtxDestroy, 12040, void *)

struct gpu_driver {
#define FUNCTION(name, version, ...) int (*name)(__VA_ARGS__);
  GPU_FUNCTIONS(FUNCTION)
#undef FUNCTION
};

extern struct gpu_driver gpu;

/* Fails the test if a function of the driver does. */
#define GPU(function, ...) gpu_check(#function, gpu.function(__VA_ARGS__))
void gpu_check(const char *call, int result);

/* Finds the driver and makes the first GPU's primary context current; false without a GPU that
 * libfa3 can use, or a build without kernels, and then says why. */
bool gpu_open(void);
/* The same without a call of libfa3. */
bool gpu_open_unprepared(void);
gpu_context gpu_primary(void);

/* How many trials a test makes: FA3_GPU_TRIALS, or what it makes without. */
int gpu_trials(int otherwise);

/* Memory taken in one piece, given out in parts, and all given back at once. */
struct gpu_arena {
  gpu_pointer base;
  size_t size;
  size_t used;
};
struct gpu_arena gpu_arena_new(size_t size);
void gpu_arena_free(struct gpu_arena *arena);
/* At a multiple of 4096. */
gpu_pointer gpu_arena_take(struct gpu_arena *arena, size_t size);

#endif
