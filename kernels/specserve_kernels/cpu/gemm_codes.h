// A packed weight of codes, and the parts in which it is multiplied.
//
// K is counted in pairs. A panel has 32 columns, as that of other weights, and holds its groups one
// after the other; a group is
//   [32] zeros, a byte each, and as many bytes of padding, if the weight has zeros
//   [32] shifts, float, if the weight has offsets: a value is (code + shift) * scale
//   its codes: of 8 bits as [pairs][32][2] bytes, of 4 bits as [pairs / 4][32] words
//   [32] scales, float
// A word's lower half has the first code of each of its four pairs, the lowest bits those of the
// first pair, and its upper half the second codes. Of 8 bits, codes and zeros are less by 128. A
// group is padded with codes that mean 0, to so many pairs that vectors and tiles can divide.
#pragma once

#include "gemm.h"

constexpr int64_t BLOCK_PAIRS = 64;  // that are decoded before rows are multiplied by them
constexpr int64_t QUAD = 4;          // pairs that are decoded together
// Behind a row's values in a block, whose sums in each of its groups stand there if there are shifts.
constexpr int64_t MAX_GROUPS = BLOCK_PAIRS / QUAD;

// Some pairs of one group, or several whole groups.
struct Block {
  int64_t group, num_groups;  // the first
  int64_t begin, pairs;       // of each group
  bool begins, ends;          // whether it has a group's first pair, and its last one
};

struct CodeShape {
  int64_t N, K, bits, group;
  bool has_zeros, has_shifts, is_gated;
  int64_t num_groups = K / group, group_pairs = padded(group) / 2;
  // Groups of a block, if they are that small; else blocks of a group.
  int64_t block_groups = std::max<int64_t>(BLOCK_PAIRS / group_pairs, 1);
  int64_t group_blocks = divide_up(group_pairs, BLOCK_PAIRS);

  static int64_t padded(int64_t group) {
    int64_t unit = group < 128 ? 2 * QUAD : 2 * TILE_WORDS;
    return divide_up(group, unit) * unit;
  }
  int64_t num_panels() const { return divide_up(N, panel_columns(is_gated)); }
  // Before a group's codes: zeros, or shifts, or neither.
  int64_t zero_bytes() const { return has_zeros ? 2 * COLUMNS : has_shifts ? 4 * COLUMNS : 0; }
  int64_t pair_bytes() const { return COLUMNS * 2 * bits / 8; }
  int64_t code_bytes() const { return group_pairs * pair_bytes(); }
  int64_t border_bytes() const { return zero_bytes() + COLUMNS * sizeof(float); }
  int64_t group_bytes() const { return code_bytes() + border_bytes(); }
  int64_t panel_bytes() const { return num_groups * group_bytes(); }

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
  // Where a block's codes begin in a panel.
  int64_t offset(const Block& b) const {
    return b.group * group_bytes() + zero_bytes() + b.begin * pair_bytes();
  }
};

// One multiplication: a block of rows times a block of a panel, whose codes it reads, or the words
// that another block of rows has left. Sums of a group go through memory between blocks, which
// changes no bit of them; those of all groups always do.
struct CodePart {
  const void* rows;     // as Path::pack left them
  uint32_t* words;      // of the block, as the path multiplies them; for other rows
  const char *codes, *zeros, *shifts, *scales;  // of the first group; null where there are none
  int64_t num_groups, pairs;           // of each group
  int64_t group_bytes, panel_bytes;    // from a group to the next, and from a panel
  int64_t border_bytes;                // between the codes of two groups
  int64_t ahead;                       // bytes from codes to those that are prefetched beside them
  float *sums, *totals;                // [rows][32]
  bool begins, ends;

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
  // The sum of a row's values in a group; rows stand `stride` values apart.
  INLINE float row_sum(int64_t row, int64_t group, int64_t stride) const {
    return ((const float*)rows)[(row + 1) * stride - MAX_GROUPS + group];
  }
};
// How a block of rows is multiplied by codes: they are used for nothing else, or their words are left
// in memory, or several panels are multiplied at once, whose sums follow each other, MAX_ROWS rows
// each.
enum CodeUse { ONCE, LEAVE, SEVERAL_PANELS };
typedef void (*CodeMultiplying)(const CodePart&, int rows, CodeUse use);
