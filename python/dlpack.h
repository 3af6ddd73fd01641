/* DLPack's C ABI as core.c uses it (dlpack.h, version 1.x: structs only grow at the end, and a
 * change of the major version is refused). */
#ifndef FA3_PYTHON_DLPACK_H
#define FA3_PYTHON_DLPACK_H

#include <stdint.h>

enum { DL_CUDA = 2, DL_CUDA_MANAGED = 13 }; /* DLDeviceType; all else that we take is the CPU's */
enum { DL_UINT = 1 };                       /* DLDataTypeCode */

struct dl_device {
  int32_t type;
  int32_t index;
};

struct dl_data_type {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct dl_tensor {
  void *data;
  struct dl_device device;
  int32_t ndim;
  struct dl_data_type dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

/* What a capsule named "dltensor" holds. */
struct dl_managed_tensor {
  struct dl_tensor tensor;
  void *manager_context;
  void (*deleter)(struct dl_managed_tensor *self);
};

struct dl_version {
  uint32_t major;
  uint32_t minor;
};

enum { DL_READ_ONLY = 1 }; /* flags */

/* What a capsule named "dltensor_versioned" holds. */
struct dl_managed_tensor_versioned {
  struct dl_version version;
  void *manager_context;
  void (*deleter)(struct dl_managed_tensor_versioned *self);
  uint64_t flags;
  struct dl_tensor tensor;
};

/* DLPackExchangeAPI: a type's functions, in a capsule named "dlpack_exchange_api". Those that
 * return an int return 0, or -1 with a Python exception set. */
struct dlpack_exchange {
  struct {
    struct dl_version version;
    void *previous;
  } header;
  int (*allocate)(struct dl_tensor *prototype, struct dl_managed_tensor_versioned **tensor,
                  void *error_context,
                  void (*set_error)(void *error_context, const char *kind, const char *message));
  int (*managed_tensor_from_py_object)(void *object, struct dl_managed_tensor_versioned **tensor);
  int (*managed_tensor_to_py_object)(struct dl_managed_tensor_versioned *tensor, void **object);
  int (*tensor_from_py_object)(void *object, struct dl_tensor *tensor);
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void **stream);
};

#endif
