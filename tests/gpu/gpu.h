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

/* The driver's functions by their names, at the versions that CUDA 12.0 and 12.4 gave them. */
struct gpu_driver {
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int *);
  int (*cuDevicePrimaryCtxRetain)(gpu_context *, int);
  int (*cuCtxCreate)(gpu_context *, unsigned, int);
  int (*cuCtxDestroy)(gpu_context);
  int (*cuCtxSetCurrent)(gpu_context);
  int (*cuCtxGetCurrent)(gpu_context *);
  int (*cuCtxSynchronize)(void);
  int (*cuMemAlloc)(gpu_pointer *, size_t);
  int (*cuMemFree)(gpu_pointer);
  int (*cuMemAllocHost)(void **, size_t);
  int (*cuMemFreeHost)(void *);
  int (*cuMemcpyHtoDAsync)(gpu_pointer, const void *, size_t, gpu_stream);
  int (*cuMemcpyDtoHAsync)(void *, gpu_pointer, size_t, gpu_stream);
  int (*cuMemcpyDtoDAsync)(gpu_pointer, gpu_pointer, size_t, gpu_stream);
  int (*cuMemsetD8Async)(gpu_pointer, unsigned char, size_t, gpu_stream);
  int (*cuStreamCreate)(gpu_stream *, unsigned);
  int (*cuStreamDestroy)(gpu_stream);
  int (*cuStreamSynchronize)(gpu_stream);
  int (*cuStreamBeginCapture)(gpu_stream, int);
  int (*cuStreamEndCapture)(gpu_stream, gpu_graph *);
  int (*cuGraphInstantiateWithFlags)(gpu_graph_exec *, gpu_graph, unsigned long long);
  int (*cuGraphLaunch)(gpu_graph_exec, gpu_stream);
  int (*cuGraphDestroy)(gpu_graph);
  int (*cuGraphExecDestroy)(gpu_graph_exec);
  /* Green contexts; null before CUDA 12.5. */
  int (*cuDeviceGetDevResource)(int, void *, int);
  int (*cuDevSmResourceSplitByCount)(void *, unsigned *, const void *, void *, unsigned, unsigned);
  int (*cuDevResourceGenerateDesc)(void **, void *, unsigned);
  int (*cuGreenCtxCreate)(void **, void *, int, unsigned);
  int (*cuGreenCtxStreamCreate)(gpu_stream *, void *, unsigned, int);
  int (*cuGreenCtxDestroy)(void *);
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
