// One thread's multiplication of rows by the panels of a packed weight, for any word type.
//
// A row's sum over K has one order for any rows, threads and blocks, so results are
// batch-invariant. Threads divide rows and columns, never a sum.
#pragma once

#include <initializer_list>

#include "linear.h"

constexpr int64_t GROUP_BYTES = 192 << 10;  // maximum bytes of panels, so that they stay in L2
constexpr int64_t MAX_GROUP = 8;            // maximum panels of a group

// Divide the work. A slab is multiplied block by block, with as many rows as fit into registers.
template <class Path> static Division division(const Shape& shape, int64_t R, int threads) {
  int64_t words = shape.words(), row_bytes = words * Path::PER_WORD * 4;
  int64_t slab = std::max<int64_t>(ROWS_BYTES / row_bytes, Path::MAX_ROWS);
  int64_t largest = std::clamp<int64_t>(GROUP_BYTES / (words * COLUMNS * 4), 1, MAX_GROUP);
  bool is_few = R <= Path::MAX_ROWS;
  return {R, slab, shape.num_panels(), is_few ? Path::panels(R) : largest, !is_few, threads};
}

// Rows that are multiplied without rounding.
template <class Path> struct PlainRows {
  typedef typename Path::Source Source;

  const Linear& a;

  void take(Range) {}
  const Source* row(int64_t r) const { return a.row<Source>(r); }
  void finish(float* sums, int64_t panel, Range rows) const {
    ::finish<Source>(a, sums, panel, rows);
  }
};

// One thread's share of linear maps.
template <class Path, class Rows = PlainRows<Path>> struct Multiplier {
  typedef typename Path::Value Value;
  typedef typename Path::Source Source;
  static constexpr int64_t BLOCK = Path::BLOCK_WORDS;
  static inline thread_local Scratch<Value> row_memory;
  static inline thread_local Scratch<float> sum_memory;

  const Maps& maps;
  Shape shape;
  Linear a = maps.each;  // the current map
  Rows source{a};
  int64_t words = shape.words(), panel_words = shape.panel_words();
  Range slab{0, 0};
  Value* rows = nullptr;  // [words / BLOCK][rows of the slab][STRIDE]
  float* sums = sum_memory.at_least(MAX_GROUP * Path::MAX_ROWS * COLUMNS);

  const uint32_t* panel(int64_t p) const { return (const uint32_t*)a.packed + p * panel_words; }
  const uint32_t* first_of(const Item& item) const {
    return (const uint32_t*)maps.packed_of(item.map) + item.panels.begin * panel_words;
  }

  void run(Team& team) {
    auto divide = [&](int64_t R, int threads) { return division<Path>(shape, R, threads); };
    Items items(maps, divide, team.size);
    Item item = items.at(team.take());
    if (item.map >= 0) Path::begin(item.num_rows);
    for (int64_t map = -1; item.map >= 0;) {
      Item following = items.at(team.take());
      if (map < 0 && item.num_rows <= Path::MAX_ROWS) prefetch_first(first_of(item));
      if (map != item.map) take_map(map = item.map);
      take_slab(item.slab);
      multiply(item.panels, first_of(following.map < 0 ? item : following));
      item = following;
    }
    Path::end();
  }

  void take_map(int64_t map) {
    a = maps.of(map);
    slab = {0, 0};
  }

  // Prefetch the first words, which no earlier multiplication prefetches, while rows are packed.
  void prefetch_first(const uint32_t* panel) {
    Loader loader{nullptr, panel};
    for (int64_t w = 0; w < std::min(Path::AHEAD, words); w++)
      for (int column : {0, LINE}) loader.prefetch_once(w, column);
  }

  void take_slab(Range next) {
    if (next.begin == slab.begin && next.end == slab.end) return;
    slab = next;
    int64_t n = slab.end - slab.begin, blocks = divide_up(words, BLOCK);
    rows = row_memory.at_least(blocks * n * Path::STRIDE);
    source.take(slab);
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < n; r++) pack_row(slab.begin + r, b, rows + (b * n + r) * Path::STRIDE);
  }
  // Pack the words of a block of K; pad with zeros.
  void pack_row(int64_t row, int64_t block, Value* to) {
    constexpr int64_t PER_WORD = 4 / sizeof(Source);
    int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, words);
    int64_t n = std::min(end * PER_WORD, a.K) - begin * PER_WORD;
    constexpr int64_t RATIO = sizeof(Value) * Path::PER_WORD / 4;  // packed bytes per byte of x
    memset((char*)to + n * sizeof(Source) * RATIO, 0,
           (end - begin) * 4 * RATIO - n * sizeof(Source) * RATIO);
    Path::pack(source.row(row) + begin * PER_WORD, n, to);
  }

  // `next` is the panel that is multiplied next.
  void multiply(Range panels, const uint32_t* next) {
    int64_t n = slab.end - slab.begin, blocks = divide_up(n, Path::MAX_ROWS);
    for (int64_t b = 0; b < blocks; b++) {
      Range part{n * b / blocks, n * (b + 1) / blocks};
      if (blocks > 1 && Path::SHARES_LOADING)
        multiply_block(part, panels, b < 2 ? next + b * words * LINE : nullptr);
      else stream_panels(part, panels, b + 1 < blocks ? panel(panels.begin) : next);
      for (int64_t p = panels.begin; p < panels.end; p++)
        source.finish(sums_of(p - panels.begin), p,
                      {slab.begin + part.begin, slab.begin + part.end});
    }
  }
  float* sums_of(int64_t i) const { return sums + i * Path::MAX_ROWS * COLUMNS; }

  // Multiply a block of rows by a group of panels, and prefetch the next words.
  void stream_panels(Range part, Range panels, const uint32_t* then) {
    int num_rows = part.end - part.begin, wide = Path::panels(num_rows);
    for (int64_t word = 0; word < words; word += BLOCK) {
      int64_t num_words = std::min(BLOCK, words - word);
      for (int64_t p = panels.begin, step; p < panels.end; p += step) {
        step = p + wide <= panels.end ? wide : 1;
        const uint32_t* next = p + step < panels.end     ? panel(p + step) + word * COLUMNS
                               : word + num_words < words ? panel(panels.begin) + (word + num_words) * COLUMNS
                                                          : then;
        Path::multiply(part_of(part, word, p, panels, next, true), num_rows, step, panel_words);
      }
    }
  }
  // Multiply one of several blocks that share loading. The first two blocks each prefetch half of
  // the next panels, because multiplying takes longer than loading. `next` is null for the others.
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
