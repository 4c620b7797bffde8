// Products of row blocks and panels on vectors. A sum stays in a register from word to word.
#pragma once

#include <array>
#include <utility>

#include "gemm.h"
#include "registers.h"

// Registers for sums. A few others hold words of the panel and the row's value.
#if defined(__AVX512F__)
constexpr int SUMS = 28;
#elif defined(__AVX__)
constexpr int SUMS = 12;
#elif defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 8;
#endif

// Multiplication of a word's values: one by one, or in one instruction.
struct Floats {
  typedef float Value;  // of a packed row
  typedef float Source;
  static constexpr int PER_WORD = 1;  // values of a packed row
  static rf unpack(rw words, int) { return (rf)words; }
  static rf add_product(rf sum, Value x, rf w) { return multiply_add(broadcast(x), w, sum); }
  static void pack(const float* x, int64_t n, Value* to) { memcpy(to, x, n * sizeof(float)); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  typedef uint32_t Value;
  typedef bf16 Source;
  static constexpr int PER_WORD = 1;
  static rf unpack(rw words, int) { return (rf)words; }
  static rf add_product(rf sum, Value x, rf w) {
    return (rf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
  }
  static void pack(const bf16* x, int64_t n, Value* to) { memcpy(to, x, n * sizeof(bf16)); }
};
#else
struct Pairs {
  typedef float Value;
  typedef bf16 Source;
  static constexpr int PER_WORD = 2;
  static rf unpack(rw words, int i) { return (rf)(i == 0 ? words << 16 : words & 0xffff0000u); }
  static rf add_product(rf sum, Value x, rf w) { return multiply_add(broadcast(x), w, sum); }
  static void pack(const bf16* x, int64_t n, Value* to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(x + i));
    for (; i < n; i++) to[i] = to_float(x[i]);
  }
};
#endif

template <class Kind> struct Vectors {
  typedef typename Kind::Value Value;
  typedef typename Kind::Source Source;
  static constexpr int PER_WORD = Kind::PER_WORD;
  static constexpr int BLOCK_WORDS = 512 / PER_WORD;  // words of K; 14 rows of them fit in L1
  static constexpr int STRIDE = BLOCK_WORDS * PER_WORD + 16;  // values; not a power of two
  static constexpr int MAX_ROWS = WORDS == 16 ? SUMS / 2 : 6;

  // Prefetch distance in words, for one panel or for several at once: far enough for memory, near
  // enough for L1.
  static constexpr int64_t AHEAD = 128, AHEAD_OF_SEVERAL = 64;

  // Return the registers across a panel: all of its columns, or half if not all sums fit.
  static constexpr int across(int rows) {
    int all = COLUMNS / WORDS;
    return rows * all <= SUMS ? all : all / 2;
  }
  // Whether several blocks of rows share loading. On narrow registers, multiplying takes far longer
  // than loading.
  static constexpr bool SHARES_LOADING = WORDS == 16;

  // Return the panels that are multiplied at once. Few sums would stall on additions, and memory
  // serves several streams faster than one.
  static constexpr int panels(int rows) {
    if (WORDS < 16) return 1;
    return rows * 8 <= SUMS ? 4 : rows * 4 <= SUMS ? 2 : 1;
  }

  static void begin(int64_t) {}
  static void end() {}
  static void pack(const Source* x, int64_t n, Value* to) { Kind::pack(x, n, to); }

  // `num_panels` is 1 or panels(rows). The panels' sums are contiguous, MAX_ROWS rows each.
  static void multiply(const Part& part, int rows, int num_panels, int64_t panel_words) {
    TABLE[part.is_streamed ? 1 + (num_panels > 1) : 0][rows - 1](part, panel_words);
  }

 private:
  typedef void (*Function)(const Part&, int64_t);

  template <int ROWS, int PANELS, bool IS_STREAMED>
  static void block(const Part& part, int64_t panel_words) {
    constexpr int V = across(ROWS);
    for (int column = 0; column < COLUMNS; column += V * WORDS)
      columns<ROWS, PANELS, V, IS_STREAMED>(part, panel_words, column);
  }

  template <int ROWS, int PANELS, int V, bool IS_STREAMED>
  static void columns(const Part& part, int64_t panel_words, int column) {
    rf sums[PANELS][ROWS][V];
    for (int p = 0; p < PANELS; p++)
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++)
          if (part.is_first) sums[p][r][v] = rf{};
          else memcpy(&sums[p][r][v], at(part, p, r, column + v * WORDS), sizeof(rf));
    const Value* x = (const Value*)part.rows;
    if constexpr (IS_STREAMED) {
      for (bool is_last : {false, true}) {
        Stretch s = stretch(part, column, PANELS == 1 ? AHEAD : AHEAD_OF_SEVERAL / PANELS, is_last);
        for (int64_t w = s.begin; w < s.end; w++) add_word<true>(s.loader, x, w, panel_words, sums);
      }
    } else {
      Loader loader{part.panel + column, part.next};
      for (int64_t w = 0; w < part.num_words; w++) add_word<false>(loader, x, w, panel_words, sums);
    }
    for (int p = 0; p < PANELS; p++)
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++)
          memcpy(at(part, p, r, column + v * WORDS), &sums[p][r][v], sizeof(rf));
  }
  static float* at(const Part& part, int panel, int row, int column) {
    return part.sums + (panel * MAX_ROWS + row) * COLUMNS + column;
  }

  template <bool IS_STREAMED, int PANELS, int ROWS, int V>
  static INLINE void add_word(const Loader& loader, const Value* x,
                                                             int64_t w, int64_t panel_words,
                                                             rf (&sums)[PANELS][ROWS][V]) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
      int64_t offset = p * panel_words;
      if constexpr (!IS_STREAMED) loader.prefetch_line(w);
#pragma GCC unroll 8
      for (int v = 0; v < V && IS_STREAMED; v += LANES / WORDS) {
        if (WORDS == 16) loader.prefetch_once(w, offset + v * WORDS);
        else loader.prefetch(w, offset + v * WORDS);
      }
#pragma GCC unroll 2
      for (int i = 0; i < PER_WORD; i++) {
        rf words[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
          words[v] = Kind::unpack(load_words(loader.words(w, offset + v * WORDS)), i);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
          for (int v = 0; v < V; v++)
            sums[p][r][v] =
                Kind::add_product(sums[p][r][v], x[r * STRIDE + w * PER_WORD + i], words[v]);
      }
    }
  }

  template <bool IS_STREAMED, bool IS_WIDE, size_t... R>
  static constexpr std::array<Function, MAX_ROWS> functions(std::index_sequence<R...>) {
    return {block<R + 1, IS_WIDE ? panels(R + 1) : 1, IS_STREAMED>...};
  }
  static constexpr std::array<Function, MAX_ROWS> TABLE[3] = {
      functions<false, false>(std::make_index_sequence<MAX_ROWS>()),
      functions<true, false>(std::make_index_sequence<MAX_ROWS>()),
      functions<true, true>(std::make_index_sequence<MAX_ROWS>())};
};
