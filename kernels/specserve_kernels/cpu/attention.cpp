// Attention of a step's rows over block tables: causal rows and tree rows in one kernel.
//
// A row's keys are the tokens of its path in order of position. Positions are cut at multiples of
// PART, counted from 0: a part's scores become weights at once, and the results of the parts are
// merged in order. Within a part, values are summed position by position or pair by pair, for as
// many query vectors at a time as there are. So a row's bits depend on its own path only: not on
// the block size, on the slots, on the rows beside it, on where the prefix ends and the tree begins,
// or on how many threads share a context. The weights of hidden positions are exact zeros, and the
// values there are read as zeros, so that the contents of their slots, NaN included, do not matter.
#include <algorithm>
#include <climits>

#include "attention_plan.h"
#include "layouts.h"
#include "softmax.h"

constexpr int KEYS = 64;      // positions whose keys are transposed at a time
constexpr int GROUP = 32;     // query vectors that share a range of tiles
constexpr int FEW = 16;       // query vectors of which the sums stay in L1 beside a tile of values
constexpr int TAIL = 128;     // tree slots, and those of the prefix in their first tile
constexpr int SCORES = PART + LANES;  // a stride with which rows do not share cache lines' places
constexpr float LOG2_E = 1.44269504f;

struct Attention {
  const KV* kv;
  const void* q;
  void* out;
  int64_t num_heads;
  float scale;
  int64_t window;  // 0: none
};

// The memory that a thread computes in, for heads of one size.
struct Scratch {
  int64_t width = 0;  // of a head, rounded up
  std::vector<word> memory;
  word *queries, *keys, *values;
  float *score, *tail, *part, *total;
  int64_t offsets[2][PART];  // of two parts: the second is prefetched
  int64_t path[PART];
  Seen seen[MAX_ITEM], now[MAX_ITEM];

  int64_t value_stride() const { return width + LANES; }

  void fit(int64_t D) {
    int64_t needed = (D + LANES - 1) / LANES * LANES;
    if (needed <= width) return;
    width = needed;
    int64_t item = (MAX_ITEM + 16) * width;
    int64_t sizes[] = {item,           width * KEYS,    PART * value_stride(), (MAX_ITEM + 16) * SCORES,
                       MAX_ITEM * TAIL, item,            item};
    int64_t all = 16;
    for (int64_t size : sizes) all += size;
    memory.assign(all, 0);
    word* at = (word*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    word** const places[] = {&queries,        &keys,          &values,       (word**)&score,
                             (word**)&tail, (word**)&part, (word**)&total};
    for (int i = 0; i < 7; i++) {
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

// An item for one KV head.
template <class T> struct Task {
  const Attention& a;
  const Rows& rows;
  const Work& work;
  const Item& item;
  int64_t head;
  Scratch& x;
  static constexpr int PER = PER_WORD<T>;
  const KV& kv = *a.kv;
  const int64_t D = kv.head_dim, width = (D + LANES - 1) / LANES * LANES, words = words_of<T>(D);
  const int group = a.num_heads / kv.num_heads;
  const int first_row = rows.qo_indptr[item.request];
  Span shared[MAX_ITEM / GROUP];  // tiles of positions that have one slot for all rows, by group
  int max_low = 0, min_prefix = INT_MAX;

  int row_of(int i) const { return first_row + (item.first + i) / group; }
  const View& view(int i) const { return work.views[row_of(i)]; }
  int64_t vector_of(int i) const {
    return row_of(i) * a.num_heads + head * group + (item.first + i) % group;
  }
  int group_size(int g) const { return std::min(GROUP, item.count - g); }
  Span part_span(int part) const { return {part * PART, (part + 1) * PART}; }

  // Where the tokens of slots [first, first + n) are, in elements from the first block.
  void locate(int first, int n, int64_t* offsets) const {
    const int32_t* block = rows.indices + rows.indptr[item.request] + first / kv.block_size;
    int64_t token = kv.num_heads * D, in_block = first % kv.block_size;
    for (int j = 0; j < n; block++, in_block = 0) {
      int64_t offset = *block * kv.block_stride + in_block * token + head * D;
      int end = std::min<int64_t>(n, j + kv.block_size - in_block);
      for (; j < end; j++, offset += token) offsets[j] = offset;
    }
  }
  // The positions of a part that have one slot for all rows, located.
  Tokens<T> located(int part, int64_t* offsets) const {
    Span span = overlap(part_span(part), {tile_of(item.begin), item.end});
    if (part >= item.end_part || span.is_empty()) return {nullptr, offsets, 0, 0};
    locate(span.begin, span.size(), offsets + span.begin - part * PART);
    return {(const T*)kv.k, offsets, std::max(item.begin, span.begin) - part * PART,
            span.end - part * PART};
  }
  Tokens<T> values_of(const Tokens<T>& keys) const {
    return {keys.base ? (const T*)kv.v : nullptr, keys.offsets, keys.begin, keys.end};
  }

  void begin() {
    for (int i = 0; i < item.count; i++) {
      load_query((const T*)a.q + vector_of(i) * D, D, x.queries + i * x.width);
      x.seen[i] = NOTHING;
    }
    for (int g = 0; g < item.count; g += GROUP) {
      Span span{item.end, item.begin};
      for (int i = g; i < g + group_size(g); i++) {
        span.begin = std::min(span.begin, view(i).low);
        span.end = std::max(span.end, std::min(view(i).prefix, item.end));
        max_low = std::max(max_low, view(i).low);
        min_prefix = std::min(min_prefix, view(i).prefix);
      }
      shared[g / GROUP] = tiles(span);
    }
    if (item.tail && item.end_part * PART > item.end) score_tail();
  }

  void multiply_keys(int g, int n, Sums scores, int num_keys) const {
    multiply<PAIRED<T>>({x.queries + g * x.width, x.width}, {x.keys, KEYS}, scores, n, words,
                        num_keys, false);
  }

  // The scores of a tree's slots, for all rows: each row takes those on its path.
  void score_tail() {
    int num = item.tail - item.end;
    locate(item.end, num, x.path);
    Tokens<T> keys{(const T*)kv.k, x.path, 0, num};
    for (int j = 0; j < num; j += KEYS) {
      int n = (std::min(KEYS, num - j) + LANES - 1) / LANES * LANES;
      load_keys(keys.from(j), n, D, x.keys, KEYS, keys, 0);
      multiply_keys(0, item.count, {x.tail + j, TAIL}, n);
    }
  }

  void score(int part, const Tokens<T>& keys) {
    Span all = tiles({keys.begin, keys.end});
    for (int j = all.begin; j < all.end; j += KEYS) {
      int n = std::min(KEYS, all.end - j);
      bool is_last = j + KEYS >= all.end;
      Tokens<T> next = is_last ? values_of(keys).from(all.begin) : keys.from(j + KEYS);
      load_keys(keys.from(j), n, D, x.keys, KEYS, next, keys.base ? n : 0);
      for (int g = 0; g < item.count; g += GROUP) {
        Span seen = overlap(shared[g / GROUP], {part * PART + j, part * PART + j + n});
        if (!seen.is_empty())
          multiply_keys(g, group_size(g), {x.score + g * SCORES + j, SCORES}, n);
      }
    }
  }

  // The tiles of the part that a query's weights are needed for, from the part's begin.
  Span weighed(int part, int i) const {
    Span whole = part_span(part), span = overlap(shared[i / GROUP], whole);
    Span own = overlap(tiles({std::max(view(i).low, whole.begin), view(i).length}), whole);
    if (span.is_empty()) span = own;
    else if (!own.is_empty()) span.end = std::max(span.end, own.end);
    return {span.begin - whole.begin, span.end - whole.begin};
  }

  // What a query may see of its scores: those on its path of the tree are put in their places.
  void choose(int part, int i, Span span) {
    const View& v = view(i);
    float *score = x.score + i * SCORES, *tail = x.tail + i * TAIL;
    int zero = part * PART;
    Span path = overlap({std::max(item.end, v.low), v.length}, part_span(part));
    for (int p = path.begin; item.tail && p < path.end; p++)
      score[p - zero] = tail[(p < v.prefix ? p : work.paths[v.path + p - v.prefix]) - item.end];
    int low = std::min(std::max(v.low - zero, span.begin), span.end);
    int high = std::max(std::min(v.length - zero, span.end), low);
    std::fill(score + span.begin, score + low, -INF);
    std::fill(score + high, score + span.end, -INF);
  }

  void soften_all(int part) {
    for (int i = 0; i < item.count; i++) {
      Span span = weighed(part, i);
      if (!span.is_empty()) choose(part, i, span);
      float* score = x.score + i * SCORES;
      x.now[i] = span.is_empty() ? NOTHING
                                 : soften<PAIRED<T>>(score + span.begin, span.size(),
                                                     a.scale * LOG2_E, score + span.begin / PER);
      memset(x.part + i * x.width, 0, width * sizeof(float));
    }
  }

  // Add the values of positions [begin, begin + n) of the part, which are loaded, for some rows.
  void multiply_values(int i, int num_rows, int begin, int n, const word* values) {
    const word* weights = (const word*)x.score + i * SCORES + begin / PER;
    multiply<PAIRED<T>>({weights, SCORES}, {values, x.value_stride()},
                        {x.part + i * x.width, x.width}, num_rows, n / PER, width, true);
  }

  void add_values(int part, const Tokens<T>& values, const Tokens<T>& next_keys) {
    Span all = tiles({values.begin, values.end});
    int step = item.count <= FEW ? TILE : PART;
    for (int j = all.begin; j < all.end; j += step) {
      int n = std::min(step, all.end - j);
      bool is_last = j + step >= all.end;
      Tokens<T> next = is_last ? next_keys : values.from(j + step);
      load_values(values.from(j), n, D, x.values, x.value_stride(), next, next.base ? n : 0);
      if (is_mixed(part * PART + j, n) && !are_finite<T>(x.values, n / PER, D, x.value_stride()))
        add_each(part, j, n, values);
      else
        add_shared(part, j, n);
    }
  }

  // Whether some queries see positions of [begin, begin + n) that others do not.
  bool is_mixed(int begin, int n) const {
    Span seen = overlap({begin, begin + n}, {item.begin, item.end});
    return max_low > seen.begin || min_prefix < seen.end;
  }

  void add_shared(int part, int begin, int n) {
    for (int g = 0; g < item.count; g += GROUP) {
      int first = part * PART + begin;
      Span span = overlap(shared[g / GROUP], {first, first + n});
      if (span.is_empty()) continue;
      const word* from = x.values + (span.begin - first) / PER * x.value_stride();
      multiply_values(g, group_size(g), span.begin - part * PART, span.size(), from);
    }
  }

  // As add_shared, with each query's hidden values read as zeros: a weight of 0 does not hide NaN.
  void add_each(int part, int begin, int n, const Tokens<T>& values) {
    int zero = part * PART;
    for (int i = 0; i < item.count; i++) {
      Tokens<T> own = values;
      own.begin = std::max(own.begin, view(i).low - zero);
      own.end = std::min(own.end, view(i).prefix - zero);
      Span span = overlap(shared[i / GROUP], {zero + begin, zero + begin + n});
      for (int j = span.begin - zero; j < span.end - zero; j += TILE) {
        load_values(own.from(j), TILE, D, x.values, x.value_stride(), own, 0);
        multiply_values(i, 1, j, TILE, x.values);
      }
    }
  }

  // Add the values on the rows' own paths, from the tile in which the tree begins.
  void add_paths(int part) {
    for (int i = 0, n; i < item.count; i += n) {
      const View& v = view(i);
      n = std::min(group - (item.first + i) % group, item.count - i);
      Span path = overlap({std::max(item.end, tile_of(v.low)), v.length}, part_span(part));
      for (int t = path.begin; t < path.end; t += TILE) {
        int64_t offsets[TILE];
        Span seen{std::max(v.low - t, 0), std::min(v.length - t, TILE)};
        for (int j = seen.begin; j < seen.end; j++) {
          int slot = t + j < v.prefix ? t + j : work.paths[v.path + t + j - v.prefix];
          offsets[j] = x.path[slot - item.end];
        }
        Tokens<T> values{(const T*)kv.v, offsets, seen.begin, seen.end};
        load_values(values, TILE, D, x.values, x.value_stride(), values, 0);
        multiply_values(i, n, t - part * PART, TILE, x.values);
      }
    }
  }

  // The part's results join those before it, or are kept until all are there.
  void keep(int part, float* partials) {
    for (int i = 0; i < item.count; i++) {
      const float* sums = x.part + i * x.width;
      if (item.partial < 0) {
        merge(x.total + i * x.width, x.seen[i], sums, x.now[i], width);
        continue;
      }
      int64_t entry = item.partial + int64_t(part - item.first_part) * item.count + i;
      float* to = partials + (entry * kv.num_heads + head) * partial_size(D);
      memcpy(to, sums, width * sizeof(float));
      memcpy(to + width, &x.now[i], sizeof(Seen));
    }
  }

  void run(float* partials) {
    begin();
    Tokens<T> keys = located(item.first_part, x.offsets[0]);
    for (int part = item.first_part; part < item.end_part; part++) {
      Tokens<T> next = located(part + 1, x.offsets[(part - item.first_part + 1) % 2]);
      score(part, keys);
      soften_all(part);
      add_values(part, values_of(keys), next);
      if (item.tail) add_paths(part);
      keep(part, partials);
      keys = next;
    }
    for (int i = 0; i < item.count && item.partial < 0; i++)
      finish(x.total + i * x.width, x.seen[i], (T*)a.out + vector_of(i) * D, D);
  }
};

// The parts of a cut context are merged in order, as in `keep`.
template <class T>
static void merge_cut(const Attention& a, const Rows& rows, const Cut& cut, const float* partials,
                      Range range) {
  int64_t heads = a.kv->num_heads, D = a.kv->head_dim, size = partial_size(D);
  int64_t group = a.num_heads / heads, width = size - LANES;
  alignas(64) float total[MAX_HEAD_DIM];
  for (int64_t n = range.begin; n < range.end; n++) {
    int64_t i = n / heads, head = n % heads, vector = cut.first + i;
    Seen seen = NOTHING;
    for (int p = 0; p < cut.num_parts; p++) {
      const float* part = partials + ((cut.partial + p * cut.count + i) * heads + head) * size;
      Seen now;
      memcpy(&now, part + width, sizeof now);
      merge(total, seen, part, now, width);
    }
    int64_t row = rows.qo_indptr[cut.request] + vector / group;
    int64_t at = row * a.num_heads + head * group + vector % group;
    finish(total, seen, (T*)a.out + at * D, D);
  }
}

template <class T> static void attention(const Attention& a, const Step& step, Team& team) {
  AttentionPlan& plan = *step.attention;
  const Work& work = plan.with_window(a.window);
  int64_t heads = a.kv->num_heads, num = work.items.size() * heads;
  static thread_local Scratch* scratch = new Scratch;
  scratch->fit(a.kv->head_dim);
  for (int64_t i = team.take(); i < num; i = team.take()) {
    Task<T> task{a, *step.rows, work, work.items[i / heads], i % heads, *scratch};
    task.run(plan.partials.data());
  }
  if (work.cuts.empty()) return;
  team.wait();
  for (const Cut& cut : work.cuts)
    merge_cut<T>(a, *step.rows, cut, plan.partials.data(), team.part(cut.count * heads));
}

extern "C" void specserve_attention(const void* args, const Step& step, Team& team) {
  const Attention& a = *(const Attention*)args;
  a.kv->is_bf16 ? attention<bf16>(a, step, team) : attention<float>(a, step, team);
}
