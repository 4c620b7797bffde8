// The softmax over some scores of one query, and merging partial results.
#pragma once

#include "words.h"

// Return 2^x within 2 ulp for x in [-126, 127]; exactly 0 below, NaN for NaN. Cephes' polynomial.
static inline vf exp2(vf x) {
#if defined(__AVX512F__)
  vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
  vf n = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
#endif
  vf r = x - n, p = splat(1.535336188319500e-4f);
  p = fma(p, r, splat(1.339887440266574e-3f));
  p = fma(p, r, splat(9.618437357674640e-3f));
  p = fma(p, r, splat(5.550332471162809e-2f));
  p = fma(p, r, splat(2.402264791363012e-1f));
  p = fma(p, r, splat(6.931472028550421e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  p = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  p = p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
#endif
  return x < -126.0f ? vf{} : p;
}

// A query's softmax state: the maximum score times log2 e, and the sum of 2^(score - max).
struct Seen {
  float max, sum;
};
constexpr Seen NOTHING{-INF, 0.0f};

// Convert scores to weights: floats, or pairs of bf16. Hidden positions have the score -INF and get
// the weight 0. The count n is a multiple of 32. Weights may overwrite or precede the scores.
//
// If values are multiplied as pairs, weights are rounded to bf16, and the rounded weights are
// summed. A row's error is then about the rounding error of a bf16 result, in half the time.
//
// If values have scales, weights are summed first and then multiplied by the scales.
template <bool IS_PAIRED, bool HAS_SCALES>
static Seen soften(const float* score, int n, float scale, float* weights, const float* scales) {
  vf top = splat(-INF);
  for (int i = 0; i < n; i += LANES) top = max(top, load(score + i));
  float peak = max(top) * scale;
  vf base = splat(peak == -INF ? 0.0f : -peak), total{};
  for (int i = 0; i < n; i += 2 * LANES) {
    vf a = exp2(fma(load(score + i), splat(scale), base));
    vf b = exp2(fma(load(score + i + LANES), splat(scale), base));
    if constexpr (HAS_SCALES) {
      total += a + b;
      a *= load(scales + i);
      b *= load(scales + i + LANES);
    }
#if HAS_PAIRS
    if constexpr (IS_PAIRED) {
      __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      if constexpr (!HAS_SCALES)
        total = (vf)_mm512_dpbf16_ps((__m512)total, pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
      memcpy(weights + i / 2, &pairs, 64);
      continue;
    }
#endif
    store(weights + i, a);
    store(weights + i + LANES, b);
    if constexpr (!HAS_SCALES) total += a + b;
  }
  return {peak, sum(total)};
}

// Merge a query's state of a later part into its state of earlier parts.
static void merge(float* values, Seen& seen, const float* later, Seen part, int64_t D) {
  if (part.sum == 0) return;
  if (seen.sum == 0) {
    memcpy(values, later, D * sizeof(float));
    seen = part;
    return;
  }
  float top = std::max(seen.max, part.max);
  vf factor = exp2(vf{seen.max - top, part.max - top});
  for (int64_t d = 0; d < D; d += LANES)
    store(values + d, fma(load(later + d), splat(factor[1]), load(values + d) * factor[0]));
  seen = {top, seen.sum * factor[0] + part.sum * factor[1]};
}

template <class T> static void finish(const float* values, Seen seen, T* out, int64_t D) {
  float scale = 1.0f / seen.sum;
  for (int64_t d = 0; d < D; d += LANES) {
    // Adding 0 turns -0 into +0, because the sign of a zero sum depends on the number of hidden
    // weights.
    vf v = load(values + d) * scale + 0.0f;
    store_up_to(out + d, v, std::min<int64_t>(LANES, D - d));
  }
}
