// Products of rows and decoded codes on AMX tile registers: up to 32 rows at once.
#pragma once

#include <initializer_list>

#include "amx.h"
#include "gemm_integers.h"

#if HAS_TILES
struct IntegerTiles {
  static constexpr int MAX_ROWS = 32;

  static void begin() { configured = {}; }
  static void end() {
    if (configured.rows) release_tiles();
  }
  // The words of `part` are bytes.
  static void multiply(const IntegerPart& part, int rows) {
    int depth = 16;
    while (part.quads % depth) depth -= 2;
    configure(rows, depth);
    rows > 16 ? block<true>(part, rows, depth) : block<false>(part, rows, depth);
  }

 private:
  static constexpr int64_t LINE_BYTES = COLUMNS * 4;
  struct Configured {
    int rows, depth;  // rows of a block, quads per tile
  };
  static inline thread_local Configured configured;

  // Tiles 0 to 3 hold sums, rows by columns; 4 and 5 rows; 6 and 7 words.
  static void configure(int rows, int depth) {
    if (rows == configured.rows && depth == configured.depth) return;
    TileConfig config{};
    int first = std::min(rows, 16), second = rows - first;
    for (int t : {0, 1}) config.set(t, first, 64);
    for (int t : {2, 3}) config.set(t, second, 64);
    config.set(4, first, depth * QUAD);
    config.set(5, second, depth * QUAD);
    for (int t : {6, 7}) config.set(t, depth, 64);
    configure_tiles(&config);
    configured = {rows, depth};
  }

  template <bool HAS_SECOND> static void block(const IntegerPart& part, int rows, int depth) {
    alignas(64) int32_t sums[MAX_ROWS * COLUMNS];
    const int64_t stride = part.quads * QUAD;
    memset(part.totals, 0, rows * COLUMNS * sizeof(float));
    GroupPlace at(part);
    for (int64_t g = 0; g < part.num_groups; g++, at.next(part)) {
      IntegerVectors::prefetch(part, g);
      const int8_t* x = part.codes + g * part.codes_bytes;
      const char* words = at.codes;
      zero_tile(0);
      zero_tile(1);
      if constexpr (HAS_SECOND) {
        zero_tile(2);
        zero_tile(3);
      }
      asm volatile("" ::: "memory");  // a tile load reads memory, which GCC does not know
      for (int64_t q = 0; q < part.quads; q += depth) {
        load_tile(6, words, LINE_BYTES);
        load_tile(7, words + 64, LINE_BYTES);
        load_tile(4, x, stride);
        multiply_code_tiles(0, 4, 6);
        multiply_code_tiles(1, 4, 7);
        if constexpr (HAS_SECOND) {
          load_tile(5, x + 16 * stride, stride);
          multiply_code_tiles(2, 5, 6);
          multiply_code_tiles(3, 5, 7);
        }
        x += depth * QUAD;
        words += depth * LINE_BYTES;
      }
      store_tile(0, sums, LINE_BYTES);
      store_tile(1, sums + 16, LINE_BYTES);
      if constexpr (HAS_SECOND) {
        store_tile(2, sums + 16 * COLUMNS, LINE_BYTES);
        store_tile(3, sums + 16 * COLUMNS + 16, LINE_BYTES);
      }
      fold(part, at, rows, g, sums);
    }
  }
  static void fold(const IntegerPart& part, const GroupPlace& at, int rows, int64_t g,
                   const int32_t* sums) {
    for (int column = 0; column < COLUMNS; column += WORDS) {
      BorderNumbers x = numbers_of(part, at, column);
      for (int r = 0; r < rows; r++) {
        const RowGroup& row = part.row(r, g);
        ri sum = (ri)load_words(sums + r * COLUMNS + column) + broadcast_integer(row.start);
        float* total = part.totals + r * COLUMNS + column;
        store_words(total, (rw)add_group_sum(part, row, x, sum, (rf)load_words(total)));
      }
    }
  }
};
#endif
