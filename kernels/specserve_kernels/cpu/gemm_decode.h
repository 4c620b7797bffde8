// Decoding a panel's codes minus their zeros to words for multiplication.
#pragma once

#include "gemm_codes.h"
#include "registers.h"

// Inlined, because GCC drops calls of a function that only prefetches.
template <int BITS> static INLINE void prefetch_quad(const char* codes) {
#pragma GCC unroll 4
  for (int line = 0; line < COLUMNS * BITS; line += 64) __builtin_prefetch(codes + line, 0, 0);
}

// Load the number that is added to each column's codes to subtract its zero.
template <int BITS, bool HAS_TABLE>
static inline void load_zeros(const int8_t* zeros, float* to) {
  for (int c = 0; c < COLUMNS; c++) to[c] = zeros ? -zeros[c] : BITS == 4 && !HAS_TABLE ? -8 : 0;
}

// Return the values of the lowest four bits of words.
static INLINE rf look_up(rw words, const float* table) {
#if defined(__AVX512F__)
  return (rf)_mm512_permutexvar_ps((__m512i)words, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)words);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)words);
  return (rf)_mm256_blendv_ps(low, high, (__m256)(words << 28));  // bit 3 is the sign bit then
#else
  rf found;
  for (int i = 0; i < WORDS; i++) found[i] = table[words[i] & 15];
  return found;
#endif
}

static INLINE rf nibble_value(const char* codes, int column, int pair, int i, rf zero) {
  rw words = load_words(codes + column * 4);
  int shift = 4 * pair + 16 * i;
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (rf)_mm512_permutexvar_ps((__m512i)(words >> shift), table) + zero;
#else
  if (shift == 28) return __builtin_convertvector((ri)(words >> 28), rf) + zero;
  rf shifted = __builtin_convertvector((ri)(words & (15u << shift)), rf);
  return multiply_add(shifted, broadcast(1.0f / (1 << shift)), zero);
#endif
}
static INLINE rf byte_value(const char* codes, int column, int pair, int i, rf zero) {
  ri both = load_shorts(codes + (pair * COLUMNS + column) * 2);
  if (i == 1) return __builtin_convertvector(both >> 8, rf) + zero;
  return multiply_add(__builtin_convertvector(both << 24, rf), broadcast(1.0f / (1 << 24)), zero);
}

// Return the first or second values of one of four pairs in `codes`, for WORDS columns.
template <int BITS, bool HAS_TABLE>
static INLINE rf value(const char* codes, int column, int pair, int i, rf zero,
                       const float* table) {
  if constexpr (BITS == 8) return byte_value(codes, column, pair, i, zero);
  else if constexpr (HAS_TABLE)
    return look_up(load_words(codes + column * 4) >> (4 * pair + 16 * i), table);
  else return nibble_value(codes, column, pair, i, zero);
}
#if defined(__AVX512BF16__)
#define DECODES_PAIRS 1
// Decoding half a panel's columns to pairs of bf16, in a few instructions each.
template <int BITS, Meaning MEANING> struct Pairing;

template <Meaning MEANING> struct Pairing<4, MEANING> {
  static constexpr bool HAS_ZEROS = MEANING == WITH_ZEROS;

  struct Zeros {
    __m512i less;
    void load(const int8_t* zeros) {
      if (!HAS_ZEROS) return;
      __m512i each = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)zeros));
      less = _mm512_or_si512(each, _mm512_slli_epi32(each, 16));
    }
  };
  struct Fixed {
    alignas(64) uint16_t pairs[32];
  };
  // Values by the low five bits of an index: code - 8, or code - zero, which is at least -16.
  static constexpr Fixed values() {
    Fixed table{};
    for (int i = 0; i < 32; i++) {
      float value = HAS_ZEROS ? (i < 16 ? i : i - 32) : (i & 15) - 8;
      table.pairs[i] = __builtin_bit_cast(uint32_t, value) >> 16;
    }
    return table;
  }
  static constexpr Fixed FIXED = values();

  __m512i table;
  INLINE explicit Pairing(const Table* given)
      : table(_mm512_loadu_si512(MEANING == BY_TABLE ? given->pairs : FIXED.pairs)) {}

  INLINE rw words(const char* quad, int pair, int half, const Zeros& zeros) const {
    __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(quad + half * 64), 4 * pair);
    if (!HAS_ZEROS) return (rw)_mm512_permutexvar_epi16(codes, table);
    __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15));
    return (rw)_mm512_permutexvar_epi16(_mm512_sub_epi16(low, zeros.less), table);
  }
};

template <Meaning MEANING> struct Pairing<8, MEANING> {
  static constexpr bool HAS_ZEROS = MEANING == WITH_ZEROS;

  INLINE explicit Pairing(const Table*) {}
  struct Zeros {
    __m512i less[2];  // eight columns each
    void load(const int8_t* zeros) {
      for (int i = 0; i < 2 && HAS_ZEROS; i++) {
        __m128i each = _mm_loadl_epi64((const __m128i*)(zeros + 8 * i));
        less[i] = _mm512_cvtepi8_epi32(_mm_unpacklo_epi8(each, each));
      }
    }
  };
  INLINE rw words(const char* quad, int pair, int half, const Zeros& zeros) const {
    __m512i codes[2];
    for (int i = 0; i < 2; i++) {
      const char* from = quad + pair * 64 + half * 32 + i * 16;
      codes[i] = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
      if (HAS_ZEROS) codes[i] = _mm512_sub_epi32(codes[i], zeros.less[i]);
    }
    return (rw)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(codes[1]), _mm512_cvtepi32_ps(codes[0]));
  }
};

// Write the words of some pairs, a multiple of four. Prefetch `ahead` bytes after their codes.
template <int BITS, Meaning MEANING>
static INLINE void decode_pairs(const char* codes, const int8_t* zeros, const Table* table,
                                int64_t pairs, int64_t ahead, uint32_t* to) {
  Pairing<BITS, MEANING> pairing(table);
  typename Pairing<BITS, MEANING>::Zeros less[2];
  for (int half = 0; half < 2; half++) less[half].load(zeros + half * COLUMNS / 2);
  for (int64_t p = 0; p < pairs; p += QUAD, codes += COLUMNS * BITS, to += QUAD * COLUMNS) {
    prefetch_quad<BITS>(codes + ahead);
#pragma GCC unroll 4
    for (int i = 0; i < QUAD; i++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        store_words(to + i * COLUMNS + half * COLUMNS / 2,
                    pairing.words(codes, i, half, less[half]));
  }
}
#else
#define DECODES_PAIRS 0
// For emulated tiles. Eight significant bits represent any code minus any zero.
template <int BITS, Meaning MEANING>
static void decode_pairs(const char* codes, const int8_t* zeros, const Table* table, int64_t pairs,
                         int64_t, uint32_t* to) {
  constexpr bool HAS_TABLE = MEANING == BY_TABLE;
  const float* values = HAS_TABLE ? table->values : nullptr;
  float less[COLUMNS];
  load_zeros<BITS, HAS_TABLE>(MEANING == WITH_ZEROS ? zeros : nullptr, less);
  for (int64_t p = 0; p < pairs; p += QUAD, codes += COLUMNS * BITS)
    for (int column = 0; column < COLUMNS; column += WORDS)
      for (int i = 0; i < QUAD; i++) {
        rf zero = (rf)load_words(less + column);
        rw first = (rw)value<BITS, HAS_TABLE>(codes, column, i, 0, zero, values);
        rw second = (rw)value<BITS, HAS_TABLE>(codes, column, i, 1, zero, values);
        store_words(to + (p + i) * COLUMNS + column, first >> 16 | (second & 0xffff0000u));
      }
}
#endif
