/* The compiled kernels: kernels/variants.def as a table. */
#ifndef FA3_SRC_CUDA_KERNELS_H
#define FA3_SRC_CUDA_KERNELS_H

#include <stdbool.h>

#include "fa3.h"
#include "kernels/variants.h"

enum { KERNEL_ENTRIES = 5 };

struct kernel;

/* What the host knows of a kind of kernel: KIND_kind, defined by the file that plans or launches
 * it. */
struct kernel_kind {
  fa3_phase phase;                     /* whose kernel it is; 0: one that helps others */
  const char *entries[KERNEL_ENTRIES]; /* the functions of its cubin */
  /* Dynamic shared memory of a block of the first function; null: none. */
  int32_t (*shared_bytes)(const struct kernel *kernel);
  int others_with_shared; /* functions behind the first whose blocks have as much */
  bool large_clusters;    /* these functions may have clusters of more than 8 blocks */
  /* Its blocks may be launched with more than half of a multiprocessor's shared memory, so that
   * each has one of its own. */
  bool may_be_alone;
};

struct kernel {
  const struct kernel_kind *kind;
  const char *architecture; /* "sm_90a": the level of the GPUs that it runs on */
  const void *fatbin;       /* null in a build without kernels */
#define FIELD(key) int32_t key;
  FA3_KEYS(FIELD)
#undef FIELD
};

enum { KERNELS = FA3_KERNEL_COUNT };
extern const struct kernel kernels[KERNELS];

extern const struct kernel_kind combine_kind;

/* False if this build has no kernels (it was made without nvcc). */
bool kernels_compiled(void);

/* The CUDA version that a driver needs to load them, as the driver counts: 1000 * major. A cubin
 * loads on every driver from its compiler's major version on (CUDA Compatibility, "Minor Version
 * Compatibility"). */
int32_t kernels_cuda_version(void);

/* Whether any kernel runs on GPUs of that level. */
bool kernels_for(const char *level);

/* What a block of the first function asks for, and the most that it may be launched with. */
int32_t kernel_shared_bytes(const struct kernel *kernel);
int32_t kernel_shared_limit(const struct kernel *kernel);

/* What a kernel has to take. */
struct kernel_need {
  const struct kernel_kind *kind;
  const char *architecture; /* null: any */
  fa3_dtype dtype;          /* as all that follow: 0 if its rows don't say */
  int64_t head_dim;
  int64_t value_head_dim;
  bool softcap;
  bool pages;
  bool head_scales;  /* keys and values have no scale of fewer rows than a sequence's */
  bool small_tiles;  /* exactly */
  int64_t most_keys; /* of a sequence, for a kernel that relies on it; 0: none does */
  bool transposed;   /* exactly: values come transposed */
  int32_t unpacked;  /* exactly: keys and values are unpacked codes (unpack.h) */
  bool by_head;      /* exactly: a kernel with it is no better in general */
  int64_t last_keys; /* of the last tile of keys, for a kernel that relies on it; 0: none does */
  bool diagonal;     /* exactly: a kernel with it relies on such a mask */
  int64_t heads;     /* of keys, that a block has at once: exactly; 0: one */
  int64_t warps;     /* of a block: exactly; 0: as usual */
  int64_t queries;   /* of a head, that a tile of keys meets */
  int64_t tile_q;    /* at least */
};

/* The first that does; null if there is none. */
const struct kernel *find_kernel(const struct kernel_need *need);

/* One of the same architecture, dtype and head dim for what else is needed, of the same kind unless
 * another is; null likewise. */
const struct kernel *find_like(const struct kernel *kernel, struct kernel_need need);

/* The error for head dims that no kernel takes. */
fa3_status no_kernel(int64_t head_dim, int64_t value_head_dim);

#endif
