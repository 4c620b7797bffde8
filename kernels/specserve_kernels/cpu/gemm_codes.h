// The layout of packed coded weights, and the parts in which they are multiplied.
//
// K is counted in pairs. A panel has 32 columns and holds its groups one after the other. A group
// consists of four arrays.
//   Zeros, if the weight has any: [32] bytes, and 32 bytes of padding.
//   Shifts, if the weight has offsets: [32] float. A value is (code + shift) * scale.
//   Codes: [pairs][32][2] bytes for 8 bits, [pairs / 4][32] words for 4 bits.
//   Scales: [32] float.
// A word of 4-bit codes holds four pairs, the first in the lowest bits of its halves. The lower
// half has the first codes, the upper half the second codes. 8-bit codes and zeros are stored minus
// 128. Groups are padded to a multiple of the pairs of vectors and tiles, with any codes, because
// rows are padded with zeros.
//
// A table of 4-bit codes, if there is one, follows the panels: twice its 16 values as bf16, which are
// exact, then the values as floats.
#pragma once

#include "gemm.h"

constexpr int64_t BLOCK_PAIRS = 64;  // pairs per block
constexpr int64_t QUAD = 4;          // pairs that are decoded together
// Maximum groups of a block. If the weight has shifts, a row's sums by group follow its values.
constexpr int64_t MAX_GROUPS = BLOCK_PAIRS / QUAD;

// The values of 4-bit codes.
struct Table {
  uint16_t pairs[32];  // bf16, each value twice, because an index has five bits
  float values[16];
};
// What a stored code means: code - middle, code - zero, or table[code].
enum Meaning { CENTERED, WITH_ZEROS, BY_TABLE };

// Some pairs of one group, or several whole groups.
struct Block {
  int64_t group, num_groups;  // first group, number of groups
  int64_t begin, pairs;       // of each group
  bool begins, ends;          // contains a group's first pair, its last pair
};

struct CodeShape {
  int64_t N, K, bits, group;
  bool has_zeros, has_shifts, has_table, is_gated;
  int64_t num_groups = K / group, group_pairs = padded(group) / 2;
  // Groups per block if groups are small; blocks per group otherwise.
  int64_t block_groups = std::max<int64_t>(BLOCK_PAIRS / group_pairs, 1);
  int64_t group_blocks = divide_up(group_pairs, BLOCK_PAIRS);

  static int64_t padded(int64_t group) {
    int64_t unit = group < 128 ? 2 * QUAD : 2 * TILE_WORDS;
    return divide_up(group, unit) * unit;
  }
  int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  // Return the bytes before a group's codes, for zeros or shifts.
  int64_t zero_bytes() const { return has_zeros ? 2 * COLUMNS : has_shifts ? 4 * COLUMNS : 0; }
  Meaning meaning() const { return has_table ? BY_TABLE : has_zeros ? WITH_ZEROS : CENTERED; }
  int64_t pair_bytes() const { return COLUMNS * 2 * bits / 8; }
  int64_t code_bytes() const { return group_pairs * pair_bytes(); }
  int64_t border_bytes() const { return zero_bytes() + COLUMNS * sizeof(float); }
  int64_t group_bytes() const { return code_bytes() + border_bytes(); }
  int64_t panel_bytes() const { return num_groups * group_bytes(); }
  int64_t table_offset() const { return num_panels() * panel_bytes(); }
  int64_t packed_bytes() const { return table_offset() + (has_table ? sizeof(Table) : 0); }

  int64_t num_blocks() const { return divide_up(num_groups, block_groups) * group_blocks; }
  Block block(int64_t i) const {
    if (group_blocks == 1) {
      int64_t first = i * block_groups;
      return {first, std::min(block_groups, num_groups - first), 0, group_pairs, true, true};
    }
    int64_t begin = i % group_blocks * BLOCK_PAIRS;
    int64_t pairs = std::min(BLOCK_PAIRS, group_pairs - begin);
    return {i / group_blocks, 1, begin, pairs, begin == 0, begin + pairs == group_pairs};
  }
  // Return the offset of a block's codes in a panel.
  int64_t offset(const Block& b) const {
    return b.group * group_bytes() + zero_bytes() + b.begin * pair_bytes();
  }
};

// One multiplication: a block of rows times a block of a panel. It decodes the panel's codes, or
// reads words that another block of rows stored. Between blocks, a group's sums go through memory,
// which does not change them. Totals over groups are always in memory.
struct CodePart {
  const void* rows;     // packed
  uint32_t* words;      // decoded, for other rows
  const char *codes, *zeros, *shifts, *scales;  // of the first group, or null
  int64_t num_groups, pairs;           // pairs per group
  int64_t group_bytes, panel_bytes;    // strides
  int64_t border_bytes;                // between codes of groups
  int64_t ahead;                       // prefetch distance
  float *sums, *totals;                // [rows][32]
  bool begins, ends;
  const Table* table;  // or null

  const int8_t* zeros_of(int64_t group, int64_t panel = 0) const {
    return (const int8_t*)(zeros + group * group_bytes + panel * panel_bytes);
  }
  const float* shifts_of(int64_t group, int64_t panel = 0) const {
    return (const float*)(shifts + group * group_bytes + panel * panel_bytes);
  }
  const float* scales_of(int64_t group, int64_t panel = 0) const {
    return (const float*)(scales + group * group_bytes + panel * panel_bytes);
  }
  const char* codes_of(int64_t group) const { return codes + group * group_bytes; }
  INLINE void prefetch_border(const char* codes) const {
    for (int64_t byte = 0; byte < border_bytes; byte += 64)
      __builtin_prefetch(codes + ahead + byte, 0, 0);
  }
  // Return the sum of a row's values in a group; rows are `stride` values apart.
  INLINE float row_sum(int64_t row, int64_t group, int64_t stride) const {
    return ((const float*)rows)[(row + 1) * stride - MAX_GROUPS + group];
  }
};
// Modes of multiplying a block of rows by codes. ONCE: no other rows use the codes. LEAVE: store
// the decoded words for other rows. SEVERAL_PANELS: multiply several panels at once; their sums are
// contiguous, MAX_ROWS rows each.
enum CodeUse { ONCE, LEAVE, SEVERAL_PANELS };
typedef void (*CodeMultiplying)(const CodePart&, int rows, CodeUse use);
