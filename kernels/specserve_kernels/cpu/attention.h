// Attention of a step's rows over block tables: causal rows and tree rows in one kernel.
//
// A row's keys are the tokens of its path in order of position. Positions are cut into parts at
// multiples of PART. Each part has its own softmax, and the parts' results are merged in order.
// Within a part, values are summed position by position or pair by pair, for all query vectors.
//
// Results are batch-invariant: a row's bits depend only on its own path. They do not depend on the
// block size, the slots, other rows, the tree's first position, or the number of threads. Hidden
// positions have weights of exact zero, and their values are read as zeros. The contents of their
// slots, including NaN, therefore have no effect.
//
// For 8-bit KV, the codes are multiplied. A score is multiplied by the scale of its key. After the
// sum of weights, a weight is multiplied by the scale of its value, which is 0 if hidden.
#pragma once

#include <algorithm>

#include "attention_memory.h"
#include "few.h"
#include "words_tiles.h"

// Whether few query vectors use few.h. Float queries over codes do not: few models need them, and
// they would double the compile time.
template <class T> constexpr bool HAS_FEW = !IS_CODE<T> || std::is_same_v<Active<T>, bf16>;

// Call f with n as a constant: f.template operator()<n>().
template <class T, class F> static void with_constant(int n, F f) {
  if constexpr (HAS_FEW<T>) switch (n) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
    case 5: return f.template operator()<5>();
    case 6: return f.template operator()<6>();
    case 7: return f.template operator()<7>();
    default: return f.template operator()<MAX_FEW>();
  }
}

// Computes one item; T is the stored type of KV. Arrays by query vector have the index i + h *
// count: i counts the vectors of a KV head, h the item's heads.
template <class T> struct Task {
  const Attention& a;
  const Rows& rows;
  const Work& work;
  const Item& item;
  Scratch& x;
  const bool on_tiles;
  typedef Active<T> A;
  static constexpr int PER = PER_WORD<T>;
  const KV& kv = *a.kv;
  const int64_t D = kv.head_dim, width = (D + LANES - 1) / LANES * LANES, words = words_of<T>(D);
  const int group = a.num_heads / kv.num_heads;
  const int first_row = rows.qo_indptr[item.request];
  Span shared[MAX_ITEM / GROUP];  // tiles with the same slots for all rows, by group
  Ahead ahead{};
  int max_low = 0, min_prefix = INT_MAX;

  int row_of(int i) const { return first_row + (item.first + i) / group; }
  const View& view(int i) const { return work.views[row_of(i)]; }
  int64_t vector_of(int h, int i) const {
    return row_of(i) * a.num_heads + (item.first_head + h) * group + (item.first + i) % group;
  }
  int group_size(int g) const { return std::min(GROUP, item.count - g); }
  bool is_few() const { return HAS_FEW<T> && item.count <= MAX_FEW && !on_tiles; }
  // Whether the item is computed group by group. It has one head then.
  bool is_wide() const { return item.count > FEW; }
  int index(int h, int i) const { return h * item.count + i; }
  // Index of scores and sums of the current part: only one group has them at a time.
  int place(int h, int i) const { return is_wide() ? i % GROUP : index(h, i); }
  float* scores(int h, int i) const { return x.score + place(h, i) * SCORES; }
  float* tail_scores(int h, int i) const { return x.tail + index(h, i) * TAIL; }
  Sums sums(int h, int i) const { return {x.part + place(h, i) * x.width, x.width}; }
  Matrix queries(int h, int i) const { return {x.queries + index(h, i) * x.width, x.width}; }
  // Weights from position `begin` of the part on, one word per unit.
  Matrix weights(int h, int i, int begin) const {
    return {(const word*)scores(h, i) + begin / PER, SCORES};
  }
  // Compute addresses of the keys and values of slots [first, first + n).
  void locate(int first, int n, const void** keys, const void** values) const {
    const int32_t* block = rows.indices + rows.indptr[item.request] + first / kv.block_size;
    int64_t token = kv.num_heads * D, in_block = first % kv.block_size;
    for (int j = 0; j < n; block++, in_block = 0) {
      int64_t offset = *block * kv.block_stride + in_block * token + item.first_head * D;
      int end = std::min<int64_t>(n, j + kv.block_size - in_block);
      for (; j < end; j++, offset += token) {
        keys[j] = (const T*)kv.k + offset;
        values[j] = (const T*)kv.v + offset;
      }
    }
  }
  // Compute addresses of a part's positions with the same slot for all rows.
  void locate_part(int number, Part& part) const {
    Span seen = overlap(part_span(number), {item.begin, item.end}), all = tiles(seen);
    part.begin = all.begin - number * PART;
    part.n = number < item.end_part && !seen.is_empty() ? all.size() : 0;
    std::fill_n(part.tokens, 2 * part.n + 2 * BLOCK, (const void*)ZEROS<T>);
    if (part.n == 0) return;
    const void** keys = part.tokens + seen.begin - all.begin;
    locate(seen.begin, seen.size(), keys, keys + part.n);
  }
  // Load the scales of slots [first, first + n); heads are `stride` apart.
  void load_scales(const float* scales, int first, int n, float* to, int stride) const {
    const int32_t* block = rows.indices + rows.indptr[item.request] + first / kv.block_size;
    int in_block = first % kv.block_size;
    for (int j = 0, end; j < n; j = end, block++, in_block = 0) {
      end = std::min<int64_t>(n, j + kv.block_size - in_block);
      const float* from = scales + *block * kv.scale_stride + item.first_head * kv.block_size;
      for (int h = 0; h < item.num_heads; h++, from += kv.block_size)
        for (int i = j; i < end; i++) to[h * stride + i] = from[in_block + i - j];
    }
  }
  // Load a part's scales; 0 for positions without keys.
  void load_part_scales(int number) {
    Span seen = overlap(part_span(number), {item.begin, item.end});
    if (seen.size() < PART)
      for (float* to : {x.key_scales, x.value_scales}) std::fill_n(to, item.num_heads * PART, 0.0f);
    int at = seen.begin - number * PART;
    load_scales(kv.k_scale, seen.begin, seen.size(), x.key_scales + at, PART);
    load_scales(kv.v_scale, seen.begin, seen.size(), x.value_scales + at, PART);
  }
  static Tokens<T> tokens_of(const Part& part) { return (Tokens<T>)part.tokens; }
  // Prefetch target of few query vectors, some blocks after block j of head h. A block's heads are
  // read in order.
  Prefetch behind(const Part& part, int j, int h) const {
    int head = h + FEW_AHEAD;
    return {part.tokens + j + head / item.num_heads * FEW_BLOCK,
            head % item.num_heads * D * int64_t(sizeof(T))};
  }

  void begin() {
    for (int h = 0; h < item.num_heads; h++)
      for (int i = 0; i < item.count; i++) {
        load_query<T>((const A*)a.q + vector_of(h, i) * D, D, x.queries + index(h, i) * x.width);
        x.seen[index(h, i)] = NOTHING;
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
    if (item.tail && item.end_part * PART > item.end) score_tails();
  }

  void multiply(Matrix p, Matrix q, Sums sums, int n, int64_t units, int64_t width, bool adds) {
#if HAS_TILES
    if (on_tiles) return multiply_on_tiles(p, q, sums, n, units, width, adds, ahead);
#endif
    multiply_vectors<PAIRED<T>>(p, q, sums, n, units, width, adds, ahead);
  }
  void multiply_keys(Matrix q, int n, Sums scores, const word* keys, int num_keys) {
    multiply(q, {keys, BLOCK}, scores, n, words, num_keys, false);
  }
  // Prefetch tokens of all of the item's heads during the next `products` register products.
  void look_ahead(const void* const* tokens, int n, int64_t products) {
    ahead = {tokens, n, item.num_heads * D * int64_t(sizeof(T)), std::max<int64_t>(products, 1)};
  }
  // Register products of n positions with keys or with values, for all query vectors and heads.
  int64_t key_products(int n) const { return item.num_heads * item.count * n / WORDS * words; }
  int64_t value_products(int n) const {
    return item.num_heads * item.count * width / WORDS * n / PER;
  }

  // Compute the scores of all tree slots for all rows. Each row later selects its path.
  void score_tails() {
    int num = item.tail - item.end;
    std::fill_n(x.path_keys, TAIL, (const void*)ZEROS<T>);
    locate(item.end, num, x.path_keys, x.path_values);
    for (int h = 0; h < item.num_heads; h++)
      for (int j = 0; j < num; j += BLOCK) {
        int n = (std::min(BLOCK, num - j) + LANES - 1) / LANES * LANES;
        load_keys<T>((Tokens<T>)x.path_keys + j, n, h * D, D, x.keys, BLOCK);
        multiply_keys(queries(h, 0), item.count, {tail_scores(h, 0) + j, TAIL}, x.keys, n);
      }
    if constexpr (IS_CODE<T>) scale_tails(num);
    for (int n = 0; n < item.num_heads * item.count; n++)
      a.cap(x.tail + n * TAIL, (num + LANES - 1) / LANES * LANES);
  }
  void scale_tails(int num) {
    load_scales(kv.k_scale, item.end, num, x.tail_scales, TAIL);
    for (int h = 0; h < item.num_heads; h++)
      for (int i = 0; i < item.count; i++)
        for (int j = 0; j < num; j++) tail_scores(h, i)[j] *= x.tail_scales[h * TAIL + j];
    load_scales(kv.v_scale, item.end, num, x.tail_scales, TAIL);
  }

  void score(int number, const Part& part) {
    for (int j = 0; j < part.n; j += is_few() ? FEW_BLOCK : BLOCK) {
      int n = std::min(BLOCK, part.n - j);
      if (!is_few()) look_ahead(part.tokens + j + n, BLOCK, key_products(n));
      for (int h = 0; h < item.num_heads; h++) {
        if (is_few()) {
          score_few_keys(part, j, h);
          continue;
        }
        load_keys<T>(tokens_of(part) + j, n, h * D, D, x.keys, BLOCK);
        for (int g = 0; g < item.count; g += GROUP)
          score_keys(number, part, j, h, g, x.keys);
      }
    }
  }
  void score_few_keys(const Part& part, int j, int h) {
    with_constant<T>(item.count, [&]<int N>() {
      score_few<T, N>(queries(h, 0), tokens_of(part) + j, FEW_BLOCK, h * D, D,
                      behind(part, j, h),
                      {scores(h, 0) + part.begin + j, SCORES});
    });
  }
  // Multiply a group by the loaded keys from j on, as far as the group sees them.
  void score_keys(int number, const Part& part, int j, int h, int g, const word* keys) {
    int n = std::min(BLOCK, part.n - j), first = number * PART + part.begin + j;
    Span span = overlap(shared[g / GROUP], {first, first + n});
    if (!span.is_empty())
      multiply_keys(queries(h, g), group_size(g),
                    {scores(h, g) + span.begin - number * PART, SCORES}, keys + span.begin - first,
                    span.size());
  }

  // Return the tiles that need a query's weights, relative to the part's begin.
  Span weighed(int part, int i) const {
    Span whole = part_span(part), span = overlap(shared[i / GROUP], whole);
    Span own = overlap(tiles({std::max(view(i).low, whole.begin), view(i).length}), whole);
    if (span.is_empty()) span = own;
    else if (!own.is_empty()) span.end = std::max(span.end, own.end);
    return {span.begin - whole.begin, span.end - whole.begin};
  }

  // Keep the visible scores of a query, and insert the scores of its tree path.
  void choose(int part, int i, Span span, float* score, const float* tail) const {
    const View& v = view(i);
    int zero = part * PART;
    take_path(part, i, tail, score);
    int low = std::min(std::max(v.low - zero, span.begin), span.end);
    int high = std::max(std::min(v.length - zero, span.end), low);
    std::fill(score + span.begin, score + low, -INF);
    std::fill(score + high, score + span.end, -INF);
  }

  // Copy values of tree slots on a query's path to their positions.
  void take_path(int part, int i, const float* tail, float* to) const {
    const View& v = view(i);
    Span path = path_in(part, i);
    for (int p = path.begin; p < path.end; p++)
      to[p - part * PART] = tail[(p < v.prefix ? p : work.paths[v.path + p - v.prefix]) - item.end];
  }
  Span path_in(int part, int i) const {
    if (!item.tail) return {0, 0};
    return overlap({std::max(item.end, view(i).low), view(i).length}, part_span(part));
  }

  void scale_scores(int h, Span span, float* score) const {
    const float* scales = x.key_scales + h * PART;
    for (int p = span.begin; p < span.end; p += LANES)
      store(score + p, load(score + p) * load(scales + p));
  }
  // Return the scales of values that a query sees, and 0 elsewhere.
  const float* value_scales(int part, int h, int i) const {
    const float* all = x.value_scales + h * PART;
    Span path = path_in(part, i), seen = overlap(part_span(part), {item.begin, item.end});
    Span own = overlap(seen, {view(i).low, view(i).prefix});
    if (path.is_empty() && own.begin == seen.begin && own.end == seen.end) return all;
    int zero = part * PART;
    std::fill_n(x.own_scales, PART, 0.0f);
    if (!own.is_empty())
      std::copy(all + own.begin - zero, all + own.end - zero, x.own_scales + own.begin - zero);
    take_path(part, i, x.tail_scales + h * TAIL, x.own_scales);
    return x.own_scales;
  }

  void soften_rows(int part, Span rows) {
    for (int i = rows.begin; i < rows.end; i++) {
      Span span = weighed(part, i);
      for (int h = 0; h < item.num_heads; h++) {
        float* score = scores(h, i);
        const float* value_scale = nullptr;
        Seen& now = x.now[place(h, i)] = NOTHING;
        memset(sums(h, i).at, 0, width * sizeof(float));
        if (span.is_empty()) continue;
        if constexpr (IS_CODE<T>) {
          scale_scores(h, span, score);
          value_scale = value_scales(part, h, i) + span.begin;
        }
        a.cap(score + span.begin, span.size());
        choose(part, i, span, score, tail_scores(h, i));
        now = soften<PAIRED<T>, IS_CODE<T>>(score + span.begin, span.size(), a.factor(),
                                            score + span.begin / PER, value_scale);
      }
    }
  }

  void add_values(int number, const Part& part) {
    bool few = is_few() && (IS_CODE<T> || !is_mixed(number * PART + part.begin, part.n));
    for (int j = 0; j < part.n; j += few ? FEW_BLOCK : TILE) {
      if (!few) look_ahead(part.tokens + part.n + j + TILE, TILE, value_products(TILE));
      for (int h = 0; h < item.num_heads; h++)
        few ? add_few_values(part, j, h) : add_values_of(number, part, j, TILE, h);
    }
  }
  void add_few_values(const Part& part, int j, int h) {
    with_constant<T>(item.count, [&]<int N>() {
      add_few<T, N>(weights(h, 0, part.begin + j), tokens_of(part) + part.n + j, FEW_BLOCK, h * D,
                    D, behind(part, part.n + j, h), sums(h, 0));
    });
  }
  void add_values_of(int number, const Part& part, int j, int n, int h) {
    Tokens<T> values = tokens_of(part) + part.n + j;
    int first = part.begin + j;
    load_values<T>(values, n, h * D, D, x.values, x.value_stride());
    bool are_safe = are_safe_values(number * PART + first, n);
    for (int g = 0; g < item.count; g += GROUP)
      if (are_safe) add_shared(number, first, n, h, g);
      else add_each(number, first, n, h, g, values);
  }
  // Whether weights of 0 may multiply the n loaded values.
  bool are_safe_values(int begin, int n) const {
    return IS_CODE<T> || !is_mixed(begin, n) ||
           are_finite<T>(x.values, n / PER, D, x.value_stride());
  }

  // Whether visibility in [begin, begin + n) differs between queries.
  bool is_mixed(int begin, int n) const {
    Span seen = overlap({begin, begin + n}, {item.begin, item.end});
    return max_low > seen.begin || min_prefix < seen.end;
  }

  // Add the loaded values of the part's positions [begin, begin + n), for some rows.
  void multiply_values(int h, int i, int num_rows, int begin, int n, const word* values) {
    multiply(weights(h, i, begin), {values, x.value_stride()}, sums(h, i), num_rows, n / PER, width,
             true);
  }

  void add_shared(int part, int begin, int n, int h, int g) {
    int first = part * PART + begin;
    Span span = overlap(shared[g / GROUP], {first, first + n});
    if (span.is_empty()) return;
    const word* from = x.values + (span.begin - first) / PER * x.value_stride();
    multiply_values(h, g, group_size(g), span.begin - part * PART, span.size(), from);
  }

  // Same as add_shared, but reads each query's hidden values as zeros, because 0 * NaN is NaN.
  // Codes are never NaN.
  void add_each(int part, int begin, int n, int h, int g, Tokens<T> values) {
    int first = part * PART + begin;
    Span span = overlap(shared[g / GROUP], {first, first + n});
    for (int i = g; i < g + group_size(g); i++)
      for (int t = span.begin; t < span.end; t += TILE)
        add_tile(h, i, 1, part, t, overlap({view(i).low, view(i).prefix}, {t, t + TILE}),
                 [&](int p) { return values[p - first]; });
  }

  // Add the values on the rows' tree paths, from the tree's first tile on.
  void add_paths(int part, int h, Span rows) {
    for (int i = rows.begin, n; i < rows.end; i += n) {
      const View& v = view(i);
      n = std::min(group - (item.first + i) % group, rows.end - i);
      Span path = overlap({std::max(item.end, tile_of(v.low)), v.length}, part_span(part));
      for (int t = path.begin; t < path.end; t += TILE)
        add_tile(h, i, n, part, t, overlap({v.low, v.length}, {t, t + TILE}), [&](int p) {
          int slot = p < v.prefix ? p : work.paths[v.path + p - v.prefix];
          return (const T*)x.path_values[slot - item.end];
        });
    }
  }

  // Add the values of the tile at position t, in which the n rows from i on see `seen`.
  template <class F>
  void add_tile(int h, int i, int n, int part, int t, Span seen, F value_at) {
    const T* values[TILE];
    std::fill_n(values, TILE, ZEROS<T>);
    for (int p = seen.begin; p < seen.end; p++) values[p - t] = value_at(p);
    if (!HAS_FEW<T> || n > MAX_FEW || on_tiles) {
      load_values<T>(values, TILE, h * D, D, x.tile, x.value_stride());
      return multiply_values(h, i, n, t - part * PART, TILE, x.tile);
    }
    // Zeros times weights of 0 change no sum, so only visible words are added.
    int begin = (seen.begin - t) / PER * PER, end = (seen.end - t + PER - 1) / PER * PER;
    with_constant<T>(n, [&]<int N>() {
      add_few<T, N>(weights(h, i, t - part * PART + begin), values + begin, end - begin, h * D, D,
                    {}, sums(h, i));
    });
  }

  // Merge the part's results into the previous ones, or store them as partial results.
  void keep(int part, int h, Span rows, float* partials) {
    for (int i = rows.begin; i < rows.end; i++) {
      int n = index(h, i);
      const Seen& now = x.now[place(h, i)];
      if (item.partial < 0) {
        merge(x.total + n * x.width, x.seen[n], sums(h, i).at, now, width);
        continue;
      }
      int64_t entry = item.partial + int64_t(part - item.first_part) * item.count + i;
      float* to = partials + (entry * kv.num_heads + item.first_head + h) * partial_size(D);
      memcpy(to, sums(h, i).at, width * sizeof(float));
      memcpy(to + width, &now, sizeof(Seen));
    }
  }

  void run(float* partials) {
    begin();
    locate_part(item.first_part, x.parts[0]);
    for (int number = item.first_part, now = 0; number < item.end_part; number++, now = 1 - now) {
      Part &part = x.parts[now], &next = x.parts[1 - now];
      locate_part(number + 1, next);
      std::copy_n(next.tokens, std::min(next.n, 2 * BLOCK), part.tokens + 2 * part.n);
      if constexpr (IS_CODE<T>) load_part_scales(number);
      is_wide() ? run_groups(number, part, next, partials) : run_heads(number, part, partials);
    }
    if (item.partial < 0) write();
  }
  // Read a part's tokens block by block, with all heads of a block, because heads are adjacent.
  void run_heads(int number, const Part& part, float* partials) {
    score(number, part);
    soften_rows(number, {0, item.count});
    add_values(number, part);
    for (int h = 0; h < item.num_heads; h++) keep_rows(number, h, {0, item.count}, partials);
  }
  // Load a part's keys and values once for all groups of query vectors. A group's scores and sums
  // stay in caches.
  void run_groups(int number, const Part& part, const Part& next, float* partials) {
    auto keys_from = [&](int j) { return x.keys + j * words; };
    for (int j = 0; j < part.n; j += BLOCK)
      load_keys<T>(tokens_of(part) + j, std::min(BLOCK, part.n - j), 0, D, keys_from(j), BLOCK);
    Tokens<T> values = tokens_of(part) + part.n;
    load_values<T>(values, part.n, 0, D, x.values, x.value_stride());
    bool are_safe = are_safe_values(number * PART + part.begin, part.n);
    look_ahead(next.tokens, 2 * next.n, key_products(part.n) + value_products(part.n));
    for (int g = 0; g < item.count; g += GROUP) {
      for (int j = 0; j < part.n; j += BLOCK) score_keys(number, part, j, 0, g, keys_from(j));
      Span rows{g, g + group_size(g)};
      soften_rows(number, rows);
      if (are_safe) add_shared(number, part.begin, part.n, 0, g);
      else add_each(number, part.begin, part.n, 0, g, values);
      keep_rows(number, 0, rows, partials);
    }
  }
  void keep_rows(int number, int h, Span rows, float* partials) {
    if (item.tail) add_paths(number, h, rows);
    keep(number, h, rows, partials);
  }
  void write() {
    for (int h = 0; h < item.num_heads; h++)
      for (int i = 0; i < item.count; i++) {
        int n = index(h, i);
        int64_t vector = vector_of(h, i);
        a.drain(x.total + n * x.width, x.seen[n], vector % a.num_heads, width);
        finish(x.total + n * x.width, x.seen[n], (A*)a.out + vector * D, D);
      }
  }
};

// Merge the parts of a cut context in order, as in `keep`; A is the type of the result.
template <class A>
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
    int64_t query_head = head * group + vector % group, at = row * a.num_heads + query_head;
    a.drain(total, seen, query_head, width);
    finish(total, seen, (A*)a.out + at * D, D);
  }
}

template <class T> static void attention(const Attention& a, const Step& step, Team& team) {
  AttentionPlan& plan = *step.attention;
  const Work& work = plan.of(a.window, a.kv->num_heads);
  int64_t num = work.items.size();
  static thread_local Scratch* scratch = new Scratch;
  scratch->fit(a.kv->head_dim, IS_CODE<T>);
  const bool on_tiles = uses_tiles<T>();
  TileUse use(on_tiles);
  for (int64_t i = team.take(); i < num; i = team.take()) {
    Task<T> task{a, *step.rows, work, work.items[i], *scratch, on_tiles};
    task.run(plan.partials.data());
  }
  if (work.cuts.empty()) return;
  team.wait();
  for (const Cut& cut : work.cuts)
    merge_cut<Active<T>>(a, *step.rows, cut, plan.partials.data(), team.part(cut.count * a.kv->num_heads));
}

// Attention over 8-bit KV, in a separate file for faster parallel compilation.
void attention_over_codes(const Attention& a, const Step& step, Team& team);
