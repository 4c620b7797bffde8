// The GEMM's layouts: packed weights, packed rows, and the sums of a block of rows.
//
// K is counted in words of 4 bytes: four codes, two bf16, or one float. A packed weight is an array of panels of
// 32 columns, [words][32] words each: whatever the dtype and the instructions, a vector or a tile
// reads 64 bytes of one or more consecutive words. Words and columns that a weight lacks are zeros.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int COLUMNS = 32;
constexpr int LINE = 16;        // words of a cache line
constexpr int TILE_WORDS = 16;  // the words of a panel are a multiple of this

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A gated weight, [2 F, K], pairs 16 columns of the gate with the 16 of the other half that they are
// multiplied by; N is F then.
static inline int64_t panel_columns(bool is_gated) { return is_gated ? COLUMNS / 2 : COLUMNS; }

// What a weight [N, K] is once it is packed.
struct Shape {
  int64_t N, K, value_bytes;
  bool is_gated;

  int64_t words() const { return divide_up(K * value_bytes, 4 * TILE_WORDS) * TILE_WORDS; }
  int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  int64_t panel_words() const { return words() * COLUMNS; }
};

// Where a multiplication reads the words of a panel.
struct Loader {
  const uint32_t* panel;  // from the first word to be multiplied on
  const uint32_t* ahead;  // prefetched beside it, at the same distance from there

  const uint32_t* words(int64_t word, int column) const { return panel + word * COLUMNS + column; }
  // Inlined, as GCC drops calls of a function that does nothing but prefetch.
  INLINE void prefetch(int64_t word, int column) const {
    __builtin_prefetch(ahead + word * COLUMNS + column);
  }
  // Words that are used once would only push others out of L2.
  INLINE void prefetch_once(int64_t word, int column) const {
    __builtin_prefetch(ahead + word * COLUMNS + column, 0, 0);
  }
  // For L2.
  INLINE void prefetch_line(int64_t line) const {
    __builtin_prefetch(ahead + line * LINE, 0, 2);
  }
};

// One multiplication: some words of a block of rows times the same words of a panel. Sums go
// through memory between the parts of K, which changes no bit of them.
struct Part {
  const void* rows;       // as Path::pack left them
  const uint32_t* panel;
  const uint32_t* next;   // what is prefetched: see is_streamed
  int64_t num_words;
  float* sums;            // [rows][32]
  bool is_first;          // sums begin with zero
  // Whether the panel comes from memory, a little after it is prefetched, and is used once: `next`
  // is then what is multiplied after this part. Else the panel stands in L2, and a line is
  // prefetched from `next` on for each word, which has two.
  bool is_streamed;
};

// The parts of a loop over words: all but the last few, beside which words of the same part are
// prefetched, and those few, with the beginning of the next part.
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
