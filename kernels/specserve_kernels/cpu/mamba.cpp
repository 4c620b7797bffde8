// Mamba-2's selective update of a matrix per head, token by token, and its replay.
#include <algorithm>

#include "recurrent.h"

// Mamba-2: decay a head's matrix S [N, P], and add k v^T. With a query, read it.
struct Selected {
  const float *k, *v;  // [N], [P]
  float decay;
};

template <int V>
static INLINE void select_columns(float* S, int64_t N, int64_t P, const Selected& u, const float* v,
                                  const float* q, float* out, int n = LANES) {
  vf added[V], read[V] = {};
  for (int j = 0; j < V; j++) added[j] = load_up_to(v + j * LANES, n);
  for (int64_t k = 0; k < N; k++, S += P)
    for (int j = 0; j < V; j++) {
      vf s = fma(added[j], splat(u.k[k]), load_up_to(S + j * LANES, n) * u.decay);
      store_up_to(S + j * LANES, s, n);
      if (q) read[j] = fma(s, splat(q[k]), read[j]);
    }
  if (q)
    for (int j = 0; j < V; j++) store_up_to(out + j * LANES, read[j], n);
}

static void select(float* S, int64_t N, int64_t P, const Selected& u, const float* q, float* out) {
  int64_t i = 0;
  for (; i + AT_ONCE * LANES <= P; i += AT_ONCE * LANES)
    select_columns<AT_ONCE>(S + i, N, P, u, u.v + i, q, out + i);
  for (; i + LANES <= P; i += LANES) select_columns<1>(S + i, N, P, u, u.v + i, q, out + i);
  if (i < P) select_columns<1>(S + i, N, P, u, u.v + i, q, out + i, P - i);
}

struct Mamba {
  const State* state;
  const void *xbc, *x;                     // [R, ..]
  const float *rate, *dt_bias, *D, *norm;  // [H], [H], [H], [H P] or null
  void* out;                               // [R, H P]
  int64_t is_bf16, x_stride, gates_first;
  float eps, z_factor, dt_factor;

  int64_t inner() const {
    return state->num_pieces * state->width + 2 * state->num_groups * state->height;
  }
};

template <class T> struct MambaHead {
  const Mamba& a;
  const OwnRows& own;
  int64_t h;
  float q[MAX_DIM], k[MAX_DIM], v[MAX_DIM], x[MAX_DIM], found[MAX_DIM];

  Selected read_row(int64_t r) {
    const State& s = *a.state;
    int64_t N = s.height, P = s.width, H = s.num_pieces, G = s.num_groups, g = h / (H / G);
    const T* row = (const T*)a.xbc + r * a.inner();
    const T *keys = row + H * P + g * N, *queries = keys + G * N;
    float dt = to_float(((const T*)a.x)[r * a.x_stride + a.inner() + H * P + h]);
    dt = dt * a.dt_factor + a.dt_bias[h];
    dt = dt > 20.0f ? dt : std::log1p(std::exp(dt));
    for (int64_t i = 0; i < N; i++) k[i] = to_float(keys[i]), q[i] = to_float(queries[i]);
    for (int64_t i = 0; i < P; i++) x[i] = to_float(row[h * P + i]), v[i] = x[i] * dt;
    return {k, v, std::exp(a.rate[h] * dt)};
  }
  // Kept are [G N | H P | H] of all heads.
  void keep(int64_t place, const Selected& u) {
    const State& s = *a.state;
    int64_t N = s.height, P = s.width, H = s.num_pieces, G = s.num_groups;
    float* to = (float*)s.kept + place * s.kept_width;
    if (h % (H / G) == 0) memcpy(to + h / (H / G) * N, u.k, N * 4);
    memcpy(to + G * N + h * P, u.v, P * 4);
    to[G * N + H * P + h] = u.decay;
  }
  void row(int64_t i, float* S) {
    int64_t P = a.state->width, r = own.first + i;
    Selected u = read_row(r);
    select(S, a.state->height, P, u, q, found);
    T* out = (T*)a.out + (r * a.state->num_pieces + h) * P;
    for (int64_t c = 0; c < P; c += LANES) {
      int n = std::min<int64_t>(P - c, LANES);
      store_up_to(out + c, fma(load_up_to(x + c, n), splat(a.D[h]), load_up_to(found + c, n)), n);
    }
    if (own.blocks && i >= own.committed) keep(own.kept + i - own.committed, u);
  }
};

template <class T> static void mamba(const Mamba& a, const Rows& rows, int64_t b, int64_t h) {
  OwnRows own(rows, b);
  MambaHead<T> head{a, own, h, {}, {}, {}, {}, {}};
  run_head(head, *a.state, own, h);
}

// Multiply the outputs of a group of heads by silu(z), before or after their norm.
template <class T> static void gated_norm(const Mamba& a, int64_t r, int64_t g) {
  const State& s = *a.state;
  int64_t width = s.num_pieces * s.width, size = width / s.num_groups, first = g * size;
  T* y = (T*)a.out + r * width + first;
  const T* z = (const T*)a.x + r * a.x_stride + a.inner() + first;
  auto gate = [&](int64_t i, int n) {
    vf v = load_up_to(z + i, n) * a.z_factor;
    return v / (1.0f + exp(-v));
  };
  vf total{};
  for (int64_t i = 0; a.norm && i < size; i += LANES) {
    int n = std::min<int64_t>(size - i, LANES);
    vf v = load_up_to(y + i, n);
    if (a.gates_first) v *= gate(i, n);
    total = fma(v, v, total);
  }
  float scale = a.norm ? 1.0f / std::sqrt(sum(total) / size + a.eps) : 1.0f;
  for (int64_t i = 0; i < size; i += LANES) {
    int n = std::min<int64_t>(size - i, LANES);
    vf v = load_up_to(y + i, n) * gate(i, n);
    if (a.norm) v *= scale * load_up_to(a.norm + first + i, n);
    store_up_to(y + i, v, n);
  }
}

template <class T> static void selective_state_update(const Mamba& a, const Rows& rows, Team& team) {
  int64_t heads = a.state->num_pieces, groups = a.state->num_groups;
  Range part = team.part(rows.num_requests * heads);
  for (int64_t i = part.begin; i < part.end; i++) mamba<T>(a, rows, i / heads, i % heads);
  team.wait();  // a norm reads the outputs of several heads
  part = team.part(rows.qo_indptr[rows.num_requests] * groups);
  for (int64_t i = part.begin; i < part.end; i++) gated_norm<T>(a, i / groups, i % groups);
}

void replay_mamba(const State& s, int64_t h, const int32_t* blocks, const int32_t* places,
                  int64_t n, int64_t snapshot_at, const int32_t* snapshot) {
  float* S = (float*)s.piece(h, blocks);
  int64_t N = s.height, P = s.width, H = s.num_pieces, G = s.num_groups, bytes = N * P * 4;
  if (snapshot_at == 0) memcpy(s.piece(h, snapshot), S, bytes);
  for (int64_t i = 0; i < n; i++) {
    const float* at = (const float*)s.kept + places[i] * s.kept_width;
    Selected u{at + h / (H / G) * N, at + G * N + h * P, at[G * N + H * P + h]};
    select(S, N, P, u, nullptr, nullptr);
    if (snapshot_at == i + 1) memcpy(s.piece(h, snapshot), S, bytes);
  }
}

extern "C" {
void specserve_selective_state_update(const void* args, const Step& step, Team& team) {
  const Mamba& a = *(const Mamba*)args;
  a.is_bf16 ? selective_state_update<bf16>(a, *step.rows, team)
            : selective_state_update<float>(a, *step.rows, team);
}
}
