// Vectors of 16 floats, and functions on them.
//
// Results do not depend on how loops are vectorized. No lane depends on another lane, and sums over
// lanes have one fixed order. Compile without -ffast-math.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// For functions whose arguments must stay in registers.
#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

#if defined(__clang__)
// GCC's shuffles, which clang lacks: lane i is lane at[i] of v, or of a followed by b.
template <class V, class I> static INLINE V __builtin_shuffle(V v, I at) {
  V x{};
  for (int i = 0; i < int(sizeof(V) / sizeof(x[0])); i++) x[i] = v[at[i]];
  return x;
}
template <class V, class I> static INLINE V __builtin_shuffle(V a, V b, I at) {
  constexpr int N = sizeof(V) / sizeof(V{}[0]);
  V x{};
  for (int i = 0; i < N; i++) x[i] = int(at[i]) < N ? a[at[i]] : b[at[i] - N];
  return x;
}
#endif

struct bf16 { uint16_t bits; };

constexpr int LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

static inline vf splat(float x) { return x - vf{}; }
static inline vf lanes() { return vf{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline vf load(const float* p) { vf v; memcpy(&v, p, 64); return v; }
static inline vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, 32);
  vu u = __builtin_convertvector(h, vu) << 16;
  return (vf)u;
}
template <class T> static inline vf load(const T* p, int n) {  // n < 16; the other lanes are 0
  T t[LANES] = {};
  memcpy(t, p, n * sizeof(T));
  return load(t);
}

// Round to nearest even. NaN stays NaN.
static inline vu round_bf16(vf x) {
  vu u = (vu)x;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return x == x ? rounded : (u >> 16) | 0x40;
}
static inline void store(float* p, vf x) { memcpy(p, &x, 64); }
static inline void store(bf16* p, vf x) {
  vh h = __builtin_convertvector(round_bf16(x), vh);
  memcpy(p, &h, 32);
}
template <class T> static inline void store(T* p, vf x, int n) {
  T t[LANES];
  store(t, x);
  memcpy(p, t, n * sizeof(T));
}

template <class T> static inline vf load_up_to(const T* p, int n) {
  return n == LANES ? load(p) : load(p, n);
}
template <class T> static inline void store_up_to(T* p, vf x, int n) {
  if (n == LANES) store(p, x);
  else store(p, x, n);
}

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}
static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }

// Reductions over lanes, by halves: lane i adds lane i + 8, then i + 4, i + 2, i + 1.
template <int S> static inline vf rotate(vf v) {
  vi at;
  for (int l = 0; l < LANES; l++) at[l] = (l + S) % LANES;
  return __builtin_shuffle(v, at);
}
static inline float sum(vf v) {
  v += rotate<8>(v);
  v += rotate<4>(v);
  v += rotate<2>(v);
  v += rotate<1>(v);
  return v[0];
}
static inline float max(vf v) {
  v = max(v, rotate<8>(v));
  v = max(v, rotate<4>(v));
  v = max(v, rotate<2>(v));
  v = max(v, rotate<1>(v));
  return v[0];
}

static inline vi load_lanes(const void* p) { vi v; memcpy(&v, p, 64); return v; }
static inline vi load_lanes(const uint32_t* p, int n) {
  vi v{};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}

// One butterfly of the transpose below. It swaps the off-diagonal S x S squares of a and b.
template <int S> static inline void exchange(vi& a, vi& b) {
  vi low, high;
  for (int l = 0; l < LANES; l++) {
    low[l] = l & S ? LANES + (l ^ S) : l;
    high[l] = l & S ? LANES + l : l ^ S;
  }
  vi x = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = x;
}

static inline void transpose(vi* x) {  // 16 x 16 words, in place
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++) exchange<8>(x[i], x[i + 8]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) if (!(i & 4)) exchange<4>(x[i], x[i + 4]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) if (!(i & 2)) exchange<2>(x[i], x[i + 2]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) if (!(i & 1)) exchange<1>(x[i], x[i + 1]);
}

// Return e^x within 2 ulp for x in [-87, 88]; exactly 0 below. Cephes' reduction and polynomial.
static inline vf exp(vf x) {
  vf n = x * 1.44269504088896341f;
  n = (n + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  vf y = p * (vf)power;
  y = x > 88.37f ? splat(INF) : y;
  return x > -87.33f ? y : (x == x ? vf{} : x);
}

// Return cap * tanh(x / cap), within 2 ulp of the cap.
static inline vf soft_cap(vf x, float cap) {
  vf t = exp((x < 0.0f ? x : -x) * (2.0f / cap));
  vf y = cap * (1.0f - t) / (1.0f + t);
  return x < 0.0f ? -y : y;
}

// Return log x for normal, positive x, within 2 ulp. Cephes' polynomial.
static inline vf log(vf x) {
  vi bits = (vi)x;
  vf e = __builtin_convertvector((bits >> 23) - 126, vf);
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  vi small = m < 0.707106781186547524f;
  e = small ? e - 1.0f : e;
  m = (small ? m + m : m) - 1.0f;
  vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vf y = m * z * p;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}
