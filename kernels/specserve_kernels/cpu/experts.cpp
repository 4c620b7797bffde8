// Mixtures of experts: routing, the experts' maps, and adding their outputs to a residual.
//
// A row of a step and one of its experts are a pair. Pairs have places, sorted by expert and then
// by row. An expert's rows are therefore contiguous.
#include <algorithm>

#include "linear.h"

constexpr int64_t MAX_EXPERTS = 1024;  // as in arguments.py
constexpr int64_t ROUTED_ALONE = 16;   // maximum rows that one thread routes

struct Route {
  int64_t is_bf16, domain;
  const void* logits;                // [R, E]
  const float *correction, *factors;  // [E], may be null
  float* weights;                    // [R, k]
  int32_t *experts, *places, *rows;  // [R, k]; places by pair, rows by place
  int32_t* begins;                   // [E + 1]  first place of each expert, and the end
  int64_t num_experts, k, normalizes, is_sigmoid;
  float factor;
};

// Choose the k largest logits. Equal logits rank by lower index; NaN never replaces an earlier
// number.
static void choose(const float* logits, int64_t E, int64_t k, int32_t* chosen) {
  bool is_taken[MAX_EXPERTS] = {};
  for (int64_t j = 0; j < k; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; e++)
      if (!is_taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    is_taken[best] = true;
    chosen[j] = best;
  }
}

template <class T> static void route_row(const Route& a, int64_t r) {
  float numbers[MAX_EXPERTS];
  int64_t E = a.num_experts, k = a.k;
  int32_t* chosen = a.experts + r * k;
  float* weights = a.weights + r * k;
  for (int64_t e = 0; e < E; e++) numbers[e] = to_float(((const T*)a.logits)[r * E + e]);
  choose(numbers, E, k, chosen);
  vf top = splat(numbers[chosen[0]]), total{};
  for (int64_t e = 0; e < E; e += LANES) {
    int n = std::min<int64_t>(E - e, LANES);
    vf x = load_up_to(numbers + e, n);
    store_up_to(numbers + e, a.is_sigmoid ? 1.0f / (1.0f + exp(-x)) : exp(x - top), n);
    total += load_up_to(numbers + e, n);
  }
  float all = a.is_sigmoid ? 1.0f : sum(total), some = 0;
  if (a.correction) {
    float ranked[MAX_EXPERTS];
    for (int64_t e = 0; e < E; e++) ranked[e] = numbers[e] / all + a.correction[e];
    choose(ranked, E, k, chosen);
  }
  for (int64_t j = 0; j < k; j++) some += weights[j] = numbers[chosen[j]] / all;
  for (int64_t j = 0; j < k && a.normalizes; j++) weights[j] /= some;
  for (int64_t j = 0; j < k; j++) weights[j] *= a.factors ? a.factors[chosen[j]] : a.factor;
}

static void give_places(const Route& a, int64_t R) {
  int32_t next[MAX_EXPERTS] = {};
  for (int64_t i = 0; i < R * a.k; i++) next[a.experts[i]]++;
  int32_t behind = 0;
  for (int64_t e = 0; e < a.num_experts; e++) {
    a.begins[e] = behind;
    behind += next[e];
    next[e] = a.begins[e];
  }
  a.begins[a.num_experts] = behind;
  for (int64_t i = 0; i < R * a.k; i++) {
    a.places[i] = next[a.experts[i]]++;
    a.rows[a.places[i]] = i / a.k;
  }
}

template <class T> static void route(const Route& a, int64_t R, Team& team) {
  bool is_alone = R <= ROUTED_ALONE;
  Range part = team.part(R);
  if (is_alone) part = team.id == 0 ? Range{0, R} : Range{0, 0};
  for (int64_t r = part.begin; r < part.end; r++) route_row<T>(a, r);
  if (!is_alone) team.wait();
  if (team.id == 0) give_places(a, R);
}

struct ExpertMaps {
  Linear map;  // shared shape of all experts; rows are in the order of places
  const void* const* packed;  // [E]
  const int32_t* begins;      // [E + 1]
  int64_t num_experts;
};

struct AddExperts {
  int64_t is_bf16, domain;
  const float *sums, *weights;  // [R k, N] by place; [R, k]
  const int32_t* places;        // [R, k]
  void* residual;               // [R, N]
  int64_t N, k, adds;           // adds to `residual`, or replaces it
};

struct AddGated {
  int64_t is_bf16, domain;
  const void *x, *gate;  // [R, N], [R]
  void* residual;        // [R, N]
  int64_t N;
};

struct WeighRows {
  int64_t is_bf16, domain;
  const void *x, *logits;  // [R, N], [R, E]
  void* out;               // [R, N]
  int64_t N, num_experts;
};

constexpr int64_t COLUMNS_AT_ONCE = 256;

template <class T>
static void do_columns(const AddExperts& a, int64_t r, int64_t begin, int64_t end) {
  const float* weights = a.weights + r * a.k;
  const int32_t* places = a.places + r * a.k;
  for (int64_t i = begin; i < end; i += LANES) {
    int n = std::min<int64_t>(end - i, LANES);
    vf total{};
    for (int64_t j = 0; j < a.k; j++)
      total += load_up_to(a.sums + places[j] * a.N + i, n) * weights[j];
    T* to = (T*)a.residual + r * a.N + i;
    store_up_to(to, a.adds ? load_up_to(to, n) + total : total, n);
  }
}

template <class T>
static void do_columns(const AddGated& a, int64_t r, int64_t begin, int64_t end) {
  vf share = 1.0f / (1.0f + exp(-splat(to_float(((const T*)a.gate)[r]))));
  for (int64_t i = begin; i < end; i += LANES) {
    int n = std::min<int64_t>(end - i, LANES);
    T* to = (T*)a.residual + r * a.N + i;
    store_up_to(to, load_up_to(to, n) + load_up_to((const T*)a.x + r * a.N + i, n) * share, n);
  }
}

template <class T>
static void do_columns(const WeighRows& a, int64_t r, int64_t begin, int64_t end) {
  const T* logits = (const T*)a.logits + r * a.num_experts;
  float largest = to_float(logits[0]);
  for (int64_t e = 1; e < a.num_experts; e++) largest = std::max(largest, to_float(logits[e]));
  vf share = 1.0f / (1.0f + exp(-splat(largest)));
  for (int64_t i = begin; i < end; i += LANES) {
    int n = std::min<int64_t>(end - i, LANES);
    store_up_to((T*)a.out + r * a.N + i, load_up_to((const T*)a.x + r * a.N + i, n) * share, n);
  }
}

template <class T, class Args> static void do_pieces(const Args& a, int64_t R, Team& team) {
  int64_t pieces = divide_up(a.N, COLUMNS_AT_ONCE);
  Range part = team.part(R * pieces);
  for (int64_t i = part.begin; i < part.end; i++) {
    int64_t begin = i % pieces * COLUMNS_AT_ONCE;
    do_columns<T>(a, i / pieces, begin, std::min(begin + COLUMNS_AT_ONCE, a.N));
  }
}

template <class Args> static void do_pieces(const void* args, const Step& step, Team& team) {
  const Args& a = *(const Args*)args;
  int64_t R = step.num_rows[a.domain];
  a.is_bf16 ? do_pieces<bf16>(a, R, team) : do_pieces<float>(a, R, team);
}

extern "C" {
void specserve_route(const void* args, const Step& step, Team& team) {
  const Route& a = *(const Route*)args;
  int64_t R = step.num_rows[a.domain];
  a.is_bf16 ? route<bf16>(a, R, team) : route<float>(a, R, team);
}

void specserve_expert_maps(const void* args, const Step&, Team& team) {
  const ExpertMaps& a = *(const ExpertMaps*)args;
  multiply({a.map, 0, a.packed, a.begins, a.num_experts}, team);
}

void specserve_add_experts(const void* args, const Step& step, Team& team) {
  do_pieces<AddExperts>(args, step, team);
}

void specserve_add_gated(const void* args, const Step& step, Team& team) {
  do_pieces<AddGated>(args, step, team);
}

void specserve_weigh_rows(const void* args, const Step& step, Team& team) {
  do_pieces<WeighRows>(args, step, team);
}
}
