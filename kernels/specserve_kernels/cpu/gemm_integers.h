// The layout of coded weights whose rows are quantized too, and their products on vectors.
//
// A panel has 32 columns and holds its blocks of groups one after the other. A block consists of the
// border of its groups, and then of each group's codes. A block is one group, or BLOCK columns of K
// for scales that are PRODUCTS. A border consists of up to three arrays.
//   Scales: [32] numbers.
//   Offsets, if the weight has any: [32] numbers.
//   Zeros, if the weight has any: [32] short.
// PRODUCTS have [32] factors instead of numbers; [32] bytes per group for the scales and then for
// the offsets follow the factors.
//
// Codes are words of a column, padded to a multiple of eight codes with any codes, because rows are
// padded with zeros. A word has four consecutive 8-bit codes, or the lowest four bits of eight
// consecutive codes. The first four of the eight are in the lower halves of the word's bytes, the
// others in the upper halves. The upper bits of codes of 5 or 6 bits follow as words of their own:
// byte i of such a word has those of code i of eight or four consecutive fours, the first four
// lowest. A table of 4-bit codes, if there is one, follows the panels: its 16 bytes, repeated to
// fill a cache line. 8-bit codes and tables are stored as `dot.h` multiplies them.
#pragma once

#include <array>
#include <utility>

#include "dot.h"
#include "gemm.h"
#include "numbers.h"
#include "row_codes.h"
#include "team.h"

constexpr int64_t QUAD = 4;  // values per word of a row

// How the words of a group are stored. DECODED: 4-bit codes that were decoded to one byte each.
enum Words { BYTES, DECODED, NIBBLES, FIVES, SIXES, INDICES };
constexpr bool are_split(Words words) { return words >= NIBBLES; }  // two fours per word
constexpr bool are_small(Words words) { return words != BYTES && words != INDICES; }
// Upper bits of a code that separate words hold.
constexpr int upper_bits(Words words) { return words == FIVES ? 1 : words == SIXES ? 2 : 0; }

struct IntegerShape {
  int64_t N, K, bits, group;  // 5 bits have groups of 32, 6 bits groups of 16
  bool has_zeros, has_offsets, has_table, is_gated;
  int64_t zero;      // stored number that stands for 0 if there are no zeros; for 8 bits: ignored
  int64_t scaling;   // Scaling
  int64_t num_groups = K / group;
  int64_t quads = divide_up(group, 2 * QUAD) * 2;  // per group
  int64_t block_groups = scaling == PRODUCTS ? BLOCK / group : 1;

  constexpr int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  constexpr Words words() const {
    return has_table ? INDICES : bits == 4 ? NIBBLES : bits == 5 ? FIVES : bits == 6 ? SIXES : BYTES;
  }
  constexpr int64_t lower_bytes() const { return quads * QUAD * COLUMNS * (bits < 8 ? 4 : 8) / 8; }
  constexpr int64_t code_bytes() const {
    return lower_bytes() + divide_up(quads * upper_bits(words()), 8) * COLUMNS * 4;
  }
  constexpr int64_t numbers_bytes() const { return COLUMNS * (scaling == SINGLES ? 4 : 2); }
  constexpr int64_t counts_at() const { return (1 + has_offsets) * numbers_bytes(); }
  constexpr int64_t zeros_at() const {
    int64_t counts = scaling == PRODUCTS ? block_groups * (1 + has_offsets) * COLUMNS : 0;
    return counts_at() + counts;
  }
  constexpr int64_t border_bytes() const { return zeros_at() + has_zeros * COLUMNS * sizeof(int16_t); }
  constexpr int64_t block_bytes() const { return border_bytes() + block_groups * code_bytes(); }
  constexpr int64_t panel_bytes() const { return num_groups / block_groups * block_bytes(); }
  constexpr int64_t table_at() const { return num_panels() * panel_bytes(); }
  constexpr int64_t packed_bytes() const { return table_at() + has_table * 64; }
  // Return the shape of a decoded panel.
  constexpr IntegerShape decoded() const {
    return {N, K, 8, group, has_zeros, has_offsets, false, is_gated, zero, SINGLES};
  }
  constexpr int64_t padded() const { return quads * QUAD; }  // values of a group
  // Return the stored number that stands for 0 if there are no zeros.
  constexpr int middle() const { return bits < 8 && !has_table ? zero : BYTE_ZERO; }
  constexpr int16_t stored_zero(uint8_t zero) const { return bits == 4 ? zero : zero - 128 + BYTE_ZERO; }
};

// A block of rows times a panel.
struct IntegerPart {
  const IntegerShape& shape;
  const int8_t* codes;     // of the first group: [rows][quads] words
  const RowGroup* groups;  // of the first group: [rows]
  int64_t codes_bytes, num_rows;  // between groups: bytes of `codes`, elements of `groups`
  const char* panel;
  const char* table;
  const char* behind;    // end of the panels that are multiplied now
  const char* next;      // the panels after them; null: nothing is prefetched
  float* totals;         // [rows][32]
  Range spread{0, 0};    // bytes of each group of `next` to prefetch; empty: see IntegerVectors
  int64_t next_bytes = 0;  // of a group of `next`, if `spread` is not empty

  int64_t num_groups = shape.num_groups, quads = shape.quads;
  int64_t code_bytes = shape.code_bytes(), border_bytes = shape.border_bytes();
  int64_t block_groups = shape.block_groups, block_bytes = shape.block_bytes();
  int64_t group_bytes = block_bytes / block_groups;  // with a part of the border
  int64_t lower_bytes = shape.lower_bytes();
  int64_t counts_at = shape.counts_at(), zeros_at = shape.zeros_at();
  Scaling scaling = Scaling(shape.scaling);
  bool has_offsets = shape.has_offsets, has_zeros = shape.has_zeros;

  const RowGroup& row(int r, int64_t group) const { return groups[group * num_rows + r]; }
};

// What the sizes of a group depend on, apart from its words. ANY_FORM: the weight's own.
struct GroupForm {
  int64_t quads, scaling;
  bool has_offsets;
};
constexpr GroupForm ANY_FORM{0, 0, false};
constexpr int64_t bits_of(Words words) {
  return words == NIBBLES || words == INDICES ? 4 : words == FIVES ? 5 : words == SIXES ? 6 : 8;
}
// Replace the sizes in a part by those of a form, which the compiler knows. There are no zeros.
template <Words KIND, GroupForm FORM> static INLINE void assume(IntegerPart& part) {
  constexpr int64_t K = FORM.scaling == PRODUCTS ? BLOCK : FORM.quads * QUAD;
  constexpr IntegerShape SHAPE{.N = COLUMNS, .K = K, .bits = bits_of(KIND),
                               .group = FORM.quads * QUAD, .has_zeros = false,
                               .has_offsets = FORM.has_offsets, .has_table = KIND == INDICES,
                               .is_gated = false, .zero = 0, .scaling = FORM.scaling};
  part.quads = SHAPE.quads;
  part.code_bytes = SHAPE.code_bytes();
  part.border_bytes = SHAPE.border_bytes();
  part.block_groups = SHAPE.block_groups;
  part.block_bytes = SHAPE.block_bytes();
  part.group_bytes = part.block_bytes / part.block_groups;
  part.lower_bytes = SHAPE.lower_bytes();
  part.counts_at = SHAPE.counts_at();
  part.scaling = Scaling(FORM.scaling);
  part.has_offsets = FORM.has_offsets;
  part.has_zeros = false;
}

// The place of a group in a panel. Groups are visited in order.
struct GroupPlace {
  const char *border, *codes;
  int64_t index = 0;  // in the block

  GroupPlace(const IntegerPart& part) : border(part.panel), codes(border + part.border_bytes) {}
  void next(const IntegerPart& part) {
    codes += part.code_bytes;
    if (++index < part.block_groups) return;
    index = 0;
    border += part.block_bytes;
    codes = border + part.border_bytes;
  }
};

// The scales, offsets and zeros of WORDS columns of a group.
struct BorderNumbers {
  rf scale, offset, zero;
};
static INLINE BorderNumbers numbers_of(const IntegerPart& part, const GroupPlace& at, int column) {
  BorderNumbers x{};
  const char* counts = at.border + part.counts_at + column +
                       at.index * (part.has_offsets ? 2 : 1) * COLUMNS;
  x.scale = load_numbers(at.border, column, part.scaling);
  if (part.scaling == PRODUCTS) x.scale *= load_bytes(counts);
  if (part.has_offsets) {
    int64_t bytes = COLUMNS * (part.scaling == SINGLES ? 4 : 2);
    x.offset = load_numbers(at.border + bytes, column, part.scaling);
    if (part.scaling == PRODUCTS) x.offset *= load_bytes(counts + COLUMNS);
  }
  if (part.has_zeros) {
    ri zero = load_shorts(at.border + part.zeros_at + column * sizeof(int16_t));
    x.zero = __builtin_convertvector(zero, rf);
  }
  return x;
}

// Add a group's sum to a row's total.
static INLINE rf add_group_sum(const IntegerPart& part, const RowGroup& row,
                               const BorderNumbers& x, ri sum, rf total) {
  if (part.has_offsets) total = multiply_add(broadcast(row.product), x.offset, total);
  rf number = __builtin_convertvector(sum, rf);
  if (part.has_zeros) number = multiply_add(broadcast(row.minus_sum), x.zero, number);
  return multiply_add(number, broadcast(row.scale) * x.scale, total);
}

// Products on vectors. A group's sums stay in registers. Totals stay there for up to MAX_ROWS rows.
// Blocks of 4-bit codes may have more rows, because fewer blocks decode the codes less often.
struct IntegerVectors {
  static constexpr int MAX_ROWS = REGISTER == 64 ? 7 : 4;
  static constexpr int MAX_NIBBLE_ROWS = REGISTER == 64 ? 12 : 4;
  static constexpr int MAX_UPPER_ROWS = REGISTER == 64 ? 8 : 4;  // of codes with upper bits
  static constexpr int MAX_FEW = 4;  // rows for which code is compiled by form
  static constexpr int max_rows(Words words) {
    if (upper_bits(words)) return MAX_UPPER_ROWS;
    return are_split(words) ? MAX_NIBBLE_ROWS : MAX_ROWS;
  }
  static constexpr int64_t AHEAD = 8 << 10;  // prefetch distance in bytes

  static void multiply(const IntegerPart& part, Words words, int rows);
  // Prefetch what follows a group at a distance, into L2: L1 has buffers for fewer misses. Every
  // group prefetches a part of the border, because a burst of misses stalls. Several blocks of rows
  // prefetch a part of the next panel each, because the first one would wait for memory. Inlined,
  // because GCC drops calls of a function that only prefetches.
  static INLINE void prefetch(const IntegerPart& part, int64_t g) {
    if (!part.next) return;
    if (part.spread.end > 0) {
      const char* from = part.next + g * part.next_bytes;
      for (int64_t byte = part.spread.begin; byte < part.spread.end; byte += 64)
        __builtin_prefetch(from + byte, 0, 2);
      return;
    }
    const char* from = part.panel + g * part.group_bytes + AHEAD;
    if (from >= part.behind) from = part.next + (from - part.behind);
#pragma GCC unroll 10
    for (int64_t byte = 0; byte < part.group_bytes; byte += 64)
      __builtin_prefetch(from + byte, 0, 2);
  }

  // Decode a panel to the layout of 8-bit codes with scales that are SINGLES.
  static void decode(const IntegerPart& part, Words words, char* to);

 private:
  typedef void (*Function)(const IntegerPart&);

  static constexpr int64_t usual_quads(Words words) { return words == SIXES ? 4 : 8; }  // GGUF's
  // Registers across a panel: for all columns, or for half of them.
  static constexpr int across(int rows) {
    constexpr int ALL = COLUMNS / WORDS;
    return REGISTER == 64 || rows * ALL <= 8 ? ALL : ALL / 2;
  }
  static rw table_of(const IntegerPart& part) {
    return part.table ? load_words(part.table) : rw{};
  }
  template <Words KIND> static void decode_as(const IntegerPart& part, char* to) {
    rw table = table_of(part);
    GroupPlace at(part);
    for (int64_t g = 0; g < part.num_groups; g++, at.next(part)) {
      prefetch(part, g);
      to = decode_border(part, at, to);
      for (int64_t pair = 0; pair < part.quads / 2; pair++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, to += COLUMNS * 4)
#pragma GCC unroll 8
          for (int c = 0; c < COLUMNS; c += WORDS)
            store_words(to + c * 4, codes_at<KIND>(at.codes, part.lower_bytes, pair, i, c, table));
    }
  }
  static char* decode_border(const IntegerPart& part, const GroupPlace& at, char* to) {
    constexpr int ARRAY = COLUMNS * sizeof(float);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; c += WORDS) {
      BorderNumbers x = numbers_of(part, at, c);
      store_words(to + c * 4, (rw)x.scale);
      if (part.has_offsets) store_words(to + ARRAY + c * 4, (rw)x.offset);
    }
    to += ARRAY * (1 + part.has_offsets);
    if (!part.has_zeros) return to;
    memcpy(to, at.border + part.zeros_at, COLUMNS * sizeof(int16_t));
    return to + COLUMNS * sizeof(int16_t);
  }
  // Load the codes of four values, the first (i = 0) or last of eight, in WORDS columns. Those of
  // upper bits begin `upper` bytes after a group's codes.
  template <Words KIND>
  static INLINE rw codes_at(const char* codes, int64_t upper, int64_t eight, int i, int column,
                            rw table) {
    constexpr int UPPER = upper_bits(KIND), LINE_BYTES = COLUMNS * 4;
    codes += column * 4;
    if constexpr (!are_split(KIND)) return load_words(codes + (2 * eight + i) * LINE_BYTES);
    rw code = load_words(codes + eight * LINE_BYTES) >> (4 * i) & 0x0f0f0f0f;
    if constexpr (KIND == INDICES) code = bytes_at(table, code);
    if constexpr (UPPER > 0) {
      constexpr int PER_WORD = 8 / UPPER;
      int64_t four = 2 * eight + i;
      rw bits = load_words(codes + upper + four / PER_WORD * LINE_BYTES);
      int up = 4 - four % PER_WORD * UPPER;
      code |= (up >= 0 ? bits << up : bits >> -up) & (UPPER == 1 ? 0x10101010 : 0x30303030);
    }
    return code;
  }
  template <Words KIND> static void run(const IntegerPart& part, int rows) {
    TABLE<KIND>[rows - 1](part);
  }
  template <Words KIND, int ROWS> static void block(const IntegerPart& part) {
    if constexpr (ROWS <= MAX_FEW && KIND != DECODED)
      if (block_of<KIND, ROWS, PRODUCTS>(part) || block_of<KIND, ROWS, HALVES>(part) ||
          block_of<KIND, ROWS, BF16S>(part))
        return;
    if constexpr (!are_split(KIND))
      if (block_of<KIND, ROWS, SINGLES>(part)) return;
    all_columns<KIND, ROWS, ANY_FORM>(part);
  }
  // Multiply by code for a GGUF type's form, or for a decoded one, if the part has it.
  template <Words KIND, int ROWS, Scaling SCALING>
  static INLINE bool block_of(const IntegerPart& part) {
    constexpr int64_t USUAL = usual_quads(KIND);
    if (part.scaling != SCALING || part.quads != USUAL || part.has_zeros) return false;
    if constexpr (SCALING == SINGLES || KIND != BYTES && KIND != INDICES)
      if (part.has_offsets) {
        all_columns<KIND, ROWS, GroupForm{USUAL, SCALING, true}>(part);
        return true;
      }
    if (part.has_offsets) return false;
    all_columns<KIND, ROWS, GroupForm{USUAL, SCALING, false}>(part);
    return true;
  }
  template <Words KIND, int ROWS, GroupForm FORM>
  static INLINE void all_columns(const IntegerPart& part) {
    constexpr int V = across(ROWS);
    constexpr int64_t USUAL = usual_quads(KIND);
    for (int column = 0; column < COLUMNS; column += V * WORDS)
      if (upper_bits(KIND) || FORM.quads || part.quads == USUAL)
        columns<KIND, ROWS, V, USUAL, FORM>(part, column);
      else columns<KIND, ROWS, V, 0, FORM>(part, column);
  }
  // Unrolled, because registers cannot be indexed; otherwise sums would be in memory.
  template <int ROWS, int V, class F> static INLINE void each(F f) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) f(r, v);
  }

  // QUADS: quads per group; 0: any number.
  template <Words KIND, int ROWS, int V, int QUADS, GroupForm FORM>
  static INLINE void columns(IntegerPart part, int column) {
    if constexpr (FORM.quads > 0) assume<KIND, FORM>(part);
    constexpr bool IN_REGISTERS = ROWS <= MAX_ROWS;
    rf totals[ROWS][V];
    auto total_at = [&](int r, int v) { return part.totals + r * COLUMNS + column + v * WORDS; };
    each<ROWS, V>([&](int r, int v) {
      if (IN_REGISTERS) totals[r][v] = rf{};
      else store_words(total_at(r, v), rw{});
    });
    rw table = table_of(part);
    GroupPlace at(part);
    for (int64_t g = 0; g < part.num_groups; g++, at.next(part)) {
      if (column == 0) prefetch(part, g);
      ri sums[ROWS][V];
      each<ROWS, V>(
          [&](int r, int v) { sums[r][v] = broadcast_integer(part.row(r, g).start); });
      add_group<KIND>(part, g, at.codes, QUADS ? QUADS : part.quads, column, table, sums);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        BorderNumbers x = numbers_of(part, at, column + v * WORDS);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          rf before = IN_REGISTERS ? totals[r][v] : (rf)load_words(total_at(r, v));
          rf total = add_group_sum(part, part.row(r, g), x, sums[r][v], before);
          if (IN_REGISTERS) totals[r][v] = total;
          else store_words(total_at(r, v), (rw)total);
        }
      }
    }
    if (!IN_REGISTERS) return;
    each<ROWS, V>([&](int r, int v) { store_words(total_at(r, v), (rw)totals[r][v]); });
  }
  // Add the products of one group.
  template <Words KIND, int ROWS, int V>
  static INLINE void add_group(const IntegerPart& part, int64_t g, const char* codes,
                               int64_t quads, int column, rw table, ri (&sums)[ROWS][V]) {
    constexpr bool IN_RUNS = HAS_SHORT_SUMS && are_small(KIND);
    constexpr int64_t RUN = SHORT_RUN >> upper_bits(KIND);
    const int8_t* x = part.codes + g * part.codes_bytes;
    const int64_t upper = quads / 2 * COLUMNS * 4;  // bytes of the lower bits
    for (int64_t begin = 0, end; begin < quads; begin = end) {
      end = IN_RUNS ? std::min(begin + RUN, quads) : quads;
      ri run[ROWS][V];
      each<ROWS, V>([&](int r, int v) { run[r][v] = IN_RUNS ? ri{} : sums[r][v]; });
#pragma GCC unroll 4
      for (int64_t pair = begin / 2; pair < end / 2; pair++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
          rw loaded[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; v++)
            loaded[v] = codes_at<KIND>(codes, upper, pair, i, column + v * WORDS, table);
          add_quad<KIND>(x + (2 * pair + i) * QUAD, quads * QUAD, loaded, run);
        }
      each<ROWS, V>([&](int r, int v) {
        sums[r][v] = IN_RUNS ? add_shorts(sums[r][v], run[r][v]) : run[r][v];
      });
    }
  }
  // Add the products of one four of values; rows are `stride` bytes apart.
  template <Words KIND, int ROWS, int V>
  static INLINE void add_quad(const int8_t* x, int64_t stride, const rw (&loaded)[V],
                              ri (&sums)[ROWS][V]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      uint32_t quad;
      memcpy(&quad, x + r * stride, sizeof quad);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
        sums[r][v] = are_small(KIND) ? add_small_dot(sums[r][v], loaded[v], quad)
                                     : add_dot(sums[r][v], loaded[v], quad);
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
