// Emulated tile instructions, as defined in Intel's manual; for tests.
#pragma once

#include <cstdlib>

#include "vec.h"

struct Tile {
  int num_rows, row_bytes;
  uint8_t bytes[16][64];
};
static thread_local Tile tile[8];

static inline bool request_tiles() { return true; }
// The CPU raises an exception for an unconfigured tile, a wrong shape, or an invalid configuration.
static inline void check(bool is_valid) {
  if (!is_valid) abort();
}

static inline void configure_tiles(const TileConfig* config) {
  check(config->palette == 1);
  for (int t = 0; t < 8; t++) {
    int rows = config->num_rows[t], bytes = config->row_bytes[t];
    check(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0));
    tile[t] = {rows, bytes, {}};
  }
}
static inline void release_tiles() {
  TileConfig none{};
  configure_tiles(&none);
}

static inline void zero_tile(int t) {
  check(tile[t].num_rows > 0);
  memset(tile[t].bytes, 0, sizeof tile[t].bytes);
}
static inline void load_tile(int t, const void* p, int64_t stride) {
  check(tile[t].num_rows > 0);
  memset(tile[t].bytes, 0, sizeof tile[t].bytes);
  for (int r = 0; r < tile[t].num_rows; r++)
    memcpy(tile[t].bytes[r], (const uint8_t*)p + r * stride, tile[t].row_bytes);
}
static inline void store_tile(int t, void* p, int64_t stride) {
  check(tile[t].num_rows > 0);
  for (int r = 0; r < tile[t].num_rows; r++)
    memcpy((uint8_t*)p + r * stride, tile[t].bytes[r], tile[t].row_bytes);
}

// Even and odd products of a tile have separate sums, from zero. Then both are added.
static inline void multiply_tiles(int c, int a, int b) {
  check(tile[c].num_rows == tile[a].num_rows && tile[b].num_rows * 4 == tile[a].row_bytes);
  check(tile[c].num_rows > 0 && tile[c].row_bytes == tile[b].row_bytes);
  for (int m = 0; m < tile[c].num_rows; m++) {
    vf even{}, odd{}, total = load((const float*)tile[c].bytes[m]);
    for (int k = 0; k < tile[b].num_rows; k++) {
      uint32_t x;
      memcpy(&x, tile[a].bytes[m] + 4 * k, 4);
      vu w = (vu)load_lanes(tile[b].bytes[k]);
      even = fma(splat(to_float(bf16{uint16_t(x)})), (vf)(w << 16), even);
      odd = fma(splat(to_float(bf16{uint16_t(x >> 16)})), (vf)(w & 0xffff0000u), odd);
    }
    store((float*)tile[c].bytes[m], total + (even + odd));
  }
}

// Multiply four signed bytes of a row by four unsigned bytes of a column; add to an integer.
static inline void multiply_code_tiles(int c, int a, int b) {
  check(tile[c].num_rows == tile[a].num_rows && tile[b].num_rows * 4 == tile[a].row_bytes);
  check(tile[c].num_rows > 0 && tile[c].row_bytes == tile[b].row_bytes);
  for (int m = 0; m < tile[c].num_rows; m++) {
    vi total = load_lanes(tile[c].bytes[m]);
    for (int k = 0; k < tile[b].num_rows; k++) {
      vu w = (vu)load_lanes(tile[b].bytes[k]);
      for (int i = 0; i < 4; i++)
        total += (vi)(w >> 8 * i & 0xff) * (int8_t)tile[a].bytes[m][4 * k + i];
    }
    memcpy(tile[c].bytes[m], &total, 64);
  }
}
