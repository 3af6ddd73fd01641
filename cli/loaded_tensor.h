/* A tensor read into memory. */
#ifndef FA3_CLI_LOADED_TENSOR_H
#define FA3_CLI_LOADED_TENSOR_H

#include "input_file.h"
#include "stored_tensor.h"

struct loaded_tensor {
  bool given;       /* false: there is none */
  char origin[512]; /* "q.npy" or "model.safetensors: tensor 'query'", for messages */
  void *data;       /* null if it has no elements */
  fa3_dtype dtype;
  int rank;
  int64_t shape[STORED_MAX_RANK];
};

/* How sources are read. */
struct source_rules {
  const char *container;    /* the .safetensors file that ":name" means, or null */
  bool heads_first;         /* bhsd instead of bshd */
  bool untyped_is_bfloat16; /* what to make of .npy's '<V2' */
};

/* `source` is FILE.npy, FILE.safetensors, FILE.safetensors:NAME, or :NAME in the rules' container;
 * null is that container. Without a name the first of `names` (ended by a null) that is there
 * counts. `elements` says in a message what they may be; the caller checks it.
 *
 * With `suffix`, which may be null, it is the tensor beside the one that `source` means, with its
 * name and that suffix: there need be none, and a .npy file has none. With an empty suffix it is
 * that tensor itself, if it is there. */
extern const char floating_point_elements[];
int loaded_tensor_read(const char *source, const struct source_rules *rules,
                       const char *const *names, const char *suffix, const char *elements,
                       struct loaded_tensor *tensor);

/* The second half of that: the data of a tensor whose header has been read. `tensor` has its
 * origin, and nothing else yet. */
int loaded_tensor_read_data(const struct input_file *file, const struct stored_tensor *stored,
                            const struct source_rules *rules, const char *elements,
                            struct loaded_tensor *tensor);

/* Zeros, for a tensor that has its dtype and shape; `what` it is, if they do not fit. */
int loaded_tensor_make(struct loaded_tensor *tensor, const char *what);

int64_t loaded_tensor_elements(const struct loaded_tensor *tensor);

/* As the library takes it, its axes in the file's order; of 4 dimensions at most. */
fa3_tensor loaded_tensor_view(const struct loaded_tensor *tensor);
void loaded_tensor_free(struct loaded_tensor *tensor);

#endif
