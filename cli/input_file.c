#include "input_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failure.h"

int input_file_open(const char *path, struct input_file *file) {
  struct stat status;
  /* O_NONBLOCK: opening a pipe would wait for its writer. */
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return fail(EXIT_INPUT, "%s: %m", path);
  if (fstat(descriptor, &status)) {
    int code = fail(EXIT_INPUT, "%s: %m", path);
    close(descriptor);
    return code;
  }
  if (!S_ISREG(status.st_mode)) {
    close(descriptor);
    return fail(EXIT_INPUT, "%s: not a regular file", path);
  }
  *file = (struct input_file){path, descriptor, (uint64_t)status.st_size};
  return 0;
}

int input_file_read(const struct input_file *file, uint64_t offset, void *buffer, size_t size) {
  size_t done = 0;
  while (done < size) {
    ssize_t got =
        pread(file->descriptor, (char *)buffer + done, size - done, (off_t)(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail(EXIT_INPUT, "%s: %m", file->path);
    if (got == 0)
      return fail(EXIT_INPUT, "%s: ends at byte %" PRIu64 ", expected %" PRIu64, file->path,
                  offset + done, offset + size);
    done += (size_t)got;
  }
  return 0;
}

void input_file_close(const struct input_file *file) {
  close(file->descriptor);
}
