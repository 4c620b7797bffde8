// The product of words on AMX tiles: 16 words of 16 rows by 16 columns per instruction.
//
// Tiles always have 16 rows. Rows of `a` beyond n are read, and their sums are dropped. Results are
// therefore batch-invariant.
#pragma once

#include "amx.h"
#include "words.h"

#if HAS_TILES
constexpr int TILE_ROWS = 16;

static inline bool are_tiles_usable() {
  static const bool usable = request_tiles();
  return usable;
}

// Configures a thread's tiles as 16 rows of 64 bytes during its lifetime.
struct TileUse {
  const bool is_on;

  explicit TileUse(bool is_on) : is_on(is_on) {
    if (!is_on) return;
    TileConfig config{};
    for (int t = 0; t < 8; t++) config.set(t, TILE_ROWS, 64);
    configure_tiles(&config);
  }
  TileUse(const TileUse&) = delete;
  ~TileUse() {
    if (is_on) release_tiles();
  }
};

// Multiply 16 or 32 rows and columns. Tiles 0 to 3 hold sums, rows by columns; 4 and 5 rows; 6 and
// 7 columns.
template <bool HAS_ROWS, bool HAS_COLUMNS>
static void multiply_square(Matrix a, Matrix b, Sums c, int64_t units, bool adds) {
  int64_t a_bytes = a.stride * 4, b_bytes = b.stride * 4, c_bytes = c.stride * 4;
  if (adds) {
    load_tile(0, c.at, c_bytes);
    if constexpr (HAS_COLUMNS) load_tile(1, c.from(0, 16).at, c_bytes);
    if constexpr (HAS_ROWS) load_tile(2, c.from(16, 0).at, c_bytes);
    if constexpr (HAS_ROWS && HAS_COLUMNS) load_tile(3, c.from(16, 16).at, c_bytes);
  } else {
    zero_tile(0);
    if constexpr (HAS_COLUMNS) zero_tile(1);
    if constexpr (HAS_ROWS) zero_tile(2);
    if constexpr (HAS_ROWS && HAS_COLUMNS) zero_tile(3);
  }
  for (int64_t u = 0; u < units; u += 16) {
    load_tile(4, a.from(0, u).at, a_bytes);
    load_tile(6, b.from(u, 0).at, b_bytes);
    multiply_tiles(0, 4, 6);
    if constexpr (HAS_COLUMNS) {
      load_tile(7, b.from(u, 16).at, b_bytes);
      multiply_tiles(1, 4, 7);
    }
    if constexpr (HAS_ROWS) {
      load_tile(5, a.from(16, u).at, a_bytes);
      multiply_tiles(2, 5, 6);
      if constexpr (HAS_COLUMNS) multiply_tiles(3, 5, 7);
    }
  }
  store_tile(0, c.at, c_bytes);
  if constexpr (HAS_COLUMNS) store_tile(1, c.from(0, 16).at, c_bytes);
  if constexpr (HAS_ROWS) store_tile(2, c.from(16, 0).at, c_bytes);
  if constexpr (HAS_ROWS && HAS_COLUMNS) store_tile(3, c.from(16, 16).at, c_bytes);
}

// Multiply n <= 32 rows, for 16 or 32 columns. Sums of rows that do not fill a tile pass through a
// copy.
template <bool HAS_COLUMNS>
static void multiply_rows(Matrix a, Matrix b, Sums c, int n, int64_t units, bool adds) {
  if (n == 2 * TILE_ROWS) return multiply_square<true, HAS_COLUMNS>(a, b, c, units, adds);
  if (n > TILE_ROWS) {
    multiply_rows<HAS_COLUMNS>(a, b, c, TILE_ROWS, units, adds);
    a = a.from(TILE_ROWS, 0);
    c = c.from(TILE_ROWS, 0);
    n -= TILE_ROWS;
  }
  if (n == TILE_ROWS) return multiply_square<false, HAS_COLUMNS>(a, b, c, units, adds);
  constexpr int64_t WIDTH = HAS_COLUMNS ? 32 : 16;
  alignas(64) float copy[TILE_ROWS * WIDTH];
  if (adds)
    for (int i = 0; i < n; i++) memcpy(copy + i * WIDTH, c.from(i, 0).at, WIDTH * sizeof(float));
  multiply_square<false, HAS_COLUMNS>(a, b, {copy, WIDTH}, units, adds);
  for (int i = 0; i < n; i++) memcpy(c.from(i, 0).at, copy + i * WIDTH, WIDTH * sizeof(float));
}

// Compute c = a b, or c += a b, of pairs of bf16. `units` and `width` are multiples of 16.
static void multiply_on_tiles(Matrix a, Matrix b, Sums c, int n, int64_t units, int64_t width,
                              bool adds, Ahead& ahead) {
  for (int i = 0; i < n; i += 2 * TILE_ROWS) {
    int rows = std::min(n - i, 2 * TILE_ROWS);
    int64_t j = 0;
    for (; j + 32 <= width; j += 32) {
      multiply_rows<true>(a.from(i, 0), b.from(0, j), c.from(i, j), rows, units, adds);
      ahead.after(2 * rows * units);
    }
    if (j < width)
      multiply_rows<false>(a.from(i, 0), b.from(0, j), c.from(i, j), rows, units, adds);
  }
}
#else
static inline bool are_tiles_usable() { return false; }
struct TileUse {
  explicit TileUse(bool) {}
};
#endif

// Whether values of type T are multiplied on tiles.
template <class T> static inline bool uses_tiles() { return PAIRED<T> && are_tiles_usable(); }
