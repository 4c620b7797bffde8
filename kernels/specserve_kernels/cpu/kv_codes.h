// KV of 8 bits: int8 or fp8 (e4m3) codes, of which the products with a scale are the numbers.
//
// reference/kv.py is the definition. A scale is that of a token's head: so scores are multiplied by
// the keys' scales, and weights by the values'; what stands in the inner loops are the codes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "registers.h"

// A code; numbers of type A are multiplied with it.
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
// The type of the queries that are multiplied with a key of type T, and of the result.
template <class T> using Active = typename OfCode<T>::type;
template <class T> constexpr bool IS_CODE = OfCode<T>::is_code;
template <class T> constexpr bool IS_INT8 = OfCode<T>::is_int8;

template <class T> constexpr float LARGEST = IS_INT8<T> ? 127.0f : 448.0f;
constexpr float SMALLEST_FP8 = 0x1p-6f, SMALLEST_HEAD = 0x1p-100f;

// Codes of 16 numbers of at most LARGEST.
static inline vi int8_codes(vf x) {
  vf n = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  return __builtin_convertvector(n, vi);
}
static inline vi fp8_codes(vf x) {
  vu u = (vu)x, sign = u >> 24 & 0x80, size = u & 0x7fffffff;
  vu rounded = size + 0x7ffff + (size >> 20 & 1);
  vu code = (rounded >> 20) - (120 << 3);  // e4m3's bias is 7, a float's 127
  return (vi)(sign | ((vf)size < SMALLEST_FP8 ? vu{} : code));
}

// Write the codes of a head's D numbers; returns their scale.
template <class T> static float quantize(const float* x, int64_t D, T* out) {
  typedef uint8_t bytes __attribute__((vector_size(LANES)));
  vf most{}, broken{};
  for (int64_t i = 0; i < D; i += LANES) {
    vf v = load_up_to(x + i, std::min<int64_t>(LANES, D - i));
    most = max(most, v < 0.0f ? -v : v);
    broken += v - v;  // NaN for what is infinite or NaN
  }
  float largest = max(most);
  bool is_broken = sum(broken) != 0.0f, is_zero = largest < SMALLEST_HEAD;
  float inverse = is_broken || is_zero ? 0.0f : LARGEST<T> / largest;
  for (int64_t i = 0; i < D; i += LANES) {
    int n = std::min<int64_t>(LANES, D - i);
    vf v = is_broken ? vf{} : load_up_to(x + i, n) * inverse;
    bytes b = __builtin_convertvector((vu)(IS_INT8<T> ? int8_codes(v) : fp8_codes(v)), bytes);
    memcpy(out + i, &b, n);
  }
  return is_broken ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0f : largest / LARGEST<T>;
}

// Of the four codes in each word, those at place I, as floats.
template <class T, int I> static inline rf floats_at(rw x) {
  typedef int32_t ri __attribute__((vector_size(REGISTER)));
  rw top = x << (24 - 8 * I);
  if constexpr (IS_INT8<T>) return __builtin_convertvector((ri)top >> 24, rf);
  return (rf)((top & 0x80000000) | (top >> 4 & 0x07f00000)) * 0x1p120f;
}
// Of as many codes as a register has words, the floats.
template <class T> static inline rf floats_of(const T* codes) {
  typedef uint8_t bytes __attribute__((vector_size(WORDS)));
  bytes b;
  memcpy(&b, codes, WORDS);
  return floats_at<T, 0>(__builtin_convertvector(b, rw));
}

// Pairs of bf16, of floats that are exact in bf16: `first` in the low halves.
static inline rw paired(rf first, rf second) {
  return ((rw)first >> 16) | ((rw)second & 0xffff0000);
}

#if defined(__AVX512VBMI__)
// bf16 of a code without its sign: its low bytes, then its high ones.
struct Bf16Table {
  alignas(64) uint8_t bytes[2][128];
};
template <class T> static constexpr Bf16Table bf16_table() {
  Bf16Table table{};
  for (int code = 1; code < 128; code++) {
    int exponent = IS_INT8<T> ? 0 : code / 8 - 7, size = IS_INT8<T> ? code : code % 8 + 8;
    if (!IS_INT8<T> && code < 8) {
      exponent = -6;
      size = code;
    }
    int shift = 0;
    while (size << shift < 128) shift++;  // bf16 has 7 bits below the highest
    exponent += 7 - shift - (IS_INT8<T> ? 0 : 3);
    int bits = (exponent + 127) << 7 | ((size << shift) & 127);
    table.bytes[0][code] = bits & 255;
    table.bytes[1][code] = bits >> 8;
  }
  return table;
}
template <class T> constexpr Bf16Table BF16_TABLE = bf16_table<T>();

// 64 codes as pairs of bf16. STEP, NEXT: the codes of word i of pairs are at STEP i and NEXT behind.
struct Bf16Bytes {
  __m512i low, high;

  template <int FIRST, int STEP, int NEXT> rw pairs() const {
    typedef uint8_t places __attribute__((vector_size(64)));
    places at;
    for (int i = 0; i < 64; i++) {
      int code = FIRST + i / 4 * STEP + (i % 4 / 2) * NEXT;
      at[i] = code + i % 2 * 64;
    }
    return (rw)_mm512_permutex2var_epi8(low, (__m512i)at, high);
  }
};
template <class T> static inline Bf16Bytes bf16_bytes(__m512i codes) {
  const Bf16Table& table = BF16_TABLE<T>;
  auto part = [&](int i, int half) { return _mm512_load_si512(table.bytes[i] + 64 * half); };
  __m512i size = IS_INT8<T> ? _mm512_abs_epi8(codes) : codes;  // of a place bit 7 does not count
  __m512i low = _mm512_permutex2var_epi8(part(0, 0), size, part(0, 1));
  __m512i high = _mm512_permutex2var_epi8(part(1, 0), size, part(1, 1));
  __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(char(0x80)));
  return {low, _mm512_or_si512(high, sign)};
}
#endif
