// Rounding weights to codes of 4 or 8 bits. `quantize` in codes.py is the definition. This code
// does the same float operations in the same order, so the codes are equal.
#include <algorithm>

#include "op.h"
#include "vec.h"

typedef uint8_t vb __attribute__((vector_size(16)));

constexpr int64_t GROUP = 64, VECTORS = GROUP / LANES;  // columns per scale of 4-bit codes
constexpr float LEAST = 0x1p-100f;  // minimum |scale|, so that its inverse cannot overflow
// Candidate unclamped codes of a group's extreme; `quantize` tries each.
constexpr float ENDS[] = {7.33f, 7.67f, 8.0f, 8.33f, 8.67f, 9.0f, 9.5f, 10.25f};

struct Quantize {
  int64_t is_bf16, bits;
  const void* weight;  // [N, K]
  uint8_t* q;          // [N, K]
  float* scale;        // [N, K / GROUP], or [N] for 8 bits
  int64_t N, K;
};

static inline float min(vf v) { return -max(-v); }

// Return the value of the largest magnitude; of two, the negative one.
static inline float extreme(vf least, vf most) {
  float low = min(least), high = max(most);
  return -low >= high ? low : high;
}

static inline float scale_of(float extreme, float end) {
  bf16 rounded{uint16_t(round_bf16(splat(extreme / -end))[0])};
  float scale = to_float(rounded);
  return std::abs(scale) < LEAST ? 1.0f : scale;
}

template <int BITS> static inline vf code(vf x, float inverse) {
  constexpr float middle = 1 << (BITS - 1), shift = 12582912.0f;  // 1.5 * 2^23: rounds
  vf q = (x * inverse + shift) - shift;
  return min(max(q, splat(-middle)), splat(middle - 1));
}

template <int BITS> static inline void store_codes(uint8_t* out, vf code, int n) {
  vi q = __builtin_convertvector(code, vi) + (1 << (BITS - 1));
  vb bytes = __builtin_convertvector(q, vb);
  memcpy(out, &bytes, n);
}

template <class T> static void quantize_row8(const T* x, int64_t K, uint8_t* q, float* scale) {
  vf least{}, most{}, zeros{};
  for (int64_t i = 0; i < K; i += LANES) {
    vf v = load_up_to(x + i, std::min<int64_t>(K - i, LANES));
    least = min(least, v);
    most = max(most, v);
    zeros += v * 0.0f;
  }
  *scale = scale_of(extreme(least, most), 128.0f);
  for (int64_t i = 0; i < K; i += LANES) {
    int n = std::min<int64_t>(K - i, LANES);
    store_codes<8>(q + i, code<8>(load_up_to(x + i, n), 1.0f / *scale), n);
  }
  *scale += sum(zeros);
}

template <class T> static void quantize_group4(const T* weight, uint8_t* q, float* scale) {
  vf x[VECTORS], least{}, most{}, zeros{};
  for (int i = 0; i < VECTORS; i++) {
    x[i] = load(weight + i * LANES);
    least = min(least, x[i]);
    most = max(most, x[i]);
    zeros += x[i] * 0.0f;  // NaN if x is not finite
  }
  float found = extreme(least, most), best = INF;
  *scale = scale_of(found, ENDS[0]);
  for (float end : ENDS) {
    float s = scale_of(found, end), inverse = 1.0f / s;
    vf error{};
    for (int i = 0; i < VECTORS; i++) {
      vf off = code<4>(x[i], inverse) * s - x[i];
      error += off * off;
    }
    float total = sum(error);
    if (total < best) best = total, *scale = s;
  }
  for (int i = 0; i < VECTORS; i++)
    store_codes<4>(q + i * LANES, code<4>(x[i], 1.0f / *scale), LANES);
  *scale += sum(zeros);
}

template <class T> static void quantize(const Quantize& a, Team& team) {
  constexpr int64_t piece = 64;  // rows
  for (int64_t first = team.take() * piece; first < a.N; first = team.take() * piece)
    for (int64_t n = first; n < std::min(first + piece, a.N); n++) {
      const T* x = (const T*)a.weight + n * a.K;
      uint8_t* q = a.q + n * a.K;
      if (a.bits == 8)
        quantize_row8(x, a.K, q, a.scale + n);
      else
        for (int64_t k = 0; k < a.K; k += GROUP)
          quantize_group4(x + k, q + k, a.scale + (n * a.K + k) / GROUP);
    }
}

extern "C" void specserve_quantize(const void* args, const Step&, Team& team) {
  const Quantize& a = *(const Quantize*)args;
  a.is_bf16 ? quantize<bf16>(a, team) : quantize<float>(a, team);
}
