// The GEMM's layouts: packed weights, packed rows, and the sums of a block of rows.
//
// K is counted in words of 4 bytes: four codes, two bf16, or one float. A packed weight is an array
// of panels of 32 columns, [words][32] words each. For any dtype and instruction set, a vector or a
// tile reads 64 bytes of one or more consecutive words. Padding words and columns are zeros.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int COLUMNS = 32;
constexpr int LINE = 16;        // words per cache line
constexpr int TILE_WORDS = 16;  // a panel's word count is a multiple of this

static constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A panel of a gated weight [2 F, K] has 16 gate columns and the 16 matching columns of the other
// half. N is F then.
static constexpr int64_t panel_columns(bool is_gated) { return is_gated ? COLUMNS / 2 : COLUMNS; }

// The packed shape of a weight [N, K].
struct Shape {
  int64_t N, K, value_bytes;
  bool is_gated;

  int64_t words() const { return divide_up(K * value_bytes, 4 * TILE_WORDS) * TILE_WORDS; }
  int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  int64_t panel_words() const { return words() * COLUMNS; }
};

// Arguments of packing coded weights.
struct PackCodes {
  const uint8_t *q, *zero;  // [N, K], and [N, K / group] or null; twice as many rows if gated
  const float *scale, *offset;  // [N, K / group]; null without offsets, which exclude zeros
  const int8_t* table;          // [16] or null; a table excludes zeros and offsets
  char* packed;
  int64_t N, K, bits, group, is_gated;
};

// Addresses from which a multiplication reads and prefetches the words of a panel.
struct Loader {
  const uint32_t* panel;  // first word to multiply
  const uint32_t* ahead;  // first word to prefetch

  const uint32_t* words(int64_t word, int column) const { return panel + word * COLUMNS + column; }
  // Inlined, because GCC drops calls of a function that only prefetches.
  INLINE void prefetch(int64_t word, int column) const {
    __builtin_prefetch(ahead + word * COLUMNS + column);
  }
  // For words that are used once, to keep other words in L2.
  INLINE void prefetch_once(int64_t word, int column) const {
    __builtin_prefetch(ahead + word * COLUMNS + column, 0, 0);
  }
  // Prefetch into L2.
  INLINE void prefetch_line(int64_t line) const {
    __builtin_prefetch(ahead + line * LINE, 0, 2);
  }
};

// One multiplication: some words of a block of rows times the same words of a panel. Between parts
// of K, sums go through memory, which does not change them.
struct Part {
  const void* rows;       // packed by Path::pack
  const uint32_t* panel;
  const uint32_t* next;   // address to prefetch: see is_streamed
  int64_t num_words;
  float* sums;            // [rows][32]
  bool is_first;          // sums start at zero

  // Whether the panel is read from memory and used once. `next` is then the panel of the next
  // multiplication. Else the panel is in L2, and each word prefetches one line from `next` on.
  bool is_streamed;
};

// One of two stretches of a loop over words. The first prefetches words of the same part; the last
// few words prefetch the beginning of the next part.
struct Stretch {
  int64_t begin, end;
  Loader loader;
};
static inline Stretch stretch(const Part& part, int64_t column, int64_t ahead, bool is_last) {
  int64_t cut = std::max<int64_t>(part.num_words - ahead, 0);
  const uint32_t* panel = part.panel + column;
  if (is_last) return {cut, part.num_words, {panel, part.next + column - cut * COLUMNS}};
  return {0, cut, {panel, panel + ahead * COLUMNS}};
}
