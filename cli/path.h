/* File names' endings, which say what a file is. */
#ifndef FA3_CLI_PATH_H
#define FA3_CLI_PATH_H

#include <stdbool.h>
#include <string.h>

static inline bool path_has_suffix(const char *path, const char *suffix) {
  size_t length = strlen(path);
  size_t wanted = strlen(suffix);
  return length > wanted && strcmp(path + length - wanted, suffix) == 0;
}

#endif
