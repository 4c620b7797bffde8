// RMSNorm, the gated SiLU, and rotary embedding with the KV write: row by row.
#include <omp.h>

#include "rows.h"
#include "vec.h"

// A parallel region costs more than a few rows of elementwise work.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;

template <class T> static float inverse_rms(const T* x, int64_t n, float eps) {
  vf acc{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = load(x + i);
    acc = fma(v, v, acc);
  }
  if (i < n) {
    vf v = load(x + i, n - i);
    acc = fma(v, v, acc);
  }
  return 1.0f / std::sqrt(sum(acc) / n + eps);
}

// out = x * scale * weight
template <class T> static void scale_row(const T* x, const T* weight, float s, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, load(x + i) * s * load(weight + i));
  if (i < n) store(out + i, load(x + i, n - i) * s * load(weight + i, n - i), n - i);
}

template <class T> static void add_row(const T* x, T* residual, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(residual + i, load(residual + i) + load(x + i));
  if (i < n) store(residual + i, load(residual + i, n - i) + load(x + i, n - i), n - i);
}

template <class T>
static void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t R, int64_t K,
                     float eps) {
#pragma omp parallel for if (R * K >= PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < R; r++) {
    const T* row = x + r * K;
    if (residual) {
      add_row(row, residual + r * K, K);
      row = residual + r * K;
    }
    scale_row(row, weight, inverse_rms(row, K, eps), K, out + r * K);
  }
}

template <class T> static void silu_mul(const T* gate_up, T* out, int64_t R, int64_t F) {
#pragma omp parallel for if (R * F >= PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < R; r++) {
    const T *gate = gate_up + r * 2 * F, *up = gate + F;
    T* to = out + r * F;
    int64_t i = 0;
    for (; i + LANES <= F; i += LANES) {
      vf g = load(gate + i);
      store(to + i, g / (1.0f + exp(-g)) * load(up + i));
    }
    if (i < F) {
      vf g = load(gate + i, F - i);
      store(to + i, g / (1.0f + exp(-g)) * load(up + i, F - i), F - i);
    }
  }
}

struct Rope {
  const void *qkv, *q_norm, *k_norm;  // norms may be null
  void* q;
  const float *cos, *sin;
  int64_t num_heads;
  float eps;
};

// Normalize and rotate one head; i pairs with i + D/2.
template <class T>
static void rotate(const T* x, const T* norm, float eps, const float* cos, const float* sin,
                   int64_t D, T* out) {
  int64_t half = D / 2;
  float scale = norm ? inverse_rms(x, D, eps) : 1.0f;
  for (int64_t i = 0; i < half; i += LANES) {
    int n = half - i < LANES ? half - i : LANES;
    vf a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    if (norm) {
      a = a * scale * load_up_to(norm + i, n);
      b = b * scale * load_up_to(norm + half + i, n);
    }
    vf c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    store_up_to(out + i, a * c - b * s, n);
    store_up_to(out + half + i, b * c + a * s, n);
  }
}

template <class T> static void rope_write_kv(const Rows& rows, const KV& kv, const Rope& rope) {
  int64_t H = rope.num_heads, Hk = kv.num_heads, D = kv.head_dim, half = D / 2;
#pragma omp parallel for if (rows.num_rows * (H + 2 * Hk) * D >= PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < rows.num_rows; r++) {
    const T* x = (const T*)rope.qkv + r * (H + 2 * Hk) * D;
    const float *c = rope.cos + rows.positions[r] * half, *s = rope.sin + rows.positions[r] * half;
    T* q = (T*)rope.q + r * H * D;
    for (int64_t h = 0; h < H; h++)
      rotate(x + h * D, (const T*)rope.q_norm, rope.eps, c, s, D, q + h * D);
    x += H * D;
    T* k = kv.at<T>(kv.k, rows.slots[r]);
    for (int64_t h = 0; h < Hk; h++)
      rotate(x + h * D, (const T*)rope.k_norm, rope.eps, c, s, D, k + h * D);
    memcpy(kv.at<T>(kv.v, rows.slots[r]), x + Hk * D, Hk * D * sizeof(T));
  }
}

extern "C" {
void specserve_rms_norm(int is_bf16, const void* x, void* residual, const void* weight, void* out,
                        int64_t R, int64_t K, float eps) {
  if (is_bf16)
    rms_norm((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, R, K, eps);
  else
    rms_norm((const float*)x, (float*)residual, (const float*)weight, (float*)out, R, K, eps);
}

void specserve_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t R, int64_t F) {
  if (is_bf16)
    silu_mul((const bf16*)gate_up, (bf16*)out, R, F);
  else
    silu_mul((const float*)gate_up, (float*)out, R, F);
}

void specserve_rope_write_kv(const Rows* rows, const KV* kv, const Rope* rope) {
  if (kv->is_bf16)
    rope_write_kv<bf16>(*rows, *kv, *rope);
  else
    rope_write_kv<float>(*rows, *kv, *rope);
}
}
