#include "fa3.h"

const char *fa3_version(void) {
  return FA3_VERSION;
}
