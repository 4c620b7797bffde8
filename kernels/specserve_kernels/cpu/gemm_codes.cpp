// Linear maps with weights of 4- or 8-bit codes: packing, and multiplying rows by them.
//
// The groups of K are added in order. A group's sum of x * (code - zero) has the same order for any
// row. Then total = fma(sum, scale, total). A shift is multiplied by the sum of x, as the first or
// last term of a sum. Threads divide only rows and columns.
#include "gemm_codes_tiles.h"
#include "gemm_codes_vectors.h"
#include "gemm_tiles.h"
#include "linear.h"

// A row of the weight, which becomes a column of a panel.
struct Column {
  const uint8_t *q, *zero;
  const float *scale, *offset;
};

static void pack_quad(const uint8_t* q, int64_t bits, int column, char* quad) {
  if (bits == 8) {
    for (int p = 0; p < QUAD; p++)
      for (int i = 0; i < 2; i++) quad[(p * COLUMNS + column) * 2 + i] = q[2 * p + i] ^ 0x80;
    return;
  }
  uint32_t word = 0;
  for (int i = 0; i < 2 * QUAD; i++) word |= uint32_t(q[i] & 15) << (i / 2 * 4 + i % 2 * 16);
  memcpy(quad + column * 4, &word, 4);
}

static void pack_table(const int8_t* from, Table* to) {
  for (int i = 0; i < 16; i++) {
    to->values[i] = from[i];
    to->pairs[i] = to->pairs[i + 16] = __builtin_bit_cast(uint32_t, to->values[i]) >> 16;
  }
}

// Whether all values of a group equal its offset in float arithmetic, for example with a scale of
// 0.
static bool is_flat(const Column& from, int64_t g) {
  return from.offset && !(fabsf(from.offset[g]) < 0x1p32f * fabsf(from.scale[g]));
}

static void pack_group(const CodeShape& shape, const Column& from, int64_t g, int column,
                       char* to) {
  uint8_t zero = from.zero ? from.zero[g] : 1 << (shape.bits - 1);
  bool has_codes = !is_flat(from, g);
  float scale = has_codes ? from.scale[g] : 1;
  if (shape.has_zeros) to[column] = shape.bits == 8 ? zero ^ 0x80 : zero;
  if (shape.has_shifts) ((float*)to)[column] = from.offset[g] / scale;
  const uint8_t* q = from.q + g * shape.group;
  char* quad = to + shape.zero_bytes();
  for (int64_t k = 0; k < 2 * shape.group_pairs; k += 2 * QUAD, quad += QUAD * shape.pair_bytes()) {
    uint8_t codes[2 * QUAD];
    int64_t n = has_codes ? std::clamp<int64_t>(shape.group - k, 0, 2 * QUAD) : 0;
    memset(codes, zero, sizeof codes);
    memcpy(codes, q + k, n);
    pack_quad(codes, shape.bits, column, quad);
  }
  ((float*)quad)[column] = scale;
}

static void pack_panel(const PackCodes& a, const CodeShape& shape, int64_t panel) {
  char* to = a.packed + panel * shape.panel_bytes();
  memset(to, 0, shape.panel_bytes());  // padding columns have scales of 0
  for (int64_t g = 0; g < shape.num_groups; g++, to += shape.group_bytes())
    for (int column = 0; column < COLUMNS; column++) {
      bool is_second = a.is_gated && column >= COLUMNS / 2;
      int64_t row = panel * panel_columns(a.is_gated) + column - is_second * COLUMNS / 2;
      if (row >= a.N) continue;
      row += is_second * a.N;
      int64_t at = row * shape.num_groups;
      Column from{a.q + row * a.K, a.zero ? a.zero + at : nullptr, a.scale + at,
                  a.offset ? a.offset + at : nullptr};
      pack_group(shape, from, g, column, to);
    }
}

// One thread's share of linear maps.
template <class Path> struct CodeMultiplier {
  typedef typename Path::Value Value;
  typedef typename Path::Source Source;
  static constexpr int64_t PREFETCHED = 8 << 10;  // prefetch distance in bytes
  static inline thread_local Scratch<Value> row_memory;
  static inline thread_local Scratch<float> sum_memory;
  static inline thread_local Scratch<uint32_t> word_memory;

  const Maps& maps;
  CodeShape shape;
  Linear a = maps.each;  // the current map
  int64_t num_blocks = shape.num_blocks(), panel_bytes = shape.panel_bytes();
  CodeMultiplying by_codes = Path::by_codes(shape.bits, shape.meaning());
  Range slab{0, 0};
  Value* rows = nullptr;  // [blocks][rows of the slab][STRIDE]
  uint32_t* words = word_memory.at_least(BLOCK_PAIRS * Path::PER_PAIR * COLUMNS);

  const char* panel(int64_t p) const { return (const char*)a.packed + p * panel_bytes; }
  const char* first_of(const Item& item) const {
    return (const char*)maps.packed_of(item.map) + item.panels.begin * panel_bytes;
  }
  static bool are_few(int64_t R) { return R <= Path::MAX_ROWS; }
  static int64_t wide(int64_t R) { return are_few(R) ? Path::panels(R) : 1; }

  Division divide(int64_t R, int threads) const {
    int64_t row_bytes = num_blocks * BLOCK_PAIRS * Path::PER_PAIR * sizeof(Value);
    int64_t most = std::max<int64_t>(ROWS_BYTES / row_bytes, Path::MAX_ROWS);
    return {R, most, shape.num_panels(), wide(R), !are_few(R), threads};
  }

  void run(Team& team) {
    Items items(maps, [&](int64_t R, int threads) { return divide(R, threads); }, team.size);
    Item item = items.at(team.take());
    if (item.map >= 0) Path::begin();
    for (int64_t map = -1; item.map >= 0;) {
      Item following = items.at(team.take());
      if (map != item.map) take_map(map = item.map);
      take_slab(item.slab);
      const char* next = first_of(following.map < 0 ? item : following);
      if (are_few(item.num_rows)) multiply_few(item.panels, next, wide(item.num_rows));
      else multiply_many(item.panels.begin, next);
      item = following;
    }
    Path::end();
  }

  void take_map(int64_t map) {
    a = maps.of(map);
    slab = {0, 0};
  }

  void take_slab(Range next) {
    if (next.begin == slab.begin && next.end == slab.end) return;
    slab = next;
    int64_t n = slab.end - slab.begin;
    rows = row_memory.at_least(num_blocks * n * Path::STRIDE);
    for (int64_t i = 0; i < num_blocks; i++) {
      Block block = shape.block(i);
      Value* to = rows_of(i);
      for (int64_t r = 0; r < n; r++, to += Path::STRIDE) {
        const Source* x = a.row<Source>(slab.begin + r);
        pack_row(x, block, to);
        if (shape.has_shifts) sum_row(x, block, (float*)(to + Path::STRIDE - MAX_GROUPS));
      }
    }
  }
  Value* rows_of(int64_t block) { return rows + block * (slab.end - slab.begin) * Path::STRIDE; }

  // Pack a row's values in the groups of a block; pad each group with zeros.
  void pack_row(const Source* x, const Block& block, Value* to) {
    constexpr int64_t RATIO = Path::PER_PAIR * sizeof(Value) / 2;  // bytes per value
    for (int64_t g = 0; g < block.num_groups; g++, to += block.pairs * Path::PER_PAIR) {
      int64_t n = std::min(2 * block.pairs, shape.group - 2 * block.begin);
      Path::pack(x + (block.group + g) * shape.group + 2 * block.begin, n, to);
      memset((char*)to + n * RATIO, 0, (2 * block.pairs - n) * RATIO);
    }
  }
  void sum_row(const Source* x, const Block& block, float* to) {
    for (int64_t g = 0; g < block.num_groups; g++) {
      vf total{};
      for (int64_t i = 0; i < shape.group; i += LANES)
        total += load_up_to(x + (block.group + g) * shape.group + i,
                            std::min<int64_t>(shape.group - i, LANES));
      to[g] = sum(total);
    }
  }

  // Multiply few rows by some panels: `wide` panels at once, or fewer one by one.
  void multiply_few(Range panels, const char* next_panel, int64_t wide) {
    int64_t n = slab.end - slab.begin, num_panels = panels.end - panels.begin;
    int64_t size = Path::MAX_ROWS * COLUMNS, step = num_panels == wide ? wide : 1;
    float *totals = sum_memory.at_least(2 * num_panels * size), *sums = totals + num_panels * size;
    memset(totals, 0, num_panels * size * sizeof(float));
    for (int64_t i = 0; i < num_blocks; i++) {
      int64_t ahead = ahead_of(i, panels.begin, next_panel, PREFETCHED / num_panels);
      for (int64_t p = 0; p < num_panels; p += step)
        by_codes(part_of(i, panels.begin + p, ahead, sums + p * size, totals + p * size), n,
                 step > 1 ? SEVERAL_PANELS : ONCE);
    }
    for (int64_t p = 0; p < num_panels; p++)
      finish<Source>(a, totals + p * size, panels.begin + p, slab);
  }

  // Multiply many rows by a panel. The first rows decode its codes; the others read words in L1.
  void multiply_many(int64_t p, const char* next_panel) {
    int64_t n = slab.end - slab.begin, num_parts = divide_up(n, Path::MAX_ROWS);
    float *totals = sum_memory.at_least(2 * n * COLUMNS), *sums = totals + n * COLUMNS;
    memset(totals, 0, n * COLUMNS * sizeof(float));
    for (int64_t i = 0; i < num_blocks; i++) {
      CodePart part = part_of(i, p, ahead_of(i, p, next_panel, PREFETCHED), sums, totals);
      for (int64_t b = 0; b < num_parts; b++) {
        int64_t begin = n * b / num_parts, num_rows = n * (b + 1) / num_parts - begin;
        part.rows = rows_of(i) + begin * Path::STRIDE;
        part.sums = sums + begin * COLUMNS;
        part.totals = totals + begin * COLUMNS;
        if (b == 0) by_codes(part, num_rows, LEAVE);
        else Path::multiply(part, num_rows);
      }
    }
    finish<Source>(a, totals, p, slab);
  }

  CodePart part_of(int64_t i, int64_t p, int64_t ahead, float* sums, float* totals) {
    Block block = shape.block(i);
    const char* group = panel(p) + block.group * shape.group_bytes();
    const char* scales = group + shape.zero_bytes() + shape.code_bytes();
    return {.rows = rows_of(i),
            .words = words,
            .codes = panel(p) + shape.offset(block),
            .zeros = shape.has_zeros ? group : nullptr,
            .shifts = shape.has_shifts ? group : nullptr,
            .scales = scales,
            .num_groups = block.num_groups,
            .pairs = block.pairs,
            .group_bytes = shape.group_bytes(),
            .panel_bytes = panel_bytes,
            .border_bytes = shape.border_bytes(),
            .ahead = ahead,
            .sums = sums,
            .totals = totals,
            .begins = block.begins,
            .ends = block.ends,
            .table = shape.has_table ? (const Table*)((const char*)a.packed + shape.table_offset())
                                     : nullptr};
  }
  // Return the bytes from a block to its prefetch target, perhaps in the next panel.
  int64_t ahead_of(int64_t i, int64_t p, const char* next_panel, int64_t bytes) const {
    Block block = shape.block(i);
    int64_t block_bytes = block.num_groups * block.pairs * shape.pair_bytes();
    int64_t other = i + divide_up(bytes, block_bytes);
    const char* from = panel(p) + shape.offset(block);
    if (other < num_blocks) return panel(p) + shape.offset(shape.block(other)) - from;
    return next_panel + shape.offset(shape.block((other - num_blocks) % num_blocks)) - from;
  }
};

template <class Path> static void multiply_on(const Maps& maps, Team& team) {
  const Linear& a = maps.each;
  CodeShape shape{a.N,         a.K, a.bits, a.group, a.has_zeros != 0, a.has_offsets != 0,
                  a.has_table != 0, a.is_gated()};
  CodeMultiplier<Path>{maps, shape}.run(team);
}

void multiply_codes(const Maps& maps, Team& team) {
  if (!maps.each.is_bf16) return multiply_on<CodeVectors<Floats>>(maps, team);
#if HAS_TILES
  if (Tiles::are_usable()) return multiply_on<CodeTiles>(maps, team);
#endif
  multiply_on<CodeVectors<Pairs>>(maps, team);
}

extern "C" {
// Return the number of bytes of a packed weight.
int64_t specserve_code_bytes(int64_t N, int64_t K, int64_t bits, int64_t group, int64_t has_zeros,
                             int64_t has_offsets, int64_t has_table, int64_t is_gated) {
  CodeShape shape{N,   K, bits, group, has_zeros != 0, has_offsets != 0, has_table != 0,
                  is_gated != 0};
  return shape.packed_bytes();
}

void specserve_pack_codes(const void* args, const Step&, Team& team) {
  const PackCodes& a = *(const PackCodes*)args;
  bool has_zeros = a.zero != nullptr, has_offsets = a.offset != nullptr;
  bool has_table = a.table != nullptr;
  CodeShape shape{a.N, a.K, a.bits, a.group, has_zeros, has_offsets, has_table, a.is_gated != 0};
  for (int64_t p = team.take(); p < shape.num_panels(); p = team.take()) {
    if (p == 0 && has_table) pack_table(a.table, (Table*)(a.packed + shape.table_offset()));
    pack_panel(a, shape, p);
  }
}
}
