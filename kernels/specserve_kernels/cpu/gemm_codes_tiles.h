// Products of row blocks and code blocks on AMX tile registers: up to 32 rows at once.
#pragma once

#include <initializer_list>

#include "amx.h"
#include "gemm_decode.h"

#if HAS_TILES
struct CodeTiles {
  typedef uint32_t Value;
  typedef bf16 Source;
  static constexpr int PER_PAIR = 1;
  static constexpr int STRIDE = BLOCK_PAIRS + MAX_GROUPS;
  static constexpr int MAX_ROWS = 32;

  static CodeMultiplying by_codes(int64_t bits, Meaning meaning) {
    if (meaning == BY_TABLE) return multiply_codes<4, BY_TABLE>;
    if (meaning == WITH_ZEROS)
      return bits == 4 ? multiply_codes<4, WITH_ZEROS> : multiply_codes<8, WITH_ZEROS>;
    return bits == 4 ? multiply_codes<4, CENTERED> : multiply_codes<8, CENTERED>;
  }
  static constexpr int panels(int) { return 1; }
  static void begin() { configured = {}; }
  static void end() {
    if (configured.rows) release_tiles();
  }
  static void pack(const bf16* x, int64_t n, Value* to) { memcpy(to, x, n * sizeof(bf16)); }

  static void multiply(const CodePart& part, int rows) {
    multiply_after(part, rows, [](int64_t, int64_t, int, uint32_t*) {});
  }

 private:
  static constexpr int64_t PANEL_LINE = COLUMNS * 4, ROW = STRIDE * 4;  // bytes
  static constexpr int64_t FOLDED = 4;  // groups whose sums are scaled and added together

  struct Configured {
    int rows, depth;  // rows of a block, pairs per tile
  };
  static inline thread_local Configured configured;

  // Tiles 0 to 3 hold sums, rows by columns; 4 and 5 rows; 6 and 7 words.
  static void configure(int rows, int depth) {
    if (rows == configured.rows && depth == configured.depth) return;
    TileConfig config{};
    uint8_t first = std::min(rows, 16), second = rows - first;
    for (int t : {0, 1}) config.set(t, first, 64);
    for (int t : {2, 3}) config.set(t, second, 64);
    config.set(4, first, depth * 4);
    config.set(5, second, depth * 4);
    for (int t : {6, 7}) config.set(t, depth, 64);
    configure_tiles(&config);
    configured = {rows, depth};
  }

  template <int BITS, Meaning MEANING>
  static void multiply_codes(const CodePart& part, int rows, CodeUse) {
    multiply_after(part, rows, [&](int64_t group, int64_t pair, int depth, uint32_t* words) {
      const char* codes = part.codes_of(group) + pair * COLUMNS * BITS / QUAD;
      decode_pairs<BITS, MEANING>(codes, part.zeros_of(group), part.table, depth, part.ahead, words);
      if (pair + depth == part.pairs) part.prefetch_border(codes + depth * COLUMNS * BITS / QUAD);
    });
  }
  // Call prepare(group, pair, depth, words) before each multiplication. The CPU decodes words while
  // the tiles multiply the previous ones.
  template <class Prepare>
  static void multiply_after(const CodePart& part, int rows, Prepare prepare) {
    int depth = part.pairs % 16 == 0 ? 16 : part.pairs % 8 == 0 ? 8 : 4;
    configure(rows, depth);
    rows > 16 ? block<true>(part, rows, depth, prepare) : block<false>(part, rows, depth, prepare);
  }

  template <bool HAS_SECOND, class Prepare>
  static void block(const CodePart& part, int rows, int depth, Prepare prepare) {
    alignas(64) float sums[FOLDED][MAX_ROWS * COLUMNS];
    const uint32_t* x = (const uint32_t*)part.rows;
    uint32_t* words = part.words;
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (part.begins) zero_sums<HAS_SECOND>();
      else load_sums<HAS_SECOND>(part.sums);
      for (int64_t p = 0; p < part.pairs; p += depth) {
        prepare(g, p, depth, words);
        asm volatile("" ::: "memory");  // a tile load reads memory, which GCC does not know
        add_words<HAS_SECOND>(x, words);
        x += depth;
        words += depth * COLUMNS;
      }
      store_sums<HAS_SECOND>(part.ends ? sums[g % FOLDED] : part.sums);
      if (part.ends && (g % FOLDED == FOLDED - 1 || g == part.num_groups - 1))
        fold(part, rows, g - g % FOLDED, g + 1, sums[0]);
    }
  }
  template <bool HAS_SECOND> static void add_words(const uint32_t* x, const uint32_t* words) {
    load_tile(6, words, PANEL_LINE);
    load_tile(7, words + 16, PANEL_LINE);
    load_tile(4, x, ROW);
    multiply_tiles(0, 4, 6);
    multiply_tiles(1, 4, 7);
    if constexpr (HAS_SECOND) {
      load_tile(5, x + 16 * STRIDE, ROW);
      multiply_tiles(2, 5, 6);
      multiply_tiles(3, 5, 7);
    }
  }
  static void fold(const CodePart& part, int rows, int64_t begin, int64_t end,
                   const float* sums) {
    for (int i = 0; i < rows * COLUMNS; i += WORDS) {
      int row = i / COLUMNS, column = i % COLUMNS;
      rf total = (rf)load_words(part.totals + i);
      for (int64_t g = begin; g < end; g++) {
        rf each = (rf)load_words(sums + (g - begin) * MAX_ROWS * COLUMNS + i);
        if (part.shifts) {
          rf shift = (rf)load_words(part.shifts_of(g) + column);
          each = multiply_add(broadcast(part.row_sum(row, g, STRIDE)), shift, each);
        }
        total = multiply_add(each, (rf)load_words(part.scales_of(g) + column), total);
      }
      store_words(part.totals + i, (rw)total);
    }
  }

  template <bool HAS_SECOND> static void zero_sums() {
    zero_tile(0);
    zero_tile(1);
    if constexpr (HAS_SECOND) {
      zero_tile(2);
      zero_tile(3);
    }
  }
  template <bool HAS_SECOND> static void load_sums(const float* from) {
    load_tile(0, from, PANEL_LINE);
    load_tile(1, from + 16, PANEL_LINE);
    if constexpr (HAS_SECOND) {
      load_tile(2, from + 16 * COLUMNS, PANEL_LINE);
      load_tile(3, from + 16 * COLUMNS + 16, PANEL_LINE);
    }
  }
  template <bool HAS_SECOND> static void store_sums(float* to) {
    store_tile(0, to, PANEL_LINE);
    store_tile(1, to + 16, PANEL_LINE);
    if constexpr (HAS_SECOND) {
      store_tile(2, to + 16 * COLUMNS, PANEL_LINE);
      store_tile(3, to + 16 * COLUMNS + 16, PANEL_LINE);
    }
  }
};
#endif
