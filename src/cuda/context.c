#include "cuda/context.h"

#include "error.h"

/* A stream that is a context's own belongs to whatever context is current. */
static bool is_default(CUstream stream) {
  return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* The context to run in: the stream's; for a default stream the current one if it is on the device,
 * else the device's primary context. */
static fa3_status find_context(const struct cuda_device *device, CUstream stream, CUcontext current,
                               CUcontext *context) {
  const struct cuda_driver *driver = device->driver;
  if (!is_default(stream)) {
    TRY_CUDA(driver, cuStreamGetCtx, stream, context);
    return FA3_OK;
  }
  *context = device->primary;
  if (!current || current == device->primary) return FA3_OK;
  CUdevice current_device;
  TRY_CUDA(driver, cuCtxGetDevice, &current_device);
  if (current_device == device->device) *context = current;
  return FA3_OK;
}

static fa3_status check_owner(const struct cuda_scope *scope) {
  const struct cuda_driver *driver = scope->device->driver;
  CUdevice owner;
  CUcontext popped;
  if (!scope->current) TRY_CUDA(driver, cuCtxPushCurrent, scope->context);
  const CUresult result = driver->cuCtxGetDevice(&owner);
  if (!scope->current) driver->cuCtxPopCurrent(&popped);
  if (result) return cuda_error(driver, "cuCtxGetDevice", result);
  if (owner == scope->device->device) return FA3_OK;
  return set_error(FA3_INVALID_STREAM, "stream is %p, of GPU %d: expected one of device.index %d",
                   (void *)scope->stream, owner, scope->device->device);
}

fa3_status cuda_scope_find(const struct cuda_device *device, void *stream,
                           struct cuda_scope *scope) {
  const struct cuda_driver *driver = device->driver;
  CUcontext current;
  *scope = (struct cuda_scope){
      .device = device, .stream = stream, .multiprocessors = device->multiprocessors};
  TRY_CUDA(driver, cuCtxGetCurrent, &current);
  TRY(find_context(device, stream, current, &scope->context));
  scope->current = scope->context == current;
  scope->primary = scope->context == device->primary;
  if (scope->primary) return FA3_OK;
  TRY(check_owner(scope));
  struct CUdevResource resource;
  if (driver->cuCtxGetDevResource &&
      driver->cuCtxGetDevResource(scope->context, &resource, CU_DEV_RESOURCE_TYPE_SM) ==
          CUDA_SUCCESS &&
      resource.sm_count > 0)
    scope->multiprocessors = (int)resource.sm_count;
  return FA3_OK;
}

fa3_status cuda_scope_enter(struct cuda_scope *scope) {
  const struct cuda_driver *driver = scope->device->driver;
  if (!scope->current) TRY_CUDA(driver, cuCtxPushCurrent, scope->context);
  scope->capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver->cuThreadExchangeStreamCaptureMode(&scope->capture_mode);
  return FA3_OK;
}

void cuda_scope_leave(struct cuda_scope *scope) {
  const struct cuda_driver *driver = scope->device->driver;
  CUcontext popped;
  driver->cuThreadExchangeStreamCaptureMode(&scope->capture_mode);
  if (!scope->current) driver->cuCtxPopCurrent(&popped);
}

static fa3_status check_memory(const struct cuda_scope *scope, const char *name, const char *field,
                               const void *data) {
  const struct cuda_device *device = scope->device;
  if (!data) return FA3_OK;
  int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  unsigned type = 0;
  int ordinal = 0;
  void *values[] = {&type, &ordinal};
  TRY_CUDA(device->driver, cuPointerGetAttributes, 2, attributes, values, (CUdeviceptr)data);
  if (type == 0) {
    /* A capture may use memory that only its graph will allocate. */
    int capturing = 0;
    TRY_CUDA(device->driver, cuStreamIsCapturing, scope->stream, &capturing);
    if (capturing) return FA3_OK;
    return set_error(FA3_INVALID_POINTER,
                     "%s%s is %p, which is no memory of a GPU: expected GPU %d's", name, field,
                     data, device->device);
  }
  if (type != CU_MEMORYTYPE_HOST && ordinal != device->device)
    return set_error(FA3_INVALID_POINTER, "%s%s is %p, on GPU %d: expected memory of GPU %d", name,
                     field, data, ordinal, device->device);
  return FA3_OK;
}

fa3_status cuda_check_memory(const struct cuda_scope *scope, const struct problem *problem,
                             const void *workspace) {
  for (int t = 0; t < TENSORS; t++) {
    const struct tensor_data tensor = problem_tensor(problem, (enum tensor)t);
    if (!tensor.empty) TRY(check_memory(scope, tensor.name, ".data", tensor.data));
  }
  return check_memory(scope, "workspace", "", workspace);
}
