// 8-bit KV: int8 or fp8 (e4m3) codes. A number is code * scale.
//
// reference/kv.py is the definition. Each head of a token has one scale. Scores are multiplied by
// the scales of keys, and weights by the scales of values, so inner loops multiply only codes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "registers.h"

// A code that is multiplied with numbers of type A.
template <class A> struct Int8 { int8_t bits; };
template <class A> struct Fp8 { uint8_t bits; };

template <class T> struct OfCode {
  typedef T type;
  static constexpr bool is_code = false, is_int8 = false;
};
template <class A> struct OfCode<Int8<A>> {
  typedef A type;
  static constexpr bool is_code = true, is_int8 = true;
};
template <class A> struct OfCode<Fp8<A>> {
  typedef A type;
  static constexpr bool is_code = true, is_int8 = false;
};
// The type of queries and results for keys of type T.
template <class T> using Active = typename OfCode<T>::type;
template <class T> constexpr bool IS_CODE = OfCode<T>::is_code;
template <class T> constexpr bool IS_INT8 = OfCode<T>::is_int8;

template <class T> constexpr float LARGEST = IS_INT8<T> ? 127.0f : 448.0f;
constexpr float SMALLEST_FP8 = 0x1p-6f, SMALLEST_HEAD = 0x1p-100f;

// Return codes of 16 numbers of magnitude at most LARGEST.
static inline vi int8_codes(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#endif
  vf n = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  return __builtin_convertvector(n, vi);
}
static inline vi fp8_codes(vf x) {
  vu u = (vu)x, sign = u >> 24 & 0x80, size = u & 0x7fffffff;
  vu rounded = size + 0x7ffff + (size >> 20 & 1);
  vu code = (rounded >> 20) - (120 << 3);  // e4m3's bias is 7, float's 127
  return (vi)(sign | ((vf)size < SMALLEST_FP8 ? vu{} : code));
}

// Return the lowest bytes of 16 words. GCC would extract them one by one.
typedef uint8_t vb __attribute__((vector_size(LANES)));
static inline vb lowest_bytes(vi x) {
#if defined(__AVX512F__)
  return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  x &= 0xff;
  __m256i first, second;
  memcpy(&first, &x, 32);
  memcpy(&second, (const char*)&x + 32, 32);
  // Packing works within halves of a register, so the quarters are reordered before the last step.
  __m256i shorts = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
  return (vb)_mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
#else
  return __builtin_convertvector((vu)x, vb);
#endif
}

// Return the largest of 16 integers, in every lane.
static inline vi largest_lanes(vi x) {
  vi other = (vi)rotate<8>((vf)x);
  x = other > x ? other : x;
  other = (vi)rotate<4>((vf)x);
  x = other > x ? other : x;
  other = (vi)rotate<2>((vf)x);
  x = other > x ? other : x;
  other = (vi)rotate<1>((vf)x);
  return other > x ? other : x;
}

// Write the codes of a head's D numbers; return their scale.
template <class T, class S> static float quantize(const S* x, int64_t D, T* out) {
  vi most{};  // as bits, which order like magnitudes; NaN is largest
  for (int64_t i = 0; i < D; i += LANES) {
    vi size = (vi)load_up_to(x + i, std::min<int64_t>(LANES, D - i)) & 0x7fffffff;
    most = size > most ? size : most;
  }
  float largest = ((vf)largest_lanes(most))[0];
  bool is_broken = !(largest < INF), is_zero = largest < SMALLEST_HEAD;
  float inverse = is_broken || is_zero ? 0.0f : LARGEST<T> / largest;
  for (int64_t i = 0; i < D; i += LANES) {
    int n = std::min<int64_t>(LANES, D - i);
    vf v = is_broken ? vf{} : load_up_to(x + i, n) * inverse;
    vb b = lowest_bytes(IS_INT8<T> ? int8_codes(v) : fp8_codes(v));
    memcpy(out + i, &b, n);
  }
  return is_broken ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0f : largest / LARGEST<T>;
}

// Return the code at place I of each word's four codes, as floats.
template <class T, int I> static inline rf floats_at(rw x) {
  typedef int32_t ri __attribute__((vector_size(REGISTER)));
  rw top = x << (24 - 8 * I);
  if constexpr (IS_INT8<T>) return __builtin_convertvector((ri)top >> 24, rf);
  // A float's exponent bias is larger than e4m3's by 120.
  return (rf)((rw)((ri)top >> 4) & 0x87f00000) * 0x1p120f;
}
// Widen WORDS bytes to one word each. GCC would widen them one by one.
static inline rw words_of_bytes(const void* bytes) {
#if defined(__AVX512F__)
  return (rw)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
  return (rw)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#elif defined(__ARM_NEON)
  uint32_t word;
  memcpy(&word, bytes, 4);
  return (rw)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
#else
  rw x;
  for (int i = 0; i < WORDS; i++) x[i] = ((const uint8_t*)bytes)[i];
  return x;
#endif
}
// Convert WORDS codes to floats.
template <class T> static inline rf floats_of(const T* codes) {
  return floats_at<T, 0>(words_of_bytes(codes));
}

// Join floats that are exact in bf16 to pairs of bf16; `first` is in the low halves.
static inline rw paired(rf first, rf second) {
  return ((rw)first >> 16) | ((rw)second & 0xffff0000);
}
