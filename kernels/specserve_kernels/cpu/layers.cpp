// Row-wise ops: table rows, norms, curves, and rotary embedding with the KV write.
#include "kv_codes.h"
#include "linear.h"
#include "op.h"

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

template <class T> static float mean_of(const T* x, int64_t n) {
  vf acc{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) acc += load(x + i);
  if (i < n) acc += load(x + i, n - i);
  return sum(acc) / n;
}

// Same as inverse_rms, for x - mean.
template <class T> static float inverse_deviation(const T* x, float mean, int64_t n, float eps) {
  vf acc{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = load(x + i) - mean;
    acc = fma(v, v, acc);
  }
  if (i < n) {
    float rest[LANES] = {};
    for (int64_t j = i; j < n; j++) rest[j - i] = to_float(x[j]) - mean;
    acc = fma(load(rest), load(rest), acc);
  }
  return 1.0f / std::sqrt(sum(acc) / n + eps);
}

struct Norm {
  int64_t is_bf16, domain;
  const void* x;
  const float *weight, *bias;  // bias may be null
  void* out;
  // Elements: width of a group of columns, and distances of rows; number of groups per row.
  int64_t width, x_stride, out_stride, num_groups;
  int64_t is_centered, adds;  // LayerNorm; adds to `out`
  float eps;
};

// Compute out = (x - mean) * scale * weight + bias, or add it to out; rounded once.
template <bool ADDS, class T, class O>
static void scale_row(const T* x, const float* weight, const float* bias, float mean, float scale,
                      int64_t n, O* out) {
  for (int64_t i = 0; i < n; i += LANES) {
    int m = n - i < LANES ? n - i : LANES;
    vf y = (load_up_to(x + i, m) - mean) * scale * load_up_to(weight + i, m);
    if (bias) y += load_up_to(bias + i, m);
    if (ADDS) y += load_up_to(out + i, m);
    store_up_to(out + i, y, m);
  }
}

template <class T> static void norm(const Norm& a, const Step& step, Team& team) {
  Range part = team.part(step.num_rows[a.domain] * a.num_groups);
  for (int64_t i = part.begin; i < part.end; i++) {
    int64_t r = i / a.num_groups, column = i % a.num_groups * a.width;
    const T* x = (const T*)a.x + r * a.x_stride + column;
    T* out = (T*)a.out + r * a.out_stride + column;
    float mean = a.is_centered ? mean_of(x, a.width) : 0.0f;
    float scale = a.is_centered ? inverse_deviation(x, mean, a.width, a.eps)
                                : inverse_rms(x, a.width, a.eps);
    if (a.adds) scale_row<true>(x, a.weight, a.bias, mean, scale, a.width, out);
    else scale_row<false>(x, a.weight, a.bias, mean, scale, a.width, out);
  }
}

// SCALE: x = first * x. SOFT_CAP: x = first * tanh(x / first). XIELU has one number for positive x,
// and one for others.
enum Curve : int64_t { SCALE, SOFT_CAP, SILU, GELU, RELU2, XIELU };
struct Elementwise {
  int64_t is_bf16, domain;
  void* x;
  int64_t width, curve;
  float first, second;
};

static inline vf bend(const Elementwise& a, vf x) {
  switch (a.curve) {
    case SCALE: return x * a.first;
    case SOFT_CAP: return soft_cap(x, a.first);
    case SILU: return gate<SILU_MUL>(x);
    case GELU: return gate<GELU_MUL>(x);
    case RELU2: return x < 0.0f ? vf{} : x * x;
  }
  vf left = (exp(x > 0.0f ? vf{} : x) - 1.0f - x) * a.second;
  return (x > 0.0f ? a.first * x * x : left) + 0.5f * x;
}

template <class T> static void elementwise(const Elementwise& a, const Step& step, Team& team) {
  Range part = team.part(step.num_rows[a.domain] * a.width);
  for (int64_t i = part.begin; i < part.end; i += LANES) {
    int n = part.end - i < LANES ? part.end - i : LANES;
    T* at = (T*)a.x + i;
    store_up_to(at, bend(a, load_up_to(at, n)), n);
  }
}

struct GateColumns {
  int64_t is_bf16, domain;
  void* x;
  const void* other;  // [R, other_width]
  int64_t width, other_width, begin, curve;
};

// x = f(x) * other, for `width` columns of `other` from `begin` on.
template <class T> static void gate_columns(const GateColumns& a, const Step& step, Team& team) {
  Elementwise bent{};
  bent.curve = a.curve;
  Range part = team.part(step.num_rows[a.domain]);
  for (int64_t r = part.begin; r < part.end; r++) {
    T* x = (T*)a.x + r * a.width;
    const T* other = (const T*)a.other + r * a.other_width + a.begin;
    for (int64_t i = 0; i < a.width; i += LANES) {
      int n = a.width - i < LANES ? a.width - i : LANES;
      store_up_to(x + i, bend(bent, load_up_to(x + i, n)) * load_up_to(other + i, n), n);
    }
  }
}

struct Rope {
  const KV* kv;  // null: rows have only query heads
  const void* qkv;
  const float *q_norm, *k_norm;  // may be null
  void* q;
  const float *cos, *sin, *query_scale;  // the last may be null
  int64_t num_heads, head_dim;
  float eps;
  int64_t is_bf16, norm_stride, is_centered, is_last;  // stride 0: one weight for all heads
  int64_t norms_values;

  int64_t num_kv_heads() const { return kv ? kv->num_heads : 0; }
};

// How to normalize and rotate one head.
struct Turn {
  const float* norm;  // weight; may be null
  float eps;
  bool is_centered, is_last;
  const float *cos, *sin;
  float factor;  // of the result

  template <class T> float mean(const T* x, int64_t D) const {
    return is_centered ? mean_of(x, D) : 0.0f;
  }
  template <class T> float scale(const T* x, float mean, int64_t D) const {
    return is_centered ? inverse_deviation(x, mean, D, eps) : inverse_rms(x, D, eps);
  }
};

// Normalize and rotate one head, or only rotate it. Dimension i pairs with i + D/2.
template <bool HAS_NORM, class T, class O>
static void rotate(const T* x, const Turn& turn, float factor, int64_t D, O* out) {
  int64_t half = D / 2;
  float mean = HAS_NORM ? turn.mean(x, D) : 0.0f;
  float scale = HAS_NORM ? turn.scale(x, mean, D) : 1.0f;
  for (int64_t i = 0; i < half; i += LANES) {
    int n = half - i < LANES ? half - i : LANES;
    vf a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    if (HAS_NORM) {
      a = (a - mean) * scale * load_up_to(turn.norm + i, n);
      b = (b - mean) * scale * load_up_to(turn.norm + half + i, n);
    }
    vf c = load_up_to(turn.cos + i, n) * factor, s = load_up_to(turn.sin + i, n) * factor;
    store_up_to(out + i, a * c - b * s, n);
    store_up_to(out + half + i, b * c + a * s, n);
  }
}
template <class T, class O> static void rotate(const T* x, const Turn& turn, int64_t D, O* out) {
  if (!turn.norm) return rotate<false>(x, turn, turn.factor, D, out);
  if (!turn.is_last) return rotate<true>(x, turn, turn.factor, D, out);
  float numbers[MAX_HEAD_DIM];
  rotate<false>(x, turn, 1.0f, D, numbers);
  float mean = turn.mean(numbers, D), scale = turn.scale(numbers, mean, D);
  scale_row<false>(numbers, turn.norm, nullptr, mean, scale * turn.factor, D, out);
}

template <class T> static void widen(const T* x, int64_t D, float* out) {
  for (int64_t i = 0; i < D; i++) out[i] = to_float(x[i]);
}

// Divide a value head by its root mean square.
template <class T, class O> static void norm_values(const T* x, int64_t D, float eps, O* out) {
  float scale = inverse_rms(x, D, eps);
  for (int64_t i = 0; i < D; i += LANES) {
    int n = D - i < LANES ? D - i : LANES;
    store_up_to(out + i, load_up_to(x + i, n) * scale, n);
  }
}

// Process one query head, or one key head and its value head, which are stored as type S. Threads
// divide heads, not rows, so that all threads work on a step of one row.
template <class T, class S>
static void rope_head(const Rope& rope, const Rows& rows, int64_t r, int64_t h) {
  int64_t H = rope.num_heads, Hk = rope.num_kv_heads(), D = rope.head_dim, half = D / 2;
  const T* x = (const T*)rope.qkv + (r * (H + 2 * Hk) + h) * D;
  int64_t position = rows.positions[r], head = h < H ? h : h - H;
  const float* norm = h < H ? rope.q_norm : rope.k_norm;
  if (norm) norm += head * rope.norm_stride;
  Turn turn = {norm, rope.eps, rope.is_centered != 0, rope.is_last != 0,
               rope.cos + position * half, rope.sin + position * half, 1.0f};
  if (h < H) {
    if (rope.query_scale) turn.factor = rope.query_scale[position];
    return rotate(x, turn, D, (T*)rope.q + (r * H + h) * D);
  }
  const KV& kv = *rope.kv;
  const T* values = x + Hk * D;
  int64_t slot = rows.slots[r];
  S *k = kv.at<S>(kv.k, slot) + head * D, *v = kv.at<S>(kv.v, slot) + head * D;
  if constexpr (IS_CODE<S>) {
    float numbers[MAX_HEAD_DIM];
    rotate(x, turn, D, numbers);
    *kv.scale_at(kv.k_scale, slot, head) = quantize(numbers, D, k);
    rope.norms_values ? norm_values(values, D, rope.eps, numbers) : widen(values, D, numbers);
    *kv.scale_at(kv.v_scale, slot, head) = quantize(numbers, D, v);
  } else {
    rotate(x, turn, D, k);
    if (rope.norms_values) norm_values(values, D, rope.eps, v);
    else memcpy(v, values, D * sizeof(T));
  }
}

template <class T, class S> static void rope_write_kv(const Rope& rope, const Step& step, Team& team) {
  int64_t heads = rope.num_heads + rope.num_kv_heads();
  Range part = team.part(step.rows->num_rows * heads);
  for (int64_t n = part.begin; n < part.end; n++)
    rope_head<T, S>(rope, *step.rows, n / heads, n % heads);
}
template <class T> static void rope_write_kv(const Rope& rope, const Step& step, Team& team) {
  if (!rope.kv) return rope_write_kv<T, T>(rope, step, team);
  switch (rope.kv->stored) {
    case AS_INT8: return rope_write_kv<T, Int8<T>>(rope, step, team);
    case AS_FP8: return rope_write_kv<T, Fp8<T>>(rope, step, team);
    default: return rope_write_kv<T, T>(rope, step, team);
  }
}

struct Copy {
  int64_t domain;
  const char* x;
  char* out;
  int64_t row_bytes;
};

struct GatherCodes {
  int64_t is_bf16;
  const uint8_t *q, *zero;       // zero may be null: every zero is `middle` then
  const float *scale, *offset;   // offset may be null
  void* out;
  int64_t width, group, middle;  // columns of a row, and columns per scale
};

static inline vf load_codes(const uint8_t* q, int n) {
  typedef uint8_t vb __attribute__((vector_size(LANES)));
  vb bytes{};
  memcpy(&bytes, q, n);
  return __builtin_convertvector(bytes, vf);
}

// Decode a row with the operations of Codes.widen in the same order, so that results are equal.
template <class T> static void widen_row(const GatherCodes& a, int64_t row, T* out) {
  int64_t groups = a.width / a.group;
  for (int64_t g = row * groups; g < (row + 1) * groups; g++, out += a.group) {
    float zero = a.zero ? a.zero[g] : a.middle;
    for (int64_t k = 0; k < a.group; k += LANES) {
      int n = a.group - k < LANES ? a.group - k : LANES;
      vf x = (load_codes(a.q + g * a.group + k, n) - zero) * a.scale[g];
      store_up_to(out + k, a.offset ? x + a.offset[g] : x, n);
    }
  }
}

template <class T> static void gather_codes(const GatherCodes& a, const Step& step, Team& team) {
  Range part = team.part(step.num_rows[STEP]);
  for (int64_t r = part.begin; r < part.end; r++)
    widen_row(a, step.token_ids[r], (T*)a.out + r * a.width);
}

extern "C" {
void specserve_copy(const void* args, const Step& step, Team& team) {
  const Copy& a = *(const Copy*)args;
  Range part = team.part(step.num_rows[a.domain]);
  memcpy(a.out + part.begin * a.row_bytes, a.x + part.begin * a.row_bytes,
         (part.end - part.begin) * a.row_bytes);
}

// Copy rows of a table, by the step's token ids or by `read`.
void specserve_gather(const void* args, const Step& step, Team& team) {
  const Copy& a = *(const Copy*)args;
  const int64_t* index = a.domain == STEP ? step.token_ids : step.read;
  Range part = team.part(step.num_rows[a.domain]);
  for (int64_t r = part.begin; r < part.end; r++)
    memcpy(a.out + r * a.row_bytes, a.x + index[r] * a.row_bytes, a.row_bytes);
}

void specserve_gather_codes(const void* args, const Step& step, Team& team) {
  const GatherCodes& a = *(const GatherCodes*)args;
  a.is_bf16 ? gather_codes<bf16>(a, step, team) : gather_codes<float>(a, step, team);
}

void specserve_norm(const void* args, const Step& step, Team& team) {
  const Norm& a = *(const Norm*)args;
  a.is_bf16 ? norm<bf16>(a, step, team) : norm<float>(a, step, team);
}

void specserve_elementwise(const void* args, const Step& step, Team& team) {
  const Elementwise& a = *(const Elementwise*)args;
  a.is_bf16 ? elementwise<bf16>(a, step, team) : elementwise<float>(a, step, team);
}

void specserve_gate_columns(const void* args, const Step& step, Team& team) {
  const GateColumns& a = *(const GateColumns*)args;
  a.is_bf16 ? gate_columns<bf16>(a, step, team) : gate_columns<float>(a, step, team);
}

void specserve_rope_write_kv(const void* args, const Step& step, Team& team) {
  const Rope& a = *(const Rope*)args;
  a.is_bf16 ? rope_write_kv<bf16>(a, step, team) : rope_write_kv<float>(a, step, team);
}
}
