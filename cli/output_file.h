/* A file that appears under its name only when it is complete: it is written beside it, under a
 * name of its own that is removed on failure and when a signal, but SIGKILL, ends the program. */
#ifndef FA3_CLI_OUTPUT_FILE_H
#define FA3_CLI_OUTPUT_FILE_H

#include <limits.h>
#include <stddef.h>

enum { OUTPUT_FILES = 6 }; /* at the same time */

struct output_file {
  const char *path; /* for messages; the caller's */
  char target[PATH_MAX];
  char temporary[PATH_MAX];
  int descriptor;
  int slot; /* in the table of names that a signal removes */
};

/* Fails where nothing could be written, so that no time is spent in vain. */
int output_file_begin(const char *path, struct output_file *file);
/* Takes the space that so many bytes need, where the file system can, and fails if there is none.
 */
int output_file_reserve(const struct output_file *file, size_t size);
int output_file_write(const struct output_file *file, const void *data, size_t size);
/* Gives it its name; on failure it is discarded. */
int output_file_commit(struct output_file *file);
void output_file_discard(struct output_file *file);

#endif
