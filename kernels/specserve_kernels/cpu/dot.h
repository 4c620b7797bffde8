// Sums of products of four codes of a column and four signed codes of a row, as exact integers.
//
// A word of a column holds four bytes: unsigned ones if the CPU multiplies them by signed bytes
// (VNNI), else signed ones. Small codes, from 0 to 15, are both.
#pragma once

#include "registers.h"

// AVX-VNNI: VNNI without AVX-512. Tests emulate it.
#if !defined(__AVX512F__) && (defined(__AVXVNNI__) || defined(EMULATE_AVX_VNNI))
#define HAS_AVX_VNNI 1
#else
#define HAS_AVX_VNNI 0
#endif
#if defined(__AVX512VNNI__) || HAS_AVX_VNNI
constexpr bool ARE_UNSIGNED = true;
#else
constexpr bool ARE_UNSIGNED = false;
#endif
constexpr int BYTE_ZERO = ARE_UNSIGNED ? 128 : 0;  // byte of a column that stands for 0
constexpr int SMALL_ZERO = 8;                      // small code that stands for 0

static INLINE ri broadcast_integer(int32_t x) { return x - ri{}; }

#if HAS_AVX_VNNI
// Return sum + the products of four unsigned bytes of w and four signed bytes of x, for each word.
static INLINE __m256i dot_of_bytes(__m256i sum, __m256i w, __m256i x) {
#if defined(EMULATE_AVX_VNNI)
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                   _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#else
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}
#endif

// Return sum + the products of four codes, for each column.
static INLINE ri add_dot(ri sum, rw w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (ri)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif HAS_AVX_VNNI
  return (ri)dot_of_bytes((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
  // |w| * (x with the sign of w): two such products, 128 * 127 at most, fit into 16 bits.
  __m512i row = _mm512_set1_epi32(x);
  __mmask64 is_negative = _mm512_movepi8_mask((__m512i)w);
  __m512i signed_row = _mm512_mask_sub_epi8(row, is_negative, _mm512_setzero_si512(), row);
  __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), signed_row);
  return sum + (ri)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i signed_row = _mm256_sign_epi8(_mm256_set1_epi32(x), (__m256i)w);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_row);
  return sum + (ri)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ri)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_u32(vdupq_n_u32(x)));
#elif defined(__ARM_NEON)
  int8x16_t row = vreinterpretq_s8_u32(vdupq_n_u32(x)), column = (int8x16_t)w;
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(column), vget_low_s8(row)));
  int32x4_t high = vpaddlq_s16(vmull_high_s8(column, row));
  return sum + (ri)vpaddq_s32(low, high);
#else
  for (int i = 0; i < 4; i++)
    sum += ((ri)(w << (24 - 8 * i)) >> 24) * (int32_t)int8_t(x >> 8 * i);
  return sum;
#endif
}

// i8mm multiplies eight codes of two rows by those of two columns. The four sums are a square: those
// of a row are adjacent.
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_SQUARES 1
static INLINE ri add_square(ri sums, rw rows, rw columns) {
  return (ri)vmmlaq_s32((int32x4_t)sums, (int8x16_t)rows, (int8x16_t)columns);
}
static INLINE rw join_eights(const void* first, const void* second) {
  return (rw)vcombine_s8(vld1_s8((const int8_t*)first), vld1_s8((const int8_t*)second));
}
// Turn four codes of four columns, and the next four, into eight codes of two columns each.
static INLINE void join_quads(rw first, rw second, rw (&eights)[2]) {
  eights[0] = (rw)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
  eights[1] = (rw)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}
// Turn two rows of four sums into the squares of the first and last two columns, or back.
static INLINE void exchange_halves(ri& a, ri& b) {
  int64x2_t x = (int64x2_t)a, y = (int64x2_t)b;
  a = (ri)vzip1q_s64(x, y);
  b = (ri)vzip2q_s64(x, y);
}
template <int ROWS, int V> static INLINE void exchange_squares(ri (&sums)[ROWS][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r += 2)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) exchange_halves(sums[r][v], sums[r + 1][v]);
}
#else
#define HAS_SQUARES 0
#endif

// Without VNNI, sums of products of small codes are pairs of shorts: eight words add up to at most
// 8 * 2 * 15 * 127, which fits.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !HAS_AVX_VNNI
constexpr bool HAS_SHORT_SUMS = true;
constexpr int64_t SHORT_RUN = 8;  // maximum words of a sum

static INLINE ri add_small_dot(ri shorts, rw w, uint32_t x) {
#if defined(__AVX512BW__)
  __m512i products = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
  return (ri)_mm512_add_epi16((__m512i)shorts, products);
#else
  __m256i products = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
  return (ri)_mm256_add_epi16((__m256i)shorts, products);
#endif
}
static INLINE ri add_shorts(ri sum, ri shorts) {
#if defined(__AVX512BW__)
  return sum + (ri)_mm512_madd_epi16((__m512i)shorts, _mm512_set1_epi16(1));
#else
  return sum + (ri)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
#endif
}
#else
constexpr bool HAS_SHORT_SUMS = false;
constexpr int64_t SHORT_RUN = 0;

static INLINE ri add_small_dot(ri sum, rw w, uint32_t x) { return add_dot(sum, w, x); }
static INLINE ri add_shorts(ri, ri sum) { return sum; }
#endif

// Return the bytes of a table at the four indices of each word, which are below 16. `table` is 16
// bytes, repeated to fill a register.
static INLINE rw bytes_at(rw table, rw indices) {
#if defined(__AVX512BW__)
  return (rw)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
  return (rw)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(__aarch64__)
  return (rw)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
#else
  uint8_t from[REGISTER], to[REGISTER];
  memcpy(from, &table, REGISTER);
  memcpy(to, &indices, REGISTER);
  for (uint8_t& byte : to) byte = from[byte];
  return load_words(to);
#endif
}
