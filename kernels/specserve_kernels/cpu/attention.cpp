// Attention of a step's rows over block tables: causal rows and tree rows in one kernel.
//
// A row's keys are the tokens of its path in order of position, in tiles of 32 positions counted
// from 0. Each tile is one step of the online softmax (Milakov, Gimelshein 1805.02867), its values
// are added key by key. So a row's bits depend on its own path only: not on the block size, on the
// slots, on the rows beside it, or on where the prefix ends and the tree begins. Hidden keys are
// skipped, never multiplied by zero: the contents of their slots, NaN included, do not matter.
//
// A work item is up to 32 query vectors (row, query head) of one request that share a KV head. Keys
// are transposed once for each item and tile, so that scores need no sums over lanes, and are
// multiplied with 8 query vectors at a time in registers.
#include <algorithm>
#include <vector>

#include "op.h"
#include "vec.h"

constexpr int TILE = 32;          // positions
constexpr int GROUP = 8;          // query vectors in registers
constexpr int ITEM = 32;          // query vectors of a work item
constexpr int TREE_TILES = 3;     // 64 tree slots, plus the part of the prefix in their first tile
constexpr int MAX_D = 512;

struct Attention {
  const KV* kv;
  const void* q;
  void* out;
  int64_t num_heads;
  float scale;
  int64_t window;  // 0: none
};

struct Item {
  int request, first, count;  // query vectors [first, first + count) of the request and KV head
};

struct Query {
  const void* q;
  void* out;
  int64_t prefix, length, low;  // positions [low, length) are visible; [0, prefix) is the prefix
  uint64_t mask;
  float max, sum;
};

// The slots of one request as addresses of one KV head.
struct Slots {
  const Rows& rows;
  const KV& kv;
  const int32_t* blocks;
  int64_t head;

  template <class T> const T* at(void* base, int64_t slot) const {
    return (const T*)base + blocks[slot / kv.block_size] * kv.block_stride +
           (slot % kv.block_size * kv.num_heads + head) * kv.head_dim;
  }
};

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// One tile of keys, transposed: [d][key], or [pair of d][key] for bf16 dot products.
struct KeyTile {
  alignas(64) uint32_t t[MAX_D][TILE];

  // Keys of `words` 32-bit words; past `count` the last one is repeated, for scores not used.
  void load_words(const void* const* keys, int count, int64_t words) {
    for (int half = 0; half < count; half += LANES)
      for (int64_t d = 0; d < words; d += LANES) {
        vi x[LANES];
        int n = std::min<int64_t>(LANES, words - d);
        for (int j = 0; j < LANES; j++) {
          const uint32_t* key = (const uint32_t*)keys[std::min(half + j, count - 1)] + d;
          x[j] = n == LANES ? load_lanes(key) : load_lanes(key, n);
        }
        transpose(x);
        for (int i = 0; i < n; i++) memcpy(&t[d + i][half], &x[i], 64);
      }
  }
  void load(const float* const* keys, int count, int64_t D) {
    load_words((const void* const*)keys, count, D);
  }
  void load(const bf16* const* keys, int count, int64_t D) {
    if (PAIRS) return load_words((const void* const*)keys, count, D / 2);
    for (int j = 0; j < count; j++)
      for (int64_t d = 0; d < D; d++) t[d][j] = uint32_t(keys[j][d].bits) << 16;
  }
};

static inline void multiply(const KeyTile& tile, const float* q, int64_t d, vf& a, vf& b) {
  a = fma(splat(q[d]), load((const float*)tile.t[d]), a);
  b = fma(splat(q[d]), load((const float*)(tile.t[d] + LANES)), b);
}
static inline void multiply(const KeyTile& tile, const bf16* q, int64_t d, vf& a, vf& b) {
#if defined(__AVX512BF16__)
  int32_t pair;
  memcpy(&pair, q + 2 * d, 4);
  __m512bh qq = (__m512bh)_mm512_set1_epi32(pair);
  a = (vf)_mm512_dpbf16_ps((__m512)a, (__m512bh)_mm512_load_si512(tile.t[d]), qq);
  b = (vf)_mm512_dpbf16_ps((__m512)b, (__m512bh)_mm512_load_si512(tile.t[d] + LANES), qq);
#else
  float x = to_float(q[d]);
  a = fma(splat(x), load((const float*)tile.t[d]), a);
  b = fma(splat(x), load((const float*)(tile.t[d] + LANES)), b);
#endif
}
static inline int64_t depth_of(const float*, int64_t D) { return D; }
static inline int64_t depth_of(const bf16*, int64_t D) { return PAIRS ? D / 2 : D; }

template <class T, int N>
static void score_group(const KeyTile& tile, Query* const* q, int64_t D, float (*out)[TILE]) {
  vf a[N] = {}, b[N] = {};
  const T* p[N];
  for (int i = 0; i < N; i++) p[i] = (const T*)q[i]->q;
  int64_t depth = depth_of(p[0], D);
  for (int64_t d = 0; d < depth; d++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) multiply(tile, p[i], d, a[i], b[i]);
  for (int i = 0; i < N; i++) {
    store(out[i], a[i]);
    store(out[i] + LANES, b[i]);
  }
}

// acc = acc * decay + sum over keys of weight * value, for N queries that see the same keys, in the
// dimensions [0, S * 16) from the pointers given; `tail` of the last 16 exist.
template <class T, int N, int S, bool IS_WHOLE>
static void add_values(const T* const* values, int64_t d, int begin, int end, int tail,
                       const float (*weight)[TILE], const float* decay, float (*acc)[MAX_D]) {
  vf sum[N][S];
  for (int i = 0; i < N; i++)
    for (int s = 0; s < S; s++) sum[i][s] = load(acc[i] + d + s * LANES) * decay[i];
  for (int j = begin; j < end; j++) {
    vf v[S];
    for (int s = 0; s < S; s++) {
      const T* p = values[j] + d + s * LANES;
      v[s] = IS_WHOLE || s < S - 1 ? load(p) : load(p, tail);
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      vf w = splat(weight[i][j]);
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) sum[i][s] = fma(w, v[s], sum[i][s]);
    }
  }
  for (int i = 0; i < N; i++)
    for (int s = 0; s < S; s++) store(acc[i] + d + s * LANES, sum[i][s]);
}

// S vectors of D at a time: as many sums as hide the latency of an addition.
template <class T, int N, int S>
static void value_group(const T* const* values, int begin, int end, int64_t D,
                        const float (*weight)[TILE], const float* decay, float (*acc)[MAX_D]) {
  int64_t d = 0;
  for (; d + S * LANES <= D; d += S * LANES)
    add_values<T, N, S, true>(values, d, begin, end, LANES, weight, decay, acc);
  for (; d + LANES <= D; d += LANES)
    add_values<T, N, 1, true>(values, d, begin, end, LANES, weight, decay, acc);
  if (d < D) add_values<T, N, 1, false>(values, d, begin, end, D - d, weight, decay, acc);
}

template <class T>
static void scores(const KeyTile& tile, Query* const* q, int n, int64_t D, float (*out)[TILE]) {
  switch (n) {
    case 1: return score_group<T, 1>(tile, q, D, out);
    case 2: return score_group<T, 2>(tile, q, D, out);
    case 3: return score_group<T, 3>(tile, q, D, out);
    case 4: return score_group<T, 4>(tile, q, D, out);
    case 5: return score_group<T, 5>(tile, q, D, out);
    case 6: return score_group<T, 6>(tile, q, D, out);
    case 7: return score_group<T, 7>(tile, q, D, out);
    default: return score_group<T, 8>(tile, q, D, out);
  }
}

template <class T>
static void values(const T* const* v, int begin, int end, int n, int64_t D,
                   const float (*weight)[TILE], const float* decay, float (*acc)[MAX_D]) {
  switch (n) {
    case 1: return value_group<T, 1, 4>(v, begin, end, D, weight, decay, acc);
    case 2: return value_group<T, 2, 4>(v, begin, end, D, weight, decay, acc);
    case 3: return value_group<T, 3, 4>(v, begin, end, D, weight, decay, acc);
    case 4: return value_group<T, 4, 4>(v, begin, end, D, weight, decay, acc);
    case 5: return value_group<T, 5, 2>(v, begin, end, D, weight, decay, acc);
    case 6: return value_group<T, 6, 2>(v, begin, end, D, weight, decay, acc);
    case 7: return value_group<T, 7, 2>(v, begin, end, D, weight, decay, acc);
    default: return value_group<T, 8, 2>(v, begin, end, D, weight, decay, acc);
  }
}

// Scores of up to 8 queries become weights in place; keys outside of [begin, end) of the tile are
// hidden. decay[i] becomes the factor for what query i has summed before. A query that sees no key
// of the tile is left as it is.
static void soften(float (*score)[TILE], Query* const* q, const int* begin, const int* end, int n,
                   float scale, float* decay) {
  vf at = lanes(), fall{};
  for (int i = 0; i < n; i++) {
    if (begin[i] >= end[i]) continue;
    vf a = load(score[i]) * scale, b = load(score[i] + LANES) * scale;
    vf low = splat(begin[i]), high = splat(end[i]);
    a = (at >= low) & (at < high) ? a : splat(-INF);
    b = (at + 16.0f >= low) & (at + 16.0f < high) ? b : splat(-INF);
    float top = std::max(q[i]->max, max(max(a, b)));
    vf wa = exp(a - top), wb = exp(b - top);
    fall[i] = q[i]->max - top;
    q[i]->max = top;
    decay[i] = sum(wa) + sum(wb);  // the new weights' sum, until all decays are known
    store(score[i], wa);
    store(score[i] + LANES, wb);
  }
  vf factor = exp(fall);
  for (int i = 0; i < n; i++) {
    if (begin[i] >= end[i]) continue;
    q[i]->sum = q[i]->sum * factor[i] + decay[i];
    decay[i] = factor[i];
  }
}

// The scratch of one thread: about 200 KiB, allocated once.
struct Scratch {
  KeyTile keys;
  alignas(64) float acc[ITEM][MAX_D];
  alignas(64) float score[ITEM][TILE];
  alignas(64) float tree[TREE_TILES][ITEM][TILE];
};

// A tile of prefix positions, for all queries whose prefix reaches it.
template <class T>
static void prefix_tile(int64_t t, const Slots& slots, Query** q, int n, float scale, Scratch& x) {
  int64_t D = slots.kv.head_dim, first = t * TILE, last = 0, low = first + TILE;
  for (int i = 0; i < n; i++) {
    last = std::max(last, std::min(q[i]->prefix, first + TILE));
    low = std::min(low, std::max(q[i]->low, first));
  }
  if (low >= last) return;  // the tile is before every query's window
  const T *k[TILE], *v[TILE];
  for (int64_t j = first; j < last; j++) {
    k[j - first] = slots.at<T>(slots.kv.k, j);
    v[j - first] = slots.at<T>(slots.kv.v, j);
  }
  x.keys.load(k, last - first, D);
  for (int g = 0; g < n; g += GROUP) {
    int size = std::min(GROUP, n - g);
    float decay[GROUP];
    int begin[GROUP], end[GROUP];
    bool same = true;
    scores<T>(x.keys, q + g, size, D, x.score + g);
    for (int i = 0; i < size; i++) {
      begin[i] = std::max<int64_t>(q[g + i]->low - first, 0);
      end[i] = std::min<int64_t>(q[g + i]->prefix - first, TILE);
      same = same && begin[i] == begin[0] && end[i] == end[0] && begin[i] < end[i];
    }
    soften(x.score + g, q + g, begin, end, size, scale, decay);
    // Rows are given in order, so that query g + i keeps its accumulator g + i.
    if (same) {
      values<T>(v, begin[0], end[0], size, D, x.score + g, decay, x.acc + g);
    } else {
      for (int i = 0; i < size; i++)
        if (begin[i] < end[i])
          values<T>(v, begin[i], end[i], 1, D, x.score + g + i, decay + i, x.acc + g + i);
    }
  }
}

// The slot of a position: first the prefix, then the path, one node for each bit of the mask.
struct Path {
  int64_t prefix, slot[64];

  explicit Path(const Query& q) : prefix(q.prefix) {
    int64_t depth = 0;
    for (uint64_t m = q.mask; m; m &= m - 1) slot[depth++] = q.prefix + __builtin_ctzll(m);
  }
  int64_t at(int64_t position) const {
    return position < prefix ? position : slot[position - prefix];
  }
};

// Everything from the tile in which the prefix ends: scores of all tree slots at once, then each
// query's own path picked from them, in tiles of positions.
template <class T>
static void tree_tiles(const Slots& slots, Query** q, int n, float scale, Scratch& x) {
  int64_t D = slots.kv.head_dim, prefix = q[0]->prefix, first = prefix / TILE * TILE, last = 0;
  uint64_t all = 0;
  for (int i = 0; i < n; i++) all |= q[i]->mask;
  last = prefix + 64 - __builtin_clzll(all);
  const T* k[TILE];
  for (int64_t u = 0; first + u * TILE < last; u++) {
    int count = std::min<int64_t>(TILE, last - first - u * TILE);
    for (int j = 0; j < count; j++) k[j] = slots.at<T>(slots.kv.k, first + u * TILE + j);
    x.keys.load(k, count, D);
    for (int g = 0; g < n; g += GROUP)
      scores<T>(x.keys, q + g, std::min(GROUP, n - g), D, x.tree[u] + g);
  }
  for (int i = 0; i < n; i++) {
    Path path(*q[i]);
    for (int64_t t = first; t < q[i]->length; t += TILE) {
      int begin = std::max<int64_t>(q[i]->low - t, 0);
      int end = std::min<int64_t>(q[i]->length - t, TILE);
      if (begin >= end) continue;
      const T* v[TILE];
      for (int j = begin; j < end; j++) {
        int64_t slot = path.at(t + j);
        v[j] = slots.at<T>(slots.kv.v, slot);
        x.score[0][j] = x.tree[(slot - first) / TILE][i][(slot - first) % TILE];
      }
      float decay;
      soften(x.score, q + i, &begin, &end, 1, scale, &decay);
      values<T>(v, begin, end, 1, D, x.score, &decay, x.acc + i);
    }
  }
}

template <class T>
static void attend(const Rows& rows, const KV& kv, const Attention& a, const Item& item,
                   int64_t head, Scratch& x) {
  int64_t D = kv.head_dim, group = a.num_heads / kv.num_heads;
  Slots slots{rows, kv, rows.indices + rows.indptr[item.request], head};
  Query query[ITEM];
  Query* q[ITEM];
  int64_t tiles = 0;
  bool has_tree = false;
  for (int i = 0; i < item.count; i++) {
    int64_t r = rows.qo_indptr[item.request] + (item.first + i) / group;
    int64_t offset = (r * a.num_heads + head * group + (item.first + i) % group) * D;
    int64_t prefix = rows.prefix[r], length = prefix + __builtin_popcountll(rows.mask[r]);
    int64_t low = a.window && length > a.window ? length - a.window : 0;
    query[i] = {(const T*)a.q + offset, (T*)a.out + offset, prefix, length, low,
                rows.mask[r], -INF, 0.0f};
    q[i] = query + i;
    has_tree = has_tree || rows.mask[r];
    tiles = std::max(tiles, rows.mask[r] ? prefix / TILE : (prefix + TILE - 1) / TILE);
  }
  for (int i = 0; i < item.count; i++) memset(x.acc[i], 0, ((D + 15) & ~15) * sizeof(float));
  for (int64_t t = 0; t < tiles; t++) prefix_tile<T>(t, slots, q, item.count, a.scale, x);
  if (has_tree) tree_tiles<T>(slots, q, item.count, a.scale, x);
  for (int i = 0; i < item.count; i++) {
    float scale = 1.0f / query[i].sum;
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) store((T*)query[i].out + d, load(x.acc[i] + d) * scale);
    if (d < D) store((T*)query[i].out + d, load(x.acc[i] + d) * scale, D - d);
  }
}

template <class T> static void attention(const Attention& a, const Step& step, Team& team) {
  const Rows& rows = *step.rows;
  const KV& kv = *a.kv;
  int64_t group = a.num_heads / kv.num_heads;
  static thread_local std::vector<Item> items;
  static thread_local Scratch* scratch = new Scratch;
  items.clear();
  for (int b = 0; b < rows.num_requests; b++) {
    int begin = rows.qo_indptr[b], end = rows.qo_indptr[b + 1];
    int vectors = (end - begin) * group;
    for (int i = 0; i < vectors; i += ITEM) items.push_back({b, i, std::min(ITEM, vectors - i)});
  }
  int64_t num = items.size() * kv.num_heads;
  for (int64_t i = team.take(); i < num; i = team.take())
    attend<T>(rows, kv, a, items[i / kv.num_heads], i % kv.num_heads, *scratch);
}

// Moves of KV from slot to slot in all layers of a model, in the order given.
struct Moves {
  const KV* layers;
  int64_t num_layers;
  const int64_t *source, *target;
  int64_t num_moves;
};

template <class T> static void move_layer(const KV& kv, const Moves& a) {
  int64_t bytes = kv.num_heads * kv.head_dim * sizeof(T);
  for (int64_t m = 0; m < a.num_moves; m++) {
    memcpy(kv.at<T>(kv.k, a.target[m]), kv.at<T>(kv.k, a.source[m]), bytes);
    memcpy(kv.at<T>(kv.v, a.target[m]), kv.at<T>(kv.v, a.source[m]), bytes);
  }
}

extern "C" {
void specserve_attention(const void* args, const Step& step, Team& team) {
  const Attention& a = *(const Attention*)args;
  a.kv->is_bf16 ? attention<bf16>(a, step, team) : attention<float>(a, step, team);
}

void specserve_move_kv(const void* args, const Step&, Team& team) {
  const Moves& a = *(const Moves*)args;
  Range part = team.part(a.num_layers);
  for (int64_t l = part.begin; l < part.end; l++)
    a.layers[l].is_bf16 ? move_layer<bf16>(a.layers[l], a) : move_layer<float>(a.layers[l], a);
}
}
