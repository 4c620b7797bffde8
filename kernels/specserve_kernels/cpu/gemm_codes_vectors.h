// Products of row blocks and code blocks on vectors. A group's sum stays in a register.
#pragma once

#include <type_traits>

#include "gemm_decode.h"
#include "gemm_vectors.h"

// Compute total = fma(sum, scale, total).
static INLINE void fold(rf sum, const float* scales, float* total) {
  rf scale = (rf)load_words(scales), before = (rf)load_words(total);
  store_words(total, (rw)multiply_add(sum, scale, before));
}

#if DECODES_PAIRS
// Products of rows and codes that are decoded to pairs of bf16 in registers.
template <int BITS, Meaning MEANING> struct PairCodes {
  typedef Pairing<BITS, MEANING> P;
  typedef void (*Function)(const CodePart&);
  static constexpr int MAX_ROWS = SUMS / 2, STRIDE = BLOCK_PAIRS + MAX_GROUPS;

  static void multiply(const CodePart& part, int rows, CodeUse use) {
    TABLE[use == SEVERAL_PANELS][rows - 1](part);
  }
  template <int ROWS, int PANELS> static void block(const CodePart& part) {
    const uint32_t* x = (const uint32_t*)part.rows;
    uint32_t* words = part.words;
    float *kept = part.sums, *totals = part.totals;
    rf sums[PANELS][ROWS][2];
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (!part.begins)
        each<PANELS, ROWS>([&](int p, int r, int v) {
          sums[p][r][v] = (rf)load_words(at(kept, p, r, v));
        });
      else if (part.shifts)
        each<PANELS, ROWS>([&](int p, int r, int v) {
          rf shift = (rf)load_words(part.shifts_of(g, p) + v * WORDS);
          sums[p][r][v] = broadcast(part.row_sum(r, g, STRIDE)) * shift;
        });
      else each<PANELS, ROWS>([&](int p, int r, int v) { sums[p][r][v] = rf{}; });
      add_codes(part, g, x, words, sums);
      x += part.pairs;
      words += part.pairs * COLUMNS;
      if (part.ends)
        each<PANELS, ROWS>([&](int p, int r, int v) {
          fold(sums[p][r][v], part.scales_of(g, p) + v * WORDS, at(totals, p, r, v));
        });
      else
        each<PANELS, ROWS>([&](int p, int r, int v) {
          store_words(at(kept, p, r, v), (rw)sums[p][r][v]);
        });
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

  // Add the codes of one group. If there is one panel, store its words for other rows.
  template <int PANELS, int ROWS>
  static INLINE void add_codes(const CodePart& part, int64_t group, const uint32_t* x,
                               uint32_t* words, rf (&sums)[PANELS][ROWS][2]) {
    const char* codes = part.codes_of(group);
    const int64_t panel_bytes = part.panel_bytes, ahead = part.ahead;
    const P pairing(part.table);
    typename P::Zeros zeros[PANELS][2];
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < 2; v++) zeros[p][v].load(part.zeros_of(group, p) + v * WORDS);
    for (int64_t i = 0; i < part.pairs; i += QUAD) {
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) prefetch_quad<BITS>(codes + p * panel_bytes + ahead);
#pragma GCC unroll 4
      for (int pair = 0; pair < QUAD; pair++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
          rw loaded[2];
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) {
            loaded[v] = pairing.words(codes + p * panel_bytes, pair, v, zeros[p][v]);
            if (PANELS == 1) store_words(words + pair * COLUMNS + v * WORDS, loaded[v]);
          }
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
              sums[p][r][v] =
                  Pairs::add_product(sums[p][r][v], x[r * STRIDE + pair], (rf)loaded[v]);
        }
      x += QUAD;
      codes += COLUMNS * BITS;
      words += QUAD * COLUMNS;
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) part.prefetch_border(codes + p * panel_bytes);
  }

  template <bool IS_WIDE, size_t... R>
  static constexpr std::array<Function, MAX_ROWS> functions(std::index_sequence<R...>) {
    return {block<R + 1, IS_WIDE ? Vectors<Pairs>::panels(R + 1) : 1>...};
  }
  static constexpr std::array<Function, MAX_ROWS> TABLE[2] = {
      functions<false>(std::make_index_sequence<MAX_ROWS>()),
      functions<true>(std::make_index_sequence<MAX_ROWS>())};
};
#endif

// Products of rows and codes as words of a kind: pairs of bf16, or floats without pair
// instructions.
template <class Kind> struct CodeVectors {
  typedef typename Kind::Value Value;
  typedef typename Kind::Source Source;
  static constexpr bool IS_PAIRED = !std::is_same_v<Value, float>;
  static constexpr int PER_PAIR = IS_PAIRED ? 1 : 2;  // values of a packed row
  static constexpr int STRIDE = BLOCK_PAIRS * PER_PAIR + MAX_GROUPS;  // values; not a power of two
  // Decoding to floats takes a few registers.
  static constexpr int MAX_ROWS = IS_PAIRED ? SUMS / 2 : WORDS == 16 ? 10 : WORDS == 8 ? 4 : 6;

  static void begin() {}
  static void end() {}
  static void pack(const Source* x, int64_t n, Value* to) { Kind::pack(x, n, to); }
  static void multiply(const CodePart& part, int rows);
  static CodeMultiplying by_codes(int64_t bits, Meaning meaning);
  static constexpr int panels(int rows) { return IS_PAIRED ? Vectors<Kind>::panels(rows) : 1; }

 private:
  typedef void (*Function)(const CodePart&);

  static constexpr int across(int rows) {  // registers for all columns, or for half of them
    int all = COLUMNS / WORDS;
    return rows * all <= SUMS ? all : all / 2;
  }
  // Multiply stored words if BITS is 0; else codes, whose words may be stored for other rows.
  template <int BITS, bool LEAVES, int ROWS> static void block(const CodePart& part) {
    constexpr int V = across(ROWS);
    for (int column = 0; column < COLUMNS; column += V * WORDS)
      columns<BITS, LEAVES, ROWS, V>(part, column);
  }
  template <int BITS> static void multiply_floats(const CodePart& part, int rows, CodeUse use) {
    (use == LEAVE ? TABLE<BITS, true> : TABLE<BITS, false>)[rows - 1](part);
  }

  // Inlined: a call would copy the part and stall on the stores that filled it.
  template <int BITS, bool LEAVES, int ROWS, int V>
  static INLINE void columns(const CodePart part, int column) {
    rf sums[ROWS][V];
    const Value* x = (const Value*)part.rows;
    uint32_t* words = part.words + column;
    float *kept = part.sums + column, *totals = part.totals + column;
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (!part.begins)
        each<ROWS, V>([&](int r, int v) { sums[r][v] = (rf)load_words(at(kept, r, v)); });
      else if (part.shifts)
        each<ROWS, V>([&](int r, int v) {
          rf shift = (rf)load_words(part.shifts_of(g) + column + v * WORDS);
          sums[r][v] = broadcast(part.row_sum(r, g, STRIDE)) * shift;
        });
      else each<ROWS, V>([&](int r, int v) { sums[r][v] = rf{}; });
      if constexpr (BITS == 0) {
        for (int64_t i = 0; i < part.pairs * PER_PAIR; i++, x++, words += COLUMNS)
          add_word(x, words, sums);
      } else {
        if (BITS == 4 && part.table)
          add_codes<BITS, LEAVES, BITS == 4>(part, g, column, x, words, sums);
        else add_codes<BITS, LEAVES, false>(part, g, column, x, words, sums);
        x += part.pairs * PER_PAIR;
        words += part.pairs * PER_PAIR * COLUMNS;
      }
      const float* scales = part.scales_of(g) + column;
      if (part.ends)
        each<ROWS, V>([&](int r, int v) {
          fold(sums[r][v], scales + v * WORDS, at(totals, r, v));
        });
      else each<ROWS, V>([&](int r, int v) { store_words(at(kept, r, v), (rw)sums[r][v]); });
    }
  }
  static INLINE float* at(float* sums, int row, int v) { return sums + row * COLUMNS + v * WORDS; }
  // Unrolled, because registers cannot be indexed; otherwise sums would be in memory.
  template <int ROWS, int V, class F> static INLINE void each(F f) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) f(r, v);
  }

  // Add the codes of one group, as floats.
  template <int BITS, bool LEAVES, bool HAS_TABLE, int ROWS, int V>
  static INLINE void add_codes(const CodePart& part, int64_t group, int column, const Value* x,
                               uint32_t* words, rf (&sums)[ROWS][V]) {
    const char* codes = part.codes_of(group);
    alignas(64) float zeros[COLUMNS];
    const float* table = HAS_TABLE ? part.table->values : nullptr;
    load_zeros<BITS, HAS_TABLE>(part.zeros ? part.zeros_of(group) : nullptr, zeros);
    for (int64_t p = 0; p < part.pairs; p += QUAD, codes += COLUMNS * BITS) {
      if (column == 0) prefetch_quad<BITS>(codes + part.ahead);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * QUAD; i++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          rf zero = (rf)load_words(zeros + column + v * WORDS);
          rf each =
              value<BITS, HAS_TABLE>(codes, column + v * WORDS, i / 2, i % 2, zero, table);
          if (LEAVES) store_words(words + i * COLUMNS + v * WORDS, (rw)each);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++)
            sums[r][v] = multiply_add(broadcast(x[r * STRIDE + i]), each, sums[r][v]);
        }
      x += 2 * QUAD;
      words += 2 * QUAD * COLUMNS;
    }
    if (column == 0) part.prefetch_border(codes);
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

  // Null for fewer rows than any block of many rows has.
  template <int BITS, bool LEAVES, int ROWS> static constexpr Function function() {
    if constexpr (LEAVES && ROWS < MAX_ROWS / 2) return nullptr;
    else return block<BITS, LEAVES, ROWS>;
  }
  template <int BITS, bool LEAVES, size_t... R>
  static constexpr std::array<Function, MAX_ROWS> functions(std::index_sequence<R...>) {
    return {function<BITS, LEAVES, R + 1>()...};
  }
  template <int BITS, bool LEAVES>
  static constexpr std::array<Function, MAX_ROWS> TABLE =
      functions<BITS, LEAVES>(std::make_index_sequence<MAX_ROWS>());
};
