// Blocks of rows times blocks of codes, on vectors: a group's sum stays in a register.
#pragma once

#include <type_traits>

#include "gemm_decode.h"
#include "gemm_vectors.h"

// Rows of type T, multiplied as pairs of bf16 where `Kind` is Pairs, else as floats.
template <class Kind, class T> struct CodeVectors {
  typedef typename Kind::Value Value;
  typedef T Source;
  static constexpr bool IS_PAIRED = !std::is_same_v<Value, float>;
  static constexpr int PER_PAIR = IS_PAIRED ? 1 : 2;  // values of a packed row
  static constexpr int STRIDE = BLOCK_PAIRS * PER_PAIR + 16;  // values; no power of two
  static constexpr int MAX_ROWS = WORDS == 16 ? SUMS / 2 : 6;

  static Decode decoder(int64_t bits, bool has_zeros) {
    return IS_PAIRED ? pair_decoder(bits, has_zeros) : float_decoder(bits, has_zeros);
  }
  static void begin() {}
  static void end() {}
  static void pack(const T* x, int64_t n, Value* to) {
    if constexpr (IS_PAIRED || std::is_same_v<T, float>) {
      memcpy(to, x, n * sizeof(T));
    } else {
      int64_t i = 0;
      for (; i + LANES <= n; i += LANES) store(to + i, load(x + i));
      for (; i < n; i++) to[i] = to_float(x[i]);
    }
  }
  static void multiply(const CodePart& part, int rows) { TABLE[rows - 1](part); }

 private:
  typedef void (*Function)(const CodePart&);

  static constexpr int across(int rows) {  // registers: all columns, or half of them
    int all = COLUMNS / WORDS;
    return rows * all <= SUMS ? all : all / 2;
  }
  template <int ROWS> static void block(const CodePart& part) {
    constexpr int V = across(ROWS);
    for (int column = 0; column < COLUMNS; column += V * WORDS) columns<ROWS, V>(part, column);
  }

  template <int ROWS, int V> static void columns(const CodePart& part, int column) {
    rf sums[ROWS][V];
    const Value* x = (const Value*)part.rows;
    const uint32_t* words = part.words + column;
    for (int64_t g = 0; g < part.num_groups; g++) {
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++)
          if (part.begins) sums[r][v] = rf{};
          else sums[r][v] = (rf)load_words(part.sums + r * COLUMNS + column + v * WORDS);
      for (int64_t i = 0; i < part.pairs * PER_PAIR; i++, x++, words += COLUMNS)
        add_word(x, words, sums);
      const float* scales = part.scales_of(g) + column;
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) {
          int at = r * COLUMNS + column + v * WORDS;
          if (!part.ends) store_words(part.sums + at, (rw)sums[r][v]);
          else fold(sums[r][v], scales + v * WORDS, part.totals + at);
        }
    }
  }
  template <int ROWS, int V>
  static INLINE void add_word(const Value* x, const uint32_t* words, rf (&sums)[ROWS][V]) {
    rw loaded[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) loaded[v] = load_words(words + v * WORDS);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
        sums[r][v] = Kind::add_product(sums[r][v], x[r * STRIDE], (rf)loaded[v]);
  }

 public:
  static INLINE void fold(rf sum, const float* scales, float* total) {
    rf scale = (rf)load_words(scales), before = (rf)load_words(total);
    store_words(total, (rw)multiply_add(sum, scale, before));
  }

 private:
  template <size_t... R>
  static constexpr std::array<Function, MAX_ROWS> functions(std::index_sequence<R...>) {
    return {block<R + 1>...};
  }
  static constexpr std::array<Function, MAX_ROWS> TABLE =
      functions(std::make_index_sequence<MAX_ROWS>());
};
