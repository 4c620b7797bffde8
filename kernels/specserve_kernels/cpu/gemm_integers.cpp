// Linear maps with weights of 4- or 8-bit codes, whose rows are quantized to int8 codes by group.
//
// reference/rounded.py is the definition. A group's sum is an exact integer. The groups of K are
// added in order: total = fma(sum, row scale * column scale, total), after total = fma(row scale *
// sum of the row's codes, offset, total) if there are offsets. Results are therefore equal on all
// levels with FMA instructions. Threads divide only rows and columns.
#include "gemm_integers_tiles.h"
#include "gemm_tiles.h"
#include "linear.h"
#include "row_codes.h"

// Arguments of packing a weight. `base` is subtracted from each code.
struct PackIntegers : PackCodes {
  int64_t base, scaling;
};

// Write the codes of one group of a row of the weight to its column of a panel.
static void pack_codes(const IntegerShape& shape, const uint8_t* q, int base, int column,
                       char* to) {
  Words words = shape.words();
  int upper = upper_bits(words);
  char* tops = to + shape.lower_bytes() + column * 4;
  int64_t step = are_split(words) ? 2 * QUAD : QUAD;
  for (int64_t k = 0; k < shape.padded(); k += step) {
    uint8_t codes[2 * QUAD] = {}, word[QUAD];
    for (int64_t i = 0; i < std::clamp<int64_t>(shape.group - k, 0, step); i++)
      codes[i] = q[k + i] - base;
    for (int i = 0; i < QUAD; i++)
      word[i] = step == QUAD ? codes[i] ^ (ARE_UNSIGNED ? 0 : 0x80)
                             : (codes[i] & 15) | (codes[QUAD + i] & 15) << 4;
    int64_t place = step == QUAD ? quad_place(k / QUAD, column) : (k / step * COLUMNS + column) * 4;
    memcpy(to + place, word, QUAD);
    for (int i = 0; upper && i < step; i++) {
      int64_t four = k / QUAD + i / QUAD, per_word = 8 / upper;
      tops[four / per_word * COLUMNS * 4 + i % QUAD] |=
          codes[i] >> 4 << four % per_word * upper;
    }
  }
}

// Write the numbers of a block's groups to its column. `counts` bytes after the numbers begin those
// of the first group, and `between` bytes further those of the next.
static void pack_numbers(const IntegerShape& shape, const float* x, int column, char* numbers,
                         char* counts, int64_t between) {
  if (shape.scaling == SINGLES) {
    memcpy(numbers + column * 4, x, 4);
    return;
  }
  int number = 0;
  if (shape.scaling == BF16S) number = std::bit_cast<uint32_t>(*x) >> 16;
  if (shape.scaling == HALVES) number = half_of(*x);
  if (shape.scaling == PRODUCTS) {
    Products products = products_of(x, shape.block_groups);
    number = products.factor;
    for (int64_t i = 0; i < shape.block_groups; i++)
      counts[i * between + column] = products.counts[i];
  }
  uint16_t bits = number;
  memcpy(numbers + column * 2, &bits, 2);
}

static void pack_block(const PackIntegers& a, const IntegerShape& shape, int64_t row,
                       int64_t first, int column, char* border) {
  int64_t at = row * shape.num_groups + first;
  char* counts = border + shape.counts_at();
  int64_t between = (1 + shape.has_offsets) * COLUMNS;
  pack_numbers(shape, a.scale + at, column, border, counts, between);
  if (a.offset)
    pack_numbers(shape, a.offset + at, column, border + shape.numbers_bytes(), counts + COLUMNS,
                 between);
  if (a.zero) ((int16_t*)(border + shape.zeros_at()))[column] = shape.stored_zero(a.zero[at]);
  char* to = border + shape.border_bytes();
  for (int64_t g = first; g < first + shape.block_groups; g++, to += shape.code_bytes())
    pack_codes(shape, a.q + row * a.K + g * shape.group, a.base, column, to);
}

static void pack_panel(const PackIntegers& a, const IntegerShape& shape, int64_t panel) {
  char* to = a.packed + panel * shape.panel_bytes();
  memset(to, 0, shape.panel_bytes());  // padding columns have scales of 0
  for (int64_t g = 0; g < shape.num_groups; g += shape.block_groups, to += shape.block_bytes())
    for (int column = 0; column < COLUMNS; column++) {
      bool is_second = a.is_gated && column >= COLUMNS / 2;
      int64_t row = panel * panel_columns(a.is_gated) + column - is_second * COLUMNS / 2;
      if (row >= a.N) continue;
      pack_block(a, shape, row + is_second * a.N, g, column, to);
    }
}

// Quantized rows of a linear map, in blocks that are multiplied at once.
//
// A block of n rows contains codes [num_groups][n][padded] and RowGroup [num_groups][n]. Blocks
// follow one another.
struct IntegerRows {
  int8_t* codes = nullptr;
  RowGroup* groups = nullptr;
  int64_t first = 0;  // row of the first block
};

// Memory of rows. One is shared by a team, because only one team of several threads runs at a time.
struct RowMemory {
  Scratch<int8_t> codes;
  Scratch<RowGroup> groups;
};

// One thread's share of linear maps.
template <class Source> struct IntegerMultiplier {
  typedef IntegerVectors Path;
  static constexpr int64_t FEW_BLOCKS = 2;  // blocks of rows that each decode a panel's codes
  static constexpr int64_t MAX_PANELS = 4;  // of an item of few rows
  static constexpr int64_t MAX_BLOCK = 32;  // rows of a block, on tiles
  static constexpr int64_t SHARED_VALUES = 1 << 15;  // minimum values of rows worth a barrier
  static constexpr int64_t SHARED_BYTES = 4 << 20;   // maximum bytes of shared rows
  static inline thread_local RowMemory own_memory;
  static inline RowMemory& shared_memory = *new RowMemory;  // threads may run at process exit
  static inline thread_local Scratch<char> word_memory;

  const Maps& maps;
  IntegerShape shape, decoded_shape = shape.decoded();
  Linear a = maps.each;  // the current map
  int64_t num_groups = shape.num_groups, panel_bytes = shape.panel_bytes();
  int64_t row_bytes = num_groups * (shape.padded() + sizeof(RowGroup));
  Range slab{0, 0};
  IntegerRows rows{};
  bool are_shared = false;  // all threads have quantized `rows` together

  const char* panel(int64_t p) const { return (const char*)a.packed + p * panel_bytes; }

  Division divide(int64_t R, int threads) const {
    int64_t most = std::max<int64_t>(ROWS_BYTES / row_bytes, Path::MAX_ROWS);
    bool are_few = R <= Path::MAX_ROWS;
    return {R, most, shape.num_panels(), are_few ? MAX_PANELS : 1, !are_few, threads};
  }

  // Whether threads quantize each row once, instead of once each.
  static bool shares_rows(const Maps& maps, const Team& team) {
    bool is_single = maps.num_maps == 1 && !maps.begins && !maps.packed;
    return team.size > 1 && is_single && maps.num_rows * maps.each.K >= SHARED_VALUES;
  }
  int64_t max_shared_rows() const { return std::max<int64_t>(SHARED_BYTES / row_bytes, 1); }

  // Quantize all rows of a single map.
  void share_rows(Team& team) {
    int64_t R = maps.num_rows, num_codes = R * num_groups * shape.padded();
    RowMemory& memory = shared_memory;
    if (memory.codes.size < num_codes || memory.groups.size < R * num_groups) {
      team.wait();  // all threads have compared sizes
      if (team.id == 0) {
        memory.codes.at_least(num_codes);
        memory.groups.at_least(R * num_groups);
      }
      team.wait();
    }
    rows = {memory.codes.memory.get(), memory.groups.memory.get(), 0};
    are_shared = true;
    a = maps.of(0);
    Division division = divide(R, team.size);
    int64_t i = team.take(), first = 0;
    for (int64_t s = 0; s < division.num_slabs; s++) {
      Range each = division.slab(s * division.groups);
      int64_t behind = first + num_blocks(each);
      for (; i < behind; i = team.take()) quantize_block(block(each, i - first));
      first = behind;
    }
    team.wait();
  }

  void run(Team& team) {
    Items items(maps, [&](int64_t R, int threads) { return divide(R, threads); }, team.size);
    Item item = items.at(team.take());
#if HAS_TILES
    IntegerTiles::begin();
#endif
    for (int64_t map = -1; item.map >= 0;) {
      Item following = items.at(team.take());
      if (map != item.map) take_map(map = item.map);
      take_slab(item.slab);
      const Item& next = following.map < 0 ? item : following;
      multiply(item.panels,
               (const char*)maps.packed_of(next.map) + next.panels.begin * panel_bytes);
      item = following;
    }
#if HAS_TILES
    IntegerTiles::end();
#endif
  }

  void take_map(int64_t map) {
    a = maps.of(map);
    slab = {0, 0};
  }

  void take_slab(Range next) {
    if (next.begin == slab.begin && next.end == slab.end) return;
    slab = next;
    if (are_shared) return;
    int64_t n = (slab.end - slab.begin) * num_groups;
    rows = {own_memory.codes.at_least(n * shape.padded()), own_memory.groups.at_least(n),
            slab.begin};
    for (int64_t b = 0; b < num_blocks(slab); b++) quantize_block(block(slab, b));
  }

  // The blocks of a slab.
  bool decodes(Range slab) const {
    int64_t n = slab.end - slab.begin;
    bool are_few = n <= FEW_BLOCKS * Path::max_rows(shape.words());
    return are_split(shape.words()) && (uses_tiles(n) || !are_few);
  }
  int64_t num_blocks(Range slab) const {
    int64_t n = slab.end - slab.begin;
    int most = decodes(slab) ? Path::MAX_ROWS : Path::max_rows(shape.words());
    return divide_up(n, uses_tiles(n) ? MAX_BLOCK : most);
  }
  Range block(Range slab, int64_t b) const {
    int64_t n = slab.end - slab.begin, blocks = num_blocks(slab);
    return {slab.begin + n * b / blocks, slab.begin + n * (b + 1) / blocks};
  }
  int8_t* codes_of(Range block) const {
    return rows.codes + (block.begin - rows.first) * num_groups * shape.padded();
  }
  RowGroup* groups_of(Range block) const {
    return rows.groups + (block.begin - rows.first) * num_groups;
  }
  void quantize_block(Range block) const {
    int64_t n = block.end - block.begin, padded = shape.padded();
    RowCodes to{codes_of(block), n * padded, padded, groups_of(block), n,
                shape.has_zeros ? 0 : shape.middle()};
    for (int64_t r = block.begin; r < block.end; r++, to.codes += padded, to.groups++)
      quantize_row(a.row<Source>(r), num_groups, shape.group, to);
  }

  void multiply(Range panels, const char* next) {
    for (int64_t p = panels.begin; p < panels.end; p++) multiply_panel(p, panels.end, next);
  }
  void multiply_panel(int64_t p, int64_t panels_end, const char* next) {
    alignas(64) float totals[MAX_BLOCK * COLUMNS];
    IntegerPart part = part_of(shape, panel(p), totals);
    part.behind = panel(panels_end);
    part.next = next;
    const char* following = p + 1 < panels_end ? panel(p + 1) : next;
    Words words = shape.words();
    if (decodes(slab)) {
      char* to = word_memory.at_least(decoded_shape.panel_bytes());
      Path::decode(part, words, to);
      multiply_blocks(part_of(decoded_shape, to, totals), words == NIBBLES ? DECODED : BYTES, p,
                      following);
    } else {
      multiply_blocks(part, words, p, num_blocks(slab) > 1 ? following : nullptr);
    }
  }
  // Multiply all blocks of rows. `following`: the panel that they prefetch, or null.
  void multiply_blocks(IntegerPart part, Words words, int64_t p, const char* following) {
    int64_t blocks = num_blocks(slab);
    if (following) part.next = following;
    part.next_bytes = panel_bytes / num_groups;
    for (int64_t b = 0; b < blocks; b++) {
      Range of = block(slab, b);
      if (following) part.spread = lines_of(part.next_bytes, b, blocks);
      part.num_rows = of.end - of.begin;
      part.codes_bytes = part.num_rows * shape.padded();
      part.codes = codes_of(of);
      part.groups = groups_of(of);
      multiply_block(part, words, part.num_rows, uses_tiles(slab.end - slab.begin));
      finish<Source>(a, part.totals, p, of);
    }
  }
  // The cache lines of a group that one of several blocks prefetches.
  static Range lines_of(int64_t bytes, int64_t b, int64_t blocks) {
    int64_t lines = divide_up(bytes, 64);
    return {lines * b / blocks * 64, lines * (b + 1) / blocks * 64};
  }
  // Tiles multiply unsigned codes. The results are those of vectors.
  static bool uses_tiles([[maybe_unused]] int64_t rows) {
#if HAS_TILES
    return ARE_UNSIGNED && rows > Path::MAX_ROWS && Tiles::are_usable();
#else
    return false;
#endif
  }
  static void multiply_block(const IntegerPart& part, Words words, int rows, bool in_tiles) {
#if HAS_TILES
    if (in_tiles) return IntegerTiles::multiply(part, rows);
#endif
    Path::multiply(part, words, rows);
  }
  IntegerPart part_of(const IntegerShape& shape, const char* panel, float* totals) const {
    return {.shape = shape,
            .codes = nullptr,
            .groups = nullptr,
            .codes_bytes = 0,
            .num_rows = 0,
            .panel = panel,
            .table = shape.has_table ? (const char*)a.packed + shape.table_at() : nullptr,
            .behind = nullptr,
            .next = nullptr,
            .totals = totals};
  }
};

template <class Source>
static void multiply_of(const Maps& maps, const IntegerShape& shape, Team& team) {
  typedef IntegerMultiplier<Source> Multiplier;
  if (!Multiplier::shares_rows(maps, team)) return Multiplier{maps, shape}.run(team);
  int64_t most = Multiplier{maps, shape}.max_shared_rows();
  for (int64_t r = 0; r < maps.num_rows; r += most) {
    if (r > 0) team.wait();
    Linear rest = maps.each.from(r);
    Multiplier each{Maps{rest, std::min(most, maps.num_rows - r)}, shape};
    each.share_rows(team);
    each.run(team);
  }
}

void multiply_integers(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  IntegerShape shape{a.N, a.K, a.bits, a.group, a.has_zeros != 0, a.has_offsets != 0,
                     a.has_table != 0, a.is_gated(), a.zero, a.scaling};
  if (a.is_bf16) multiply_of<bf16>(maps, shape, team);
  else multiply_of<float>(maps, shape, team);
}

extern "C" {
// Return the number of bytes of a packed weight.
int64_t specserve_integer_bytes(int64_t N, int64_t K, int64_t bits, int64_t group,
                                int64_t has_zeros, int64_t has_offsets, int64_t has_table,
                                int64_t scaling, int64_t is_gated) {
  IntegerShape shape{N, K, bits, group, has_zeros != 0, has_offsets != 0, has_table != 0,
                     is_gated != 0, 0, scaling};
  return shape.packed_bytes();
}

// Return which forms besides SINGLES represent all numbers exactly: bit 1 << BF16S, and so on. Each
// block of `block` numbers has one factor; 0: there are no blocks.
int64_t specserve_scalings(const float* x, int64_t count, int64_t block) {
  bool are_bf16 = true, are_halves = true, are_products = block > 0;
  for (int64_t i = 0; i < count && (are_halves || are_bf16); i++) {
    are_bf16 &= (std::bit_cast<uint32_t>(x[i]) & 0xffff) == 0;
    are_halves &= half_of(x[i]) >= 0;
  }
  for (int64_t i = 0; i < count && are_products; i += block)
    are_products = products_of(x + i, block).factor >= 0;
  return are_bf16 << BF16S | are_halves << HALVES | are_products << PRODUCTS;
}

void specserve_pack_integers(const void* args, const Step&, Team& team) {
  const PackIntegers& a = *(const PackIntegers*)args;
  IntegerShape shape{a.N, a.K, a.bits, a.group, a.zero != nullptr, a.offset != nullptr,
                     a.table != nullptr, a.is_gated != 0, 0, a.scaling};
  for (int64_t p = team.take(); p < shape.num_panels(); p = team.take()) {
    char* table = a.packed + shape.table_at();
    for (int i = 0; i < 64 && p == 0 && a.table; i++) table[i] = a.table[i % 16] + BYTE_ZERO;
    pack_panel(a, shape, p);
  }
}
}
