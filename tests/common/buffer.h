/* Memory that notices stray accesses: a page without access on either side, and a known pattern
 * in what is left of the pages between. */
#ifndef FA3_TESTS_BUFFER_H
#define FA3_TESTS_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

struct buffer {
  char *data;
  size_t size;
  char *map;
  size_t map_size;
};

/* Filled with 0xff, which is NaN in every floating dtype. The data ends at the page without
 * access, or begins `offset` bytes behind the one before it. */
struct buffer buffer_at_end(size_t size);
struct buffer buffer_at_start(size_t size, size_t offset);

/* Any write from now on is fatal, until it is writable again. */
void buffer_make_read_only(const struct buffer *buffer);
void buffer_make_writable(const struct buffer *buffer);

/* Fails the test, naming `name`, if a byte around the data has changed. */
void buffer_check(const struct buffer *buffer, const char *name);

/* Does nothing for a cleared buffer. */
void buffer_free(struct buffer *buffer);

#endif
