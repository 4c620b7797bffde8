// Products of quantized rows and coded weights on vectors.
#pragma once

#include <array>
#include <utility>

#include "gemm_integers_layout.h"

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
  // Registers across a panel: for all columns, or for a part of them.
  static constexpr int across(int rows) {
    constexpr int ALL = COLUMNS / WORDS;
    if (HAS_SQUARES && rows > 2) return ALL / 4;  // sums and totals would fill all registers
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
#if HAS_SQUARES
      for (int64_t pair = 0; pair < part.quads / 2; pair++)
        for (int c = 0; c < COLUMNS; c += WORDS, to += 2 * REGISTER) {
          rw eights[2];
          eights_at<KIND>(at.codes, part.lower_bytes, pair, c, table, eights);
          store_words(to, eights[0]);
          store_words(to + REGISTER, eights[1]);
        }
#else
      for (int64_t pair = 0; pair < part.quads / 2; pair++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, to += COLUMNS * 4)
#pragma GCC unroll 8
          for (int c = 0; c < COLUMNS; c += WORDS)
            store_words(to + c * 4, codes_at<KIND>(at.codes, part.lower_bytes, pair, i, c, table));
#endif
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
#if HAS_SQUARES
  // Load eight codes of the first two and of the last two of WORDS columns.
  template <Words KIND>
  static INLINE void eights_at(const char* codes, int64_t upper, int64_t eight, int column,
                               rw table, rw (&to)[2]) {
    if constexpr (are_split(KIND)) {
      join_quads(codes_at<KIND>(codes, upper, eight, 0, column, table),
                 codes_at<KIND>(codes, upper, eight, 1, column, table), to);
    } else {
      to[0] = load_words(codes + quad_place(2 * eight, column));
      to[1] = load_words(codes + quad_place(2 * eight, column) + REGISTER);
    }
  }
  // Add the products of one group. An odd row is paired with itself.
  template <Words KIND, int ROWS, int V>
  static INLINE void add_group(const IntegerPart& part, int64_t g, const char* codes,
                               int64_t quads, int column, rw table, ri (&sums)[ROWS][V]) {
    constexpr int EVEN = ROWS + ROWS % 2, LAST = ROWS - 1;
    const int8_t* x = part.codes + g * part.codes_bytes;
    const int64_t upper = quads / 2 * COLUMNS * 4;  // bytes of the lower bits
    const int64_t stride = quads * QUAD;
    ri squares[EVEN][V];
    each<EVEN, V>([&](int r, int v) { squares[r][v] = sums[std::min(r, LAST)][v]; });
    exchange_squares(squares);
#pragma GCC unroll 4
    for (int64_t eight = 0; eight < quads / 2; eight++, x += 2 * QUAD) {
      rw columns[V][2];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
        eights_at<KIND>(codes, upper, eight, column + v * WORDS, table, columns[v]);
#pragma GCC unroll 4
      for (int r = 0; r < EVEN; r += 2) {
        rw rows = join_eights(x + r * stride, x + std::min(r + 1, LAST) * stride);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
#pragma GCC unroll 2
          for (int i = 0; i < 2; i++)
            squares[r + i][v] = add_square(squares[r + i][v], rows, columns[v][i]);
      }
    }
    exchange_squares(squares);
    each<ROWS, V>([&](int r, int v) { sums[r][v] = squares[r][v]; });
  }
#else
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
#endif

  template <Words KIND, size_t... R>
  static constexpr std::array<Function, max_rows(KIND)> functions(std::index_sequence<R...>) {
    return {block<KIND, R + 1>...};
  }
  template <Words KIND>
  static constexpr std::array<Function, max_rows(KIND)> TABLE =
      functions<KIND>(std::make_index_sequence<max_rows(KIND)>());
};
