// Linear maps: packing their weights, and multiplying rows by them.
//
// A row's sum is taken over K in one order, whatever rows, threads and blocks there are. Threads
// divide rows and columns, never a sum.
#include "gemm_tiles.h"
#include "gemm_vectors.h"
#include "linear.h"

struct Pack {
  int64_t is_bf16, is_gated;
  const void* weight;  // [N, K], or [2 N, K] if gated
  uint32_t* packed;
  int64_t N, K;
};

// 16 rows of a weight become 16 columns of a panel; `num_rows` of them exist.
static void pack_columns(const char* weight, int64_t num_rows, int64_t row_bytes, int64_t words,
                         uint32_t* panel) {
  for (int64_t w = 0; w < words; w += TILE_WORDS) {
    vi x[16];
    int64_t bytes = std::min<int64_t>(row_bytes - w * 4, 64);
    if (num_rows == 16 && bytes == 64) {
      for (int r = 0; r < 16; r++) x[r] = load_lanes(weight + r * row_bytes + w * 4);
    } else {
      for (vi& row : x) row = vi{};
      for (int64_t r = 0; r < num_rows; r++)
        memcpy(&x[r], weight + r * row_bytes + w * 4, bytes);
    }
    transpose(x);
    for (int i = 0; i < TILE_WORDS; i++) memcpy(panel + (w + i) * COLUMNS, &x[i], 64);
  }
}

static void pack(const Pack& a, Team& team) {
  Shape shape{a.N, a.K, a.is_bf16 != 0, a.is_gated != 0};
  int64_t row_bytes = a.K * shape.value_bytes();
  int64_t second = shape.is_gated ? a.N : COLUMNS / 2;  // rows from a panel's first to its 17th
  for (int64_t p = team.take(); p < shape.num_panels(); p = team.take())
    for (int half = 0; half < 2; half++) {
      int64_t first = p * panel_columns(shape.is_gated) + half * second;
      int64_t left = a.N * (1 + (shape.is_gated && half)) - first;
      int64_t num_rows = std::clamp<int64_t>(left, 0, COLUMNS / 2);
      pack_columns((const char*)a.weight + first * row_bytes, num_rows, row_bytes, shape.words(),
                   a.packed + p * shape.panel_words() + half * COLUMNS / 2);
    }
}

constexpr int64_t GROUP_BYTES = 192 << 10;  // of panels that stay in L2 while blocks of rows pass
constexpr int64_t MAX_GROUP = 8;            // panels

// A slab is multiplied block by block: as many rows as fit into registers.
template <class Path> static Division division(const Shape& shape, int64_t R, int threads) {
  int64_t words = shape.words(), row_bytes = words * Path::PER_WORD * 4;
  int64_t slab = std::max<int64_t>(ROWS_BYTES / row_bytes, Path::MAX_ROWS);
  int64_t largest = std::clamp<int64_t>(GROUP_BYTES / (words * COLUMNS * 4), 1, MAX_GROUP);
  bool is_few = R <= Path::MAX_ROWS;
  return {R, slab, shape.num_panels(), is_few ? Path::panels(R) : largest, !is_few, threads};
}

// One thread's share of a linear map.
template <class Path> struct Multiplier {
  typedef typename Path::Value Value;
  typedef typename Path::Source Source;
  static constexpr int64_t BLOCK = Path::BLOCK_WORDS;
  static inline thread_local Scratch<Value> row_memory;
  static inline thread_local Scratch<float> sum_memory;

  const Linear& a;
  Shape shape;
  int64_t words = shape.words(), panel_words = shape.panel_words();
  Range slab{0, 0};
  Value* rows = nullptr;  // [words / BLOCK][rows of the slab][STRIDE]
  float* sums = sum_memory.at_least(MAX_GROUP * Path::MAX_ROWS * COLUMNS);

  const uint32_t* panel(int64_t p) const { return (const uint32_t*)a.packed + p * panel_words; }

  void run(int64_t R, Team& team) {
    Division division = ::division<Path>(shape, R, team.size);
    int64_t item = team.take();
    if (item < division.num_items()) Path::begin(R);
    while (item < division.num_items()) {
      int64_t following = team.take();
      bool is_last = following >= division.num_items();
      Range panels = division.panels(item);
      if (R <= Path::MAX_ROWS && slab.end == 0) prefetch_first(panels.begin);
      take_slab(division.slab(item));
      multiply(panels, is_last ? panels.begin : division.panels(following).begin);
      item = following;
    }
    Path::end();
  }

  // The words whose prefetch has no multiplication before it arrive while rows are packed.
  void prefetch_first(int64_t p) {
    Loader loader{nullptr, panel(p)};
    for (int64_t w = 0; w < std::min(Path::AHEAD, words); w++)
      for (int column : {0, LINE}) loader.prefetch_once(w, column);
  }

  void take_slab(Range next) {
    if (next.begin == slab.begin && next.end == slab.end) return;
    slab = next;
    int64_t n = slab.end - slab.begin, blocks = divide_up(words, BLOCK);
    rows = row_memory.at_least(blocks * n * Path::STRIDE);
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < n; r++) pack_row(slab.begin + r, b, rows + (b * n + r) * Path::STRIDE);
  }
  // The words of a block of K, zeros after the last.
  void pack_row(int64_t row, int64_t block, Value* to) {
    constexpr int64_t PER_WORD = 4 / sizeof(Source);
    int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, words);
    int64_t n = std::min(end * PER_WORD, a.K) - begin * PER_WORD;
    constexpr int64_t RATIO = sizeof(Value) * Path::PER_WORD / 4;  // bytes packed for each of x
    memset((char*)to + n * sizeof(Source) * RATIO, 0,
           (end - begin) * 4 * RATIO - n * sizeof(Source) * RATIO);
    Path::pack((const Source*)a.x + row * a.K + begin * PER_WORD, n, to);
  }

  void multiply(Range panels, int64_t next_panel) {
    int64_t n = slab.end - slab.begin, blocks = divide_up(n, Path::MAX_ROWS);
    for (int64_t b = 0; b < blocks; b++) {
      Range part{n * b / blocks, n * (b + 1) / blocks};
      if (blocks > 1 && Path::SHARES_LOADING)
        multiply_block(part, panels, b < 2 ? panel(next_panel) + b * words * LINE : nullptr);
      else stream_panels(part, panels, b + 1 < blocks ? panels.begin : next_panel);
      for (int64_t p = panels.begin; p < panels.end; p++)
        finish<Source>(a, sums_of(p - panels.begin), p,
                       {slab.begin + part.begin, slab.begin + part.end});
    }
  }
  float* sums_of(int64_t i) const { return sums + i * Path::MAX_ROWS * COLUMNS; }

  // A block of rows times a group of panels; what is multiplied a little later is prefetched.
  void stream_panels(Range part, Range panels, int64_t next_panel) {
    int num_rows = part.end - part.begin, wide = Path::panels(num_rows);
    for (int64_t word = 0; word < words; word += BLOCK) {
      int64_t num_words = std::min(BLOCK, words - word);
      for (int64_t p = panels.begin, step; p < panels.end; p += step) {
        step = p + wide <= panels.end ? wide : 1;
        const uint32_t* next = p + step < panels.end     ? panel(p + step) + word * COLUMNS
                               : word + num_words < words ? panel(panels.begin) + (word + num_words) * COLUMNS
                                                          : panel(next_panel);
        Path::multiply(part_of(part, word, p, panels, next, true), num_rows, step, panel_words);
      }
    }
  }
  // One of several blocks that share loading. The first two prefetch a half of the next panels
  // each, as multiplying takes longer than loading; `next` is null for the others.
  void multiply_block(Range part, Range panels, const uint32_t* next) {
    for (int64_t word = 0; word < words; word += BLOCK)
      for (int64_t p = panels.begin; p < panels.end; p++) {
        const uint32_t* from = next ? next + (p - panels.begin) * panel_words : panel(p);
        Path::multiply(part_of(part, word, p, panels, from + word * LINE, false),
                       part.end - part.begin, 1, panel_words);
      }
  }
  Part part_of(Range part, int64_t word, int64_t p, Range panels, const uint32_t* next,
               bool is_streamed) const {
    int64_t row = word / BLOCK * (slab.end - slab.begin) + part.begin;
    int64_t num_words = std::min(BLOCK, words - word);
    return {rows + row * Path::STRIDE, panel(p) + word * COLUMNS, next, num_words,
            sums_of(p - panels.begin), word == 0, is_streamed};
  }
};

template <class Path> static void multiply(const Linear& a, int64_t R, Team& team) {
  Multiplier<Path>{a, {a.N, a.K, a.is_bf16 != 0, a.is_gated()}}.run(R, team);
}

extern "C" {
// The words of a packed weight.
int64_t specserve_packed_words(int64_t N, int64_t K, int64_t is_bf16, int64_t is_gated) {
  Shape shape{N, K, is_bf16 != 0, is_gated != 0};
  return shape.num_panels() * shape.panel_words();
}

void specserve_pack(const void* args, const Step&, Team& team) { pack(*(const Pack*)args, team); }

void specserve_linear(const void* args, const Step& step, Team& team) {
  const Linear& a = *(const Linear*)args;
  int64_t R = step.num_rows[a.domain];
  if (a.bits) return multiply_codes(a, R, team);
  if (!a.is_bf16) return multiply<Vectors<Floats>>(a, R, team);
#if HAS_TILES
  if (Tiles::are_usable()) return multiply<Tiles>(a, R, team);
#endif
  multiply<Vectors<Pairs>>(a, R, team);
}
}
