// Several residual streams next to each other in a row, and sparse gates. A row of N streams of
// width K has N K columns. Threads divide rows.
#include "linear.h"
#include "op.h"

constexpr float LEAST_SQUARE = 1e-5f;  // as in reference/streams.py
constexpr int64_t MAX_STREAMS = 8;     // as in arguments.py

struct Streams {
  int64_t is_bf16, domain;
  const void *x, *coefficients;
  void* out;
  int64_t width, num;  // K, N
};

// Sparse gates have `width` outputs.
struct SparseGated {
  int64_t is_bf16, domain;
  const void* x;
  void* out;
  int64_t width, is_gelu;
  float deviations;
};

// Columns [begin, begin + width) of rows, times a weight.
struct Weigh {
  int64_t is_bf16, domain;
  const void* x;
  const float* weight;
  void* out;
  int64_t width, x_width, begin;
};

// Call f with the first column and the number of columns of each register.
template <class F> static void each_register(int64_t width, F f) {
  for (int64_t i = 0; i < width; i += LANES) f(i, int(width - i < LANES ? width - i : LANES));
}

template <class T> static float sum_of_squares(const T* x, int64_t n, float mean) {
  vf acc{};
  each_register(n, [&](int64_t i, int m) {
    float rest[LANES] = {};
    for (int j = 0; j < m; j++) rest[j] = to_float(x[i + j]) - mean;
    acc = fma(load(rest), load(rest), acc);
  });
  return sum(acc);
}

template <class T> static float mean_of(const T* x, int64_t n) {
  vf acc{};
  each_register(n, [&](int64_t i, int m) { acc += load_up_to(x + i, m); });
  return sum(acc) / n;
}

template <class T> static float match_factor(const T* x, const T* first, int64_t K) {
  float found = sum_of_squares(x, K, 0.0f) / K, wanted = sum_of_squares(first, K, 0.0f) / K;
  return std::sqrt(wanted) / std::sqrt(found < LEAST_SQUARE ? LEAST_SQUARE : found);
}

// `x` has all streams but the first, which is `coefficients`.
template <class T> static void spread(const Streams& a, int64_t r) {
  int64_t K = a.width;
  const T *x = (const T*)a.x + r * (a.num - 1) * K, *first = (const T*)a.coefficients + r * K;
  T* out = (T*)a.out + r * a.num * K;
  memcpy(out, first, K * sizeof(T));
  for (int64_t j = 1; j < a.num; j++, x += K) {
    float factor = match_factor(x, first, K);
    each_register(K, [&](int64_t i, int m) {
      store_up_to(out + j * K + i, load_up_to(x + i, m) * factor, m);
    });
  }
}

// `coefficients` is the first stream, `out` the total.
template <class T> static void add_matched(const Streams& a, int64_t r) {
  const T *x = (const T*)a.x + r * a.width, *first = (const T*)a.coefficients + r * a.width;
  T* out = (T*)a.out + r * a.width;
  float factor = match_factor(x, first, a.width);
  each_register(a.width, [&](int64_t i, int m) {
    store_up_to(out + i, load_up_to(out + i, m) + load_up_to(x + i, m) * factor, m);
  });
}

template <class T> static void mix(const Streams& a, int64_t r) {
  int64_t N = a.num, K = a.width;
  const T *x = (const T*)a.x + r * N * K, *c = (const T*)a.coefficients + r * N * N;
  T* out = (T*)a.out + r * N * K;
  each_register(K, [&](int64_t i, int m) {
    for (int64_t j = 0; j < N; j++) {
      vf total{};
      for (int64_t s = 0; s < N; s++)
        total += load_up_to(x + s * K + i, m) * to_float(c[j * N + s]);
      store_up_to(out + j * K + i, load_up_to(x + j * K + i, m) + total, m);
    }
  });
}

template <class T> static void correct(const Streams& a, int64_t r) {
  int64_t N = a.num, K = a.width;
  const T *x = (const T*)a.x + r * K, *c = (const T*)a.coefficients + r * N;
  T* out = (T*)a.out + r * N * K;
  each_register(K, [&](int64_t i, int m) {
    vf difference = load_up_to(x + i, m) - load_up_to(out + i, m);
    for (int64_t j = 0; j < N; j++) {
      T* at = out + j * K + i;
      store_up_to(at, load_up_to(at, m) + difference * (1.0f + to_float(c[j])), m);
    }
  });
}

template <class T> static void sparse_gated(const SparseGated& a, int64_t r) {
  const T *gate = (const T*)a.x + r * 2 * a.width, *up = gate + a.width;
  T* out = (T*)a.out + r * a.width;
  float mean = mean_of(gate, a.width);
  float deviation = std::sqrt(sum_of_squares(gate, a.width, mean) / a.width);
  float cutoff = mean + a.deviations * deviation;
  each_register(a.width, [&](int64_t i, int m) {
    vf above = load_up_to(gate + i, m) - cutoff;
    above = above < 0.0f ? vf{} : above;
    vf bent = a.is_gelu ? ::gate<GELU_MUL>(above) : ::gate<SILU_MUL>(above);
    store_up_to(out + i, bent * load_up_to(up + i, m), m);
  });
}

template <class T> static void weigh(const Weigh& a, int64_t r) {
  const T* x = (const T*)a.x + r * a.x_width + a.begin;
  T* out = (T*)a.out + r * a.width;
  each_register(a.width, [&](int64_t i, int m) {
    store_up_to(out + i, load_up_to(x + i, m) * load_up_to(a.weight + i, m), m);
  });
}

template <class Args, class F> static void each_row(const Args& a, const Step& step, Team& team, F f) {
  Range part = team.part(step.num_rows[a.domain]);
  for (int64_t r = part.begin; r < part.end; r++) f(a, r);
}

#define OP(NAME, ARGS, FUNCTION)                                                 \
  void specserve_##NAME(const void* args, const Step& step, Team& team) {        \
    const ARGS& a = *(const ARGS*)args;                                          \
    each_row(a, step, team, a.is_bf16 ? FUNCTION<bf16> : FUNCTION<float>);       \
  }

extern "C" {
OP(spread_streams, Streams, spread)
OP(add_matched, Streams, add_matched)
OP(mix_streams, Streams, mix)
OP(correct_streams, Streams, correct)
OP(sparse_gated, SparseGated, sparse_gated)
OP(weigh_columns, Weigh, weigh)
}
