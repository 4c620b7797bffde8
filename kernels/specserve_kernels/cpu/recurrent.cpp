// Recurrent ops: a causal convolution, the gated delta rule, and replays of accepted draft tokens.
//
// All inputs are applied token by token, in one order. A row's bits therefore do not depend on how
// rows are divided into steps, nor on other rows.
#include <algorithm>
#include <vector>

#include "recurrent.h"

static inline vf rounded_to(const float*, vf x) { return x; }
static inline vf rounded_to(const bf16*, vf x) { return (vf)(round_bf16(x) << 16); }

struct Conv {
  const State* state;
  const void* x;
  const float *weight, *bias;  // [L, C]; [C] or null
  void* out;
  int64_t is_bf16, is_gated, x_stride;
};

// The inputs of some channels: the last ones before the step, then those of its rows.
template <class T> struct Inputs {
  T tail[MAX_TAPS][CHANNELS];
  int64_t length;  // of the tail
  int64_t begin;   // first channel
  const T* x;
  int64_t stride, width;
  bool is_gated;
  const T* const* kept = nullptr;  // instead of x: kept inputs of draft tokens

  // i: number of a row, or -1 for the last input before the step
  vf at(int64_t i, int64_t c, int n) const {
    if (i < 0) return load_up_to(tail[length + i] + c, n);
    if (kept) return load_up_to(kept[i] + begin + c, n);
    const T* row = x + i * stride + begin + c;
    vf v = load_up_to(row, n);
    return is_gated ? rounded_to(row, v * load_up_to(row + 2 * width, n)) : v;
  }
  void read_tail(const T* state, int64_t channels) {
    for (int64_t j = 0; j < length; j++)
      if (state) memcpy(tail[j], state + j * width + begin, channels * sizeof(T));
      else memset(tail[j], 0, channels * sizeof(T));
  }
  // Write the inputs that precede row `rows`.
  void write_tail(T* state, int64_t rows, int64_t channels) const {
    for (int64_t j = 0; j < length; j++)
      for (int64_t c = 0; c < channels; c += LANES) {
        int n = std::min<int64_t>(channels - c, LANES);
        store_up_to(state + j * width + begin + c, at(rows - length + j, c, n), n);
      }
  }
};

template <class T>
static void conv_row(const Conv& a, const Inputs<T>& in, const OwnRows& own, int64_t i,
                     int64_t channels) {
  int64_t path[MAX_TAPS], L = in.length + 1, C = in.width;
  path[L - 1] = i;
  for (int64_t j = L - 2; j >= 0; j--)
    path[j] = path[j + 1] >= 0 ? own.parent(path[j + 1]) : path[j + 1] - 1;
  for (int64_t c = 0; c < channels; c += LANES) {
    int n = std::min<int64_t>(channels - c, LANES);
    const float* weight = a.weight + in.begin + c;
    vf total{};
    for (int64_t j = 0; j < L; j++)
      total = fma(in.at(path[j], c, n), load_up_to(weight + j * C, n), total);
    if (a.bias) total += load_up_to(a.bias + in.begin + c, n);
    if (a.is_gated) total *= load_up_to(in.x + i * in.stride + C + in.begin + c, n);
    else total = total / (1.0f + exp(-total));
    store_up_to((T*)a.out + (own.first + i) * C + in.begin + c, total, n);
  }
}

template <class T> static void conv(const Conv& a, const Rows& rows, int64_t b, int64_t begin) {
  const State& s = *a.state;
  OwnRows own(rows, b);
  int64_t channels = std::min(CHANNELS, s.width - begin);
  Inputs<T> in;
  in.length = s.height, in.begin = begin, in.width = s.width;
  in.x = (const T*)a.x + own.first * a.x_stride, in.stride = a.x_stride;
  in.is_gated = a.is_gated;
  T* state = own.blocks ? (T*)s.piece(0, own.blocks) : nullptr;
  in.read_tail(own.is_new ? nullptr : state, channels);
  for (int64_t i = 0; i < own.size(); i++) conv_row(a, in, own, i, channels);
  if (!state) return;
  if (own.snapshot_at)
    in.write_tail((T*)s.piece(0, own.snapshot), own.snapshot_at, channels);
  in.write_tail(state, own.committed, channels);
  for (int64_t i = own.committed; i < own.size(); i++) {
    T* to = (T*)s.kept + (own.kept + i - own.committed) * s.width + begin;
    for (int64_t c = 0; c < channels; c += LANES) {
      int n = std::min<int64_t>(channels - c, LANES);
      store_up_to(to + c, in.at(i, c, n), n);
    }
  }
}

// Update a head's matrix S [Dk, Dv]; with a query, read it.
struct Update {
  const float *k, *v;  // [Dk], [Dv]
  float decay, beta;
};

// Update some columns of S: N vectors, or a last one of n floats.
template <int N>
static INLINE void update_columns(float* S, int64_t Dk, int64_t Dv, const Update& u, const float* v,
                                  const float* q, float* out, int n = LANES) {
  vf seen[N] = {}, read[N] = {};
  float* at = S;
  for (int64_t k = 0; k < Dk; k++, at += Dv)
    for (int j = 0; j < N; j++) {
      vf s = load_up_to(at + j * LANES, n) * u.decay;
      store_up_to(at + j * LANES, s, n);
      seen[j] = fma(s, splat(u.k[k]), seen[j]);
    }
  for (int j = 0; j < N; j++) seen[j] = (load_up_to(v + j * LANES, n) - seen[j]) * u.beta;
  at = S;
  for (int64_t k = 0; k < Dk; k++, at += Dv)
    for (int j = 0; j < N; j++) {
      vf s = fma(seen[j], splat(u.k[k]), load_up_to(at + j * LANES, n));
      store_up_to(at + j * LANES, s, n);
      if (q) read[j] = fma(s, splat(q[k]), read[j]);
    }
  if (q)
    for (int j = 0; j < N; j++) store_up_to(out + j * LANES, read[j], n);
}

// Columns do not depend on each other.
static void update(float* S, int64_t Dk, int64_t Dv, const Update& u, const float* q, float* out) {
  int64_t i = 0;
  for (; i + AT_ONCE * LANES <= Dv; i += AT_ONCE * LANES)
    update_columns<AT_ONCE>(S + i, Dk, Dv, u, u.v + i, q, out + i);
  for (; i + LANES <= Dv; i += LANES) update_columns<1>(S + i, Dk, Dv, u, u.v + i, q, out + i);
  if (i < Dv) update_columns<1>(S + i, Dk, Dv, u, u.v + i, q, out + i, Dv - i);
}

struct Delta {
  const State* state;
  const void *qkv, *x;                  // [R, ..]
  const float *rate, *dt_bias, *norm;   // [Hv], [Hv], [Dv]
  void* out;                            // [R, Hv Dv]
  int64_t is_bf16, num_k_heads, x_stride;
  float eps, beta_factor;
};

template <class T> static float unit_factor(const T* x, int64_t n) {
  vf total{};
  for (int64_t i = 0; i < n; i += LANES) {
    vf v = load_up_to(x + i, std::min<int64_t>(n - i, LANES));
    total = fma(v, v, total);
  }
  return 1.0f / std::sqrt(sum(total) + 1e-6f);
}

// The inputs of one head for one row, as floats.
struct HeadInputs {
  float q[MAX_DIM], k[MAX_DIM], v[MAX_DIM];
  Update update;
};

template <class T> static void read_row(const Delta& a, int64_t r, int64_t h, HeadInputs& in) {
  const State& s = *a.state;
  int64_t Dk = s.height, Dv = s.width, Hv = s.num_pieces, Hk = a.num_k_heads;
  int64_t inner = 2 * Hk * Dk + Hv * Dv, kh = h / (Hv / Hk);
  const T* row = (const T*)a.qkv + r * inner;
  const T *q = row + kh * Dk, *k = row + (Hk + kh) * Dk, *v = row + 2 * Hk * Dk + h * Dv;
  float q_factor = unit_factor(q, Dk) / std::sqrt(float(Dk)), k_factor = unit_factor(k, Dk);
  for (int64_t i = 0; i < Dk; i++) in.q[i] = to_float(q[i]) * q_factor;
  for (int64_t i = 0; i < Dk; i++) in.k[i] = to_float(k[i]) * k_factor;
  for (int64_t i = 0; i < Dv; i++) in.v[i] = to_float(v[i]);
  const T* gates = (const T*)a.x + r * a.x_stride + inner + Hv * Dv;
  float dt = to_float(gates[Hv + h]) + a.dt_bias[h];
  dt = dt > 20.0f ? dt : std::log1p(std::exp(dt));
  float beta = a.beta_factor / (1.0f + std::exp(-to_float(gates[h])));
  in.update = {in.k, in.v, std::exp(a.rate[h] * dt), beta};
}

// Normalize a head's output, and multiply it by silu(z).
template <class T> static void write_row(const Delta& a, int64_t r, int64_t h, const float* found) {
  const State& s = *a.state;
  int64_t Dv = s.width, Hv = s.num_pieces, inner = 2 * a.num_k_heads * s.height + Hv * Dv;
  const T* z = (const T*)a.x + r * a.x_stride + inner + h * Dv;
  T* out = (T*)a.out + (r * Hv + h) * Dv;
  vf total{};
  for (int64_t i = 0; i < Dv; i += LANES) {
    vf v = load_up_to(found + i, std::min<int64_t>(Dv - i, LANES));
    total = fma(v, v, total);
  }
  float scale = 1.0f / std::sqrt(sum(total) / Dv + a.eps);
  for (int64_t i = 0; i < Dv; i += LANES) {
    int n = std::min<int64_t>(Dv - i, LANES);
    vf gate = load_up_to(z + i, n);
    vf y = load_up_to(found + i, n) * scale * load_up_to(a.norm + i, n);
    store_up_to(out + i, y * (gate / (1.0f + exp(-gate))), n);
  }
}

// Keep the inputs of an update: [Hv Dk | Hv Dv | Hv | Hv] of all heads.
static void keep(const State& s, int64_t place, int64_t h, const Update& u) {
  int64_t Dk = s.height, Dv = s.width, Hv = s.num_pieces;
  float* to = (float*)s.kept + place * s.kept_width;
  memcpy(to + h * Dk, u.k, Dk * 4);
  memcpy(to + Hv * Dk + h * Dv, u.v, Dv * 4);
  to[Hv * (Dk + Dv) + h] = u.decay;
  to[Hv * (Dk + Dv + 1) + h] = u.beta;
}

static Update kept_update(const State& s, int64_t place, int64_t h) {
  int64_t Dk = s.height, Dv = s.width, Hv = s.num_pieces;
  const float* at = (const float*)s.kept + place * s.kept_width;
  return {at + h * Dk, at + Hv * Dk + h * Dv, at[Hv * (Dk + Dv) + h], at[Hv * (Dk + Dv + 1) + h]};
}

template <class T> struct DeltaHead {
  const Delta& a;
  const OwnRows& own;
  int64_t h;
  HeadInputs in;
  float found[MAX_DIM];

  void row(int64_t i, float* S) {
    int64_t r = own.first + i;
    read_row<T>(a, r, h, in);
    update(S, a.state->height, a.state->width, in.update, in.q, found);
    write_row<T>(a, r, h, found);
    if (own.blocks && i >= own.committed)
      keep(*a.state, own.kept + i - own.committed, h, in.update);
  }
};

template <class T> static void delta(const Delta& a, const Rows& rows, int64_t b, int64_t h) {
  OwnRows own(rows, b);
  DeltaHead<T> head{a, own, h, {}, {}};
  run_head(head, *a.state, own, h);
}

// Accepted draft tokens that advance states.
struct Replays {
  const State* const* states;
  int64_t num_states;
  const int32_t *blocks, *begins, *places, *snapshot_at, *snapshots;
  int64_t num_replays, num_blocks;
};

template <class T>
static void replay_conv(const State& s, const int32_t* blocks, const int32_t* places, int64_t n,
                        int64_t snapshot_at, const int32_t* snapshot) {
  std::vector<const T*> kept(n + 1);
  for (int64_t i = 0; i < n; i++) kept[i] = (const T*)s.kept + places[i] * s.kept_width;
  T* state = (T*)s.piece(0, blocks);
  Inputs<T> in;
  in.length = s.height, in.width = s.width, in.kept = kept.data();
  for (in.begin = 0; in.begin < s.width; in.begin += CHANNELS) {
    int64_t channels = std::min(CHANNELS, s.width - in.begin);
    in.read_tail(state, channels);
    if (snapshot_at >= 0) in.write_tail((T*)s.piece(0, snapshot), snapshot_at, channels);
    in.write_tail(state, n, channels);
  }
}

static void replay_delta(const State& s, int64_t h, const int32_t* blocks, const int32_t* places,
                         int64_t n, int64_t snapshot_at, const int32_t* snapshot) {
  float* S = (float*)s.piece(h, blocks);
  int64_t bytes = s.height * s.width * 4;
  if (snapshot_at == 0) memcpy(s.piece(h, snapshot), S, bytes);
  for (int64_t i = 0; i < n; i++) {
    update(S, s.height, s.width, kept_update(s, places[i], h), nullptr, nullptr);
    if (snapshot_at == i + 1) memcpy(s.piece(h, snapshot), S, bytes);
  }
}

static void replay_piece(const Replays& a, int64_t m, const State& s, int64_t number) {
  const int32_t *blocks = a.blocks + m * a.num_blocks, *places = a.places + a.begins[m];
  const int32_t* snapshot = a.snapshots + m * a.num_blocks;
  int64_t n = a.begins[m + 1] - a.begins[m], at = a.snapshot_at[m];
  if (s.kind == DELTA) return replay_delta(s, number, blocks, places, n, at, snapshot);
  if (s.kind == MAMBA) return replay_mamba(s, number, blocks, places, n, at, snapshot);
  if (s.is_bf16) replay_conv<bf16>(s, blocks, places, n, at, snapshot);
  else replay_conv<float>(s, blocks, places, n, at, snapshot);
}

struct Gate {
  int64_t is_bf16, domain;
  void* x;
  const void* gate;
  int64_t width;
};

template <class T> static void multiply_by_gate(const Gate& a, const Step& step, Team& team) {
  Range part = team.part(step.num_rows[a.domain] * a.width);
  for (int64_t i = part.begin; i < part.end; i += LANES) {
    int n = std::min<int64_t>(part.end - i, LANES);
    T* x = (T*)a.x + i;
    vf gate = load_up_to((const T*)a.gate + i, n);
    store_up_to(x, load_up_to(x, n) / (1.0f + exp(-gate)), n);
  }
}

extern "C" {
// Multiply x by the sigmoid of a gate of equal shape.
void specserve_gate(const void* args, const Step& step, Team& team) {
  const Gate& a = *(const Gate*)args;
  a.is_bf16 ? multiply_by_gate<bf16>(a, step, team) : multiply_by_gate<float>(a, step, team);
}

void specserve_causal_conv(const void* args, const Step& step, Team& team) {
  const Conv& a = *(const Conv*)args;
  int64_t parts = (a.state->width + CHANNELS - 1) / CHANNELS;
  Range part = team.part(step.rows->num_requests * parts);
  for (int64_t i = part.begin; i < part.end; i++) {
    int64_t b = i / parts, begin = i % parts * CHANNELS;
    a.is_bf16 ? conv<bf16>(a, *step.rows, b, begin) : conv<float>(a, *step.rows, b, begin);
  }
}

void specserve_delta_rule(const void* args, const Step& step, Team& team) {
  const Delta& a = *(const Delta*)args;
  int64_t heads = a.state->num_pieces;
  Range part = team.part(step.rows->num_requests * heads);
  for (int64_t i = part.begin; i < part.end; i++)
    a.is_bf16 ? delta<bf16>(a, *step.rows, i / heads, i % heads)
              : delta<float>(a, *step.rows, i / heads, i % heads);
}

// Threads divide the pieces of all states. One replay follows the other, because the snapshot of a
// later one may be in the blocks of an earlier one, whose request has ended.
void specserve_replay(const void* args, const Step&, Team& team) {
  const Replays& a = *(const Replays*)args;
  for (int64_t m = 0; m < a.num_replays; m++) {
    if (m > 0) team.wait();
    int64_t count = 0;
    for (int64_t l = 0; l < a.num_states; l++)
      for (int64_t number = 0; number < a.states[l]->num_pieces; number++)
        if (count++ % team.size == team.id) replay_piece(a, m, *a.states[l], number);
  }
}
}
