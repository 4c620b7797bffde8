// The layout of coded weights whose rows are quantized too, and the sums of a group.
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
// fill a cache line. 8-bit codes and tables are stored as `dot.h` multiplies them. If it multiplies
// squares, two consecutive words of 8-bit codes of a column are adjacent.
#pragma once

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

// Return the place of four 8-bit codes of a column in a group.
constexpr int64_t quad_place(int64_t quad, int64_t column) {
  if (HAS_SQUARES) return (quad / 2 * COLUMNS + column) * 2 * QUAD + quad % 2 * QUAD;
  return (quad * COLUMNS + column) * QUAD;
}

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
