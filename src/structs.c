#include "structs.h"

#include <string.h>

#include "error.h"

/* Far above any version's size. A larger one was never set, and must not send us reading. */
static const size_t largest_size = 1 << 16;

static fa3_status read_size(const char *name, const void *theirs, size_t oldest, size_t *size) {
  if (!theirs) return set_error(FA3_INVALID_STRUCT, "%s is null", name);
  memcpy(size, theirs, sizeof *size);
  if (*size < oldest)
    return set_error(FA3_INVALID_STRUCT, "%s.struct_size is %zu: expected at least %zu", name,
                     *size, oldest);
  if (*size > largest_size)
    return set_error(FA3_INVALID_STRUCT, "%s.struct_size is %zu: expected at most %zu", name, *size,
                     largest_size);
  return FA3_OK;
}

fa3_status struct_read(const char *name, const void *theirs, void *ours, size_t oldest,
                       size_t known) {
  size_t size = 0;
  TRY(read_size(name, theirs, oldest, &size));
  const unsigned char *bytes = theirs;
  for (size_t i = known; i < size; i++)
    if (bytes[i])
      return set_error(FA3_UNSUPPORTED,
                       "%s.struct_size is %zu, and byte %zu is set: libfa3 " FA3_VERSION
                       " knows %zu bytes",
                       name, size, i, known);
  memset(ours, 0, known);
  memcpy(ours, theirs, size < known ? size : known);
  return FA3_OK;
}

fa3_status struct_write(const char *name, void *theirs, const void *ours, size_t oldest,
                        size_t known) {
  size_t size = 0;
  TRY(read_size(name, theirs, oldest, &size));
  memset(theirs, 0, size);
  memcpy(theirs, ours, size < known ? size : known);
  memcpy(theirs, &size, sizeof size);
  return FA3_OK;
}
