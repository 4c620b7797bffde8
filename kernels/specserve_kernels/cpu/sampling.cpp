// Sampling: logit edits, masks, temperature, min_p, top_k, top_p, counter-based Gumbel noise,
// argmax.
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "op.h"
#include "vec.h"

constexpr int BLOCK = 64;  // ids of 16 counters with four words each
constexpr float MAX_NOISE = 23.0f;  // upper bound of noise: the smallest uniform, 2^-33, gives 22.9

struct Range32 {
  int32_t begin, end;
};

// The pointers of edits and masks are null if no row has any.
struct SampleParams {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seeds, *index;
  const Range32 *base, *own;
  const int32_t* ids;
  const float *bias, *factor, *penalty;
  const int32_t* mask;
  const uint32_t* words;

  bool has_edits(int64_t i) const {
    return base && (base[i].begin < base[i].end || own[i].begin < own[i].end);
  }
  bool has_mask(int64_t i) const { return mask && mask[i] > 0; }
};

struct Words {
  vu w0, w1, w2, w3;
};

static inline void multiply(uint32_t a, vu b, vu& high, vu& low) {
#if defined(__AVX512F__)
  __m512i m = _mm512_set1_epi32((int)a);
  __m512i even = _mm512_mul_epu32((__m512i)b, m);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)b, 32), m);
  low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#else
  for (int i = 0; i < LANES; i++) {
    uint64_t p = uint64_t(a) * b[i];
    high[i] = p >> 32;
    low[i] = uint32_t(p);
  }
#endif
}

// Philox4x32-10 (Salmon et al., SC'11) on 16 counters (first + lane, index, 0, 0).
static inline Words philox(uint64_t seed, uint32_t index, uint32_t first) {
  vu c0 = vu{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
  vu c1 = vu{} + index, c2{}, c3{};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vu h0, l0, h1, l1;
    multiply(0xD2511F53u, c0, h0, l0);
    multiply(0xCD9E8D57u, c2, h1, l1);
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// Return -log(-log1p(-u)) with u = min((word + 0.5) / 2^32, 1 - 2^-24).
static inline vf gumbel(vu word) {
  vf u = (__builtin_convertvector(word, vf) + 0.5f) * 0x1p-32f;
  u = u < 0x1.fffffep-1f ? u : splat(0x1.fffffep-1f);
  vf w = 1.0f - u;
  // log1p(-u) = log(w) * u / (1 - w) undoes the rounding of w (Kahan). If w = 1, it is -u.
  vf e = w == 1.0f ? u : -log(w) * (u / (1.0f - w));
  return -log(e);
}

static void spread(const Words& w, float* out) {
  alignas(64) float g[4][LANES];
  store(g[0], gumbel(w.w0));
  store(g[1], gumbel(w.w1));
  store(g[2], gumbel(w.w2));
  store(g[3], gumbel(w.w3));
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < 4; j++) out[4 * i + j] = g[j][i];
}

// Compute noise of the ids [64 block, 64 block + 64) at one position.
static void noise(uint64_t seed, uint32_t index, int64_t block, float* out) {
  spread(philox(seed, index, uint32_t(block * LANES)), out);
}

// Whether noise of these words may exceed `least`, by the bound -log(-log1p(-u)) <= -log(u). The
// check avoids the two logarithms, which take most of the time.
static bool may_exceed(const Words& w, float least) {
  vu a = w.w0 < w.w1 ? w.w0 : w.w1, b = w.w2 < w.w3 ? w.w2 : w.w3;
  float smallest = -max(-__builtin_convertvector(a < b ? a : b, vf));
  return !(smallest * 0x1p-32f > 1.001f * std::exp(-least));
}

// Replace NaN by infinity, so that no maximum drops it.
static inline vf nan_to_inf(vf x) { return x == x ? x : splat(INF); }

// Return the maximum of n <= BLOCK logits; infinity if one is NaN.
static float most_of(const float* x, int n) {
  if (n == BLOCK) {
    vf a = nan_to_inf(load(x)), b = nan_to_inf(load(x + 16));
    vf c = nan_to_inf(load(x + 32)), d = nan_to_inf(load(x + 48));
    return max(max(max(a, b), max(c, d)));
  }
  float most = -INF;
  for (int i = 0; i < n; i++) most = x[i] <= most ? most : x[i] == x[i] ? x[i] : INF;
  return most;
}

static float most_of_row(const float* x, int64_t V) {
  float most = -INF;
  for (int64_t b = 0; b < V; b += BLOCK)
    most = std::max(most, most_of(x + b, std::min<int64_t>(BLOCK, V - b)));
  return most;
}

constexpr int64_t NO_TOKEN = -1, NOT_FINITE = -2;  // as in types.py

static int64_t argmax(const float* x, int64_t V) {
  int64_t best = NO_TOKEN;
  float top = -INF;
  for (int64_t b = 0; b < V; b += BLOCK) {
    int n = std::min<int64_t>(BLOCK, V - b);
    float most = most_of(x + b, n);
    if (!(most > top)) continue;
    if (most == INF) return NOT_FINITE;
    top = most;
    for (best = b; x[best] != top;) best++;
  }
  return best;
}

// An id with its logit / temperature. More probable candidates order first.
struct Candidate {
  float z;
  int32_t id;
  float mass;  // only set for top_p
  bool operator<(const Candidate& o) const { return z > o.z || (z == o.z && id < o.id); }
};

using Candidates = std::vector<Candidate>;

// A row's logits / temperature, with the maximum of each block.
struct Scaled {
  const float* x;
  int64_t V;
  float t;
  std::vector<float>& tops;

  Scaled(const float* x, int64_t V, float t, std::vector<float>& tops)
      : x(x), V(V), t(t), tops(tops) {
    tops.resize((V + BLOCK - 1) / BLOCK);
    for (size_t b = 0; b < tops.size(); b++) tops[b] = most_of(x + b * BLOCK, length(b)) / t;
  }
  int length(size_t block) const { return std::min<int64_t>(BLOCK, V - block * BLOCK); }
  float most() const { return *std::max_element(tops.begin(), tops.end()); }
  Candidate at(size_t block, int j) const {
    int64_t id = block * BLOCK + j;
    return {x[id] / t, int32_t(id), 0};
  }
};

// Return the most probable id with noise, among candidates up to `last`. Blocks that cannot win are
// skipped without noise.
static int64_t argmax_noisy(const Scaled& row, uint64_t seed, uint32_t index, Candidate last) {
  int64_t best = 0;
  float top = -INF, g[BLOCK];
  for (size_t b = 0; b < row.tops.size(); b++) {
    float most = row.tops[b];
    if (most < last.z || most + MAX_NOISE < top) continue;
    Words w = philox(seed, index, uint32_t(b * LANES));
    if (!may_exceed(w, top - most)) continue;
    spread(w, g);
    for (int j = 0; j < row.length(b); j++) {
      Candidate y = row.at(b, j);
      if (y.z + g[j] > top && !(last < y)) {
        top = y.z + g[j];
        best = y.id;
      }
    }
  }
  return best;
}

// Return the last of the k most probable candidates up to `last`; store all k in c.
static Candidate keep_top_k(const Scaled& row, size_t k, Candidate last, Candidates& c) {
  if (k < row.tops.size()) {  // the k-th value is at least the k-th block maximum
    static thread_local std::vector<float> tops;
    tops = row.tops;
    std::nth_element(tops.begin(), tops.begin() + (k - 1), tops.end(), std::greater<float>());
    last.z = std::max(last.z, tops[k - 1]);
  }
  auto cut = [&] {
    std::nth_element(c.begin(), c.begin() + (k - 1), c.end());
    c.resize(k);
    last = c[k - 1];
  };
  for (size_t b = 0; b < row.tops.size(); b++) {
    if (row.tops[b] < last.z) continue;
    for (int j = 0; j < row.length(b); j++) {
      Candidate y = row.at(b, j);
      if (y.z >= last.z && !(last < y)) c.push_back(y);
    }
    if (c.size() > k + std::max<size_t>(k, BLOCK)) cut();
  }
  if (c.size() > k) cut();
  return last;
}

// Store the candidates >= `floor` in c; return the mass of the others.
static double take_above(const Scaled& row, float most, float floor, Candidates& c) {
  double rest = 0;
  for (size_t b = 0; b < row.tops.size(); b++) {
    int n = row.length(b);
    vf some{};
    for (int j = 0; j < n; j += LANES) {
      int m = std::min(LANES, n - j);
      vf z = load_up_to(row.x + b * BLOCK + j, m) / row.t;
      some += z < floor && lanes() < float(m) ? exp(z - most) : vf{};
    }
    rest += sum(some);
    if (row.tops[b] < floor) continue;
    for (int j = 0; j < n; j++) {
      Candidate y = row.at(b, j);
      if (y.z >= floor) c.push_back(y);
    }
  }
  return rest;
}

constexpr int BUCKETS = 2048, BUCKETS_OF_ONE = 64;  // in total, and per factor e of mass

// Reduce c to the bucket of the last kept candidate; return the mass before that bucket.
static double find_bucket(Candidates& c, float most, double enough) {
  auto bucket = [&](const Candidate& y) {
    float at = (most - y.z) * BUCKETS_OF_ONE;
    return at < BUCKETS - 1 ? int(at) : BUCKETS - 1;
  };
  double masses[BUCKETS] = {}, before = 0;
  int at = BUCKETS - 1, last = 0;  // first and last nonempty bucket
  for (const Candidate& y : c) {
    masses[bucket(y)] += y.mass;
    at = std::min(at, bucket(y));
    last = std::max(last, bucket(y));
  }
  for (; at < last && before + masses[at] < enough; at++) before += masses[at];
  std::erase_if(c, [&](const Candidate& y) { return bucket(y) != at; });
  return before;
}

// Return the last candidate that top_p keeps: the fewest most probable candidates with top_p of the
// total mass, at least one. The total is the mass of c plus `rest`.
static Candidate keep_top_p(Candidates& c, float top_p, float most, double rest) {
  double total = rest, before = 0;
  for (size_t b = 0; b < c.size(); b += LANES) {
    int n = std::min<size_t>(LANES, c.size() - b);
    vf z{};
    for (int j = 0; j < n; j++) z[j] = c[b + j].z;
    z = exp(z - most);
    for (int j = 0; j < n; j++) total += c[b + j].mass = z[j];
  }
  double enough = double(top_p) * total;
  if (c.size() > 256) before = find_bucket(c, most, enough);
  std::sort(c.begin(), c.end());
  size_t last = 0;
  while (last + 1 < c.size() && (before += c[last].mass) < enough) last++;
  return c[last];
}

// Return the last candidate that min_p, top_k and top_p keep.
static Candidate last_kept(const Scaled& row, const SampleParams& p, int64_t i) {
  static thread_local Candidates c;
  Candidate last{std::numeric_limits<float>::lowest(), int32_t(row.V), 0};  // excludes -inf
  float top_p = p.top_p[i], most = row.most();
  size_t top_k = p.top_k[i];
  if (p.min_p[i] > 0) last.z = std::max(last.z, most + std::log(p.min_p[i]));
  if (top_k == 0 && top_p >= 1) return last;
  c.clear();
  double rest = 0;
  if (top_k > 0) {
    last = keep_top_k(row, top_k, last, c);
  } else if (p.min_p[i] > 0) {
    take_above(row, most, last.z, c);
  } else {  // ids below `floor` have less than 1 - top_p of the mass, which is at least 1
    float floor = most + std::log(std::max((1 - top_p) / float(row.V), 1e-30f));
    rest = take_above(row, most, std::max(last.z, floor), c);
  }
  return top_p < 1 && !c.empty() ? keep_top_p(c, top_p, most, rest) : last;
}

static int64_t choose(const float* x, int64_t V, const SampleParams& p, int64_t i) {
  static thread_local std::vector<float> tops;
  if (p.temperature[i] == 0) return argmax(x, V);
  Scaled row(x, V, p.temperature[i], tops);
  if (std::isinf(row.most())) return row.most() < 0 ? NO_TOKEN : NOT_FINITE;
  return argmax_noisy(row, p.seeds[i], uint32_t(p.index[i]), last_kept(row, p, i));
}

// Each edit reads the original logits x, so only an id's last edit takes effect.
static void edit(const float* x, const SampleParams& p, Range32 edits, float* z) {
  for (int32_t e = edits.begin; e < edits.end; e++) {
    float y = x[p.ids[e]] + p.bias[e];
    z[p.ids[e]] = (y > 0 ? y / p.factor[e] : y * p.factor[e]) - p.penalty[e];
  }
}

static void forbid(const uint32_t* words, int64_t V, float* z) {
  for (int64_t v = 0; v < V; v += 32) {
    uint32_t word = words[v / 32];
    if (word == ~0u) continue;
    int n = std::min<int64_t>(32, V - v);
    for (int i = 0; i < n; i++) z[v + i] = word >> i & 1 ? z[v + i] : -INF;
  }
}

// Return a row after its edits and mask, in thread-local memory.
static const float* edited(const float* x, int64_t V, const SampleParams& p, int64_t i) {
  static thread_local std::vector<float> z;
  z.resize(V);
  for (int64_t v = 0; v < V; v++) z[v] = x[v];
  if (p.has_edits(i)) {
    edit(x, p, p.base[i], z.data());
    edit(x, p, p.own[i], z.data());
  }
  if (p.has_mask(i)) forbid(p.words + (p.mask[i] - 1) * ((V + 31) / 32), V, z.data());
  return z.data();
}

struct Sample {
  const float* logits;
  int64_t vocab_size;
  const int64_t* rows;
  int64_t num_rows;
  SampleParams params;
  int64_t* out;
};

static void sample(const Sample& a, Team& team) {
  const SampleParams& p = a.params;
  int64_t V = a.vocab_size;
  for (int64_t i = team.take(); i < a.num_rows; i = team.take()) {
    const float* x = a.logits + a.rows[i] * V;
    bool is_plain = !p.has_edits(i) && !p.has_mask(i);
    a.out[i] = is_plain ? choose(x, V, p, i) : choose(edited(x, V, p, i), V, p, i);
  }
}

// Insert into the k best so far. Equal weights keep the lower id first.
static void insert(float w, int64_t id, int64_t k, float* weight, int64_t* ids) {
  int64_t at = k - 1;
  for (; at > 0 && weight[at - 1] < w; at--) {
    weight[at] = weight[at - 1];
    ids[at] = ids[at - 1];
  }
  weight[at] = w;
  ids[at] = id;
}

// Find the k greatest values of a row, in descending order; equal values by lower id.
static void greatest(const float* x, int64_t V, int64_t k, float* z, int64_t* ids) {
  for (int64_t v = 0; v < k; v++) insert(x[v], v, v + 1, z, ids);
  if (k == 0) return;
  for (int64_t b = k; b < V; b += BLOCK) {
    int n = std::min<int64_t>(BLOCK, V - b);
    if (!(most_of(x + b, n) > z[k - 1])) continue;
    for (int j = 0; j < n; j++)
      if (x[b + j] > z[k - 1]) insert(x[b + j], b + j, k, z, ids);
  }
}

// Return the sum of exp(x - most). The order of additions depends only on V.
static double sum_of_exp(const float* x, int64_t V, float most) {
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += 64 * LANES) {
    int64_t b = begin, end = std::min<int64_t>(begin + 64 * LANES, V);
    vf some{};
    for (; b + LANES <= end; b += LANES) some += exp(load(x + b) - most);
    total += sum(some);
    for (; b < end; b++) total += std::exp(x[b] - most);
  }
  return total;
}

static int64_t rank(const float* x, int64_t V, int64_t token) {
  float own = x[token];
  int32_t before = 0;
  for (int64_t v = 0; v < token; v++) before += x[v] >= own;
  for (int64_t v = token + 1; v < V; v++) before += x[v] > own;
  return 1 + before;
}

struct Logprobs {
  const float* logits;
  int64_t vocab_size;
  const int64_t *rows, *tokens;
  int64_t num_rows, k;
  float* token;
  int64_t *rank, *ids;
  float* top;
};

static void logprobs(const Logprobs& a, Team& team) {
  int64_t V = a.vocab_size, k = a.k;
  for (int64_t i = team.take(); i < a.num_rows; i = team.take()) {
    const float* x = a.logits + a.rows[i] * V;
    float *top = a.top + i * k;
    greatest(x, V, k, top, a.ids + i * k);
    float most = k > 0 ? top[0] : most_of_row(x, V);
    double log_total = std::log(sum_of_exp(x, V, most));
    auto log_share = [&](float z) { return float(double(z) - most - log_total); };
    a.token[i] = log_share(x[a.tokens[i]]);
    a.rank[i] = rank(x, V, a.tokens[i]);
    for (int64_t j = 0; j < k; j++) top[j] = log_share(top[j]);
  }
}

static void children(const float* x, int64_t V, const SampleParams& p, int64_t i, int64_t k,
                     float tau, float* z, int64_t* ids, float* weight) {
  float t = p.temperature[i];
  for (int64_t v = 0; v < V; v++) z[v] = t > 0 ? x[v] / t : x[v];
  if (t > 0) {
    float g[BLOCK];
    for (int64_t b = 0; b < V; b += BLOCK) {
      noise(p.seeds[i], uint32_t(p.index[i]), b / BLOCK, g);
      int n = std::min<int64_t>(BLOCK, V - b);
      for (int j = 0; j < n; j++) z[b + j] += g[j];
    }
  }
  std::fill(weight, weight + k, -INF);
  std::fill(ids, ids + k, 0);
  for (int64_t b = 0; b < V; b += LANES) {
    int n = std::min<int64_t>(LANES, V - b);
    if (n == LANES && !(max(load(z + b)) > weight[k - 1])) continue;
    for (int j = 0; j < n; j++)
      if (z[b + j] > weight[k - 1]) insert(z[b + j], b + j, k, weight, ids);
  }
  float most = weight[0];
  vf total{};
  int64_t b = 0;
  for (; b + LANES <= V; b += LANES) total += exp((load(z + b) - most) / tau);
  float rest = 0;
  for (; b < V; b++) rest += std::exp((z[b] - most) / tau);
  float log_total = std::log(sum(total) + rest);
  for (int64_t j = 0; j < k; j++) weight[j] = (weight[j] - most) / tau - log_total;
}

struct TopChildren {
  const float* logits;
  int64_t num_rows, vocab_size;
  SampleParams params;
  int64_t k;
  float tau;
  int64_t* ids;
  float* weight;
};

static void top_children(const TopChildren& a, Team& team) {
  static thread_local std::vector<float> z;
  int64_t V = a.vocab_size, k = a.k;
  z.resize(V);
  for (int64_t i = team.take(); i < a.num_rows; i = team.take())
    children(a.logits + i * V, V, a.params, i, k, a.tau, z.data(), a.ids + i * k,
             a.weight + i * k);
}

extern "C" {
void specserve_sample(const void* args, const Step&, Team& team) {
  sample(*(const Sample*)args, team);
}

void specserve_logprobs(const void* args, const Step&, Team& team) {
  logprobs(*(const Logprobs*)args, team);
}

void specserve_top_children(const void* args, const Step&, Team& team) {
  top_children(*(const TopChildren*)args, team);
}
}
