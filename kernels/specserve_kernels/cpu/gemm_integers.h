// The layout of coded weights whose rows are quantized too, and their products on vectors.
//
// A panel has 32 columns and holds its groups one after the other. A group consists of four arrays.
//   Codes, padded to a multiple of eight with any codes, because rows are padded with zeros.
//   Scales: [32] float.
//   Offsets, if the weight has any: [32] float.
//   Zeros, if the weight has any: [32] short.
//
// Codes are words of a column: four consecutive 8-bit codes, or eight consecutive 4-bit codes. The
// first four of the eight are in the lower halves of the word's bytes, the others in the upper
// halves. A table of 4-bit codes, if there is one, follows the panels: its 16 bytes, repeated to
// fill a cache line. 8-bit codes and tables are stored as `dot.h` multiplies them.
#pragma once

#include <array>
#include <utility>

#include "dot.h"
#include "gemm.h"
#include "row_codes.h"

constexpr int64_t QUAD = 4;  // values per word of a row

// How the words of a group are stored. DECODED: 4-bit codes that were decoded to one byte each.
enum Words { BYTES, DECODED, NIBBLES, INDICES };
constexpr bool are_nibbles(Words words) { return words == NIBBLES || words == INDICES; }
constexpr bool are_small(Words words) { return words == NIBBLES || words == DECODED; }

struct IntegerShape {
  int64_t N, K, bits, group;
  bool has_zeros, has_offsets, has_table, is_gated;
  int64_t num_groups = K / group;
  int64_t quads = divide_up(group, 2 * QUAD) * 2;  // per group

  int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  Words words() const { return has_table ? INDICES : bits == 4 ? NIBBLES : BYTES; }
  int64_t code_bytes() const { return quads * QUAD * COLUMNS * bits / 8; }
  int64_t offsets_at() const { return code_bytes() + COLUMNS * sizeof(float); }
  int64_t zeros_at() const { return offsets_at() + has_offsets * COLUMNS * sizeof(float); }
  int64_t group_bytes() const { return zeros_at() + has_zeros * COLUMNS * sizeof(int16_t); }
  int64_t panel_bytes() const { return num_groups * group_bytes(); }
  int64_t table_at() const { return num_panels() * panel_bytes(); }
  int64_t packed_bytes() const { return table_at() + has_table * 64; }
  int64_t padded() const { return quads * QUAD; }  // values of a group
  // Return the stored number that stands for 0 if there are no zeros.
  int zero() const { return words() == NIBBLES ? SMALL_ZERO : BYTE_ZERO; }
  int16_t stored_zero(uint8_t zero) const { return bits == 4 ? zero : zero - 128 + BYTE_ZERO; }
};

// A block of rows times a panel.
struct IntegerPart {
  const int8_t* codes;     // of the first group: [rows][quads] words
  const RowGroup* groups;  // of the first group: [rows]
  int64_t num_groups, quads;
  int64_t codes_bytes, num_rows;  // between groups: bytes of `codes`, elements of `groups`
  const char *words, *panel;      // of the first group; equal unless the words are decoded
  int64_t words_bytes, group_bytes;         // between groups
  int64_t scales_at, offsets_at, zeros_at;  // 0: none
  const char* table;
  const char* next;  // panel to prefetch after this one; null: nothing is prefetched
  float* totals;     // [rows][32]

  const RowGroup& row(int r, int64_t group) const { return groups[group * num_rows + r]; }
};

// Add a group's sum to a row's total, in WORDS columns of a panel's group.
static INLINE rf add_group_sum(const IntegerPart& part, const RowGroup& row, const char* group,
                               int column, ri sum, rf total) {
  const char* floats = group + column * sizeof(float);
  if (part.offsets_at) {
    rf offset = (rf)load_words(floats + part.offsets_at);
    total = multiply_add(broadcast(row.product), offset, total);
  }
  rf number = __builtin_convertvector(sum, rf);
  if (part.zeros_at) {
    ri zero = load_shorts(group + part.zeros_at + column * sizeof(int16_t));
    number = multiply_add(broadcast(row.minus_sum), __builtin_convertvector(zero, rf), number);
  }
  rf scale = broadcast(row.scale) * (rf)load_words(floats + part.scales_at);
  return multiply_add(number, scale, total);
}

// Products on vectors. A group's sums stay in registers. Totals stay there for up to MAX_ROWS rows.
// Blocks of 4-bit codes may have more rows, because fewer blocks decode the codes less often.
struct IntegerVectors {
  static constexpr int MAX_ROWS = REGISTER == 64 ? 7 : 4;
  static constexpr int MAX_NIBBLE_ROWS = REGISTER == 64 ? 12 : 4;
  static constexpr int max_rows(Words words) {
    return are_nibbles(words) ? MAX_NIBBLE_ROWS : MAX_ROWS;
  }
  static constexpr int64_t AHEAD = 4 << 10;  // prefetch distance in bytes

  static void multiply(const IntegerPart& part, Words words, int rows) {
    switch (words) {
      case BYTES: return run<BYTES>(part, rows);
      case DECODED: return run<HAS_SHORT_SUMS ? DECODED : BYTES>(part, rows);
      case NIBBLES: return run<NIBBLES>(part, rows);
      case INDICES: return run<INDICES>(part, rows);
    }
  }
  // Inlined, because GCC drops calls of a function that only prefetches.
  static INLINE void prefetch(const IntegerPart& part, int64_t g) {
    if (!part.next) return;
    int64_t to = g * part.group_bytes + AHEAD, end = part.num_groups * part.group_bytes;
    const char* from = to < end ? part.panel + to : part.next + (to - end) % end;
    for (int64_t byte = 0; byte < part.group_bytes; byte += 64)
      __builtin_prefetch(from + byte, 0, 0);
  }

  // Decode a panel's 4-bit codes to words of one byte each, [groups][quads][32].
  static void decode(const IntegerPart& part, Words words, char* to) {
    rw table = table_of(part);
    for (int64_t g = 0; g < part.num_groups; g++) {
      const char* from = part.panel + g * part.group_bytes;
      prefetch(part, g);
      for (int64_t q = 0; q < part.quads; q += 2, to += 2 * COLUMNS * 4)
        for (int c = 0; c < COLUMNS; c += WORDS, from += REGISTER) {
          rw both = load_words(from), first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
          bool is_table = words == INDICES;
          store_words(to + c * 4, is_table ? bytes_at(table, first) : first);
          store_words(to + (COLUMNS + c) * 4, is_table ? bytes_at(table, second) : second);
        }
    }
  }

 private:
  typedef void (*Function)(const IntegerPart&);

  // Registers across a panel: for all columns, or for half of them.
  static constexpr int across(int rows) {
    constexpr int ALL = COLUMNS / WORDS;
    return REGISTER == 64 || rows * ALL <= 8 ? ALL : ALL / 2;
  }
  static rw table_of(const IntegerPart& part) {
    return part.table ? load_words(part.table) : rw{};
  }
  template <Words KIND> static void run(const IntegerPart& part, int rows) {
    TABLE<KIND>[rows - 1](part);
  }
  template <Words KIND, int ROWS> static void block(const IntegerPart& part) {
    constexpr int V = across(ROWS);
    for (int column = 0; column < COLUMNS; column += V * WORDS)
      if (part.quads == 8) columns<KIND, ROWS, V, 8>(part, column);
      else columns<KIND, ROWS, V, 0>(part, column);
  }
  // Unrolled, because registers cannot be indexed; otherwise sums would be in memory.
  template <int ROWS, int V, class F> static INLINE void each(F f) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) f(r, v);
  }

  // QUADS: quads per group; 0: any number.
  template <Words KIND, int ROWS, int V, int QUADS>
  static INLINE void columns(const IntegerPart part, int column) {
    constexpr bool IN_REGISTERS = ROWS <= MAX_ROWS;
    rf totals[ROWS][V];
    auto total_at = [&](int r, int v) { return part.totals + r * COLUMNS + column + v * WORDS; };
    each<ROWS, V>([&](int r, int v) {
      if (IN_REGISTERS) totals[r][v] = rf{};
      else store_words(total_at(r, v), rw{});
    });
    rw table = table_of(part);
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (column == 0) prefetch(part, g);
      ri sums[ROWS][V];
      each<ROWS, V>(
          [&](int r, int v) { sums[r][v] = broadcast_integer(part.row(r, g).start); });
      add_group<KIND>(part, g, QUADS ? QUADS : part.quads, column, table, sums);
      const char* border = part.panel + g * part.group_bytes;
      each<ROWS, V>([&](int r, int v) {
        rf before = IN_REGISTERS ? totals[r][v] : (rf)load_words(total_at(r, v));
        rf total = add_group_sum(part, part.row(r, g), border, column + v * WORDS, sums[r][v],
                                 before);
        if (IN_REGISTERS) totals[r][v] = total;
        else store_words(total_at(r, v), (rw)total);
      });
    }
    if (!IN_REGISTERS) return;
    each<ROWS, V>([&](int r, int v) { store_words(total_at(r, v), (rw)totals[r][v]); });
  }
  // Add the products of one group.
  template <Words KIND, int ROWS, int V>
  static INLINE void add_group(const IntegerPart& part, int64_t g, int64_t quads, int column,
                               rw table, ri (&sums)[ROWS][V]) {
    constexpr bool IN_RUNS = HAS_SHORT_SUMS && are_small(KIND);
    const int8_t* x = part.codes + g * part.codes_bytes;
    const char* words = part.words + g * part.words_bytes + column * 4;
    for (int64_t begin = 0, end; begin < quads; begin = end) {
      end = IN_RUNS ? std::min(begin + SHORT_RUN, quads) : quads;
      ri run[ROWS][V];
      each<ROWS, V>([&](int r, int v) { run[r][v] = IN_RUNS ? ri{} : sums[r][v]; });
#pragma GCC unroll 4
      for (int64_t quad = begin; quad < end; quad += 2) {
        add_pair<KIND>(x, quads * QUAD, words, table, run);
        x += 2 * QUAD;
        words += (are_nibbles(KIND) ? 1 : 2) * COLUMNS * 4;
      }
      each<ROWS, V>([&](int r, int v) {
        sums[r][v] = IN_RUNS ? add_shorts(sums[r][v], run[r][v]) : run[r][v];
      });
    }
  }
  // Add the products of two quads; rows are `stride` bytes apart.
  template <Words KIND, int ROWS, int V>
  static INLINE void add_pair(const int8_t* x, int64_t stride, const char* words, rw table,
                              ri (&sums)[ROWS][V]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      rw loaded[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const char* at = words + v * REGISTER;
        if constexpr (!are_nibbles(KIND)) loaded[v] = load_words(at + i * COLUMNS * 4);
        else loaded[v] = load_words(at) >> (4 * i) & 0x0f0f0f0f;
        if constexpr (KIND == INDICES) loaded[v] = bytes_at(table, loaded[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        uint32_t quad;
        memcpy(&quad, x + r * stride + i * QUAD, sizeof quad);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
          sums[r][v] = are_small(KIND) ? add_small_dot(sums[r][v], loaded[v], quad)
                                       : add_dot(sums[r][v], loaded[v], quad);
      }
    }
  }

  template <Words KIND, size_t... R>
  static constexpr std::array<Function, max_rows(KIND)> functions(std::index_sequence<R...>) {
    return {block<KIND, R + 1>...};
  }
  template <Words KIND>
  static constexpr std::array<Function, max_rows(KIND)> TABLE =
      functions<KIND>(std::make_index_sequence<max_rows(KIND)>());
};
