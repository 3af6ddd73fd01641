/* AMX-BF16 for bfloat16: tiles of 16 rows x 64 bytes; TDPBF16PS multiplies 16 rows of 16 pairs
 * with 16 pairs of 16 columns (Intel SDM volume 2, TDPBF16PS). The right operand's rows of pairs
 * are the words of a panel as they lie. */
#include "amx.h"

#ifdef FA3_TILES /* the tests run this file on a model of the instructions */
#include FA3_TILES
#else
#include <immintrin.h>
#endif

enum { TILE = AMX_TILE, PANEL = AMX_PANEL, WORD = sizeof(float) };

/* Tiles 0-3 are a 2x2 block of sums, 4 and 5 of the left operand, 6 and 7 of the right: eight of
 * 16 rows x 64 bytes (Intel SDM volume 1, "Tile configuration"). Constant, since gcc's
 * _tile_loadconfig tells the compiler of 8 of its bytes only: stores to the others may vanish. */
static const struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config __attribute__((aligned(64))) = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};

void amx_enter(void) {
  _tile_loadconfig(&tile_config);
}

void amx_leave(void) {
  _tile_release();
}

/* 32 rows x 32 columns. */
static void multiply_block(const float *left, size_t left_stride, const float *right, int64_t depth,
                           float *output, size_t output_stride, bool accumulate) {
  float *lower = output + TILE * (output_stride / WORD);
  if (accumulate) {
    _tile_loadd(0, output, output_stride);
    _tile_loadd(1, output + TILE, output_stride);
    _tile_loadd(2, lower, output_stride);
    _tile_loadd(3, lower + TILE, output_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += TILE) {
    _tile_loadd(4, left + k, left_stride);
    _tile_loadd(6, right + k * PANEL, PANEL * WORD);
    _tile_loadd(7, right + k * PANEL + TILE, PANEL * WORD);
    _tile_loadd(5, left + TILE * (left_stride / WORD) + k, left_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, output, output_stride);
  _tile_stored(1, output + TILE, output_stride);
  _tile_stored(2, lower, output_stride);
  _tile_stored(3, lower + TILE, output_stride);
}

/* Whole blocks always: the rows past p->rows and the columns past p->columns are there in the
 * scratch, and nothing reads what they give. */
void amx_multiply(const struct product *p) {
  for (int64_t column = 0; column < p->columns; column += PANEL)
    for (int64_t row = 0; row < p->rows; row += PANEL)
      multiply_block(p->left + row * p->left_stride, (size_t)p->left_stride * WORD,
                     p->right + column / PANEL * p->right_stride, p->depth,
                     p->output + row * p->output_stride + column, (size_t)p->output_stride * WORD,
                     p->accumulate);
}
