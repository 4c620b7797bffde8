// Linear maps with weights of 4- or 8-bit codes, whose rows are quantized to int8 codes by group.
//
// reference/rounded.py is the definition. A group's sum is an exact integer. The groups of K are
// added in order: total = fma(sum, row scale * column scale, total), after total = fma(row scale *
// sum of the row's codes, offset, total) if there are offsets. Results are therefore equal on all
// levels with FMA instructions. Threads divide only rows and columns.
#include "gemm_integers_tiles.h"
#include "gemm_tiles.h"
#include "kv_codes.h"
#include "linear.h"

// Write the codes of one group of a row of the weight to its column of a panel.
static void pack_codes(const IntegerShape& shape, const uint8_t* q, char* to) {
  int64_t step = are_nibbles(shape.words()) ? 2 * QUAD : QUAD;
  for (int64_t k = 0; k < shape.quads * QUAD; k += step, to += COLUMNS * 4) {
    uint8_t codes[2 * QUAD] = {}, word[QUAD];
    memcpy(codes, q + k, std::clamp<int64_t>(shape.group - k, 0, step));
    for (int i = 0; i < QUAD; i++)
      word[i] = step == QUAD ? codes[i] ^ (ARE_UNSIGNED ? 0 : 0x80)
                             : (codes[i] & 15) | (codes[QUAD + i] & 15) << 4;
    memcpy(to, word, QUAD);
  }
}

static void pack_panel(const PackCodes& a, const IntegerShape& shape, int64_t panel) {
  char* to = a.packed + panel * shape.panel_bytes();
  memset(to, 0, shape.panel_bytes());  // padding columns have scales of 0
  for (int64_t g = 0; g < shape.num_groups; g++, to += shape.group_bytes())
    for (int column = 0; column < COLUMNS; column++) {
      bool is_second = a.is_gated && column >= COLUMNS / 2;
      int64_t row = panel * panel_columns(a.is_gated) + column - is_second * COLUMNS / 2;
      if (row >= a.N) continue;
      row += is_second * a.N;
      int64_t at = row * shape.num_groups + g;
      pack_codes(shape, a.q + row * a.K + g * shape.group, to + column * 4);
      memcpy(to + shape.code_bytes() + column * 4, a.scale + at, sizeof(float));
      if (a.offset) memcpy(to + shape.offsets_at() + column * 4, a.offset + at, sizeof(float));
      if (a.zero) ((int16_t*)(to + shape.zeros_at()))[column] = shape.stored_zero(a.zero[at]);
    }
}

// Return the sum of codes; n is a multiple of eight.
static inline int32_t sum_of(const int8_t* codes, int64_t n) {
  typedef int8_t bytes __attribute__((vector_size(8)));
  typedef int32_t words __attribute__((vector_size(32)));
  words total{};
  for (int64_t k = 0; k < n; k += 8) {
    bytes some;
    memcpy(&some, codes + k, sizeof some);
    total += __builtin_convertvector(some, words);
  }
  int32_t sum = 0;
  for (int i = 0; i < 8; i++) sum += total[i];
  return sum;
}

// One thread's share of linear maps.
template <class Source> struct IntegerMultiplier {
  typedef IntegerVectors Path;
  static constexpr int64_t FEW_BLOCKS = 2;  // blocks of rows that each decode a panel's codes
  static constexpr int64_t MAX_PANELS = 4;  // of an item of few rows
  static constexpr int64_t MAX_BLOCK = 32;  // rows of a block, on tiles
  static inline thread_local Scratch<int8_t> code_memory;
  static inline thread_local Scratch<RowGroup> group_memory;
  static inline thread_local Scratch<char> word_memory;

  const Maps& maps;
  IntegerShape shape;
  Linear a = maps.each;  // the current map
  int64_t num_groups = shape.num_groups, panel_bytes = shape.panel_bytes();
  Range slab{0, 0};
  int8_t* codes = nullptr;     // [num_groups][rows of the slab][padded]
  RowGroup* groups = nullptr;  // [num_groups][rows of the slab]

  const char* panel(int64_t p) const { return (const char*)a.packed + p * panel_bytes; }

  Division divide(int64_t R, int threads) const {
    int64_t bytes = num_groups * (shape.padded() + sizeof(RowGroup));
    int64_t most = std::max<int64_t>(ROWS_BYTES / bytes, Path::MAX_ROWS);
    bool are_few = R <= Path::MAX_ROWS;
    return {R, most, shape.num_panels(), are_few ? MAX_PANELS : 1, !are_few, threads};
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
    int64_t n = slab.end - slab.begin;
    codes = code_memory.at_least(num_groups * n * shape.padded());
    groups = group_memory.at_least(n * num_groups);
    for (int64_t r = 0; r < n; r++) round_row(a.row<Source>(slab.begin + r), r);
  }
  void round_row(const Source* x, int64_t r) {
    int64_t n = slab.end - slab.begin, padded = shape.padded();
    int64_t zero = shape.has_zeros ? 0 : shape.zero();
    for (int64_t g = 0; g < num_groups; g++, x += shape.group) {
      int8_t* to = codes + (g * n + r) * padded;
      float scale = quantize(x, shape.group, (Int8<float>*)to);
      for (int64_t k = shape.group; k < padded; k++) to[k] = 0;
      int32_t sum = sum_of(to, padded);
      groups[g * n + r] = {scale, int32_t(-zero * sum), float(-sum), scale * float(sum)};
    }
  }

  void multiply(Range panels, const char* next_panel) {
    for (int64_t p = panels.begin; p < panels.end; p++)
      multiply_panel(p, p + 1 < panels.end ? panel(p + 1) : next_panel);
  }
  void multiply_panel(int64_t p, const char* next) {
    alignas(64) float totals[MAX_BLOCK * COLUMNS];
    int64_t n = slab.end - slab.begin;
    bool in_tiles = uses_tiles(n);
    int64_t num_blocks = divide_up(n, in_tiles ? MAX_BLOCK : Path::MAX_ROWS);
    IntegerPart part = part_of(p, next, totals);
    Words words = shape.words();
    if (are_nibbles(words) && (in_tiles || num_blocks > FEW_BLOCKS)) words = decode(part, words);
    for (int64_t b = 0; b < num_blocks; b++) {
      int64_t begin = n * b / num_blocks, end = n * (b + 1) / num_blocks;
      part.codes = codes + begin * shape.padded();
      part.groups = groups + begin;
      multiply_block(part, words, end - begin, in_tiles);
      part.next = nullptr;
      finish<Source>(a, totals, p, {slab.begin + begin, slab.begin + end});
    }
  }
  // Tiles multiply unsigned codes. The results are those of vectors.
  static bool uses_tiles(int64_t rows) {
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
  // Decode a panel's codes for all blocks of rows.
  Words decode(IntegerPart& part, Words words) {
    part.words_bytes = shape.quads * COLUMNS * 4;
    char* to = word_memory.at_least(num_groups * part.words_bytes);
    Path::decode(part, words, to);
    part.words = to;
    part.next = nullptr;
    return words == INDICES ? BYTES : DECODED;
  }
  IntegerPart part_of(int64_t p, const char* next, float* totals) const {
    return {.codes = nullptr,
            .groups = nullptr,
            .num_groups = num_groups,
            .quads = shape.quads,
            .codes_bytes = (slab.end - slab.begin) * shape.padded(),
            .num_rows = slab.end - slab.begin,
            .words = panel(p),
            .panel = panel(p),
            .words_bytes = shape.group_bytes(),
            .group_bytes = shape.group_bytes(),
            .scales_at = shape.code_bytes(),
            .offsets_at = shape.has_offsets ? shape.offsets_at() : 0,
            .zeros_at = shape.has_zeros ? shape.zeros_at() : 0,
            .table = shape.has_table ? (const char*)a.packed + shape.table_at() : nullptr,
            .next = next,
            .totals = totals};
  }
};

void multiply_integers(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  IntegerShape shape{a.N, a.K, a.bits, a.group, a.has_zeros != 0, a.has_offsets != 0,
                     a.has_table != 0, a.is_gated()};
  if (a.is_bf16) IntegerMultiplier<bf16>{maps, shape}.run(team);
  else IntegerMultiplier<float>{maps, shape}.run(team);
}

extern "C" {
// Return the number of bytes of a packed weight.
int64_t specserve_integer_bytes(int64_t N, int64_t K, int64_t bits, int64_t group,
                                int64_t has_zeros, int64_t has_offsets, int64_t has_table,
                                int64_t is_gated) {
  IntegerShape shape{N,   K, bits, group, has_zeros != 0, has_offsets != 0, has_table != 0,
                     is_gated != 0};
  return shape.packed_bytes();
}

void specserve_pack_integers(const void* args, const Step&, Team& team) {
  const PackCodes& a = *(const PackCodes*)args;
  IntegerShape shape{a.N, a.K, a.bits, a.group, a.zero != nullptr, a.offset != nullptr,
                     a.table != nullptr, a.is_gated != 0};
  for (int64_t p = team.take(); p < shape.num_panels(); p = team.take()) {
    char* table = a.packed + shape.table_at();
    for (int i = 0; i < 64 && p == 0 && a.table; i++) table[i] = a.table[i % 16] + BYTE_ZERO;
    pack_panel(a, shape, p);
  }
}
}
