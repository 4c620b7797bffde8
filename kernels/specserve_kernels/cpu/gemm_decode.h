// Codes of a panel, less their zeros, as the words that rows are multiplied by.
#pragma once

#include "gemm_codes.h"
#include "registers.h"

typedef int32_t ri __attribute__((vector_size(REGISTER)));
typedef int16_t rs __attribute__((vector_size(REGISTER / 2)));

// Write the words of some pairs, a multiple of four, to `to`; `zeros` is null where there are none.
// What is `ahead` bytes behind the codes is prefetched.
typedef void (*Decode)(const char* codes, const int8_t* zeros, int64_t pairs, uint32_t* to,
                       int64_t ahead);

// Inlined, as GCC drops calls of a function that does nothing but prefetch.
template <int BITS> static INLINE void prefetch_quad(const char* codes) {
  for (int line = 0; line < COLUMNS * BITS; line += 64) __builtin_prefetch(codes + line, 0, 2);
}

// Codes of WORDS columns and of four pairs, from the panel's codes of these pairs on.
template <int BITS> struct Quad;
template <> struct Quad<4> {
  rw words;

  Quad(const char* codes, int column) : words(load_words(codes + column * 4)) {}
  INLINE rf code(int pair, int i) const {
    return __builtin_convertvector((ri)((words >> (4 * pair + 16 * i)) & 15), rf);
  }
};
template <> struct Quad<8> {
  ri words[QUAD];  // the lower half is two codes

  Quad(const char* codes, int column) {
    for (int p = 0; p < QUAD; p++) {
      rs both;
      memcpy(&both, codes + (p * COLUMNS + column) * 2, sizeof both);
      words[p] = __builtin_convertvector(both, ri);
    }
  }
  INLINE rf code(int pair, int i) const {
    return __builtin_convertvector((i ? words[pair] : words[pair] << 24 >> 16) >> 8, rf);
  }
};

// As floats: a pair's first values, then its second ones.
struct AsFloats {
  static constexpr int PER_PAIR = 2;
  static INLINE void store(uint32_t* to, rf first, rf second) {
    store_words(to, (rw)first);
    store_words(to + COLUMNS, (rw)second);
  }
};
// As pairs of bf16, which hold eight significant bits, and so any code less any zero.
struct AsPairs {
  static constexpr int PER_PAIR = 1;
  static INLINE void store(uint32_t* to, rf first, rf second) {
    store_words(to, (rw)first >> 16 | ((rw)second & 0xffff0000u));
  }
};

template <class Form, int BITS>
static void decode(const char* codes, const int8_t* zeros, int64_t pairs, uint32_t* to,
                   int64_t ahead) {
  alignas(64) float zero[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) zero[c] = zeros ? zeros[c] : BITS == 4 ? 8 : 0;
  for (int64_t p = 0; p < pairs; p += QUAD, codes += COLUMNS * BITS) {
    prefetch_quad<BITS>(codes + ahead);
    for (int column = 0; column < COLUMNS; column += WORDS) {
      Quad<BITS> quad(codes, column);
      rf less = (rf)load_words(zero + column);
#pragma GCC unroll 4
      for (int i = 0; i < QUAD; i++)
        Form::store(to + (p + i) * Form::PER_PAIR * COLUMNS + column, quad.code(i, 0) - less,
                    quad.code(i, 1) - less);
    }
  }
}

#if defined(__AVX512BF16__)
#define DECODES_IN_REGISTERS 1
// Codes of half a panel's columns as pairs of bf16, in a few instructions each.
template <int BITS, bool HAS_ZEROS> struct Pairing;

template <bool HAS_ZEROS> struct Pairing<4, HAS_ZEROS> {
  __m512i table = values();

  struct Zeros {
    __m512i less;
    void load(const int8_t* zeros) {
      if (!HAS_ZEROS) return;
      __m512i each = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)zeros));
      less = _mm512_or_si512(each, _mm512_slli_epi32(each, 16));
    }
  };
  // Of an index's low five bits: a code less 8, or a code less a zero, which is at least -16.
  static __m512i values() {
    alignas(64) uint16_t bits[32];
    for (int i = 0; i < 32; i++) {
      float value = HAS_ZEROS ? (i < 16 ? i : i - 32) : (i & 15) - 8;
      uint32_t word;
      memcpy(&word, &value, 4);
      bits[i] = word >> 16;
    }
    return _mm512_load_si512(bits);
  }
  INLINE rw words(const char* quad, int pair, int half, const Zeros& zeros) const {
    __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(quad + half * 64), 4 * pair);
    if (HAS_ZEROS) codes = _mm512_sub_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(15)), zeros.less);
    return (rw)_mm512_permutexvar_epi16(codes, table);
  }
};

template <bool HAS_ZEROS> struct Pairing<8, HAS_ZEROS> {
  struct Zeros {
    __m512i less[2];  // of eight columns each
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

template <int BITS, bool HAS_ZEROS>
static void decode_pairs(const char* codes, const int8_t* zeros, int64_t pairs, uint32_t* to,
                         int64_t ahead) {
  typedef Pairing<BITS, HAS_ZEROS> P;
  P pairing;
  typename P::Zeros less[2];
  for (int half = 0; half < 2 && HAS_ZEROS; half++) less[half].load(zeros + half * COLUMNS / 2);
  for (int64_t p = 0; p < pairs; p += QUAD, codes += COLUMNS * BITS, to += QUAD * COLUMNS) {
    prefetch_quad<BITS>(codes + ahead);
#pragma GCC unroll 4
    for (int i = 0; i < QUAD; i++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        store_words(to + i * COLUMNS + half * COLUMNS / 2, pairing.words(codes, i, half, less[half]));
  }
}
static Decode pair_decoder(int64_t bits, bool has_zeros) {
  if (has_zeros) return bits == 4 ? decode_pairs<4, true> : decode_pairs<8, true>;
  return bits == 4 ? decode_pairs<4, false> : decode_pairs<8, false>;
}
#else
#define DECODES_IN_REGISTERS 0
[[maybe_unused]] static Decode pair_decoder(int64_t bits, bool) {
  return bits == 4 ? decode<AsPairs, 4> : decode<AsPairs, 8>;
}
#endif

static Decode float_decoder(int64_t bits, bool) {
  return bits == 4 ? decode<AsFloats, 4> : decode<AsFloats, 8>;
}
