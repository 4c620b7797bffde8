// Attention's arguments, and a thread's working memory.
#pragma once

#include <climits>
#include <initializer_list>

#include "attention_plan.h"
#include "softmax.h"

constexpr int GROUP = 32;     // query vectors per range of tiles, multiplied together
constexpr int BLOCK = 64;     // keys whose columns stay in L1
constexpr int TAIL = 128;     // slots from the tree's first tile on
constexpr int SCORES = PART + LANES;  // stride without cache set conflicts
constexpr float LOG2_E = 1.44269504f;

struct Attention {
  const KV* kv;
  const void* q;
  void* out;
  int64_t num_heads;
  float scale;
  float soft_cap;  // 0: none
  const float* sinks;  // one score per query head, without a value; may be null
  int64_t window;  // as for `first_seen`
  int64_t is_bf16;

  // Factor f so that the weight of a score is 2^(f * score).
  float factor() const { return (soft_cap ? 1.0f : scale) * LOG2_E; }
  // Cap scores in place; n is a multiple of LANES.
  void cap(float* scores, int n) const {
    if (soft_cap == 0) return;
    for (int i = 0; i < n; i += LANES)
      store(scores + i, ::soft_cap(load(scores + i) * scale, soft_cap));
  }
  // Add the sink's weight to the sum of weights.
  void drain(float* values, Seen& seen, int64_t head, int64_t width) const {
    if (!sinks) return;
    float at = sinks[head] * LOG2_E, top = std::max(seen.max, at);
    vf factor = exp2(vf{seen.max - top, at - top});
    for (int64_t d = 0; d < width; d += LANES) store(values + d, load(values + d) * factor[0]);
    seen = {top, seen.sum * factor[0] + factor[1]};
  }
};

// Addresses for the positions [begin, begin + n) of a part, in whole tiles. Keys come first, then
// values, then up to two blocks of the next part's keys, for prefetching.
struct Part {
  int begin, n;
  const void* tokens[2 * PART + 2 * BLOCK];
};

// A thread's working memory, for heads of one size.
struct Scratch {
  int64_t width = 0;  // of a head, padded to pairs of registers
  std::vector<word> memory;
  word *queries, *keys, *values, *tile;  // `keys` by BLOCK; `tile`: values of one TILE
  float *score, *tail, *part, *total;
  // Scales of codes, by head of the item: for keys and values of a part, tree values, and the
  // values that one query sees.
  float *key_scales, *value_scales, *tail_scales, *own_scales;
  Part parts[2];        // the current part and the next
  const void *path_keys[TAIL], *path_values[TAIL];  // addresses of tree slots
  Seen seen[MAX_ITEM], now[MAX_SHARED];

  int64_t value_stride() const { return width + LANES; }

  void fit(int64_t D, bool has_scales) {
    int64_t needed = (D + 4 * LANES - 1) / (4 * LANES) * 4 * LANES;
    if (needed <= width) return;
    width = needed;
    int64_t item = (MAX_ITEM + 16) * width, scales = has_scales ? MAX_SHARED : 0;
    int64_t sizes[] = {item,
                       width * PART,
                       PART * value_stride(),
                       TILE * value_stride(),
                       (MAX_SHARED + 16) * SCORES,
                       MAX_ITEM * TAIL,
                       (MAX_SHARED + 16) * width,
                       item,
                       scales * PART,
                       scales * PART,
                       scales * TAIL,
                       PART};
    int64_t all = 16;
    for (int64_t size : sizes) all += size;
    memory.assign(all, 0);
    word* at = (word*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    word** const places[] = {&queries,
                             &keys,
                             &values,
                             &tile,
                             (word**)&score,
                             (word**)&tail,
                             (word**)&part,
                             (word**)&total,
                             (word**)&key_scales,
                             (word**)&value_scales,
                             (word**)&tail_scales,
                             (word**)&own_scales};
    for (int i = 0; i < 12; i++) {
      *places[i] = at;
      at += sizes[i];
    }
  }
};

// A range of positions.
struct Span {
  int begin, end;

  bool is_empty() const { return begin >= end; }
  int size() const { return std::max(end - begin, 0); }
};
static inline Span overlap(Span a, Span b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}
static inline int tile_of(int position) { return position / TILE * TILE; }
static inline Span tiles(Span s) { return {tile_of(s.begin), tile_of(s.end + TILE - 1)}; }
static inline Span part_span(int part) { return {part * PART, (part + 1) * PART}; }
