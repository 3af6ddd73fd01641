/* The tile instructions that src/cpu/amx.c uses, in C, under the compilers' names: so its
 * indexing is tested on processors without AMX (Intel SDM volume 2: LDTILECFG, TILELOADD,
 * TILESTORED, TDPBF16PS). */
#ifndef FA3_TESTS_AMX_MODEL_H
#define FA3_TESTS_AMX_MODEL_H

#include <stdlib.h>
#include <string.h>

#include "half.h"

// NOLINTBEGIN(bugprone-reserved-identifier)

static _Thread_local struct {
  int configured;
  float words[8][16][16];
} tiles;

/* Only what amx.c asks for: every tile 16 rows of 64 bytes. */
static void _tile_loadconfig(const void *config) {
  const unsigned char *bytes = config;
  if (bytes[0] != 1 || bytes[1] != 0) abort();
  for (int tile = 0; tile < 8; tile++)
    if (bytes[16 + 2 * tile] != 64 || bytes[17 + 2 * tile] != 0 || bytes[48 + tile] != 16) abort();
  tiles.configured = 1;
}

static void _tile_release(void) {
  tiles.configured = 0;
}

static void _tile_zero(int tile) {
  if (!tiles.configured) abort();
  memset(tiles.words[tile], 0, sizeof tiles.words[tile]);
}

static void _tile_loadd(int tile, const void *base, size_t stride) {
  if (!tiles.configured) abort();
  for (size_t row = 0; row < 16; row++)
    memcpy(tiles.words[tile][row], (const char *)base + row * stride, 64);
}

static void _tile_stored(int tile, void *base, size_t stride) {
  if (!tiles.configured) abort();
  for (size_t row = 0; row < 16; row++)
    memcpy((char *)base + row * stride, tiles.words[tile][row], 64);
}

static void _tile_dpbf16ps(int sum, int left, int right) {
  if (!tiles.configured) abort();
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 16; column++) {
        uint16_t a[2], b[2];
        memcpy(a, &tiles.words[left][row][k], sizeof a);
        memcpy(b, &tiles.words[right][k][column], sizeof b);
        float *to = &tiles.words[sum][row][column];
        *to += float_from_bfloat(a[0]) * float_from_bfloat(b[0]);
        *to += float_from_bfloat(a[1]) * float_from_bfloat(b[1]);
      }
}

// NOLINTEND(bugprone-reserved-identifier)

#endif
