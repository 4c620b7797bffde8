// Blocks of rows times blocks of codes, on vectors: a group's sum stays in a register.
#pragma once

#include <type_traits>

#include "gemm_decode.h"
#include "gemm_vectors.h"

#if DECODES_IN_REGISTERS
static CodeStreaming stream_of(int64_t bits, bool has_zeros);
#else
static CodeStreaming stream_of(int64_t, bool) { return nullptr; }
#endif

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

  // Where few rows are multiplied by codes that are decoded in registers; else null.
  static CodeStreaming streaming(int64_t bits, bool has_zeros) {
    if constexpr (IS_PAIRED) return stream_of(bits, has_zeros);
    return nullptr;
  }
  static constexpr int panels(int rows) { return Vectors<Kind>::panels(rows); }

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

  template <int ROWS, int V> static void columns(const CodePart part, int column) {
    rf sums[ROWS][V];
    const Value* x = (const Value*)part.rows;
    const uint32_t* words = part.words + column;
    float *kept = part.sums + column, *totals = part.totals + column;
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (part.begins) each<ROWS, V>([&](int r, int v) { sums[r][v] = rf{}; });
      else each<ROWS, V>([&](int r, int v) { sums[r][v] = (rf)load_words(at(kept, r, v)); });
      for (int64_t i = 0; i < part.pairs * PER_PAIR; i++, x++, words += COLUMNS)
        add_word(x, words, sums);
      const float* scales = part.scales_of(g) + column;
      if (part.ends)
        each<ROWS, V>([&](int r, int v) {
          fold(sums[r][v], scales + v * WORDS, at(totals, r, v));
        });
      else each<ROWS, V>([&](int r, int v) { store_words(at(kept, r, v), (rw)sums[r][v]); });
    }
  }
  static INLINE float* at(float* sums, int row, int v) { return sums + row * COLUMNS + v * WORDS; }
  // Unrolled, as registers have no index: else sums would stand in memory.
  template <int ROWS, int V, class F> static INLINE void each(F f) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) f(r, v);
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

#if DECODES_IN_REGISTERS
// A few rows times blocks of several panels, whose codes come from memory and are decoded once.
template <int BITS, bool HAS_ZEROS> struct CodeStreams {
  typedef Vectors<Pairs> Plain;
  typedef CodeVectors<Pairs, bf16> Decoded;
  static constexpr int MAX_ROWS = Decoded::MAX_ROWS;

  static void multiply(const CodePart& part, const CodeStream& stream, int rows, bool is_wide) {
    TABLE[is_wide][rows - 1](part, stream);
  }

 private:
  typedef void (*Function)(const CodePart&, const CodeStream&);
  typedef Pairing<BITS, HAS_ZEROS> P;

  template <int ROWS, int PANELS> static void block(const CodePart& part, const CodeStream& stream) {
    const uint32_t* x = (const uint32_t*)part.rows;
    const char* codes = stream.codes;
    const int64_t panel_bytes = stream.panel_bytes, ahead = stream.ahead;
    uint32_t* kept = part.words;
    const P pairing;
    rf sums[PANELS][ROWS][2];
    for (int64_t g = 0; g < part.num_groups; g++) {
      typename P::Zeros zeros[PANELS][2];
      for (int p = 0; p < PANELS && HAS_ZEROS; p++)
        for (int v = 0; v < 2; v++) zeros[p][v].load(stream.zeros + g * part.group_bytes + p * panel_bytes + v * 16);
      if (part.begins) each<PANELS, ROWS>([&](int p, int r, int v) { sums[p][r][v] = rf{}; });
      else
        each<PANELS, ROWS>([&](int p, int r, int v) {
          sums[p][r][v] = (rf)load_words(at(part.sums, p, r, v));
        });
      for (int64_t i = 0; i < part.pairs; i += QUAD, x += QUAD, codes += COLUMNS * BITS) {
        add_quad(pairing, x, codes, panel_bytes, ahead, zeros, sums, kept);
        kept += QUAD * COLUMNS;
      }
      const float* scales = part.scales_of(g);
      if (part.ends)
        each<PANELS, ROWS>([&](int p, int r, int v) {
          const float* scale = (const float*)((const char*)scales + p * panel_bytes) + v * 16;
          Decoded::fold(sums[p][r][v], scale, at(part.totals, p, r, v));
        });
      else
        each<PANELS, ROWS>([&](int p, int r, int v) {
          store_words(at(part.sums, p, r, v), (rw)sums[p][r][v]);
        });
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++)
        for (int line = 0; line < 128 + HAS_ZEROS * 64; line += 64)
          __builtin_prefetch(codes + p * panel_bytes + ahead + line, 0, 0);
      codes += part.group_bytes - part.pairs * (COLUMNS * BITS / 4);
    }
  }
  static INLINE float* at(float* sums, int panel, int row, int v) {
    return sums + (panel * MAX_ROWS + row) * COLUMNS + v * WORDS;
  }
  template <int PANELS, int ROWS, class F> static INLINE void each(F f) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        f(p, r, 0);
        f(p, r, 1);
      }
  }
  template <int PANELS, int ROWS, class Z>
  static INLINE void add_quad(const P& pairing, const uint32_t* x, const char* codes,
                              int64_t panel_bytes, int64_t ahead, const Z& zeros,
                              rf (&sums)[PANELS][ROWS][2], uint32_t* kept) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int line = 0; line < COLUMNS * BITS; line += 64)
        __builtin_prefetch(codes + p * panel_bytes + ahead + line, 0, 0);
#pragma GCC unroll 4
    for (int i = 0; i < QUAD; i++)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        rw words[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
          words[v] = pairing.words(codes + p * panel_bytes, i, v, zeros[p][v]);
        if (PANELS == 1)
          for (int v = 0; v < 2; v++) store_words(kept + i * COLUMNS + v * WORDS, words[v]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++)
            sums[p][r][v] =
                Pairs::add_product(sums[p][r][v], x[r * Decoded::STRIDE + i], (rf)words[v]);
      }
  }

  template <bool IS_WIDE, size_t... R>
  static constexpr std::array<Function, MAX_ROWS> functions(std::index_sequence<R...>) {
    return {block<R + 1, IS_WIDE ? Plain::panels(R + 1) : 1>...};
  }
  static constexpr std::array<Function, MAX_ROWS> TABLE[2] = {
      functions<false>(std::make_index_sequence<MAX_ROWS>()),
      functions<true>(std::make_index_sequence<MAX_ROWS>())};
};

static CodeStreaming stream_of(int64_t bits, bool has_zeros) {
  if (has_zeros) return bits == 4 ? CodeStreams<4, true>::multiply : CodeStreams<8, true>::multiply;
  return bits == 4 ? CodeStreams<4, false>::multiply : CodeStreams<8, false>::multiply;
}
#endif
