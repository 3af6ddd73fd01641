/* What the targets of file readers share. */
#ifndef FA3_FUZZ_READER_H
#define FA3_FUZZ_READER_H

#include "input_file.h"
#include "stored_tensor.h"

/* A file that holds these bytes; the next call overwrites it. */
struct input_file memory_file(const void *data, size_t size);

/* Aborts if a reader took a tensor that is not wholly inside its file, or whose shape asks for
 * something else than its size; then reads its data. */
void check_tensor(const struct input_file *file, const struct stored_tensor *tensor);

#endif
