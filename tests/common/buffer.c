#include "buffer.h"

#include "test.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const unsigned char pattern = 0xa5;

static struct buffer map_pages(size_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  struct buffer buffer = {.size = size};
  buffer.map_size = (size + page - 1) / page * page + 2 * page;
  buffer.map =
      mmap(NULL, buffer.map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(buffer.map != MAP_FAILED);
  if (buffer.map_size == 2 * page) return buffer;
  assert_int_equal(mprotect(buffer.map + page, buffer.map_size - 2 * page, PROT_READ | PROT_WRITE),
                   0);
  memset(buffer.map + page, pattern, buffer.map_size - 2 * page);
  return buffer;
}

struct buffer buffer_at_end(size_t size) {
  struct buffer buffer = map_pages(size);
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  buffer.data = buffer.map + buffer.map_size - page - size;
  memset(buffer.data, 0xff, size);
  return buffer;
}

struct buffer buffer_at_start(size_t size, size_t offset) {
  struct buffer buffer = map_pages(size + offset);
  buffer.size = size;
  buffer.data = buffer.map + sysconf(_SC_PAGESIZE) + offset;
  memset(buffer.data, 0xff, size);
  return buffer;
}

static void protect(const struct buffer *buffer, int access) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  if (!buffer->map || buffer->map_size == 2 * page) return;
  assert_int_equal(mprotect(buffer->map + page, buffer->map_size - 2 * page, access), 0);
}

void buffer_make_read_only(const struct buffer *buffer) {
  protect(buffer, PROT_READ);
}

void buffer_make_writable(const struct buffer *buffer) {
  protect(buffer, PROT_READ | PROT_WRITE);
}

void buffer_check(const struct buffer *buffer, const char *name) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  if (!buffer->map) return;
  for (const char *p = buffer->map + page; p < buffer->map + buffer->map_size - page; p++) {
    if (p == buffer->data) p += buffer->size;
    if (p >= buffer->map + buffer->map_size - page) break;
    if ((unsigned char)*p != pattern)
      fail_msg("%s: the byte at offset %td of %zu was overwritten", name, p - buffer->data,
               buffer->size);
  }
}

void buffer_free(struct buffer *buffer) {
  if (buffer->map) munmap(buffer->map, buffer->map_size);
  *buffer = (struct buffer){0};
}
