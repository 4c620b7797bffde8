// Products of row blocks and panels on AMX tile registers: 32 rows and 32 columns at once.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "amx.h"
#include "gemm.h"

#if HAS_TILES
// Tiles of bf16 words with float sums, or of codes with integer sums.
template <class T> struct TilesOf {
  typedef uint32_t Value;
  typedef T Source;
  static constexpr int PER_WORD = 1;
  static constexpr int BLOCK_WORDS = 256;  // words of K; 32 rows of them fit in L1
  static constexpr int STRIDE = BLOCK_WORDS + 16;
  static constexpr int MAX_ROWS = 32;
  static constexpr int64_t AHEAD = 128;  // prefetch distance in words
  static constexpr bool SHARES_LOADING = true;
  static constexpr int panels(int) { return 1; }

  // Whether this process may use the tiles.
  static bool are_usable() {
    static const bool usable = request_tiles();
    return usable;
  }

  // Every op reconfigures the tiles, because other libraries use them, too.
  static void begin(int64_t) { configured = 0; }
  static void end() {
    if (configured) release_tiles();
  }
  static void pack(const T* x, int64_t n, Value* to) { memcpy(to, x, n * sizeof(T)); }

  static void multiply(const Part& part, int rows, int, int64_t) {
    if (rows != configured) configure(rows);
    rows > 16 ? block<true>(part) : block<false>(part);
  }

 private:
  static inline thread_local int configured;  // rows

  // Tiles 0 to 3 hold sums, rows by columns; 4 and 5 rows; 6 and 7 words of the panel.
  static void configure(int rows) {
    TileConfig config{};
    uint8_t first = std::min(rows, 16), second = rows - first;
    for (int t : {0, 1, 4}) config.set(t, first, 64);
    for (int t : {2, 3, 5}) config.set(t, second, 64);
    for (int t : {6, 7}) config.set(t, TILE_WORDS, 64);
    configure_tiles(&config);
    configured = rows;
  }

  template <bool HAS_SECOND> static void block(const Part& part) {
    constexpr int64_t PANEL_LINE = COLUMNS * 4;
    begin_sums<HAS_SECOND>(part);
    const uint32_t* x = (const uint32_t*)part.rows;
    if (part.is_streamed)
      for (bool is_last : {false, true}) {
        Stretch s = stretch(part, 0, AHEAD, is_last);
        for (int64_t w = s.begin; w < s.end; w += TILE_WORDS) {
          for (int i = 0; i < TILE_WORDS; i++)
            for (int column : {0, 16}) s.loader.prefetch(w + i, column);
          add_words<HAS_SECOND>(s.loader, x, w);
        }
      }
    else
      for (int64_t w = 0; w < part.num_words; w += TILE_WORDS) {
        Loader loader{part.panel, part.next};
        for (int i = 0; i < TILE_WORDS; i++) loader.prefetch_line(w + i);
        add_words<HAS_SECOND>(loader, x, w);
      }
    store_tile(0, part.sums, PANEL_LINE);
    store_tile(1, part.sums + 16, PANEL_LINE);
    if constexpr (HAS_SECOND) {
      store_tile(2, part.sums + 16 * COLUMNS, PANEL_LINE);
      store_tile(3, part.sums + 16 * COLUMNS + 16, PANEL_LINE);
    }
  }

  template <bool HAS_SECOND>
  static void add_words(const Loader& loader, const uint32_t* x, int64_t w) {
    constexpr int64_t PANEL_LINE = COLUMNS * 4, ROW = STRIDE * 4;
    load_tile(6, loader.words(w, 0), PANEL_LINE);
    load_tile(7, loader.words(w, 16), PANEL_LINE);
    load_tile(4, x + w, ROW);
    if constexpr (HAS_SECOND) load_tile(5, x + 16 * STRIDE + w, ROW);
    if constexpr (std::is_same_v<T, bf16>) {
      multiply_tiles(0, 4, 6);
      multiply_tiles(1, 4, 7);
      if constexpr (HAS_SECOND) {
        multiply_tiles(2, 5, 6);
        multiply_tiles(3, 5, 7);
      }
    } else {
      multiply_code_tiles(0, 4, 6);
      multiply_code_tiles(1, 4, 7);
      if constexpr (HAS_SECOND) {
        multiply_code_tiles(2, 5, 6);
        multiply_code_tiles(3, 5, 7);
      }
    }
  }

  template <bool HAS_SECOND> static void begin_sums(const Part& part) {
    constexpr int64_t PANEL_LINE = COLUMNS * 4;
    if (part.is_first) {
      zero_tile(0);
      zero_tile(1);
      if constexpr (HAS_SECOND) {
        zero_tile(2);
        zero_tile(3);
      }
      return;
    }
    load_tile(0, part.sums, PANEL_LINE);
    load_tile(1, part.sums + 16, PANEL_LINE);
    if constexpr (HAS_SECOND) {
      load_tile(2, part.sums + 16 * COLUMNS, PANEL_LINE);
      load_tile(3, part.sums + 16 * COLUMNS + 16, PANEL_LINE);
    }
  }
};
typedef TilesOf<bf16> Tiles;
#endif
