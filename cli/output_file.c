#include "output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failure.h"

/* What a signal removes; one more, because a shared file is begun twice. */
enum { SLOTS = OUTPUT_FILES + 1 };
static char temporaries[SLOTS][PATH_MAX];
static volatile sig_atomic_t used[SLOTS];

static void remove_and_end(int number) {
  for (int i = 0; i < SLOTS; i++)
    if (used[i]) (void)unlink(temporaries[i]);
  (void)raise(number); /* SA_RESETHAND: the default action, after this handler */
}

/* Whether a signal's default action is to end the program, and it can be caught. */
static bool ends_the_program(int number) {
  switch (number) {
    case SIGKILL:
    case SIGSTOP:
    case SIGTSTP:
    case SIGTTIN:
    case SIGTTOU:
    case SIGCHLD:
    case SIGCONT:
    case SIGURG:
    case SIGWINCH:
    case SIGXFSZ: /* ignored here: past the file size limit write fails instead */
      return false;
    default:
      return true;
  }
}

static void handle_signals(void) {
  struct sigaction action = {.sa_flags = (int)SA_RESETHAND};
  struct sigaction before;
  static bool done;
  if (done) return;
  done = true;
  action.sa_handler = remove_and_end;
  for (int number = 1; number <= SIGRTMAX; number++) {
    /* What is ignored, as under nohup, stays ignored. */
    if (ends_the_program(number) && !sigaction(number, NULL, &before) &&
        before.sa_handler == SIG_DFL)
      (void)sigaction(number, &action, NULL);
  }
  action.sa_handler = SIG_IGN;
  (void)sigaction(SIGXFSZ, &action, NULL);
}

static int take_slot(void) {
  for (int i = 0; i < SLOTS; i++)
    if (!used[i]) return i;
  return -1;
}

/* Makes the temporary file while no signal can come in between it and its place in the table. */
static int create(struct output_file *file) {
  sigset_t all;
  sigset_t before;
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_BLOCK, &all, &before);
  file->descriptor = mkostemp(file->temporary, O_CLOEXEC);
  int error = errno;
  if (file->descriptor >= 0) {
    memcpy(temporaries[file->slot], file->temporary, sizeof file->temporary);
    used[file->slot] = 1;
  }
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  errno = error;
  return file->descriptor < 0 ? fail(EXIT_OUTPUT, "%s: %m", file->path) : 0;
}

/* The full path of a file that is not there yet. */
static int resolve_new(const char *path, char target[PATH_MAX]) {
  const char *slash = strrchr(path, '/');
  const char *base = slash ? slash + 1 : path;
  char folder[PATH_MAX] = ".";
  if (slash && (size_t)(slash - path) + 1 < sizeof folder) {
    memcpy(folder, path, (size_t)(slash - path) + 1);
    folder[slash - path + 1] = '\0';
  }
  if (!realpath(folder, target)) return fail(EXIT_OUTPUT, "%s: this output's folder: %m", path);
  size_t length = strlen(target);
  if (length + 1 + strlen(base) >= PATH_MAX)
    return fail(EXIT_OUTPUT, "%s: the name is too long", path);
  target[length] = '/';
  memcpy(target + length + 1, base, strlen(base) + 1);
  return 0;
}

/* The permissions that the file is to have: what it has, or what a new one would get. */
static int check_target(const char *path, struct output_file *file, mode_t *mode) {
  struct stat status;
  if (stat(path, &status)) {
    if (errno != ENOENT) return fail(EXIT_OUTPUT, "%s: %m", path);
    if (!lstat(path, &status)) return fail(EXIT_OUTPUT, "%s: a symbolic link to nothing", path);
    TRY(resolve_new(path, file->target));
    mode_t mask = umask(0);
    (void)umask(mask);
    *mode = 0666 & ~mask;
    return 0;
  }
  if (!S_ISREG(status.st_mode)) return fail(EXIT_OUTPUT, "%s: not a regular file", path);
  if (access(path, W_OK) || !realpath(path, file->target)) return fail(EXIT_OUTPUT, "%s: %m", path);
  *mode = status.st_mode & 0777;
  return 0;
}

int output_file_begin(const char *path, struct output_file *file) {
  mode_t mode = 0;
  memset(file, 0, sizeof *file);
  file->path = path;
  file->descriptor = -1;
  file->slot = take_slot();
  if (file->slot < 0) return fail(EXIT_FAILED, "%s: too many outputs", path);
  TRY(check_target(path, file, &mode));
  int folder = (int)(strrchr(file->target, '/') - file->target) + 1;
  int length =
      snprintf(file->temporary, sizeof file->temporary, "%.*s.fa3-XXXXXX", folder, file->target);
  if (length >= (int)sizeof file->temporary)
    return fail(EXIT_OUTPUT, "%s: the name is too long", path);
  handle_signals();
  TRY(create(file));
  if (!fchmod(file->descriptor, mode)) return 0;
  int code = fail(EXIT_OUTPUT, "%s: %m", path);
  output_file_discard(file);
  return code;
}

int output_file_reserve(const struct output_file *file, size_t size) {
  if (size == 0 || size > INT64_MAX) return 0; /* what is too large fails when it is written */
  if (!fallocate(file->descriptor, 0, 0, (off_t)size)) return 0;
  if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG) return 0; /* nothing to reserve by */
  return fail(EXIT_OUTPUT, "%s: %m (%zu bytes are needed)", file->path, size);
}

int output_file_write(const struct output_file *file, const void *data, size_t size) {
  size_t done = 0;
  while (done < size) {
    ssize_t put = write(file->descriptor, (const char *)data + done, size - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail(EXIT_OUTPUT, "%s: %m", file->path);
    done += (size_t)put;
  }
  return 0;
}

int output_file_commit(struct output_file *file) {
  int code = 0;
  const off_t written = lseek(file->descriptor, 0, SEEK_CUR); /* perhaps less than was reserved */
  if (written < 0 || ftruncate(file->descriptor, written))
    code = fail(EXIT_OUTPUT, "%s: %m", file->path);
  /* Some file systems have no fsync to offer: EINVAL. */
  if (!code && fsync(file->descriptor) && errno != EINVAL)
    code = fail(EXIT_OUTPUT, "%s: %m", file->path);
  if (!code && rename(file->temporary, file->target))
    code = fail(EXIT_OUTPUT, "%s: %m", file->path);
  if (code) {
    output_file_discard(file);
    return code;
  }
  (void)close(file->descriptor);
  used[file->slot] = 0;
  file->descriptor = -1;
  return 0;
}

void output_file_discard(struct output_file *file) {
  if (file->descriptor < 0) return;
  (void)unlink(file->temporary);
  (void)close(file->descriptor);
  used[file->slot] = 0;
  file->descriptor = -1;
}
