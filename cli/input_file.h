/* A regular file that is read at offsets. */
#ifndef FA3_CLI_INPUT_FILE_H
#define FA3_CLI_INPUT_FILE_H

#include <stddef.h>
#include <stdint.h>

struct input_file {
  const char *path; /* for messages; the caller's */
  int descriptor;
  uint64_t size;
};

int input_file_open(const char *path, struct input_file *file);
/* Exactly `size` bytes from `offset`. Reading, unlike mapping, survives a file that someone cuts
 * short meanwhile. */
int input_file_read(const struct input_file *file, uint64_t offset, void *buffer, size_t size);
void input_file_close(const struct input_file *file);

#endif
