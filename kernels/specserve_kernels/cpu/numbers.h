// The numbers of the groups of a packed weight, its scales and offsets, in the smallest exact form.
#pragma once

#include <bit>

#include "registers.h"

// SINGLES: the floats. BF16S: their upper halves. HALVES: float16. PRODUCTS: a half for each BLOCK
// columns of K, times a signed byte for each group.
enum Scaling : int64_t { SINGLES, BF16S, HALVES, PRODUCTS };
constexpr int64_t BLOCK = 256;

static INLINE rf floats_of_halves(const char* p) {
#if defined(__AVX512F__)
  return (rf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (rf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON)
  return (rf)vcvt_f32_f16(vld1_f16((const __fp16*)p));
#else
  uint16_t halves __attribute__((vector_size(REGISTER / 2)));
  memcpy(&halves, p, sizeof halves);
  rw x = __builtin_convertvector(halves, rw);
  rf size = (rf)((x & 0x7fff) << 13) * 0x1p112f;  // moves the exponent; exact
  return (rf)((rw)size | (x & 0x8000) << 16);
#endif
}

// Load the numbers of WORDS columns from `column` on.
static INLINE rf load_numbers(const char* p, int column, Scaling scaling) {
  if (scaling == SINGLES) return (rf)load_words(p + column * 4);
  if (scaling == BF16S) return (rf)((rw)load_shorts(p + column * 2) << 16);
  return floats_of_halves(p + column * 2);
}
// Load WORDS signed bytes.
static INLINE rf load_bytes(const char* p) {
#if defined(__AVX512F__)
  return (rf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (rf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__ARM_NEON)
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  int16x8_t shorts = vmovl_s8(vcreate_s8(bytes));
  return (rf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
#else
  int8_t bytes __attribute__((vector_size(REGISTER / 4)));
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, ri), rf);
#endif
}

// The bits of the half that equals x; -1: none does.
static inline int half_of(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x), fraction = bits & 0x7fffff;
  int sign = bits >> 31 << 15, exponent = int(bits >> 23 & 255) - 127;
  if ((bits & 0x7fffffff) == 0) return sign;
  if (exponent < -24 || exponent > 15) return -1;
  int lost = exponent < -14 ? -1 - exponent : 13;  // bits; halves below 2^-14 lack the first one
  if (fraction & ((1u << lost) - 1)) return -1;
  if (exponent < -14) return sign | int((fraction | 1 << 23) >> lost);
  return sign | (exponent + 15) << 10 | int(fraction >> 13);
}

// Numbers of a block as products: number i is exactly factor * counts[i].
struct Products {
  int factor = -1;  // bits of the half; -1: there is none
  int8_t counts[BLOCK];
};
static inline Products products_of(const float* x, int64_t n) {
  Products found;
  float largest = 0;
  for (int64_t i = 0; i < n; i++)
    if (!(std::abs(x[i]) <= std::abs(largest))) largest = x[i];
  if (largest == 0) {
    memset(found.counts, 0, n);
    found.factor = 0;
    return found;
  }
  // Files mostly use the largest count of 6 or 8 bits.
  for (int tried = -2; tried < 127; tried++) {
    int count = tried == -2 ? 63 : tried == -1 ? -128 : 127 - tried;
    float factor = largest / count;
    int bits = half_of(factor);
    bool is_exact = bits >= 0 && factor * count == largest;
    for (int64_t i = 0; i < n && is_exact; i++) {
      float number = x[i] / factor;
      is_exact = std::abs(number) < 127.5f || number == -128;
      if (!is_exact) break;
      found.counts[i] = int8_t(std::nearbyint(number));
      is_exact = found.counts[i] * factor == x[i];
    }
    if (is_exact) {
      found.factor = bits;
      return found;
    }
  }
  return found;
}
