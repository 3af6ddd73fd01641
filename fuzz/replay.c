/* Without libFuzzer: runs the target on every file of the folders that are named. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "target.h"

static void run_file(const char *folder, const char *name) {
  static uint8_t bytes[1 << 20];
  char path[4096];
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "rb");
  size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
  if (!file || ferror(file) || fclose(file)) {
    perror(path);
    exit(1);
  }
  LLVMFuzzerTestOneInput(bytes, size);
}

int main(int argc, char **argv) {
  int count = 0;
  for (int i = 1; i < argc; i++) {
    struct dirent **entries;
    int found = scandir(argv[i], &entries, NULL, alphasort);
    for (int j = 0; j < found; j++) {
      if (entries[j]->d_name[0] != '.') {
        run_file(argv[i], entries[j]->d_name);
        count++;
      }
      free(entries[j]);
    }
    if (found >= 0) free(entries);
  }
  printf("%d inputs\n", count);
  return count ? 0 : 1;
}
